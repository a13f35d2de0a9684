"""How weights lie in the buffers that they travel through. Both ends compute it from the same list of tensors.

A bucket is a run of tensors that travels as one. Buckets take turns in two slots, so that one can be filled or loaded
while another is on its way; a tensor larger than a slot makes a bucket alone, in a third slot of its own size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Bytes; every dtype may begin there."""
PIECE_BYTES = 32 << 20
"""Most bytes of a bucket of several tensors: larger ones move no faster and leave less to overlap."""
LARGE = 2
"""The slot of tensors that fit no other."""


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

    slot: int
    """Index of the slot that it travels in."""
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    """Bytes from the slot's start, one a tensor."""
    used: int
    """Bytes of the slot that are taken up."""

    def views(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of each tensor in the slot's bytes, uint8 [used or more]."""
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            yield spec.name, data[offset : offset + spec.bytes].view(spec.dtype).view(spec.shape)


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a whole model, in the order that they travel."""

    buckets: tuple[Bucket, ...]
    slot_bytes: tuple[int, ...]
    """Size of each slot: as much as its fullest bucket needs."""

    def slots(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut a buffer, uint8 [sum of slot_bytes], into the slots."""
        return buffer.split(self.slot_bytes)


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> BucketPlan:
    """Cut a model into buckets.

    Args:
        specs: Its tensors, in the order that they travel.
        bucket_bytes: Most bytes of the two slots together. A bucket is closed before a tensor that does not fit.
    """
    limit = bucket_bytes // 2
    piece = min(limit, PIECE_BYTES)
    buckets: list[Bucket] = []
    run: list[TensorSpec] = []
    turn = used = 0
    for spec in specs:
        size = _aligned(spec.bytes)
        if run and used + size > piece:
            buckets.append(_bucket(turn, run))
            run, used, turn = [], 0, 1 - turn
        if size > limit:
            buckets.append(_bucket(LARGE, [spec]))
        else:
            run.append(spec)
            used += size
    if run:
        buckets.append(_bucket(turn, run))
    sizes = [max((bucket.used for bucket in buckets if bucket.slot == slot), default=0) for slot in (0, 1, LARGE)]
    return BucketPlan(tuple(buckets), tuple(sizes))


def tensor_specs(names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Specs from the lists that vLLM's weight transfer sends."""
    return [
        TensorSpec(name, getattr(torch, dtype_name), tuple(shape))
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True)
    ]


def _bucket(slot: int, specs: list[TensorSpec]) -> Bucket:
    offsets, used = [], 0
    for spec in specs:
        offsets.append(used)
        used += _aligned(spec.bytes)
    return Bucket(slot, tuple(specs), tuple(offsets), used)


def _aligned(size: int) -> int:
    """The bytes that a tensor takes up; an empty one too, as a bucket of nothing cannot be sent."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT
