"""How weights lie in the buffers that they travel through. Both ends compute it from the same list of tensors.

A bucket is a run of tensors that travels as one. Buckets take turns in three slots: one is filled or on its way while
another is loaded, and what the loader still keeps of the one before stays where it is. A tensor larger than a slot
makes a bucket alone, in a fourth slot of its own size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes; every dtype may begin there."""
PIECE_BYTES = 32 << 20
"""Most bytes of a bucket of several tensors: larger ones move no faster and leave less to overlap."""
TURNS = 3
"""Slots that buckets take turns in."""
LARGE = TURNS
"""The slot of tensors that fit no other."""

Views = Sequence[tuple[str, torch.Tensor]]
"""Name and place, in its slot, of each tensor of a bucket."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as both ends know it."""

    name: str
    """Name in the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype without `torch.`, as vLLM's weight transfer spells it."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel as one."""

    index: int
    """Its place among the buckets."""
    slot: int
    """Index of the slot that it travels in."""
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    """Bytes from the slot's start, one a tensor."""
    used: int
    """Bytes of the slot that are taken up."""

    def views(self, slot: torch.Tensor) -> Views:
        """The tensors in the slot's bytes, uint8 [used or more]."""
        return [
            (spec.name, slot[offset : offset + spec.bytes].view(spec.dtype).view(spec.shape))
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        ]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a whole model, in the order that they travel."""

    buckets: tuple[Bucket, ...]
    slot_bytes: tuple[int, ...]
    """Size of each slot: as much as its fullest bucket needs."""

    def slots(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut a buffer, uint8 [sum of slot_bytes], into the slots."""
        return buffer.split(self.slot_bytes)

    def views(self, slots: Sequence[torch.Tensor]) -> tuple[Views, ...]:
        """The tensors of each bucket. To be made once: with many small ones it takes as long as to copy them."""
        return tuple(bucket.views(slots[bucket.slot]) for bucket in self.buckets)

    def used_soon(self, bucket: Bucket) -> set[int]:
        """The slots of the two buckets after it, which may be overwritten once it is loaded."""
        return {following.slot for following in self.buckets[bucket.index + 1 : bucket.index + 3]}


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> BucketPlan:
    """Cut a model into buckets.

    Args:
        specs: Its tensors, in the order that they travel.
        bucket_bytes: Most bytes of the slots that buckets take turns in, together. A bucket is closed before a tensor
            that does not fit.
    """
    limit = bucket_bytes // TURNS
    piece = min(limit, PIECE_BYTES)
    buckets: list[Bucket] = []
    run: list[TensorSpec] = []
    turn = used = 0
    for spec in specs:
        size = _aligned(spec.bytes)
        if run and used + size > piece:
            buckets.append(_bucket(len(buckets), turn, run))
            run, used, turn = [], 0, (turn + 1) % TURNS
        if size > limit:
            buckets.append(_bucket(len(buckets), LARGE, [spec]))
        else:
            run.append(spec)
            used += size
    if run:
        buckets.append(_bucket(len(buckets), turn, run))
    sizes = [max((bucket.used for bucket in buckets if bucket.slot == slot), default=0) for slot in range(LARGE + 1)]
    return BucketPlan(tuple(buckets), tuple(sizes))


def lists_of(specs: Iterable[TensorSpec]) -> dict[str, list[Any]]:
    """Specs as lists for a handshake, named as vLLM's weight transfer names them."""
    specs = list(specs)
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype_name for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def tensor_specs(names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Specs from the lists of a handshake."""
    return [
        TensorSpec(name, getattr(torch, dtype_name), tuple(shape))
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True)
    ]


def _bucket(index: int, slot: int, specs: list[TensorSpec]) -> Bucket:
    offsets, used = [], 0
    for spec in specs:
        offsets.append(used)
        used += _aligned(spec.bytes)
    return Bucket(index, slot, tuple(specs), tuple(offsets), used)


def _aligned(size: int) -> int:
    """The bytes that a tensor takes up; an empty one too, as a bucket of nothing cannot be sent."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT
