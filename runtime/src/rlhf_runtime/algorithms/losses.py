"""Losses of tokens: the clipped policy loss and the value loss. `aggregation` makes one loss of them.

Every function takes a mask; masked slots reach neither value nor gradient.
"""

from dataclasses import dataclass

import torch
from rlhf_api.algorithm import ClipRange
from torch.utils.checkpoint import checkpoint

from rlhf_runtime.algorithms.kl import LOG_RATIO_LIMIT, kl_divergence, log_ratio
from rlhf_runtime.algorithms.masking import masked

SCORED_AT_ONCE = 2**27
"""Most logits of a block that is scored at once: half a GiB in float32."""


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy loss, and what is watched beside it without gradient."""

    losses: torch.Tensor
    """[...] loss of each token."""
    clipped: torch.Tensor
    """Scalar: how many tokens a clip holds back."""
    kl: torch.Tensor
    """Scalar: sum of k3(old policy || new policy)."""
    ratio_deviation: torch.Tensor
    """Scalar: largest |ratio - 1|."""


@dataclass(frozen=True)
class ValueLoss:
    """The value loss, and what is watched beside it without gradient."""

    losses: torch.Tensor
    """[...] loss of each token."""
    clipped: torch.Tensor
    """Scalar: how many tokens the clip holds back."""


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: ClipRange,
    dual_clip: float | None,
) -> PolicyLoss:
    """The clipped surrogate, with `ratio = exp(new - old)`.

        L = -min(ratio A, clamp(ratio, 1 - low, 1 + high) A)
        L = min(L, -dual A) where A < 0

    The exponent is limited to ±`LOG_RATIO_LIMIT`, beyond which the gradient is 0.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7; low and high apart
    Yu et al., "DAPO", arXiv:2503.14476, section 3.1; dual clip Ye et al., arXiv:1912.09729, equation 4.

    Args:
        log_probs: [...] log-probabilities under the policy in training.
        old_log_probs: [...] and under the policy that the batch was taken from.
        advantages: [...] advantage of each token.
        mask: [...] bool, the tokens that count.
        clip: How far the ratio may move below and above 1.
        dual_clip: Largest ratio that counts where the advantage is negative, above 1; None sets no bound.
    """
    log_probs, old_log_probs = masked(log_probs, mask), masked(old_log_probs, mask)
    advantages = masked(advantages, mask)
    ratio = log_ratio(log_probs, old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -ratio * advantages
    losses = torch.maximum(plain, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    with torch.no_grad():
        held = (losses != plain).sum()
        kl = kl_divergence(old_log_probs, log_probs, "k3").sum()
        deviation = torch.zeros_like(kl) if ratio.numel() == 0 else (ratio - 1).abs().max()
    return PolicyLoss(losses, held, kl, deviation)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip_range: float | None,
) -> ValueLoss:
    """`max((v - R)^2, (clamp(v, old - c, old + c) - R)^2) / 2`, or the first term alone where `c` is None.

    Source: the clip is that of OpenAI Baselines' PPO; Engstrom et al., "Implementation Matters", arXiv:2005.12729,
    equation 2.

    Args:
        values: [...] values of the critic in training.
        old_values: [...] values that the advantages were made with.
        returns: [...] targets R.
        mask: [...] bool, the tokens that count.
        clip_range: c.
    """
    values, old_values, returns = (masked(column, mask) for column in (values, old_values, returns))
    error = (values - returns).square()
    if clip_range is None:
        return ValueLoss(error / 2, torch.zeros((), device=error.device))
    near = values.clamp(old_values - clip_range, old_values + clip_range)
    clipped = (near - returns).square()
    return ValueLoss(torch.maximum(error, clipped) / 2, (clipped > error).sum())


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a softmax at a temperature says about tokens.

    More than a block of them are scored block by block, and again in the backward pass: beside the logits and their
    gradient no more than a block's copies in float32 are held, where all of them would take several times the logits.

    Args:
        logits: [N, V].
        tokens: [N] int64.
        temperature: Divides the logits; the one that the tokens were sampled at.
        entropy_gradient: Whether entropies carry a gradient.

    Returns:
        log-probabilities [N] of the tokens, and entropies [N] in nats; float32 at least.
    """
    rows = max(1, SCORED_AT_ONCE // logits.shape[-1])
    if len(logits) <= rows:
        return _score(logits, tokens, temperature, entropy_gradient)
    scored = [
        checkpoint(_score, *block, temperature, entropy_gradient, use_reentrant=False, preserve_rng_state=False)
        for block in zip(logits.split(rows), tokens.split(rows), strict=True)
    ]
    log_probs, entropies = zip(*scored, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _score(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_softmax = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
    log_probs = -torch.nn.functional.nll_loss(log_softmax, tokens, reduction="none")
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # the limit makes a token of probability 0 add 0, where exp(-inf) * -inf would be NaN
        entropy = -(log_softmax.exp() * log_softmax.clamp(min=torch.finfo(dtype).min)).sum(-1)
    return log_probs, entropy
