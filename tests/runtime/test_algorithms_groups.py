"""Advantages by comparison, and how losses of tokens become one, against references in plain Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_api.algorithm import ClipRange
from rlhf_runtime.algorithms.aggregation import Counts, token_weights, tokens_of_rows
from rlhf_runtime.algorithms.groups import (
    STD_EPSILON,
    groups_with_signal,
    grpo_advantages,
    overlong_penalty,
    rloo_advantages,
)
from rlhf_runtime.algorithms.losses import policy_loss

quick = settings(max_examples=60, deadline=None)
scores = st.one_of(st.floats(-10, 10, width=32), st.sampled_from([0.0, 0.1, 1.0]))


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Rewards, and groups of any size in any order."""
    rewards = draw(st.lists(scores, min_size=1, max_size=12))
    groups = draw(st.lists(st.sampled_from([7, 0, 3, -2]), min_size=len(rewards), max_size=len(rewards)))
    return rewards, groups


def members(rewards: list[float], groups: list[int], row: int) -> list[float]:
    return [reward for reward, group in zip(rewards, groups, strict=True) if group == groups[row]]


@quick
@given(scored(), st.booleans())
def test_grpo_follows_the_paper(data, normalize: bool) -> None:
    rewards, groups = data
    got = grpo_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), normalize)
    for row, reward in enumerate(rewards):
        group = members(rewards, groups, row)
        expected = reward - statistics.fmean(group)
        if normalize:
            expected /= (statistics.stdev(group) if len(group) > 1 else 0.0) + STD_EPSILON
        assert got[row].item() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@quick
@given(scored())
def test_rloo_follows_the_paper(data) -> None:
    rewards, groups = data
    got = rloo_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    for row, reward in enumerate(rewards):
        others = members(rewards, groups, row)
        others.remove(reward)
        expected = reward - statistics.fmean(others) if others else 0.0
        assert got[row].item() == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_known_numbers_of_groups() -> None:
    rewards, groups = torch.tensor([6.0, 3, 9, 12, 1]), torch.tensor([0, 0, 1, 1, 2])
    torch.testing.assert_close(rloo_advantages(rewards, groups), torch.tensor([3.0, -3, -3, 3, 0]), atol=1e-4, rtol=0)
    plain = grpo_advantages(rewards, groups, normalize_by_std=False)
    torch.testing.assert_close(plain, torch.tensor([1.5, -1.5, -1.5, 1.5, 0]), atol=1e-4, rtol=0)
    normalized = grpo_advantages(rewards, groups, normalize_by_std=True)
    torch.testing.assert_close(normalized, torch.tensor([1.0, -1, -1, 1, 0]) / math.sqrt(2), atol=1e-4, rtol=0)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1, -7.7])
def test_equal_rewards_give_no_advantage_of_rounding(reward: float) -> None:
    rewards, groups = torch.full((7,), reward), torch.zeros(7, dtype=torch.int64)
    assert not grpo_advantages(rewards, groups, normalize_by_std=True).any()
    assert not rloo_advantages(rewards, groups).any()
    assert not groups_with_signal(rewards, groups).any()


@quick
@given(scored())
def test_signal_is_a_group_with_two_rewards(data) -> None:
    rewards, groups = data
    got = groups_with_signal(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert got.tolist() == [len(set(members(rewards, groups, row))) > 1 for row in range(len(rewards))]


def test_a_nan_is_no_signal_and_reaches_its_own_group_alone() -> None:
    rewards, groups = torch.tensor([math.nan, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    for advantages in (rloo_advantages(rewards, groups), grpo_advantages(rewards, groups, True)):
        assert torch.isfinite(advantages).tolist() == [False, False, True, True]


def test_the_overlong_penalty_is_that_of_the_paper() -> None:
    penalties = overlong_penalty(torch.tensor([0, 6, 7, 8, 10, 12]), max_length=10, buffer=4, penalty=0.5)
    torch.testing.assert_close(penalties, torch.tensor([0, 0, -0.125, -0.25, -0.5, -0.5]))


# ---- aggregation

KINDS = ["tokenMean", "sequenceMeanTokenMean", "sequenceMeanTokenSum", "constant"]
CONSTANT = 37.0


@st.composite
def ragged_losses(draw: st.DrawFn) -> list[list[tuple[float, bool]]]:
    """Rows of tokens, each with a log-probability and whether it counts; rows without any are among them."""
    token = st.tuples(st.floats(-1, 1, width=32), st.booleans())
    return draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=5))


def slow_loss(rows: list[list[tuple[float, bool]]], kind: str) -> float:
    counted = [[value for value, counts in row if counts] for row in rows]
    counted = [row for row in counted if row]
    tokens = [value for row in counted for value in row]
    if not tokens:
        return 0.0
    match kind:
        case "tokenMean":
            return sum(tokens) / len(tokens)
        case "sequenceMeanTokenMean":
            return sum(sum(row) / len(row) for row in counted) / len(counted)
        case "sequenceMeanTokenSum":
            return sum(sum(row) for row in counted) / len(counted)
    return sum(tokens) / CONSTANT


def flat(rows: list[list[tuple[float, bool]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.tensor([value for row in rows for value, _ in row])
    mask = torch.tensor([counts for row in rows for _, counts in row], dtype=torch.bool)
    return values, mask, torch.tensor([len(row) for row in rows], dtype=torch.int64)


def counts_of(rows: list[list[tuple[float, bool]]]) -> Counts:
    _, mask, lengths = flat(rows)
    return Counts(int(mask.sum()), int((tokens_of_rows(mask, lengths) > 0).sum()))


@quick
@given(ragged_losses(), st.sampled_from(KINDS), st.integers(0, 5), st.randoms())
def test_a_loss_does_not_depend_on_ranks_or_order(rows, kind: str, cut: int, random) -> None:
    expected, counts = slow_loss(rows, kind), counts_of(rows)
    random.shuffle(rows)
    total = 0.0
    for part in (rows[:cut], rows[cut:]):  # what two ranks hold
        values, mask, lengths = flat(part)
        weights = token_weights(mask, lengths, counts, kind, CONSTANT)
        total += (weights * values.masked_fill(~mask, 1e9)).sum().item()
        assert not weights[~mask].any()
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_known_numbers_of_aggregation() -> None:
    rows = [[(1.0, True), (2.0, True)], [(3.0, True), (4.0, True), (5.0, True)], [(7.0, True)]]
    values, mask, lengths = flat(rows)
    for cut in range(4):  # micro-batches
        weights = token_weights(mask, lengths, counts_of(rows), "tokenMean", None)
        first = int(lengths[:cut].sum())
        parts = (weights * values)[:first].sum() + (weights * values)[first:].sum()
        assert parts.item() == pytest.approx(22 / 6, abs=1e-4)


def test_a_token_sum_counts_every_rank_once() -> None:
    rows = [[(1.0, True), (2.0, True), (30.0, False)], [(4.0, True), (50.0, False), (6.0, True)]]
    values, mask, lengths = flat(rows)
    weights = token_weights(mask, lengths, counts_of(rows * 4), "constant", 1.0)
    own = (weights * values).sum()
    averaged = torch.stack([own * 4] * 4).mean()  # as the engine scales what FSDP averages
    assert (own.item(), averaged.item()) == pytest.approx((13, 52), abs=1e-4)


@quick
@given(ragged_losses(), st.sampled_from(KINDS), st.integers(0, 2**32))
def test_the_whole_policy_loss_and_its_gradient_follow_the_formula(rows, kind: str, seed: int) -> None:
    """Ratio, clip and aggregation together, in loops over rows and tokens; the gradient by differences."""
    generator = torch.Generator().manual_seed(seed)
    new, mask, lengths = flat(rows)
    new = new.double()
    old, advantages = (torch.randn(len(new), generator=generator, dtype=torch.float64) for _ in range(2))
    clip, counts = ClipRange(low=0.2, high=0.28), counts_of(rows)

    def slow(log_probs: list[float]) -> float:
        place, written = 0, []
        for row in rows:
            written.append([])
            for _, counted in row:
                ratio = math.exp(log_probs[place] - old[place].item())
                a = advantages[place].item()
                written[-1].append((-min(ratio * a, min(max(ratio, 0.8), 1.28) * a), counted))
                place += 1
        return slow_loss(written, kind)

    weights = token_weights(mask, lengths, counts, kind, CONSTANT).double()
    variable = new.clone().requires_grad_()
    loss = (weights * policy_loss(variable, old, advantages, mask, clip, None).losses).sum()
    loss.backward()
    assert loss.item() == pytest.approx(slow(new.tolist()), rel=1e-5, abs=1e-6)
    step = 1e-6
    for place in range(len(new)):
        ratio = math.exp((new - old)[place].item())
        if min(abs(ratio - edge) for edge in (0.8, 1.28)) < 1e-4:
            continue  # a kink has no derivative
        up, down = ([*new[:place].tolist(), new[place].item() + d, *new[place + 1 :].tolist()] for d in (step, -step))
        assert variable.grad[place].item() == pytest.approx((slow(up) - slow(down)) / (2 * step), rel=1e-4, abs=1e-6)
