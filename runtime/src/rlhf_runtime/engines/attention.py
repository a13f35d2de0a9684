"""Causal attention over rows that stand one after the other in one line of tokens, none of which sees another.

So nothing is padded: all else that a model does, it does token by token. A model loaded with `attn_implementation`
`PACKED` attends this way when called with `packing`; without it each row of its batch is a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "rlhf_packed"
"""The name that transformers knows it by."""

ALTERING = ("softcap", "s_aux", "position_bias")
"""What layers of some models pass that is not done here: capped products, sinks, and biases by distance."""


@dataclass(frozen=True)
class Packing:
    """Where the rows of a line of T tokens begin and end."""

    lengths: list[int]
    """b lengths, of one token at least, that add up to T."""
    offsets: torch.Tensor
    """[b + 1] int32, from 0 to T."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: The layer.
        query: [1, heads, T, D].
        key: [1, key-value heads, T, D].
        value: [1, key-value heads, T, D].
        attention_mask: None, as transformers makes no mask for an implementation that it does not know.
        scaling: Multiplies the products of queries and keys; None for 1 / sqrt(D).
        packing: The rows; None where the tokens are one row, or a row each of a batch.
        sliding_window: How many tokens, itself included, each sees; None for all before it.
        others: What else a layer has to say.

    Returns:
        [1, T, heads, D], and no weights.

    Raises:
        ValueError: naming what of that would change the result.
    """
    if unknown := [name for name in ALTERING if others.get(name) is not None]:
        raise ValueError(f"{', '.join(unknown)} in its attention")
    if packing is None:
        return _rows_alone(query, key, value, scaling, sliding_window).transpose(1, 2), None
    if query.is_cuda and query.dtype != torch.float32:  # the flash kernel has no float32
        line = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
        longest, before = max(packing.lengths), -1 if sliding_window is None else sliding_window - 1
        attended = varlen_attn(
            *line,
            packing.offsets,
            packing.offsets,
            longest,
            longest,
            scale=scaling,
            window_size=(before, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.unsqueeze(0), None
    rows = zip(*(states.split(packing.lengths, dim=2) for states in (query, key, value)), strict=True)
    attended = torch.cat([_rows_alone(*row, scaling, sliding_window) for row in rows], dim=2)
    return attended.transpose(1, 2), None


def _rows_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, sliding_window: int | None
) -> torch.Tensor:
    """[b, heads, L, D] of b rows of one length."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # asked to share heads by itself, torch has no fused kernel on a CPU
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    length = query.shape[2]
    if sliding_window is None or length <= sliding_window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - sliding_window)
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)


AttentionInterface.register(PACKED, attend)
