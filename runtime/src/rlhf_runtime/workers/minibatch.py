"""What policy, critic and reference share: from a batch to sequences, mini-batches and masks."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from rlhf_runtime.algorithms.aggregation import Counts, tokens_of_rows
from rlhf_runtime.engines.sequences import Sequences
from rlhf_runtime.protocol import VALID, DataProto
from rlhf_runtime.ragged import from_values, lengths
from rlhf_runtime.single_controller.decorator import Call, Mode, by_rank, in_order, order_of, require_batch, scatter


def sequences_of(batch: DataProto) -> Sequences:
    """The prompts and responses of a batch."""
    return Sequences(batch.batch["prompt_ids"].unbind(), batch.batch["response_ids"].unbind())


def token_mask(batch: DataProto) -> torch.Tensor:
    """Which response tokens count, flat [N] bool: those of padding rows do not."""
    counts = lengths(batch.batch["response_ids"])
    if VALID not in batch.columns:
        return torch.ones(int(counts.sum()), dtype=torch.bool)
    return batch.batch[VALID].repeat_interleave(counts)


def per_token(batch: DataProto, columns: dict[str, torch.Tensor]) -> DataProto:
    """Flat columns [N] as ragged ones [B, R*] beside the batch's responses."""
    counts = lengths(batch.batch["response_ids"])
    return DataProto.from_dict({name: from_values(values, counts) for name, values in columns.items()})


def _hands(batch: DataProto, world_size: int) -> tuple[DataProto, list[torch.Tensor]]:
    """The batch padded to a multiple of the ranks, and the rows of each rank, int64.

    Of each next rows, as many as ranks, the longest goes to the rank with the fewest tokens so far, and so on: ranks
    never differ by more tokens than the longest row has.
    """
    padded, _ = batch.pad_to_multiple(world_size)
    tokens = (lengths(padded.batch["prompt_ids"]) + lengths(padded.batch["response_ids"])).tolist()
    loads = [0] * world_size
    hands: list[list[int]] = [[] for _ in range(world_size)]
    for first in range(0, len(padded), world_size):
        rows = sorted(range(first, first + world_size), key=lambda row: -tokens[row])
        ranks = sorted(range(world_size), key=loads.__getitem__)
        for row, rank in zip(rows, ranks, strict=True):
            hands[rank].append(row)
            loads[rank] += tokens[row]
    return padded, [torch.tensor(hand) for hand in hands]


def _deal(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    batch = require_batch(args)
    padded, hands = _hands(batch, world_size)
    return scatter(padded, hands, len(batch), args[1:], kwargs)


def _ask(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    batch = require_batch(args)
    return Call((), {}, plan=order_of(_hands(batch, world_size)[1], len(batch)))


DEALT = Mode(_deal, by_rank)
"""Rows of the first argument, a `DataProto`, dealt out to the ranks as cards are, so that all have about as many
tokens; padded so that all have as many rows. So the next m rows of all ranks together are the batch's next m, however
many ranks there are."""

DEALT_AND_BACK = Mode(_deal, in_order)
"""As `DEALT`; the rows of the results, `DataProto` each, in the batch's order and without padding."""

PICKED_UP = Mode(_ask, in_order)
"""What ranks made of a batch that was `DEALT` to them, in its order and without padding; the caller gives that batch,
the method takes nothing."""


def mini_batches(batch: DataProto, size: int | None, epochs: int, world_size: int) -> Iterator[DataProto]:
    """This rank's parts of each mini-batch, in row order, `epochs` times over; as many on every rank.

    Args:
        batch: This rank's rows, `DEALT` to it.
        size: Samples of a mini-batch over all ranks, rounded up to a multiple of them; None takes all.
        epochs: Passes over the batch.
        world_size: Ranks.
    """
    rows = torch.arange(len(batch))
    parts = rows.split(len(rows) if size is None else math.ceil(size / world_size))
    for _ in range(epochs):
        for part in parts:
            yield batch if len(parts) == 1 else batch.select_rows(part)


def count_over_ranks(mask: torch.Tensor, rows: torch.Tensor) -> Counts:
    """What counts on all ranks, of a rank's flat mask [N] and its rows' lengths [B]."""
    counts = torch.stack([mask.sum(), (tokens_of_rows(mask, rows) > 0).sum()])
    dist.all_reduce(counts)
    return Counts(*counts.tolist())


class Totals:
    """Sums over micro-batches, mini-batches and ranks.

    Args:
        device: Where they are kept.
        names: What is summed.
    """

    def __init__(self, device: torch.device, *names: str) -> None:
        self._names = names
        self._sums = torch.zeros(len(names), dtype=torch.float64, device=device)

    def add(self, *values: torch.Tensor | float) -> None:
        """Add one value to each sum, in the order of the names."""
        with torch.no_grad():
            self._sums += torch.stack([torch.as_tensor(value).to(self._sums) for value in values])

    def over_ranks(self) -> dict[str, float]:
        """The sums over all ranks, by name. All ranks call it."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        return dict(zip(self._names, sums.tolist(), strict=True))
