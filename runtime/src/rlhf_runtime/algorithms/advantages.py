"""Rewards of tokens, and what follows from them along a response: generalized advantage estimation and returns.

Padded tensors: B samples by T response positions, with a bool mask of the positions that hold a token. A position
without one is skipped wherever it stands, as if the row were written without it.
"""

import torch

from rlhf_runtime.algorithms.masking import masked


def token_rewards(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """`-coefficient * kl` at each token, and the score on a row's last one.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, equation 2.

    Args:
        scores: [B] reward of each response.
        kl: [B, T] KL of each token in nats.
        mask: [B, T] bool.
        coefficient: Weight of the KL; 0 where it is part of the loss.

    Returns:
        [B, T], 0 where the mask is false.
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).amax(dim=1, keepdim=True)  # [B, 1], -1 for an empty row
    penalty = -coefficient * masked(kl, mask)
    return penalty + torch.where(position == last, scores.unsqueeze(1), 0.0)


def rewards_to_go(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What is still to be earned at each token: `A_t = sum over s >= t of r_s`.

    With the score on the last token and `-coefficient * k1` on each it is REINFORCE++'s advantage before whitening.
    Source: Hu et al., "REINFORCE++", arXiv:2501.03262.

    Args:
        rewards: [B, T].
        mask: [B, T] bool.

    Returns:
        [B, T], 0 where the mask is false.
    """
    return masked(masked(rewards, mask).flip(1).cumsum(1).flip(1), mask)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lambda_: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation, with value 0 after the last token.

    Tokens that the mask leaves out, such as a tool's text inside a response, are stepped over: the token before them
    follows on the one after, neither discounted nor decayed by their number.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}
        R_t     = A_t + V_t

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    arXiv:1506.02438, equations 11, 12 and 16.

    Args:
        rewards: [B, T].
        values: [B, T] value before each token.
        mask: [B, T] bool.
        gamma: Discount a token.
        lambda_: 0 trusts the values alone, 1 the rewards alone.

    Returns:
        advantages and returns, each [B, T] and 0 where the mask is false.
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    advantages = torch.zeros_like(values)
    following_value = following_advantage = values.new_zeros(values.shape[0])
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * following_value - values[:, step]
        advantage = delta + gamma * lambda_ * following_advantage
        following_advantage = torch.where(mask[:, step], advantage, following_advantage)
        following_value = torch.where(mask[:, step], values[:, step], following_value)
        advantages[:, step] = advantage
    advantages = masked(advantages, mask)
    return advantages, advantages + values
