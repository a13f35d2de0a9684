"""KL(policy || reference): estimators from sampled tokens, and the coefficient that a target steers.

With x ~ policy and r = log policy(x) - log reference(x), all three estimate E[r]:

    k1 = r                 unbiased, high variance
    k2 = r^2 / 2           biased, low variance
    k3 = exp(-r) - 1 + r   unbiased, low variance, never negative

As a penalty in the reward k1 is the one whose policy gradient is the KL's. As a loss the expected gradient on policy is
0 for k1, which is refused there, the KL's own for k2, and that of the reverse KL(reference || policy) for k3.

Source: J. Schulman, "Approximating KL Divergence", 2020; on gradients Tang and Munos, arXiv:2506.09477.
"""

import torch
from rlhf_api.algorithm import KL, AdaptiveKL, KLEstimator

LOG_RATIO_LIMIT = 10.0
"""Largest exponent of a probability ratio: exp(10) = 22026, and so its gradient, is finite in float16 too."""

STEP_LIMIT = 0.2
"""Largest relative error that the adaptive coefficient reacts to."""


def log_ratio(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """`log_probs - other_log_probs` [...], subtracted in float32 at least."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return log_probs.to(dtype) - other_log_probs.to(dtype)


def kl_divergence(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    estimator: KLEstimator,
    exponent_clamp: float = LOG_RATIO_LIMIT,
    value_clamp: float | None = None,
) -> torch.Tensor:
    """KL of each token. Beyond a clamp the value stays constant and the gradient is 0.

    Args:
        log_probs: [...] log-probabilities of the sampled tokens under the policy.
        ref_log_probs: [...] and under the reference.
        estimator: k1, k2 or k3.
        exponent_clamp: Largest exponent in k3: r counts as no less than minus this.
        value_clamp: Largest size of an estimate, if there is to be one.

    Returns:
        [...] float32 (float64 for float64 input), in nats.
    """
    ratio = log_ratio(log_probs, ref_log_probs)
    match estimator:
        case "k1":
            kl = ratio
        case "k2":
            kl = ratio.square() / 2
        case "k3":
            ratio = ratio.clamp(min=-exponent_clamp)
            # expm1 keeps the digits that exp(-r) - 1 loses near r = 0, where k3 is r^2 / 2
            kl = torch.expm1(-ratio) + ratio
    return kl if value_clamp is None else kl.clamp(-value_clamp, value_clamp)


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kl: KL) -> torch.Tensor:
    """KL of each token [...] by a job's estimator and clamps, yet without the coefficient."""
    return kl_divergence(log_probs, ref_log_probs, kl.estimator, kl.exponent_clamp, kl.value_clamp)


def adapted_coefficient(coefficient: float, observed: float, samples: int, adaptive: AdaptiveKL) -> float:
    """The coefficient for the next step: `c (1 + clamp(KL / target - 1, -0.2, 0.2) n / horizon)`.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, section 2.2.

    Args:
        coefficient: c, that of the step.
        observed: KL of the step, in nats a token.
        samples: n, the step's responses.
        adaptive: Target, and a horizon of at least n samples.
    """
    error = max(-STEP_LIMIT, min(STEP_LIMIT, observed / adaptive.target - 1))
    return coefficient * (1 + error * samples / adaptive.horizon)
