"""Estimators of KL(policy || reference) from sampled tokens.

With x ~ policy and r = log policy(x) - log reference(x), all three estimate E[r]:

    k1 = r                 unbiased, high variance
    k2 = r^2 / 2           biased, low variance, its gradient is the KL's own on policy
    k3 = exp(-r) - 1 + r   unbiased, low variance, never negative

Source: J. Schulman, "Approximating KL Divergence", 2020.
"""

import torch
from rlhf_api.algorithm import KLEstimator

LOG_RATIO_LIMIT = 10.0
"""Largest exponent of a probability ratio: exp(10) = 22026, and so its gradient, is finite in float16 too."""


def log_ratio(log_probs: torch.Tensor, other_log_probs: torch.Tensor) -> torch.Tensor:
    """`log_probs - other_log_probs` [...], subtracted in float32 at least."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return log_probs.to(dtype) - other_log_probs.to(dtype)


def kl_divergence(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """KL of each token.

    In k3 the exponent is limited to `LOG_RATIO_LIMIT`: beyond it value and gradient stay at finite constants.

    Args:
        log_probs: [...] log-probabilities of the sampled tokens under the policy.
        ref_log_probs: [...] and under the reference.
        estimator: k1, k2 or k3.

    Returns:
        [...] float32 (float64 for float64 input), in nats.
    """
    ratio = log_ratio(log_probs, ref_log_probs)
    match estimator:
        case "k1":
            return ratio
        case "k2":
            return ratio.square() / 2
        case "k3":
            ratio = ratio.clamp(min=-LOG_RATIO_LIMIT)
            # expm1 keeps the digits that exp(-r) - 1 loses near r = 0, where k3 is r^2 / 2
            return torch.expm1(-ratio) + ratio
