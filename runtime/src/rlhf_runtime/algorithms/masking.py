"""Reductions over the true slots of a mask.

Masked slots are replaced before any arithmetic, so that a NaN or Inf in one reaches neither the value nor the
gradient; one in an unmasked slot goes through, for the caller to find.
"""

import torch


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` [...] with zero, and zero gradient, where `mask` [...] (bool) is false."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` [...] over the true slots of `mask` [...] (bool); a float32 scalar, 0 where none is true."""
    return masked(values, mask).sum(dtype=torch.promote_types(values.dtype, torch.float32))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `values` [...] over the true slots of `mask` [...] (bool); a float32 scalar, 0 where none is true."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def whiten(values: torch.Tensor, mask: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """`(x - mean) / sqrt(variance + epsilon)` over the true slots.

    Args:
        values: [...] float.
        mask: [...] bool.
        epsilon: Added to the (biased) variance, so that equal values give 0 and not NaN.

    Returns:
        [...] float: mean 0 and variance 1 over the true slots, 0 elsewhere.
    """
    centred = masked(values - masked_mean(values, mask), mask)
    variance = masked_mean(centred.square(), mask)
    return centred * torch.rsqrt(variance + epsilon)
