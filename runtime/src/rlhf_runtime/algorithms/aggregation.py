"""How the losses of tokens become one loss.

A loss is `sum_t w_t L_t` with a weight a token, made of counts over all ranks and micro-batches. So its value and
gradient depend on none of: how rows are cut into micro-batches, spread over ranks, ordered or padded.
"""

from dataclasses import dataclass

import torch
from rlhf_api.algorithm import LossAggregation


@dataclass(frozen=True)
class Counts:
    """What an optimizer step trains on, over all ranks."""

    tokens: int
    """Response tokens that count."""
    sequences: int
    """Responses with such a token."""


def token_weights(
    mask: torch.Tensor, lengths: torch.Tensor, counts: Counts, aggregation: LossAggregation, constant: float | None
) -> torch.Tensor:
    """The weight of each token in the loss.

        tokenMean              1 / tokens                    the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8)
        sequenceMeanTokenMean  1 / (sequences |y_i|)         the mean over responses of their means (GRPO)
        sequenceMeanTokenSum   1 / sequences                 the mean over responses of their sums (RLOO)
        constant               1 / constant                  the sum over a constant (Dr. GRPO, arXiv:2503.20783)

    Args:
        mask: Flat [N] bool, the tokens of all rows one after another: those that count.
        lengths: [B] int64 tokens of each row, masked ones too.
        counts: Those of all ranks.
        aggregation: Which of the four.
        constant: What `constant` divides by.

    Returns:
        [N] float32, 0 where the mask is false.
    """
    match aggregation:
        case "tokenMean":
            weights = torch.full_like(mask, 1 / max(counts.tokens, 1), dtype=torch.float32)
        case "sequenceMeanTokenMean":
            own = tokens_of_rows(mask, lengths).clamp(min=1).float()  # [B]
            weights = (1 / (max(counts.sequences, 1) * own)).repeat_interleave(lengths)
        case "sequenceMeanTokenSum":
            weights = torch.full_like(mask, 1 / max(counts.sequences, 1), dtype=torch.float32)
        case "constant":
            if constant is None:
                raise ValueError("constant: got None; expected what to divide by")
            weights = torch.full_like(mask, 1 / constant, dtype=torch.float32)
    return torch.where(mask, weights, 0.0)


def tokens_of_rows(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How many tokens of each row count, [B] int64, of a flat mask [N] and the rows' lengths [B]."""
    rows = torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths)
    return torch.zeros(len(lengths), dtype=torch.int64, device=mask.device).index_add(0, rows, mask.long())
