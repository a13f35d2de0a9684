"""Ragged columns: jagged nested tensors [B, R*] built from, and taken apart into, values and lengths.

Arithmetic belongs on `column.values()` [sum of lengths]; `from_values` puts the rows back. Two columns whose lengths
are equal need not share an offsets object, and torch refuses arithmetic between such columns.
"""

from collections.abc import Sequence

import torch


def from_values(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Jagged [B, R*, ...] from the rows' values one after another [sum of lengths, ...] and `lengths` [B].

    Raises:
        ValueError: when the lengths do not add up to the values.
    """
    if lengths.dim() != 1 or int(lengths.sum()) != len(values):
        got = f"shape {list(lengths.shape)} adding up to {int(lengths.sum())}"
        raise ValueError(f"lengths: got {got}; expected [B] adding up to {len(values)}")
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def ragged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Jagged [B, R*, ...] from one tensor [R, ...] a row; rows may be empty.

    Raises:
        ValueError: when there is no row, or rows differ in dtype or trailing shape.
    """
    kinds = {(row.dtype, row.shape[1:]) for row in rows if row.dim()}
    if len(kinds) != 1 or not all(row.dim() for row in rows):
        got = f"{len(rows)} of kinds {kinds}"
        raise ValueError(f"rows: got {got}; expected at least one, of one dtype and trailing shape")
    return from_values(torch.cat(list(rows)), torch.tensor([len(row) for row in rows], device=rows[0].device))


def lengths(column: torch.Tensor) -> torch.Tensor:
    """Entries a row, [B] int64, of a jagged [B, R*, ...]."""
    return column.offsets().diff()


def take(column: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Some rows of a jagged [B, R*, ...]: a slice without steps shares memory, an int64 index [N] is copied."""
    offsets = column.offsets()
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(len(offsets) - 1)
        part = offsets[start : max(start, stop) + 1]
        return torch.nested.nested_tensor_from_jagged(column.values()[part[0] : part[-1]], part - part[0])
    counts = lengths(column)[rows]
    ends = counts.cumsum(0)
    places = torch.arange(int(counts.sum()), device=offsets.device)
    return from_values(column.values()[places + (offsets[rows] - ends + counts).repeat_interleave(counts)], counts)


def to_padded(column: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Dense [B, Rmax, ...] from a jagged [B, R*, ...], filled up on the right with `pad_value`."""
    values, counts = column.values(), lengths(column)
    longest = int(counts.max()) if len(counts) else 0
    padded = values.new_full((len(counts), longest, *values.shape[1:]), pad_value)
    return padded.masked_scatter(_spread(_filled(counts, longest), padded), values)


def from_padded(padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Jagged [B, R*, ...] of the first `lengths` [B] entries of each row of a dense [B, Rmax, ...].

    Raises:
        ValueError: when a length exceeds the row.
    """
    if len(lengths) != len(padded) or (len(lengths) and int(lengths.max()) > padded.shape[1]):
        raise ValueError(f"lengths: got {lengths.tolist()}; expected {len(padded)}, each at most {padded.shape[1]}")
    return from_values(padded[_filled(lengths.to(padded.device), padded.shape[1])], lengths)


def _filled(counts: torch.Tensor, longest: int) -> torch.Tensor:
    """Mask [B, Rmax] of the slots that hold an entry."""
    return torch.arange(longest, device=counts.device) < counts.unsqueeze(1)


def _spread(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask [B, Rmax] repeated over the trailing dimensions of `like` [B, Rmax, ...]."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - 2)).expand_as(like)
