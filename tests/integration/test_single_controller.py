"""The single controller on a real Ray of two local nodes with fake GPUs, and one colocated group for the whole file."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from ray import cloudpickle
from rlhf_runtime.errors import InfrastructureError, PlacementError, RewardError
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import from_values, ragged
from rlhf_runtime.single_controller import (
    Dispatch,
    Mode,
    PerRank,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroupView,
    create_colocated_worker_cls,
    register,
    reserve,
)
from rlhf_runtime.single_controller.decorator import MODES

# Workers cannot import a test file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counted:
    """Remembers how often it was pickled."""

    pickles = 0

    def __reduce__(self):
        Counted.pickles += 1
        return Counted, ()


class Role(Worker):
    def __init__(self, bias: int = 0):
        self.bias = bias
        self.rank_at_init = self.rank

    @register()
    def describe(self, *ignored: object) -> dict:
        return {
            "pid": os.getpid(),
            "rank": self.rank_at_init,
            "group": str(torch.distributed.group.WORLD.group_name),
            "env": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
            "threads": torch.get_num_threads(),
            "bias": self.bias,
        }

    @register(Dispatch.ALL_TO_ALL)
    def all_reduce(self, value: float) -> float:
        total = torch.tensor(value)
        torch.distributed.all_reduce(total)
        return total.item()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_bias(self, data: DataProto) -> DataProto:
        columns = {name: data.batch[name] for name in ("tokens", "valid")}
        shifted = {"x": data.batch["x"] + self.bias, "rank": torch.full((len(data),), self.rank)}
        return DataProto.from_dict(columns | shifted, data.non_tensor_batch, data.meta_info)

    @register(Dispatch.RANK_ZERO)
    def fail(self) -> None:
        raise RewardError("rewards.length: got NaN; expected one number a response. Fix: mend it")

    @register()
    def fail_on_the_last_rank(self) -> None:
        if self.rank == self.world_size - 1:
            raise ZeroDivisionError("a bug")
        torch.distributed.barrier()

    @register()
    def die_on_the_last_rank(self) -> None:
        if self.rank == self.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()


class CountedBatch(DataProto):
    """A batch that remembers how often it, or a chunk of it, was pickled."""

    pickles = 0

    def __reduce__(self):
        CountedBatch.pickles += 1
        return super().__reduce__()


def batch_of(rows: int, cls: type[DataProto] = DataProto) -> DataProto:
    return cls.from_dict(
        {"x": torch.arange(rows), "tokens": ragged([torch.full((row % 3,), row) for row in range(rows)])},
        {"text": [f"row {row}" for row in range(rows)]},
        {"step": 1},
    )


def mapping_of(tensor: torch.Tensor) -> str:
    """The file that a tensor's memory is a part of, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return name
    return ""


class Scorer(Worker):
    """A worker that computes alone, and whose methods are not marked."""

    needs_process_group = False

    def triple(self, data: DataProto, *ignored: object) -> DataProto:
        columns = {"y": data.batch["x"] * 3, "tokens": data.batch["tokens"]}
        ranks = torch.full((len(data),), self.rank)
        return DataProto.from_dict(columns | {"rank": ranks}, data.non_tensor_batch, data.meta_info)

    def mappings(self, data: DataProto) -> list[str]:
        return [mapping_of(data.batch["x"]), mapping_of(data.batch["tokens"].values())]

    def now(self) -> float:
        return time.time()


@pytest.fixture(scope="module")
def group(pool: RayResourcePool) -> Iterator[RayWorkerGroup]:
    roles = {"policy": RayClassWithInitArgs(Role, bias=100), "critic": RayClassWithInitArgs(Role, bias=200)}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles))
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def views(group: RayWorkerGroup) -> dict[str, WorkerGroupView]:
    return group.spawn(["policy", "critic"])


@pytest.fixture(scope="module")
def four(cluster: None) -> Iterator[RayResourcePool]:
    """Four bundles on one node."""
    pool = RayResourcePool("scorers", 4, {"CPU": 0.05}, "STRICT_PACK")
    reserve([pool], 30)
    yield pool
    pool.remove()


@pytest.fixture(scope="module")
def scorers(four: RayResourcePool) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(four, RayClassWithInitArgs(Scorer))
    yield group
    group.shutdown()


@pytest.fixture
def policy(views: dict[str, WorkerGroupView]) -> WorkerGroupView:
    return views["policy"]


def test_colocated_roles_share_process_and_process_group(views: dict[str, WorkerGroupView]) -> None:
    policy, critic = views["policy"].describe(), views["critic"].describe()
    assert [p["pid"] for p in policy] == [c["pid"] for c in critic]
    assert len({p["pid"] for p in policy}) == 2
    assert {p["group"] for p in policy} == {c["group"] for c in critic}
    assert [(p["bias"], c["bias"]) for p, c in zip(policy, critic, strict=True)] == [(100, 200)] * 2


def test_rank_environment_and_threads_are_there_when_a_worker_is_made(policy: WorkerGroupView) -> None:
    described = policy.describe()
    assert [d["rank"] for d in described] == [0, 1]
    assert [d["env"] for d in described] == [["0", "2", "0"], ["1", "2", "0"]]
    assert {d["threads"] for d in described} == {len(os.sched_getaffinity(0))}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_any_batch_keeps_its_order_and_loses_its_padding(policy: WorkerGroupView, rows: int) -> None:
    result = policy.add_bias(batch_of(rows)).get()
    assert result.batch["x"].tolist() == [100 + row for row in range(rows)]
    assert [tokens.tolist() for tokens in result.batch["tokens"].unbind()] == [[r] * (r % 3) for r in range(rows)]
    assert result.non_tensor_batch["text"].tolist() == [f"row {row}" for row in range(rows)]
    assert result.batch["valid"].all()
    assert result.batch["rank"].tolist() == [int(row >= (rows + 1) // 2) for row in range(rows)]
    assert result.meta_info == {"step": 1}


def test_padding_rows_arrive_marked(group: RayWorkerGroup, policy: WorkerGroupView) -> None:
    data = DataProto.from_dict({"x": torch.arange(1), "tokens": ragged([torch.arange(0)])})
    chunks = data.pad_to_multiple(2)[0].chunk(2)
    path = ("policy", "add_bias")
    refs = [worker.host_call.remote(path, chunk) for worker, chunk in zip(group.workers, chunks, strict=True)]
    assert [answer.value.batch["valid"].tolist() for answer in ray.get(refs)] == [[True], [False]]


def first_ranks(count: int, mode: Dispatch) -> Mode:
    """A dispatch mode on the first `count` ranks alone."""
    pair = MODES[mode]
    return Mode(
        lambda world_size, args, kwargs: replace(pair.dispatch(count, args, kwargs), ranks=range(count)), pair.collect
    )


@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_SHARD])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_batches_of_any_size_travel_over_any_number_of_ranks(
    scorers: RayWorkerGroup, ranks: int, mode: Dispatch
) -> None:
    for rows in range(1, 3 * ranks + 1):
        future = scorers.async_run_method_batch("triple", batch_of(rows), mode=first_ranks(ranks, mode))
        result = future.get()
        assert result.batch["y"].tolist() == [3 * row for row in range(rows)]
        assert [t.tolist() for t in result.batch["tokens"].unbind()] == [[row] * (row % 3) for row in range(rows)]
        assert result.non_tensor_batch["text"].tolist() == [f"row {row}" for row in range(rows)]
        assert result.meta_info == {"step": 1}
        assert [span.rank for span in scorers.take_spans()] == list(range(ranks))


def test_a_chunk_is_pickled_once_and_an_argument_once_a_call(scorers: RayWorkerGroup) -> None:
    Counted.pickles = CountedBatch.pickles = 0
    shared = Counted()
    result = scorers.async_run_method_batch("triple", batch_of(6, CountedBatch), shared).get()
    assert (CountedBatch.pickles, Counted.pickles) == (4, 1)
    assert result.batch["rank"].tolist() == [0, 0, 1, 1, 2, 3]


def test_received_tensors_share_the_memory_of_the_store(scorers: RayWorkerGroup) -> None:
    rows = 200_000
    data = DataProto.from_dict(
        {"x": torch.arange(rows), "tokens": from_values(torch.zeros(rows), torch.ones(rows, dtype=torch.int64))}
    )
    for names in scorers.async_run_method_batch("mappings", data).get():
        assert ["plasma" in name for name in names] == [True, True]


def references() -> set[bytes]:
    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def test_a_result_can_be_had_twice_and_leaves_nothing_in_ray(scorers: RayWorkerGroup) -> None:
    scorers.wait_ready()
    before = references()
    future = scorers.async_run_method_batch("triple", data=batch_of(6))
    assert references() - before
    assert future.get() is future.get()
    assert references() <= before  # those of earlier tests may go meanwhile


def test_spans_tell_what_each_rank_did_when(scorers: RayWorkerGroup, views: dict[str, WorkerGroupView]) -> None:
    scorers.take_spans()
    begin = time.time()
    times = scorers.async_run_method_batch("now", mode=Dispatch.ONE_TO_ALL).get()
    end = time.time()
    spans = scorers.take_spans()
    assert [(span.group, span.role, span.method, span.rank) for span in spans] == [
        ("scorers", None, "now", rank) for rank in range(4)
    ]
    assert all(begin <= s.start <= now <= s.end <= end for s, now in zip(spans, times, strict=True))
    assert scorers.take_spans() == []

    views["policy"].group.take_spans()
    views["policy"].describe()
    views["critic"].describe()
    assert [(span.role, span.rank) for span in views["critic"].take_spans()] == [("critic", 0), ("critic", 1)]
    assert [(span.role, span.rank) for span in views["policy"].take_spans()] == [("policy", 0), ("policy", 1)]


def test_collectives_work_and_arguments_go_whole_or_one_a_rank(policy: WorkerGroupView) -> None:
    assert policy.all_reduce(2.0) == [4.0, 4.0]
    assert policy.all_reduce(PerRank([1.0, 10.0])) == [11.0, 11.0]


def test_an_error_of_ours_arrives_as_it_was_raised(policy: WorkerGroupView) -> None:
    with pytest.raises(RewardError) as error:
        policy.fail()
    assert type(error.value) is RewardError
    assert str(error.value) == "rewards.length: got NaN; expected one number a response. Fix: mend it"


def test_two_groups_that_start_at_once_do_not_meet(pool: RayResourcePool) -> None:
    first, second = (RayWorkerGroup(pool, RayClassWithInitArgs(Role), num_gpus=0, name=name) for name in ("a", "b"))
    try:
        assert first.all_reduce(PerRank([1.0, 2.0])) == [3.0, 3.0]
        assert second.all_reduce(PerRank([10.0, 20.0])) == [30.0, 30.0]

        with pytest.raises(ZeroDivisionError, match="a bug") as bug:
            first.fail_on_the_last_rank()
        assert "fail_on_the_last_rank" in str(bug.value.__cause__)

        pid = second.describe()[1]["pid"]
        with pytest.raises(InfrastructureError, match=rf"group `b`, rank 1 \(pid {pid} on node [\d.]+\): got a dead"):
            second.die_on_the_last_rank()
    finally:
        first.shutdown()
        second.shutdown()


def test_a_worker_may_hold_several_bundles_of_one_node(four: RayResourcePool, pool: RayResourcePool) -> None:
    with pytest.raises(PlacementError, match="group `actor`, worker 0: got 2 bundles on 2 node"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Scorer), bundles_per_worker=2)

    pairs = RayWorkerGroup(four, RayClassWithInitArgs(Scorer), bundles_per_worker=2, name="pairs")
    result = pairs.async_run_method_batch("triple", batch_of(3)).get()
    pairs.shutdown()
    assert result.batch["rank"].tolist() == [0, 0, 1]
