"""How weights move, without vLLM: buckets, the pipeline, the shared buffer, the broadcast group, calls to engines."""

import os
import pickle
import time
import uuid
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
from rlhf_runtime.weight_sync.broadcast import BroadcastGroup, address_towards, find_store, open_store
from rlhf_runtime.weight_sync.buckets import ALIGNMENT, LARGE, Bucket, BucketPlan, TensorSpec, plan_buckets
from rlhf_runtime.weight_sync.buffer import FOLDER, create_buffer, map_buffer
from rlhf_runtime.weight_sync.client import EngineClient, StepFailure, raise_failure, root_cause
from rlhf_runtime.weight_sync.pipeline import Wait, receive_buckets, send_buckets

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
    assert turns == [index % 2 for index in range(len(turns))]
    assert sum(plan.slot_bytes[:LARGE]) <= bucket_bytes
    assert all(len(bucket.specs) == 1 for bucket in plan.buckets if bucket.slot == LARGE)
    assert sum(plan.slot_bytes) <= sum(bucket.used for bucket in plan.buckets)


def test_a_bucket_is_closed_before_a_tensor_that_does_not_fit_and_large_ones_travel_alone() -> None:
    sizes = [100, 100, 60, 1000, 200, 700, 10]
    plan = plan_buckets([TensorSpec(str(size), torch.int8, (size,)) for size in sizes], bucket_bytes=512)
    assert [[spec.shape[0] for spec in bucket.specs] for bucket in plan.buckets] == [
        [100, 100],
        [60],
        [1000],
        [200],
        [700],
        [10],
    ]
    assert [bucket.slot for bucket in plan.buckets] == [0, 1, LARGE, 0, LARGE, 1]
    assert plan.slot_bytes == (256, 64, 1024)


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

    send_buckets(plan, ours, weights_of(specs), send)
    receive_buckets(plan, receive, load)
    assert list(loaded) == [spec.name for spec in specs]
    for name, tensor in weights_of(specs):
        assert torch.equal(loaded[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_next_bucket_is_on_its_way_while_one_is_loaded() -> None:
    plan = plan_buckets([TensorSpec(str(index), torch.int8, (64,)) for index in range(4)], bucket_bytes=128)
    steps: list[str] = []

    def start(bucket: Bucket) -> Wait:
        steps.append(f"start {bucket.specs[0].name}")
        return lambda: None

    receive_buckets(plan, start, lambda bucket: steps.append(f"load {bucket.specs[0].name}"))
    assert steps == ["start 0", "start 1", "load 0", "start 2", "load 1", "start 3", "load 2", "load 3"]


def test_a_model_that_is_not_the_planned_one_is_refused() -> None:
    plan = plan_buckets([TensorSpec("a", torch.float32, (2, 3))], bucket_bytes=1024)
    with pytest.raises(RuntimeError, match=r"got tensor a \[3, 2\] torch.float32 in the place of a"):
        send_buckets(plan, slots_of(plan), [("a", torch.zeros(3, 2))], lambda bucket: lambda: None)


@pytest.fixture
def path() -> Path:
    return FOLDER / f"rlhf-test-{uuid.uuid4().hex}"


def test_both_ends_share_a_buffer_whose_name_is_gone(path: Path) -> None:
    ours = create_buffer(path, 4096)
    theirs = map_buffer(path, 4096)
    path.unlink()
    ours[17] = 5
    assert theirs[17] == 5
    assert not path.exists()


def test_too_little_shared_memory_is_told_and_leaves_nothing(path: Path) -> None:
    free = os.statvfs(FOLDER)
    too_much = free.f_blocks * free.f_frsize * 4
    with pytest.raises(WeightSyncError, match=rf"weightSync.bucketMiB: got a buffer of {too_much} bytes; .*bucketMiB"):
        create_buffer(path, too_much)
    assert not path.exists()


def test_an_engine_on_another_machine_finds_no_buffer_and_makes_none(path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"got no buffer .* Fix: place rollout and policy in one group"):
        map_buffer(path, 4096)
    assert not path.exists()


class Groups:
    """The ranks of one broadcast group, each driven by a thread of its own."""

    def __init__(self, size: int, timeout_seconds: float = 20.0) -> None:
        self.threads = ThreadPoolExecutor(size)
        store = open_store(HOST, timeout_seconds)

        def join(rank: int) -> BroadcastGroup:
            met = find_store(HOST, store.port, timeout_seconds) if rank else store
            return BroadcastGroup(met, rank, size, address_towards(HOST, store.port), timeout_seconds)

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
        BroadcastGroup(open_store(HOST, 0.5), 0, 2, HOST, 0.5)


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


def test_what_a_worker_answers_is_raised_as_it_was() -> None:
    lost = StepFailure.of("update_weights", ConnectionLostError("lost"))
    own = StepFailure.of("update_weights", ValueError("no such layer"))
    raise_failure([None, None])
    with pytest.raises(ConnectionLostError, match=r"^lost$"):
        raise_failure([None, pickle.loads(pickle.dumps(lost))])
    with pytest.raises(WeightSyncError, match=r"got ValueError \(no such layer\) in update_weights; .* Fix: "):
        raise_failure([lost, own])
