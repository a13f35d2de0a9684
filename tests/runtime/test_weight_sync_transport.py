"""How weights move, without vLLM: buckets, the pipeline, the shared buffer, the broadcast group, calls to engines."""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_runtime.errors import ConnectionLostError, InfrastructureError, WeightSyncError
from rlhf_runtime.store import open_store
from rlhf_runtime.weight_sync.broadcast import BroadcastGroup, address_towards
from rlhf_runtime.weight_sync.buckets import ALIGNMENT, LARGE, TURNS, Bucket, BucketPlan, TensorSpec, plan_buckets
from rlhf_runtime.weight_sync.buffer import FOLDER, create_buffer, map_buffer
from rlhf_runtime.weight_sync.client import EngineCall, EngineClient, StepFailure, background, raise_failure, root_cause
from rlhf_runtime.weight_sync.meeting import Meeting, join_engines
from rlhf_runtime.weight_sync.pipeline import Wait, receive_buckets, send_buckets
from rlhf_runtime.weight_sync.receive import TransferExtension

HOST = "127.0.0.1"
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), max_size=30)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    return [TensorSpec(f"t{index}", draw(DTYPES), shape) for index, shape in enumerate(draw(SHAPES))]


@given(models(), st.integers(1, 10_000))
def test_every_tensor_has_a_place_of_its_own_in_order(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = plan_buckets(specs, bucket_bytes)
    assert [spec for bucket in plan.buckets for spec in bucket.specs] == specs
    for bucket in plan.buckets:
        ends = [0]
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
            assert offset >= ends[-1]
            assert offset % ALIGNMENT == 0
            ends.append(offset + spec.bytes)
        assert max(ends) <= bucket.used <= plan.slot_bytes[bucket.slot]


@given(models(), st.integers(1, 10_000))
def test_buckets_take_turns_within_the_bytes_asked_for(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = plan_buckets(specs, bucket_bytes)
    turns = [bucket.slot for bucket in plan.buckets if bucket.slot != LARGE]
    assert turns == [index % TURNS for index in range(len(turns))]
    assert sum(plan.slot_bytes[:LARGE]) <= bucket_bytes
    assert all(len(bucket.specs) == 1 for bucket in plan.buckets if bucket.slot == LARGE)
    assert sum(plan.slot_bytes) <= sum(bucket.used for bucket in plan.buckets)


def test_a_bucket_is_closed_before_a_tensor_that_does_not_fit_and_large_ones_travel_alone() -> None:
    sizes = [100, 100, 60, 1000, 200, 700, 10]
    plan = plan_buckets([TensorSpec(str(size), torch.int8, (size,)) for size in sizes], bucket_bytes=768)
    assert [[spec.shape[0] for spec in bucket.specs] for bucket in plan.buckets] == [
        [100, 100],
        [60],
        [1000],
        [200],
        [700],
        [10],
    ]
    assert [bucket.slot for bucket in plan.buckets] == [0, 1, LARGE, 2, LARGE, 0]
    assert plan.slot_bytes == (256, 64, 256, 1024)


def weights_of(specs: list[TensorSpec], seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for spec in specs:
        data = torch.randint(0, 255, (spec.bytes,), dtype=torch.uint8, generator=generator)
        yield spec.name, data.view(spec.dtype).view(spec.shape)


def slots_of(plan: BucketPlan) -> tuple[torch.Tensor, ...]:
    return plan.slots(torch.zeros(sum(plan.slot_bytes), dtype=torch.uint8))


@settings(deadline=None)
@given(models(), st.integers(128, 10_000))
def test_what_is_sent_is_what_is_loaded_though_slots_are_used_again(specs: list[TensorSpec], bucket_bytes: int) -> None:
    """The wire takes a bucket's bytes as late, and gives them as early, as each end allows."""
    plan = plan_buckets(specs, bucket_bytes)
    ours, theirs = slots_of(plan), slots_of(plan)
    wire: list[torch.Tensor] = []
    loaded: dict[str, torch.Tensor] = {}

    def send(bucket: Bucket) -> Wait:
        place = torch.empty(bucket.used, dtype=torch.uint8)
        wire.append(place)
        return lambda: place.copy_(ours[bucket.slot][: bucket.used])

    def receive(bucket: Bucket) -> Wait:
        theirs[bucket.slot][: bucket.used] = wire.pop(0)
        return lambda: None

    def load(bucket: Bucket) -> None:
        loaded.update((name, tensor.clone()) for name, tensor in bucket.views(theirs[bucket.slot]))

    send_buckets(plan, plan.views(ours), weights_of(specs), send)
    receive_buckets(plan, receive, load)
    assert list(loaded) == [spec.name for spec in specs]
    for name, tensor in weights_of(specs):
        assert torch.equal(loaded[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@settings(deadline=None)
@given(models(), st.integers(128, 10_000))
def test_what_a_loader_keeps_of_a_bucket_is_there_until_the_next_is_loaded(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    """In shared memory, and with a receiver that loads as late as the sender allows."""
    plan = plan_buckets(specs, bucket_bytes)
    views = plan.views(slots_of(plan))
    expected = dict(weights_of(specs))
    kept: list[tuple[str, torch.Tensor]] = []

    def load(bucket: Bucket) -> None:
        for name, tensor in (*kept, *views[bucket.index]):
            assert torch.equal(tensor.view(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8))
        kept[:] = () if bucket.slot in plan.used_soon(bucket) else views[bucket.index]

    send_buckets(plan, views, expected.items(), lambda bucket: lambda: load(bucket))


def test_the_next_bucket_is_on_its_way_while_one_is_loaded() -> None:
    plan = plan_buckets([TensorSpec(str(index), torch.int8, (64,)) for index in range(4)], bucket_bytes=192)
    steps: list[str] = []

    def start(bucket: Bucket) -> Wait:
        steps.append(f"start {bucket.specs[0].name}")
        return lambda: None

    receive_buckets(plan, start, lambda bucket: steps.append(f"load {bucket.specs[0].name}"))
    assert steps == ["start 0", "start 1", "load 0", "start 2", "load 1", "start 3", "load 2", "load 3"]


def test_a_model_that_is_not_the_planned_one_is_refused() -> None:
    plan = plan_buckets([TensorSpec("a", torch.float32, (2, 3))], bucket_bytes=1024)
    with pytest.raises(RuntimeError, match=r"got tensor a \[3, 2\] torch.float32 in the place of a"):
        send_buckets(plan, plan.views(slots_of(plan)), [("a", torch.zeros(3, 2))], lambda bucket: lambda: None)


MAPS = """
import sys
from pathlib import Path
from rlhf_runtime.weight_sync.buffer import map_buffer
map_buffer(Path(sys.argv[1]), 4096)[17] = 5
"""


def test_processes_share_a_buffer_that_never_had_a_name() -> None:
    before = set(os.listdir(FOLDER))
    with create_buffer(4096) as (ours, path):
        assert set(os.listdir(FOLDER)) <= before
        subprocess.run([sys.executable, "-c", MAPS, path], check=True)
    assert ours[17] == 5
    assert not path.exists()


def test_too_little_shared_memory_is_told_and_none_is_kept() -> None:
    memory = os.statvfs(FOLDER)
    too_much, free = memory.f_blocks * memory.f_frsize * 4, memory.f_bavail
    with (
        pytest.raises(WeightSyncError, match=rf"weightSync.bucketMiB: got a buffer of {too_much} bytes; .*bucketMiB"),
        create_buffer(too_much),
    ):
        pass
    assert os.statvfs(FOLDER).f_bavail > free / 2


@pytest.mark.parametrize("found", ["nothing", "another file", "one that is not ours to see"])
def test_an_engine_on_another_machine_finds_no_buffer_and_makes_none(found: str, tmp_path: Path) -> None:
    path = tmp_path / "there"
    if found == "another file":
        path.write_bytes(b"other")
    elif found == "one that is not ours to see":
        path = path / "below"
        path.parent.write_bytes(b"no folder")
    with pytest.raises(WeightSyncError, match=r"got no buffer .* Fix: place rollout and policy in one group"):
        map_buffer(path, 4096)
    assert path.exists() == (found == "another file")


def test_a_store_listens_at_its_address_alone() -> None:
    port = open_store(HOST, 5.0).port
    with socket.create_server(("127.0.0.2", port)):
        """Taken already, had the store bound every address."""


class Engines:
    """Answers of two engines to a handshake, which are given one at a time."""

    def __init__(self, timeout_seconds: float = 20.0) -> None:
        self.answers = [Future[None](), Future[None]()]
        client = EngineClient([], 1, True, timeout_seconds)
        self.call = EngineCall("init_weight_transfer_engine", self.answers, client)


def test_a_handshake_that_one_engine_fails_in_ends_for_all_at_once_and_tells_why() -> None:
    """The one that failed tells the others itself, and answers after one of them."""
    meeting, engines = Meeting.open(HOST, 3, 300.0), Engines()
    other, failing = (Meeting.find(HOST, meeting.port, 3, 300.0) for _ in range(2))
    built: list[int] = []
    failing.leave()
    with pytest.raises(ConnectionLostError, match="a process left") as told:
        other.join(lambda store: built.append(1))
    engines.answers[0].set_exception(told.value)
    threading.Timer(0.2, engines.answers[1].set_exception, [WeightSyncError("no such device")]).start()
    with pytest.raises(WeightSyncError, match="no such device"):
        join_engines(meeting, engines.call, lambda: meeting.join(lambda store: built.append(0)))
    assert not built


def test_engines_that_wait_for_one_that_never_came_leave_once_the_sender_gives_up() -> None:
    meeting, engines = Meeting.open(HOST, 3, 300.0), Engines(timeout_seconds=0.5)
    waiting = background(lambda: Meeting.find(HOST, meeting.port, 3, 300.0).join(lambda store: None))
    with pytest.raises(WeightSyncError, match=r"got no answer to init_weight_transfer_engine from engines \[0, 1\]"):
        join_engines(meeting, engines.call, lambda: meeting.join(lambda store: None))
    assert isinstance(waiting.exception(timeout=10), ConnectionLostError)


def test_a_group_that_hangs_while_it_is_built_is_left_with_the_first_process() -> None:
    """As NCCL's would, where a process fails in the middle."""
    first = Meeting.open(HOST, 2, 300.0)
    second = Meeting.find(HOST, first.port, 2, 300.0)
    never = threading.Event()
    hanging = background(lambda: first.join(lambda store: never.wait()))
    second.join(lambda store: None)
    second.leave()
    assert isinstance(hanging.exception(timeout=10), ConnectionLostError)
    never.set()


def test_a_group_that_hangs_while_it_is_built_is_left_in_time() -> None:
    never = threading.Event()
    with pytest.raises(ConnectionLostError, match=r"no group within 0.5 s"):
        Meeting.open(HOST, 1, 0.5).join(lambda store: never.wait())
    never.set()


class Groups:
    """The ranks of one broadcast group, each driven by a thread of its own."""

    def __init__(self, size: int, timeout_seconds: float = 20.0) -> None:
        self.threads = ThreadPoolExecutor(size)
        opened = Meeting.open(HOST, size, timeout_seconds)

        def join(rank: int) -> BroadcastGroup:
            meeting = Meeting.find(HOST, opened.port, size, timeout_seconds) if rank else opened
            return BroadcastGroup(meeting, rank, size, address_towards(HOST, opened.port), timeout_seconds)

        self.ranks = list(self.threads.map(join, range(size)))

    def start(self, rank: int, data: torch.Tensor, timeout_seconds: float = 20.0) -> Future[None]:
        wait = self.ranks[rank].start(data, timeout_seconds)
        return self.threads.submit(wait)


def test_rank_0_reaches_everyone() -> None:
    groups = Groups(3)
    data = [torch.arange(1000) if rank == 0 else torch.zeros(1000, dtype=torch.int64) for rank in range(3)]
    for move in [groups.start(rank, data[rank].view(torch.uint8)) for rank in range(3)]:
        move.result()
    assert torch.equal(data[1], data[0])
    assert torch.equal(data[2], data[0])


@pytest.mark.parametrize("leaver", [0, 1])
def test_whoever_waits_for_a_process_that_closes_fails_at_once(leaver: int) -> None:
    groups = Groups(3)
    began = time.monotonic()
    waiting = [groups.start(rank, torch.empty(1 << 24, dtype=torch.uint8)) for rank in range(3) if rank != leaver]
    groups.ranks[leaver].close()
    errors = []
    for rank, move in zip([rank for rank in range(3) if rank != leaver], waiting, strict=True):
        errors.append(move.exception())
        groups.ranks[rank].close()
    assert all(isinstance(error, ConnectionLostError) for error in errors if error)
    assert any(errors)
    assert time.monotonic() - began < 15
    with pytest.raises(ConnectionLostError, match="the group is closed"):
        groups.ranks[leaver].start(torch.empty(8, dtype=torch.uint8), 1.0)


def test_a_receiver_that_is_late_is_not_waited_for_without_end() -> None:
    groups = Groups(2)
    with pytest.raises(ConnectionLostError, match="Timed out"):
        groups.start(0, torch.empty(1 << 26, dtype=torch.uint8), timeout_seconds=0.5).result()


def test_a_group_that_does_not_come_together_in_time_is_told() -> None:
    with pytest.raises(ConnectionLostError, match="expected all of them"):
        BroadcastGroup(Meeting.open(HOST, 2, 0.5), 0, 2, HOST, 0.5)


class LateMove:
    """A move that ends just after a wait for it gave up, well or not."""

    def __init__(self, error: str | None) -> None:
        self.waits, self.error = 0, error

    def wait(self, timeout: Any) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_a_move_that_ends_as_a_look_at_it_ends_is_not_taken_for_lost() -> None:
    group = Groups(1).ranks[0]
    group._group = SimpleNamespace(broadcast=lambda data, options: LateMove(None))
    group.start(torch.empty(8, dtype=torch.uint8), 5.0)()
    group._group = SimpleNamespace(broadcast=lambda data, options: LateMove("Connection closed by peer"))
    with pytest.raises(ConnectionLostError, match="closed by peer"):
        group.start(torch.empty(8, dtype=torch.uint8), 5.0)()


class Engine:
    """An actor handle whose steps end as they are told, or never."""

    def __init__(self, answer: Callable[[str, Any], None] | None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._answer = answer
        self.transfer_weights = SimpleNamespace(remote=self._call)

    def _call(self, step: str, info: Any) -> SimpleNamespace:
        self.asked.append((step, info))
        future: Future[None] = Future()
        if self._answer is not None:
            try:
                future.set_result(self._answer(step, info))
            except Exception as error:
                future.set_exception(error)
        return SimpleNamespace(future=lambda: future)


def fine(step: str, info: Any) -> None:
    return None


def failing(error: Exception) -> Callable[[str, Any], None]:
    def answer(step: str, info: Any) -> None:
        raise error

    return answer


def test_ranks_of_an_engine_follow_those_of_the_one_before() -> None:
    engines = [Engine(fine) for _ in range(3)]
    client = EngineClient(engines, workers_per_engine=2, verify=False, timeout_seconds=9)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": client.world_size})
    infos = [engine.asked[0][1] for engine in engines]
    assert [info.pop("rank_offset") for info in infos] == [1, 3, 5]
    assert infos == [{"world_size": 7, "verify": False, "timeout_seconds": 9}] * 3


def test_the_first_engine_to_fail_ends_the_wait_for_the_others() -> None:
    client = EngineClient([Engine(None), Engine(failing(WeightSyncError("full")))], 1, True, 60)
    with pytest.raises(WeightSyncError, match="full"):
        client.start_weight_update()


def test_an_engine_that_does_not_answer_in_time_is_named() -> None:
    client = EngineClient([Engine(fine), Engine(None)], 1, True, 0.1)
    with pytest.raises(
        WeightSyncError, match=r"weightSync.timeoutSeconds: got no answer to start_weight_update from engines \[1\]"
    ):
        client.start_weight_update()


def test_the_cause_is_told_and_not_what_follows_from_it() -> None:
    lost, own, gone = ConnectionLostError("lost"), WeightSyncError("own"), InfrastructureError("gone")
    assert root_cause([lost, own]) is own
    assert root_cause([lost, own, gone]) is gone
    assert root_cause([lost]) is lost
    assert root_cause([]) is None


def test_a_worker_whose_connection_cannot_be_closed_still_answers_why_it_failed() -> None:
    def fail(error: str) -> None:
        raise ValueError(error)

    worker = TransferExtension()
    worker.update_weights = lambda: fail("no such layer")
    target = {"reset_weight_update_target": lambda: None, "shutdown": lambda: fail("closed already")}
    worker.weight_transfer_engine = SimpleNamespace(**target)
    failure = worker.attempt_transfer("update_weights", None)
    assert failure is not None
    assert "no such layer" in failure.message


def test_what_a_worker_answers_is_raised_as_it_was() -> None:
    lost = StepFailure.of("update_weights", ConnectionLostError("lost"))
    own = StepFailure.of("update_weights", ValueError("no such layer"))
    raise_failure([None, None])
    with pytest.raises(ConnectionLostError, match=r"^lost$"):
        raise_failure([None, pickle.loads(pickle.dumps(lost))])
    with pytest.raises(WeightSyncError, match=r"got ValueError \(no such layer\) in update_weights; .* Fix: "):
        raise_failure([lost, own])
