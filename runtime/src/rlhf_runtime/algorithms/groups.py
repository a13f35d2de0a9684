"""Advantages by comparing the samples of a prompt, and what else is judged of whole responses.

A group is the samples of one prompt in one step; `groups` [B] int64 numbers them in any order. Every statistic is taken
over the whole batch in one place and in float64, so that it depends on neither ranks nor row order, and so that
rewards which are equal have a deviation of 0.
"""

import torch

STD_EPSILON = 1e-6
"""Added to a group's standard deviation."""


def grpo_advantages(rewards: torch.Tensor, groups: torch.Tensor, normalize_by_std: bool) -> torch.Tensor:
    """`A_i = (r_i - mean(r)) / (std(r) + epsilon)` over each group, or `r_i - mean(r)`; 0 in a group of one.

    Source: Shao et al., "DeepSeekMath", arXiv:2402.03300, section 4.1; without the division Liu et al., "Understanding
    R1-Zero-Like Training" (Dr. GRPO), arXiv:2503.20783. The standard deviation is the sample's (over n - 1).

    Args:
        rewards: [B] reward of each response.
        groups: [B] int64 group of each.
        normalize_by_std: Whether to divide.

    Returns:
        [B] of the rewards' dtype.
    """
    centred, places, counts = _centred(rewards, groups)
    if normalize_by_std:
        squares = torch.zeros_like(counts).index_add(0, places, centred.square())
        deviation = (squares / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation[places] + STD_EPSILON)
    return centred.to(rewards.dtype)


def rloo_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`A_i = r_i - mean of the group's other rewards`, which is `n / (n - 1) (r_i - mean(r))`; 0 in a group of one.

    Source: Ahmadian et al., "Back to Basics", arXiv:2402.14740, section 2.1, after Kool et al., 2019.

    Args:
        rewards: [B] reward of each response.
        groups: [B] int64 group of each.

    Returns:
        [B] of the rewards' dtype.
    """
    centred, places, counts = _centred(rewards, groups)
    return (centred * (counts / (counts - 1).clamp(min=1))[places]).to(rewards.dtype)


def groups_with_signal(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Which rows belong to a group whose rewards are not all the same; the others' advantages are 0.

    Source: Yu et al., "DAPO", arXiv:2503.14476, section 3.2, dynamic sampling.

    Args:
        rewards: [B] reward of each response.
        groups: [B] int64 group of each.

    Returns:
        [B] bool.
    """
    _, places = groups.unique(return_inverse=True)
    start = torch.zeros(int(places.max()) + 1 if len(places) else 0, dtype=rewards.dtype)
    most = start.scatter_reduce(0, places, rewards, "amax", include_self=False)
    least = start.scatter_reduce(0, places, rewards, "amin", include_self=False)
    return (most > least)[places]


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer: int, penalty: float) -> torch.Tensor:
    """The soft overlong punishment, added to the reward: 0 up to `max - buffer` tokens, then falling linearly.

        -penalty (|y| - (max - buffer)) / buffer      for max - buffer < |y| <= max

    Source: Yu et al., "DAPO", arXiv:2503.14476, section 3.4, equation 13, where the penalty is 1.

    Args:
        lengths: [B] int64 tokens of each response.
        max_length: Most tokens of a response, where the whole penalty is due.
        buffer: Tokens over which it grows.
        penalty: Its size.

    Returns:
        [B] float32, never positive.
    """
    exceeded = (lengths - (max_length - buffer)).clamp(0, buffer)
    return -penalty * exceeded.float() / buffer


def _centred(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards less their group's mean [B], each row's place among the groups [B], and the groups' sizes; float64."""
    numbers, places = groups.unique(return_inverse=True)
    counts = torch.bincount(places, minlength=len(numbers)).double()
    sums = torch.zeros_like(counts).index_add(0, places, rewards.double())
    return rewards.double() - (sums / counts)[places], places, counts
