import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_runtime.balancing import BALANCED, ResponseLengths, assign, assign_rows
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.single_controller.decorator import Mode
from rlhf_runtime.workers.minibatch import DEALT

WORK = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


def prompts(lengths: list[int], index: list[int] | None = None) -> DataProto:
    return DataProto.from_dict(
        {
            "prompt_ids": ragged([torch.arange(length) for length in lengths]),
            "prompt_index": torch.tensor(index or list(range(len(lengths)))),
        }
    )


def responses(lengths: list[int]) -> torch.Tensor:
    return ragged([torch.zeros(length, dtype=torch.int64) for length in lengths])


@given(work=WORK, engines=st.integers(1, 6))
def test_every_row_has_one_engine_and_no_engine_much_more_than_its_share(work, engines):
    rows = assign(work, engines)
    assert len(rows) == engines
    assert sorted(row for own in rows for row in own) == list(range(len(work)))
    assert all(own == sorted(own) for own in rows)
    loads = [sum(work[row] for row in own) for own in rows]
    assert max(loads) <= sum(work) / engines + max(work)


def test_one_long_response_does_not_wait_behind_short_ones():
    assert assign([10, 10, 100, 10, 10], 2) == [[2], [0, 1, 3, 4]]


def expecting(tokens: list[int], lengths: list[int], index: list[int] | None = None) -> DataProto:
    """Prompts of these lengths of which so many tokens are expected; each is its own unless an index says otherwise."""
    return prompts(lengths, index).union(
        DataProto.from_dict(
            {"expected_tokens": torch.tensor(tokens, dtype=torch.float32), "row": torch.arange(len(tokens))}
        )
    )


def test_the_samples_of_a_prompt_stay_together_and_its_tokens_count_once():
    # 90, 100 and 95 tokens; were its prompt counted three times, the first would be the heaviest.
    batch = expecting([10, 33, 30] * 3, [60, 1, 5] * 3, [7, 2, 9] * 3)
    assert [own.tolist() for own in assign_rows(batch, 2)] == [[1, 4, 7], [0, 2, 3, 5, 6, 8]]
    assert [len(own) for own in assign_rows(batch, 3)] == [3, 3, 3]


def test_fewer_prompts_than_engines_are_spread_by_their_samples():
    batch = expecting([10] * 6, [5] * 6, [1, 1, 1, 1, 1, 1])
    assert [len(own) for own in assign_rows(batch, 3)] == [2, 2, 2]


NOTHING = DataProto.from_dict({"prompt_index": torch.arange(0)})


@pytest.mark.parametrize(
    ("args", "got"),
    [((), "no argument by position"), (([1],), "list; expected"), ((NOTHING,), "a DataProto of 0 rows")],
)
@pytest.mark.parametrize("mode", [BALANCED, DEALT])
def test_what_has_no_rows_to_spread_is_refused(mode: Mode, args: tuple, got: str):
    with pytest.raises(ValueError, match=f"^argument 0: got {got}"):
        mode.dispatch(2, args, {})


@given(work=WORK, engines=st.integers(1, 6))
def test_what_the_engines_answer_comes_back_in_order_and_idle_ones_are_not_called(work, engines):
    batch = expecting(work, [1] * len(work))
    call = BALANCED.dispatch(engines, (batch, 7), {})
    chunks, version = call.args
    assert version.value == 7
    assert len(call.ranks) == min(engines, len(work))
    answers = [chunks.values[rank].select(["row"]) for rank in call.ranks]
    assert BALANCED.collect(call, answers).batch["row"].tolist() == list(range(len(work)))


def test_unknown_prompts_are_expected_to_get_the_longest_response():
    batch = prompts([3, 5])
    assert ResponseLengths(longest=100).forecast(batch).batch["expected_tokens"].tolist() == [100, 100]


def test_a_prompt_is_expected_to_get_what_it_got_before_and_a_new_one_the_mean():
    known = ResponseLengths(longest=100)
    seen = prompts([1, 1, 1], index=[4, 9, 4])
    known.observe(seen.batch["prompt_index"], responses([10, 40, 20]))
    expected = known.forecast(prompts([2, 2, 2], index=[9, 4, 1])).batch["expected_tokens"]
    assert expected.tolist() == pytest.approx([40, 15, 70 / 3])


def test_what_is_known_of_lengths_comes_back_as_it_was():
    known = ResponseLengths(10)
    known.observe(torch.tensor([3, 3, 5]), responses([1, 2, 7]))
    restored = ResponseLengths(10)
    restored.load_state_dict(json.loads(json.dumps(known.state_dict())))
    asked = prompts([1, 1, 1], [3, 5, 9])
    assert restored.forecast(asked).batch["expected_tokens"].equal(known.forecast(asked).batch["expected_tokens"])
