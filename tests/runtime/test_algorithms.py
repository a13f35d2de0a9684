"""The algorithms against slow float64 references, and where numbers are extreme, masked or missing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_api.algorithm import AdaptiveKL, ClipRange
from rlhf_runtime.algorithms import losses
from rlhf_runtime.algorithms.advantages import gae, rewards_to_go, token_rewards
from rlhf_runtime.algorithms.kl import LOG_RATIO_LIMIT, adapted_coefficient, kl_divergence
from rlhf_runtime.algorithms.losses import policy_loss, score_tokens, value_loss
from rlhf_runtime.algorithms.masking import masked_mean, masked_sum, whiten

CLIP = ClipRange(low=0.2, high=0.3)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BAD = [math.nan, math.inf, -math.inf]
quick = settings(max_examples=40, deadline=None)


@st.composite
def rows(draw: st.DrawFn, columns: int) -> tuple[torch.Tensor, ...]:
    """`columns` float64 tensors [B, T] and a mask."""
    size, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 1.0, 3.0]))
    tensors = torch.randn(columns, size, width, generator=generator, dtype=torch.float64) * spread
    draws = torch.rand(size, width, generator=generator)
    return *tensors.unbind(), draws < draw(st.sampled_from([0.0, 0.5, 1.0]))


def slow_gae(rewards: list[float], values: list[float], gamma: float, lambda_: float) -> list[float]:
    """Each advantage as the explicit sum over all later deltas."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lambda_) ** (later - start) * deltas[later] for later in range(start, len(deltas)))
        for start in range(len(deltas))
    ]


@pytest.mark.parametrize(
    ("gamma", "lambda_", "expected"),
    [(1.0, 1.0, [6, 5, 3]), (0.5, 1.0, [2.75, 3.5, 3]), (1.0, 0.5, [3.625, 4.25, 3])],
)
def test_gae_returns_known_numbers(gamma: float, lambda_: float, expected: list[float]) -> None:
    rewards, values = torch.tensor([[1.0, 2, 3]]), torch.tensor([[0.5, 1, 1.5]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma, lambda_)
    torch.testing.assert_close(returns, torch.tensor([expected]).float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(advantages, returns - values)


@quick
@given(rows(2), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_that_of_each_row_without_its_masked_slots(data, gamma: float, lambda_: float) -> None:
    rewards, values, mask = data
    poisoned = values.masked_fill(~mask, math.nan)
    advantages, returns = gae(rewards.masked_fill(~mask, math.inf), poisoned, mask, gamma, lambda_)
    for row, kept in enumerate(mask):
        expected = slow_gae(rewards[row][kept].tolist(), values[row][kept].tolist(), gamma, lambda_)
        torch.testing.assert_close(advantages[row][kept], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns[mask], (advantages + values)[mask])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_the_score_lands_on_the_last_token_and_kl_on_each() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    kl = torch.tensor([[1.0, 2, math.nan], [0, 1, 0], [math.inf, 0, 0]])
    rewards = token_rewards(torch.tensor([10.0, 20, 30]), kl, mask, coefficient=0.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.5, 9, 0], [0, -0.5, 20], [0, 0, 0]]))


@quick
@given(rows(1))
def test_rewards_to_go_are_the_sums_of_what_follows(data) -> None:
    rewards, mask = data
    returns = rewards_to_go(rewards.masked_fill(~mask, math.nan), mask)
    for row, kept in enumerate(mask.tolist()):
        for place, counts in enumerate(kept):
            later = [rewards[row, other].item() for other in range(place, len(kept)) if kept[other]]
            assert returns[row, place].item() == pytest.approx(sum(later) if counts else 0)


def test_token_means_do_not_depend_on_how_rows_are_cut() -> None:
    values = torch.tensor([[1.0, 2, 0], [3, 4, 5], [7, 0, 0]])
    mask = torch.arange(3) < torch.tensor([[2], [3], [1]])
    assert masked_mean(values, mask).item() == pytest.approx(22 / 6)
    parts = sum(masked_sum(row, kept) for row, kept in zip(values, mask, strict=True)) / mask.sum()
    assert parts.item() == pytest.approx(22 / 6)


@quick
@given(rows(1))
def test_whitened_values_have_mean_0_and_variance_1(data) -> None:
    values, mask = data
    white = whiten(values.masked_fill(~mask, math.nan), mask)
    kept = white[mask]
    assert torch.isfinite(white).all()
    assert not white[~mask].any()
    if mask.sum() > 1 and values[mask].std() > 0.01:
        assert kept.mean().item() == pytest.approx(0, abs=1e-6)
        assert kept.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def slow_kl(log_prob: float, ref: float, estimator: str, exponent: float, limit: float | None) -> tuple[float, float]:
    """One token's estimate and its derivative by the log-probability."""
    r = log_prob - ref
    held = estimator == "k3" and -r > exponent
    r = -exponent if held else r
    value = {"k1": r, "k2": r * r / 2, "k3": math.exp(-r) - 1 + r}[estimator]
    slope = 0.0 if held else {"k1": 1.0, "k2": r, "k3": 1 - math.exp(-r)}[estimator]
    if limit is not None and abs(value) > limit:
        return math.copysign(limit, value), 0.0
    return value, slope


@quick
@given(rows(2), st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([0.5, 10.0]), st.sampled_from([None, 1.0]))
def test_kl_and_its_gradient_follow_the_formula(data, estimator, exponent: float, limit: float | None) -> None:
    log_probs, ref, _ = data
    log_probs.requires_grad_()
    kl = kl_divergence(log_probs, ref, estimator, exponent, limit)
    kl.sum().backward()
    pairs = zip(log_probs.flatten().tolist(), ref.flatten().tolist(), strict=True)
    expected = torch.tensor([slow_kl(*pair, estimator, exponent, limit) for pair in pairs], dtype=torch.float64)
    torch.testing.assert_close(kl.flatten(), expected[:, 0])
    torch.testing.assert_close(log_probs.grad.flatten(), expected[:, 1])


@pytest.mark.parametrize(("estimator", "truth"), [("k1", "nothing"), ("k2", "KL"), ("k3", "reverse KL")])
def test_what_an_estimator_pulls_at_as_a_loss(estimator: str, truth: str) -> None:
    """Expected gradients on policy, exactly: every token weighed with its probability."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    [got] = torch.autograd.grad((policy.detach().exp() * kl_divergence(policy, reference, estimator)).sum(), logits)
    policy = logits.log_softmax(-1)
    loss = {
        "nothing": 0 * logits.sum(),
        "KL": (policy.exp() * (policy - reference)).sum(),
        "reverse KL": (reference.exp() * (reference - policy)).sum(),
    }[truth]
    [expected] = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("observed", "factor"), [(0.1, 1.0), (0.11, 1.001), (0.09, 0.999), (5.0, 1.002), (0.0, 0.998)])
def test_the_adaptive_coefficient_follows_the_target(observed: float, factor: float) -> None:
    adaptive = AdaptiveKL(target=0.1, horizon=1000)
    assert adapted_coefficient(0.5, observed, 10, adaptive) == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_the_true_divergence(estimator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(8, generator=generator).mul(0.3).log_softmax(-1)
    reference = policy.add(torch.randn(8, generator=generator).mul(0.1)).log_softmax(-1)
    truth = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * kl_divergence(policy, reference, estimator)).sum()  # the exact expectation
    assert estimate.item() == pytest.approx(truth.item(), rel=0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [1e3, -1e3])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "policy", "dual"])
def test_huge_log_ratios_give_finite_values_and_gradients(dtype, gap: float, advantage: float, kind: str) -> None:
    log_probs = torch.tensor([gap / 2, -1.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([-gap / 2, -1.5], dtype=dtype)
    if kind in ("policy", "dual"):
        both, dual = torch.tensor([True, True]), 3.0 if kind == "dual" else None
        part = policy_loss(log_probs, old, torch.full((2,), advantage), both, CLIP, dual)
        assert torch.isfinite(part.kl)
        assert torch.isfinite(part.ratio_deviation)
        loss = part.losses.sum()
    else:
        loss = kl_divergence(log_probs, old, kind).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(log_probs.grad).all()


def slow_policy_loss(new: float, old: float, advantage: float, dual: float | None) -> tuple[float, float, bool]:
    """One token's loss, its derivative by the new log-probability, and whether a clip holds the token back."""
    ratio = math.exp(new - old)
    if advantage > 0 and ratio > 1 + CLIP.high:
        return -advantage * (1 + CLIP.high), 0.0, True
    if advantage < 0 and ratio < 1 - CLIP.low:
        return -advantage * (1 - CLIP.low), 0.0, True
    if advantage < 0 and dual is not None and ratio > dual:
        return -advantage * dual, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


@quick
@given(rows(3), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_and_its_gradient_follow_the_papers(data, dual: float | None) -> None:
    new, old, advantages, mask = data
    new.clamp_(-4, 4), old.clamp_(-4, 4)  # within `LOG_RATIO_LIMIT`
    new.requires_grad_()
    part = policy_loss(new, old.masked_fill(~mask, math.nan), advantages, mask, CLIP, dual)
    part.losses.sum().backward()
    columns = (new[mask].tolist(), old[mask].tolist(), advantages[mask].tolist())
    expected = [slow_policy_loss(*token, dual) for token in zip(*columns, strict=True)]
    losses, slopes = ([token[index] for token in expected] for index in range(2))
    torch.testing.assert_close(part.losses[mask], torch.tensor(losses, dtype=torch.float64))
    torch.testing.assert_close(new.grad[mask], torch.tensor(slopes, dtype=torch.float64))
    assert not part.losses[~mask].any()
    assert not new.grad[~mask].any()
    assert part.clipped.item() == sum(held for *_, held in expected)


def test_an_exponent_beyond_the_limit_has_no_gradient() -> None:
    new = torch.tensor([LOG_RATIO_LIMIT + 1, LOG_RATIO_LIMIT - 1]).requires_grad_()
    part = policy_loss(new, torch.zeros(2), torch.tensor([-1.0, -1]), torch.tensor([True, True]), CLIP, None)
    part.losses.sum().backward()
    assert new.grad[0] == 0 < new.grad[1]


@quick
@given(rows(3), st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_and_its_gradient_follow_the_formula(data, clip: float | None) -> None:
    values, old, returns, mask = data
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    part = value_loss(ours, old, returns.masked_fill(~mask, math.inf), mask, clip)
    expected, held = theirs.sum() * 0, 0
    for v, o, r in zip(theirs[mask], old[mask], returns[mask], strict=True):
        error = (v - r) ** 2
        if clip is not None and abs(v - o) > clip and (held_error := (o + clip * torch.sign(v - o) - r) ** 2) > error:
            error = held_error.detach()
            held += 1
        expected = expected + error / 2
    torch.testing.assert_close(part.losses.sum(), expected)
    assert part.clipped.item() == held
    part.losses.sum().backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


LOSSES = {
    "policy": lambda *columns: policy_loss(*columns, CLIP, None),
    "dual": lambda *columns: policy_loss(*columns, CLIP, 3.0),
    "value": lambda *columns: value_loss(*columns, 0.2),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("everything", [False, True], ids=["one slot", "all slots"])
@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("loss", LOSSES)
def test_a_bad_number_in_a_masked_slot_changes_nothing(loss: str, column: int, everything: bool, bad: float) -> None:
    mask = torch.tensor([[True, False], [not everything, False]]) & (not everything)
    clean = [torch.tensor([[0.5, 0.1], [-0.2, 0.3]]) * scale for scale in (1, 2, 3)]
    dirty = [tensor.clone() for tensor in clean]
    dirty[column][~mask] = bad
    results = []
    for columns in (clean, dirty):
        columns[0].requires_grad_()
        part = LOSSES[loss](*columns, mask)
        part.losses.sum().backward()
        results.append((part.losses.detach(), part.clipped, columns[0].grad))
    for expected, got in zip(*results, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_nan_in_an_unmasked_slot_surfaces(loss: str, column: int, sign: int) -> None:
    columns = [torch.tensor([0.5, 0.1]) * sign for _ in range(3)]
    columns[column][0] = math.nan
    assert torch.isnan(LOSSES[loss](*columns, torch.tensor([True, True])).losses).tolist() == [True, False]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_scores_are_those_of_the_tempered_distribution(temperature: float) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 4
    tokens = torch.tensor([0, 6, 3, 2, 2])
    log_probs, entropy = score_tokens(logits, tokens, temperature, entropy_gradient=False)
    scaled = (logits.double() / temperature).exp()
    expected = scaled / scaled.sum(-1, keepdim=True)
    torch.testing.assert_close(log_probs.double(), expected[torch.arange(5), tokens].log(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(expected * expected.log()).sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_blocks_score_what_all_at_once_does_and_keep_no_copy_of_the_logits(entropy_gradient, monkeypatch) -> None:
    made = torch.randn(11, 7, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(11) % 7

    def scored() -> list[torch.Tensor]:
        logits = made.clone().requires_grad_()
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            log_probs, entropy = score_tokens(logits, tokens, 0.7, entropy_gradient)
        (log_probs - 0.1 * entropy).square().sum().backward()
        sizes.append(max(kept, default=0))
        return [log_probs, entropy, logits.grad]

    sizes: list[int] = []
    expected = scored()
    monkeypatch.setattr(losses, "SCORED_AT_ONCE", 30)  # four rows
    for got, wanted in zip(scored(), expected, strict=True):
        assert torch.equal(got, wanted)
    whole, blocks = sizes
    assert whole >= made.numel() > blocks
    with torch.no_grad():
        assert torch.equal(score_tokens(made, tokens, 0.7, entropy_gradient)[0], expected[0])


def test_impossible_tokens_leave_the_entropy_finite_and_its_gradient_is_right() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    assert torch.isfinite(score_tokens(logits, torch.tensor([0]), 1.0, entropy_gradient=False)[1]).all()
    inputs = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([1, 3])
    assert torch.autograd.gradcheck(lambda x: score_tokens(x, tokens, 0.7, entropy_gradient=True), inputs)
