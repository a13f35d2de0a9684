"""Mini-batches hold the same rows however many ranks share them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_runtime.protocol import VALID, DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.workers.minibatch import DEALT, DEALT_AND_BACK, PICKED_UP, mini_batches, token_mask


def numbered(prompts: list[int], responses: list[int]) -> DataProto:
    """A batch of rows of these lengths that tell their number."""
    columns = {"prompt_ids": prompts, "response_ids": responses}
    tokens = {name: ragged([torch.zeros(count, dtype=torch.int64) for count in of]) for name, of in columns.items()}
    return DataProto.from_dict({"row": torch.arange(len(prompts)), **tokens})


def rows_of_mini_batches(rows: int, size: int | None, world_size: int) -> list[list[int]]:
    """The rows that each optimizer step trains on, over all ranks."""
    batch = numbered([1] * rows, [row % 3 for row in range(rows)])
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


sizes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 5))
def test_what_was_dealt_comes_back_in_order(rows: list[tuple[int, int]], world_size: int) -> None:
    batch = numbered([prompt for prompt, _ in rows], [response for _, response in rows])
    call = DEALT_AND_BACK.dispatch(world_size, (batch,), {})
    made = [hand.select(["row"]) for hand in call.args[0].values]
    for mode, asked in ((DEALT_AND_BACK, call), (PICKED_UP, PICKED_UP.dispatch(world_size, (batch,), {}))):
        assert mode.collect(asked, made).batch["row"].tolist() == list(range(len(rows)))


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 5))
def test_ranks_get_as_many_rows_and_about_as_many_tokens(rows: list[tuple[int, int]], world_size: int) -> None:
    batch = numbered([prompt for prompt, _ in rows], [response for _, response in rows])
    hands = DEALT.dispatch(world_size, (batch,), {}).args[0].values
    tokens = [len(hand.batch["prompt_ids"].values()) + len(hand.batch["response_ids"].values()) for hand in hands]
    assert len({len(hand) for hand in hands}) == 1
    assert max(tokens) - min(tokens) <= max(map(sum, rows))
