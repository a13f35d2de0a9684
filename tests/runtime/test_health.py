"""Signs of life of real processes over real sockets, without Ray, and what is concluded from them."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import pytest
from rlhf_runtime.errors import InfrastructureError
from rlhf_runtime.single_controller import probe, watch
from rlhf_runtime.single_controller.health import HealthMonitor
from rlhf_runtime.single_controller.probe import Finding, ProcessId
from rlhf_runtime.single_controller.pulse import Beacon, Beat
from rlhf_runtime.single_controller.verdict import Member
from rlhf_runtime.single_controller.watch import Question, Ward, Watch

WORKER = """
import ctypes, os, sys, threading
from rlhf_runtime.single_controller import pulse

beats = threading.Semaphore(0)
send = pulse._send

def counted(connection, line):
    send(connection, line)
    beats.release()

pulse._send = counted
host, port, token, rank = sys.argv[1:]
worker = pulse.Pulse(pulse.Beacon(host, int(port), token), int(rank))
worker.tell(("policy.update", 0.0))
worker.start()
beats.acquire(), beats.acquire()
print("up", flush=True)
exec(sys.stdin.read())
"""
"""Says `up` once its hello and a beat are sent, then does what it is told, and ends."""


class Workers:
    """A group of one or more real processes under a monitor that asks about them on this machine."""

    def __init__(self, monitor: HealthMonitor) -> None:
        self.monitor = monitor
        self.processes: list[subprocess.Popen] = []
        self.ended = threading.Event()

    def start(self, number: int = 1) -> Beacon:
        members = [Member("actor", rank, "10.0.0.1") for rank in range(number)]
        self.beacon = self.monitor.watch(members, 600.0, self.ended.set)
        for rank in range(number):
            arguments = [self.beacon.host, str(self.beacon.port), self.beacon.token, str(rank)]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        for process in self.processes:
            assert process.stdout.readline() == "up\n"
        return self.beacon

    def tell(self, code: str, rank: int = 0) -> None:
        """Have a worker do this and end."""
        self.processes[rank].stdin.write(code)
        self.processes[rank].stdin.close()


def on_this_machine(executor: ThreadPoolExecutor) -> Callable[[Question], "Future[Finding]"]:
    return lambda question: executor.submit(probe.examine, question.ward.process, question.fatal)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 3.0)
    threads = threading.active_count()
    with ThreadPoolExecutor() as executor:
        monitor = HealthMonitor(on_this_machine(executor))
        monitor.start("127.0.0.1")
        workers = Workers(monitor)
        yield workers
        monitor.close()
    for process in workers.processes:
        with process:
            process.kill()
    assert threading.active_count() == threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(monitor._address)


def message(workers: Workers, within: float = 20.0) -> str:
    """What is told of a death that the monitor has not heard of yet."""
    assert workers.ended.wait(within), "no verdict"
    return str(workers.monitor.verdict(0).error())


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL, or ended by os._exit"),
        ("os._exit(3)", "killed by SIGKILL, or ended by os._exit"),
        ("ctypes.string_at(0)", "fatal: Segmentation fault at __init__.py:"),
        ("os.abort()", "fatal: Aborted at <string>:1 <module>"),
        ("os.kill(os.getpid(), 15)", "SIGTERM at <string>:1 <module>"),
        ("sys.exit(3)", "it ended itself"),
    ],
    ids=["SIGKILL", "os._exit", "SIGSEGV", "SIGABRT", "SIGTERM", "sys.exit"],
)
def test_a_death_is_told_with_its_cause(workers: Workers, code: str, cause: str) -> None:
    workers.start()
    workers.tell(code)
    told = message(workers)
    assert told.startswith(f"group `actor`, rank 0 (pid {workers.processes[0].pid} on node 10.0.0.1): got a dead")
    assert f"({cause}" in told
    assert "in policy.update" in told


def test_a_stopped_worker_is_found_killed_and_named_and_the_others_are_not(workers: Workers) -> None:
    workers.start(2)
    workers.processes[1].send_signal(signal.SIGSTOP)
    assert f"rank 1 (pid {workers.processes[1].pid} on node 10.0.0.1): got a stopped worker" in message(workers)
    assert workers.processes[1].wait(10) == -signal.SIGKILL
    assert workers.processes[0].poll() is None


def test_a_worker_that_holds_python_and_waits_is_stuck(workers: Workers) -> None:
    workers.start()
    workers.tell("ctypes.PyDLL(None).sleep(600)")  # as a deadlock in an extension does
    assert "got a stuck worker that gave no sign of life for" in message(workers)
    assert workers.processes[0].wait(10) == -signal.SIGKILL


def test_a_worker_that_holds_python_and_works_is_not_harmed(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 1.0)
    asked = threading.Event()
    answer = workers.monitor._watch.answer

    def note(question: Question, finding: Finding | None, now: float) -> None:
        answer(question, finding, now)
        asked.set()

    monkeypatch.setattr(workers.monitor._watch, "answer", note)
    workers.start()
    workers.tell("import re; re.match('(a+)+b', 'a' * 32)")
    assert asked.wait(20)
    assert workers.monitor.verdict(0) is None
    assert workers.processes[0].poll() is None


def test_an_end_on_purpose_is_no_death(workers: Workers) -> None:
    beacon = workers.start(2)
    workers.monitor.forget(beacon)
    for process in workers.processes:
        process.kill()
        process.wait()
    assert workers.monitor.verdict(within=2.0) is None
    assert not workers.ended.is_set()


def test_every_worker_heard_of_is_a_quick_answer(workers: Workers) -> None:
    workers.start(2)
    assert workers.monitor.verdict(within=600.0) is None


def test_a_forked_child_neither_hides_its_parents_death_nor_is_taken_for_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 600.0)  # only the end of the connection can tell
    workers.start()
    child = "pid = os.fork()\nif pid == 0: os.kill(os.getpid(), 11)\nos.waitpid(pid, 0)\n"
    lingers = "if os.fork() == 0:\n  import time\n  time.sleep(30)\n  os._exit(0)\n"
    workers.tell(f"{child}{lingers}os.kill(os.getpid(), 9)")
    assert "killed by SIGKILL" in message(workers)


def test_a_monitor_that_is_gone_harms_no_worker(workers: Workers) -> None:
    workers.start()
    workers.monitor.close()
    workers.tell("import time; time.sleep(2.5); os._exit(7)")
    assert workers.processes[0].wait(20) == 7


def test_a_child_that_a_signal_ended_is_known(workers: Workers) -> None:
    workers.start()
    start = (
        "part = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(60,), name='part'); part.start()"
    )
    end = "time.sleep(1.5); part.kill(); part.join(); time.sleep(60)"
    workers.tell(f"import multiprocessing, time; {start}; {end}")
    deadline = time.monotonic() + 20
    while not (killed := workers.monitor.killed_children(Member("actor", 0, "10.0.0.1"))):
        assert time.monotonic() < deadline
        workers.monitor.verdict(within=5.0)
    assert re.fullmatch(r"part, pid \d+, by SIGKILL", killed[0])
    assert workers.monitor.verdict(0) is None


def test_strangers_are_turned_away(workers: Workers) -> None:
    beacon = workers.start()
    for line in (b'{"token": "x", "rank": 0, "pid": 1, "started": 1, "oom_kills": 0}\n', b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((beacon.host, beacon.port), timeout=10) as stranger:
            stranger.sendall(line)
            assert stranger.recv(1) == b""
    assert workers.monitor.verdict(within=2.0) is None


def test_a_group_that_comes_after_the_verdict_is_refused_with_it(workers: Workers) -> None:
    workers.start()
    workers.tell("os.abort()")
    told = message(workers)
    with pytest.raises(InfrastructureError) as error:
        workers.monitor.watch([Member("late", 0, "10.0.0.1")], None, workers.ended.set)
    assert str(error.value) == told


# What is concluded, on a clock of its own.


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


@pytest.mark.parametrize("name", ["a b", "x) R 1 2 (y"])
def test_a_process_is_read_whatever_its_name(name: str) -> None:
    rename = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", rename], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        reading = probe.Reading.of(process.pid)
        process.kill()
    assert reading.parent == os.getpid()
    assert reading.states <= {"S", "R"}


def test_a_number_given_to_a_later_process_is_not_taken_for_the_worker() -> None:
    assert probe.examine(ProcessId(os.getpid(), 1), ("waiting", "working")).state == "gone"
    assert probe.examine(probe.this_process(), ()).state in ("waiting", "working")


def test_a_stopped_sibling_is_found_and_ended() -> None:
    look = (
        "import subprocess, sys; from rlhf_runtime.single_controller.probe import examine_siblings\n"
        "print(examine_siblings().pid)"
    )
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    assert int(found) == sleeper.pid
    assert sleeper.wait(10) == -signal.SIGKILL
