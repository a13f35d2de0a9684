"""What is concluded from signs of life, on a clock of its own."""

from itertools import count

import pytest
from rlhf_runtime.single_controller.probe import Finding, ProcessId
from rlhf_runtime.single_controller.pulse import Beat
from rlhf_runtime.single_controller.verdict import Member
from rlhf_runtime.single_controller.watch import Ward, Watch


def watched(ranks: int, timeout: float | None = 100.0) -> tuple[Watch, list[Ward]]:
    """A watch whose members all said hello at second 0."""
    watch = Watch()
    watch.expect("token", [Member("actor", rank, "10.0.0.1", node_id="n") for rank in range(ranks)], timeout, 0.0)
    wards = [watch.hello("token", rank, ProcessId(100 + rank, 1), 0, object(), 0.0) for rank in range(ranks)]
    return watch, wards


def test_silence_is_asked_about_once_and_again_after_the_answer() -> None:
    watch, (ward,) = watched(1)
    assert watch.questions(7.0) == []
    [question] = watch.questions(11.0)
    assert watch.questions(12.0) == []
    watch.answer(question, Finding("working", 0, 100), 13.0)
    assert watch.questions(14.0) == []
    assert len(watch.questions(17.0)) == 1
    watch.beat(ward, Beat(), 20.0)
    assert watch.verdict is None


def test_a_process_is_ended_as_stuck_only_if_it_is_still_silent_when_found_waiting_again() -> None:
    watch, (ward,) = watched(1)
    for now in (11.0, 31.0):
        [question] = watch.questions(now)
        assert question.fatal == ("stopped",)
        watch.answer(question, Finding("waiting", 0, 100), now + 1)
        if now == 11.0:
            watch.beat(ward, Beat(), 20.0)
    [question] = watch.questions(36.0)
    assert "waiting" in question.fatal
    watch.answer(question, Finding("waiting", 0, 100), 37.0)
    assert "stuck worker that gave no sign of life for 17 s" in str(watch.verdict.error())


def test_a_silent_process_that_works_has_two_minutes() -> None:
    watch, _ = watched(1)
    for now in count(11.0, 6.0):
        [question] = watch.questions(now)
        watch.answer(question, Finding("working", 0, 100), now)
        if watch.verdict is not None:
            break
    assert 120 <= now < 130
    assert "busy worker that gave no sign of life for 12" in str(watch.verdict.error())


def test_a_rank_may_write_for_as_long_as_it_takes_while_none_waits_for_it() -> None:
    watch, (writer, other) = watched(2)
    for now in range(1, 3600):
        writing = Beat("export", 1.0, collectives=7, at="model_writer.py:160 _write_file")
        watch.beat(writer, writing, float(now))
        watch.beat(other, Beat(collectives=7), float(now))
        watch.compare_ranks(float(now))
        assert watch.questions(float(now)) == []
    assert watch.verdict is None


def test_a_node_that_does_not_answer_is_told() -> None:
    watch, _ = watched(1)
    watch.questions(11.0)
    watch.questions(27.0)
    assert "no sign of life and no answer from its node" in str(watch.verdict.error())


def test_a_lost_connection_alone_is_no_verdict() -> None:
    watch, (ward,) = watched(1)
    watch.lost(ward, ward.channel)
    [question] = watch.questions(1.0)
    watch.answer(question, Finding("waiting", 0, 100), 2.0)
    assert watch.verdict is None
    old = object()
    watch.hello("token", 0, ProcessId(100, 1), 0, object(), 3.0)
    watch.lost(ward, old)  # the end of the earlier connection is noticed late
    assert watch.questions(9.0) == []


def test_memory_that_ran_out_is_told() -> None:
    watch, (ward,) = watched(1)
    watch.lost(ward, ward.channel)
    [question] = watch.questions(1.0)
    watch.answer(question, Finding("gone", 1, 100), 2.0)
    assert "killed by the kernel as memory ran out" in str(watch.verdict.error())


def test_the_first_verdict_stands() -> None:
    watch, wards = watched(2)
    for ward in wards:
        watch.trace(ward, "Fatal Python error: Aborted")
        watch.lost(ward, ward.channel)
    assert watch.verdict.member.rank == 0


def unborn(*groups: str) -> Watch:
    """A watch over groups of one worker, all on one node, of which none said hello."""
    watch = Watch()
    for group in groups:
        watch.expect(group, [Member(group, 0, "10.0.0.1", node_id="n")], None, 0.0)
    return watch


def test_a_worker_stopped_before_its_hello_is_the_one_that_ray_then_misses() -> None:
    watch = unborn("actor", "rollout")
    [question] = watch.questions(16.0)
    watch.answer(question, Finding("stopped", 0, 77), 17.0)
    assert watch.verdict is None
    watch.stillborn("rollout", 0, 77, "killed")
    told = str(watch.verdict.error())
    assert told.startswith("group `rollout`, rank 0 (pid 77 on node 10.0.0.1): got a stopped worker (before its start)")


def test_a_stopped_process_found_for_another_is_told_as_the_member_that_it_is() -> None:
    watch, (ward,) = watched(1)
    watch.expect("late", [Member("rollout", 0, "10.0.0.1", node_id="n")], None, 0.0)
    [asked_late] = [question for question in watch.questions(16.0) if question.ward is not ward]
    watch.answer(asked_late, Finding("stopped", 0, ward.process.pid), 17.0)
    assert watch.verdict.member == ward.member


@pytest.mark.parametrize(
    ("finding", "got"), [(Finding("stopped", 0, 7), "stopped"), (Finding("working", 0), "dead"), (None, "dead")]
)
def test_a_death_before_the_hello_waits_for_the_answer_that_may_explain_it(finding: Finding | None, got: str) -> None:
    watch = unborn("actor")
    [question] = watch.questions(16.0)
    watch.stillborn("actor", 0, 7, "killed")
    assert watch.verdict is None
    watch.answer(question, finding, 17.0)
    assert f"(pid 7 on node 10.0.0.1): got a {got} worker" in str(watch.verdict.error())


def test_a_worker_that_died_before_its_hello_is_told_unless_its_group_was_ended() -> None:
    watch = Watch()
    watch.expect("token", [Member("actor", 0, "10.0.0.1")], None, 0.0)
    watch.stillborn("ended", 0, 6, "killed")
    assert watch.verdict is None
    watch.stillborn("token", 0, 7, "killed")
    assert "(pid 7 on node 10.0.0.1): got a dead worker (killed, before its start)" in str(watch.verdict.error())


def test_a_monitor_that_slept_blames_nobody() -> None:
    watch, _ = watched(1)
    watch.overslept(300.0)
    assert watch.questions(301.0) == []


def test_the_rank_that_others_wait_for_is_named_with_its_place() -> None:
    watch, wards = watched(3)
    for ward in wards:
        watch.beat(ward, Beat("policy.update", 1.0, 7, "torch_engine.py:232 accumulate"), 10.0)
    for rank in (0, 2):
        watch.beat(wards[rank], Beat("policy.update", 1.0, 8, "optimizer.py:83 step", "all_reduce"), 20.0)
    watch.compare_ranks(109.0)
    assert watch.verdict is None
    watch.compare_ranks(111.0)
    told = str(watch.verdict.error())
    assert "rank 1 (pid 101 on node 10.0.0.1): got a collective without it" in told
    assert "rank 1 in policy.update at torch_engine.py:232 accumulate" in told
    assert "while rank 0, 2 waited 91 s in all_reduce (in policy.update at optimizer.py:83 step)" in told


def test_ranks_that_never_wait_for_each_other_are_not_compared() -> None:
    watch, wards = watched(2, timeout=None)
    watch.beat(wards[0], Beat("generate", 1.0, 5), 1.0)
    watch.compare_ranks(1e6)
    assert watch.verdict is None


def test_a_member_that_stands_in_a_call_without_using_a_cpu_is_told_of_once() -> None:
    watch, (ward,) = watched(1)
    for now in range(1, 200):
        watch.beat(ward, Beat("reward.score", 1.0, 0, "mine.py:3 score", cpu_seconds=5.0 + 0.01 * now), float(now))
        told = watch.standing(float(now))
        assert len(told) == (now == 122)
        if told:
            assert "(pid 100 on node 10.0.0.1): in reward.score at mine.py:3 score for 121 s without" in told[0]
    assert watch.verdict is None


@pytest.mark.parametrize(
    "beat",
    [
        lambda now: Beat("generate", 1.0, cpu_seconds=0.2 * now),
        lambda now: Beat("generate", 1.0, at=f"engine.py:{now} step"),
        lambda now: Beat("update", 1.0, waits="all_reduce"),
        lambda now: Beat(),
    ],
    ids=["works", "moves", "waits for ranks", "between calls"],
)
def test_a_member_that_works_or_waits_for_its_group_is_not_told_of(beat) -> None:
    watch, (ward,) = watched(1)
    for now in range(1, 300):
        watch.beat(ward, beat(now), float(now))
        assert watch.standing(float(now)) == []


def test_a_child_that_was_stopped_is_a_verdict_on_its_parent() -> None:
    watch, (_, ward) = watched(2)
    watch.beat(ward, Beat("generate", 1.0, stopped=("VllmWorker-1, pid 7",)), 20.0)
    told = str(watch.verdict.error())
    assert "rank 1 (pid 101 on node 10.0.0.1): got a stopped child process (VllmWorker-1, pid 7)" in told
