import pickle
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle
from rlhf_runtime.errors import PlacementError
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.single_controller import Call, Dispatch, Execute, Mode, PerRank, Shared, register
from rlhf_runtime.single_controller.decorator import MODES, mode_of, registered_methods
from rlhf_runtime.single_controller.seating import join_devices, seat_workers
from rlhf_runtime.single_controller.worker import assign_seats


def run(mode: Dispatch | Mode, world_size: int, method, *args, **kwargs):
    """What a group does, without processes."""

    def of_rank(argument, rank):
        return argument.value if isinstance(argument, Shared) else argument.values[rank]

    call = mode_of(mode).dispatch(world_size, args, kwargs)
    results = [
        method(*(of_rank(a, rank) for a in call.args), **{k: of_rank(a, rank) for k, a in call.kwargs.items()})
        for rank in (range(world_size) if call.ranks is None else call.ranks)
    ]
    return mode_of(mode).collect(replace(call, args=(), kwargs={}), results)


def batch_of(rows: int) -> DataProto:
    """Row i holds i in a dense, a ragged and an object column."""
    tokens = ragged([torch.full((row % 3,), row) for row in range(rows)])
    return DataProto.from_dict({"x": torch.arange(rows), "tokens": tokens}, {"text": [[row] for row in range(rows)]})


def triple(data: DataProto, factor: int = 3) -> DataProto:
    columns = {"y": data.batch["x"] * factor, "tokens": data.batch["tokens"]}
    return DataProto.from_dict(columns, data.non_tensor_batch)


ANY_CASE = st.integers(1, 4).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(1, 3 * ranks)))


@settings(deadline=None, max_examples=60)
@given(ANY_CASE, st.sampled_from([Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_SHARD]))
def test_a_batch_of_any_size_comes_back_in_order(case: tuple[int, int], mode: Dispatch) -> None:
    ranks, rows = case
    seen: list[DataProto] = []

    def method(data: DataProto, factor: int) -> DataProto:
        seen.append(data)
        return triple(data, factor)

    result = run(mode, ranks, method, batch_of(rows), factor=2)

    assert result.batch["y"].tolist() == [2 * row for row in range(rows)]
    assert [t.tolist() for t in result.batch["tokens"].unbind()] == [[row] * (row % 3) for row in range(rows)]
    assert result.non_tensor_batch["text"].tolist() == [[row] for row in range(rows)]
    sizes = [len(data) for data in seen]
    assert len(sizes) == ranks
    if mode is Dispatch.DP_COMPUTE_PROTO:
        assert torch.cat([data.batch["valid"] for data in seen]).tolist() == [True] * rows + [False] * (-rows % ranks)
        assert len(set(sizes)) == 1
    else:
        assert sum(sizes) == rows
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_SHARD])
def test_rows_may_be_answered_with_several_each(mode: Dispatch) -> None:
    def sample_twice(data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"].repeat_interleave(2)})

    assert run(mode, 2, sample_twice, batch_of(3)).batch["x"].tolist() == [0, 0, 1, 1, 2, 2]


def test_results_that_are_no_batch_come_by_rank() -> None:
    assert run(Dispatch.DP_COMPUTE_PROTO, 2, len, batch_of(3)) == [2, 2]


def test_a_list_is_whole_unless_it_is_marked() -> None:
    assert run(Dispatch.ALL_TO_ALL, 2, list, [5, 6]) == [[5, 6], [5, 6]]
    assert run(Dispatch.ALL_TO_ALL, 2, int, PerRank([5, 6])) == [5, 6]
    assert run(Dispatch.ONE_TO_ALL, 2, list, [5, 6]) == [[5, 6], [5, 6]]
    assert run(Dispatch.DP_COMPUTE, 2, int, [5, 6]) == [5, 6]
    assert run(Dispatch.RANK_ZERO, 2, list, [5, 6]) == [5, 6]


@pytest.mark.parametrize(
    ("mode", "args", "message"),
    [
        (Dispatch.DP_COMPUTE, ([1],), "got 1 items; expected 2"),
        (Dispatch.DP_COMPUTE, (7,), "got int; expected a list"),
        (Dispatch.ALL_TO_ALL, (PerRank([1, 2, 3]),), "got 3 items; expected 2"),
        (Dispatch.DP_COMPUTE_PROTO, (7,), "no DataProto"),
        (Dispatch.DP_COMPUTE_PROTO, (batch_of(1), batch_of(2)), "all of one length"),
    ],
)
def test_arguments_that_cannot_be_spread_are_refused(mode: Dispatch, args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODES[mode].dispatch(2, args, {})


def test_a_result_with_rows_that_belong_to_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[3, 3\] rows for \[2, 2\]; expected the same multiple"):
        run(Dispatch.DP_COMPUTE_PROTO, 2, lambda data: batch_of(3), batch_of(4))
    with pytest.raises(ValueError, match=r"got \[1, 2\] rows for \[2, 1\]; expected the same multiple"):
        run(Dispatch.DP_COMPUTE_SHARD, 2, lambda data: batch_of(3 - len(data)), batch_of(3))


def test_a_pair_of_ones_own_chooses_ranks_and_is_told_its_plan() -> None:
    def even_rows_to_the_last_rank(world_size: int, args: tuple, kwargs: dict) -> Call:
        (data,) = args
        even = torch.arange(len(data)) % 2 == 0
        values = [data.select_rows(~even), *[None] * (world_size - 2), data.select_rows(even)]
        order = torch.cat([even.nonzero(), (~even).nonzero()]).flatten()
        return Call((PerRank(values),), {}, ranks=[world_size - 1, 0], plan=order)

    def in_order(call: Call, results: list[DataProto]) -> DataProto:
        assert call.args == ()
        return DataProto.concat(results).select_rows(call.plan.argsort())

    result = run(Mode(even_rows_to_the_last_rank, in_order), 4, triple, batch_of(5))
    assert result.batch["y"].tolist() == [0, 3, 6, 9, 12]


def test_a_pair_of_ones_own_need_not_be_pickled() -> None:
    lock = threading.Lock()

    class Role:
        @register(Mode(lambda world_size, args, kwargs: Call((), {}), lambda call, results: lock))
        def method(self): ...

    assert registered_methods(Role)["method"].dispatch_mode.collect(Call((), {}), []) is lock
    assert registered_methods(pickle.loads(cloudpickle.dumps(Role))) == {}


def test_register_marks_methods_and_inherits_them() -> None:
    class Base:
        @register(Dispatch.RANK_ZERO)
        def first(self): ...

        def plain(self): ...

    class Role(Base):
        @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def spread(self): ...

    methods = registered_methods(Role)
    assert methods.keys() == {"first", "spread"}
    assert methods["first"].execute_mode is Execute.RANK_ZERO
    assert methods["spread"].execute_mode is Execute.ALL
    assert not methods["spread"].blocking


def test_register_refuses_data_for_ranks_that_do_not_run() -> None:
    with pytest.raises(ValueError, match="got RANK_ZERO with DP_COMPUTE_PROTO"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)
    with pytest.raises(ValueError, match="got RANK_ZERO with a mode of one's own"):
        register(Mode(MODES[Dispatch.ONE_TO_ALL].dispatch, lambda call, results: None), Execute.RANK_ZERO)


def test_ranks_follow_nodes_even_where_bundles_do_not() -> None:
    seats = assign_seats("actor", ["b", "a", "b", "a", "a"], "cpu")
    assert [bundle for _, bundle in seats] == [0, 2, 1, 3, 4]
    assert [(seat.rank, seat.local_rank, seat.local_world_size) for seat, _ in seats] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 3),
        (3, 1, 3),
        (4, 2, 3),
    ]


def test_workers_of_several_bundles_hold_neighbours() -> None:
    seats = seat_workers("rollout", ["b", "a", "b", "a"], "cpu", 2)
    assert [(seat.rank, seat.world_size, seat.local_rank, held) for seat, held in seats] == [
        (0, 2, 0, (0, 2)),
        (1, 2, 0, (1, 3)),
    ]


def test_a_worker_sees_the_devices_of_all_its_bundles() -> None:
    assert join_devices(["0", "1", "4", "5"], 2) == ["0,1", "4,5"]
    assert join_devices(["0", "1"], 1) == ["0", "1"]
    assert join_devices(["0", "0"], 2) == ["0"]  # half a GPU each


@pytest.mark.parametrize(
    ("nodes", "got"),
    [("aab", r"worker 1: got 1 bundles on 1 node\(s\)"), ("abbb", r"worker 0: got 2 bundles on 2 node\(s\)")],
)
def test_a_worker_whose_bundles_lie_apart_is_named(nodes: str, got: str) -> None:
    with pytest.raises(PlacementError, match=rf"group `rollout`, {got}; expected 2 on one"):
        seat_workers("rollout", nodes, "cpu", 2)
