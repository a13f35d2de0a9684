"""Mini-batches hold the same rows however many ranks share them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_runtime.protocol import VALID, DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.workers.minibatch import DEALT, PICKED_UP, mini_batches, token_mask


def rows_of_mini_batches(rows: int, size: int | None, world_size: int) -> list[list[int]]:
    """The rows that each optimizer step trains on, over all ranks."""
    batch = DataProto.from_dict(
        {
            "row": torch.arange(rows),
            "response_ids": ragged([torch.zeros(row % 3, dtype=torch.int64) for row in range(rows)]),
        }
    )
    hands = DEALT.dispatch(world_size, (batch,), {}).args[0].values
    parts = [list(mini_batches(hand, size, 1, world_size)) for hand in hands]
    steps = []
    for step in zip(*parts, strict=True):
        for part in step:
            assert token_mask(part).sum() == sum(row % 3 for row in part.batch["row"][part.batch[VALID]].tolist())
        steps.append(sorted(row for part in step for row in part.batch["row"][part.batch[VALID]].tolist()))
    return [step for step in steps if step]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 10), st.booleans())
def test_ranks_change_no_mini_batch(rows: int, world_size: int, per_rank: int, whole: bool) -> None:
    size = None if whole else per_rank * world_size
    assert rows_of_mini_batches(rows, size, world_size) == rows_of_mini_batches(rows, size, 1)


def test_a_mini_batch_is_the_next_rows() -> None:
    assert rows_of_mini_batches(10, 4, 2) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5))
def test_what_was_dealt_is_picked_up_in_order(rows: int, world_size: int) -> None:
    batch = DataProto.from_dict({"row": torch.arange(rows)})
    hands = DEALT.dispatch(world_size, (batch,), {}).args[0].values
    call = PICKED_UP.dispatch(world_size, (rows,), {})
    together = PICKED_UP.collect(call, [hand.select(["row"]) for hand in hands])
    assert together.batch["row"].tolist() == list(range(rows))
