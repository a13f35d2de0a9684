"""Proof that an engine holds what the trainer sent."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import xxhash

from rlhf_runtime.errors import WeightSyncError

BLOCK = 1 << 14
"""32-bit words that are summed with weights of their own."""
BLOCKS_AT_ONCE = 1024
"""Blocks that are widened to 64 bits at a time: 128 MiB."""
PRIME = 0x100000001B3
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SendReport:
    """What a trainer rank sent."""

    checksums: Mapping[str, int | None]
    """Checksum of each tensor by its checkpoint name, in the order sent; none on ranks that take none."""
    bytes: int
    """Bytes of these tensors."""


@dataclass(frozen=True)
class ReceivedWeights:
    """What a worker of an engine received in its last update."""

    checksums: Mapping[str, int | None]
    """Checksum of each tensor as it arrived, by its checkpoint name."""
    expected: frozenset[str]
    """The engine's own parameters, all of which an update has to fill."""
    loaded: frozenset[str]
    """Those that were filled completely."""


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit checksum of a tensor's bytes, dtype and shape. Sender and engine must be on the same kind of device.

    On a CPU it is XXH3, which reads as fast as memory and leaves the interpreter to other threads.

    Args:
        tensor: Any shape and dtype.
    """
    if tensor.device.type == "cpu":
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return xxhash.xxh3_64_intdigest(data.numpy(), _seed(tensor.dtype, tensor.shape))
    return block_checksum(tensor)


def block_checksum(tensor: torch.Tensor) -> int:
    """The checksum of tensors on other devices, computed where they lie.

    Blocks of 32-bit words are summed with weights that are distinct within a block, so that one changed word, and two
    swapped ones, always change the sum of their block; blocks are folded in order.
    """
    words = _words(tensor)
    weights = _weights(words.device)
    sums = []
    for part in words.split(BLOCKS_AT_ONCE * BLOCK):
        whole = len(part) // BLOCK * BLOCK
        if whole:
            sums.append((part[:whole].view(-1, BLOCK).to(torch.int64).mul_(weights)).sum(1))
        if whole < len(part):
            tail = part[whole:].to(torch.int64)
            sums.append(tail.mul_(weights[: len(tail)]).sum(0, keepdim=True))
    folded = _seed(tensor.dtype, tensor.shape)
    for block in torch.cat(sums).tolist() if sums else []:
        folded = ((folded ^ (folded >> 32)) * PRIME + block) & MASK
    return folded


@cache
def _seed(dtype: torch.dtype, shape: torch.Size) -> int:
    """What dtype and shape add to a checksum."""
    return zlib.crc32(f"{dtype}{list(shape)}".encode())


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as int32 [W], filled up with zeros."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if odd := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(odd)])
    if data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Distinct 31-bit factors [BLOCK] int64: a permutation polynomial modulo 2**31, as its linear factor is odd."""
    index = torch.arange(1, BLOCK + 1, dtype=torch.int64)
    return ((index * index % (1 << 31) * 0x5BD1E994 + index * 0x2545F491) % (1 << 31)).to(device)


def verify(sent: Mapping[str, int | None], received: ReceivedWeights, engine: str) -> None:
    """Compare what was sent with what an engine received and filled.

    Args:
        sent: Checksums by checkpoint name, in the order sent.
        received: The engine's record of the same update.
        engine: The engine's name in messages.

    Raises:
        WeightSyncError: naming the first tensor that did not arrive, arrived changed or was not asked for, or the first
            parameter of the engine that was left out.
    """
    for name, value in sent.items():
        if name not in received.checksums:
            raise _sync_error(name, f"nothing at {engine}", "the tensor that was sent")
        if (got := received.checksums[name]) != value:
            raise _sync_error(name, f"checksum {_hex(got)} at {engine}", f"{_hex(value)}, as sent")
    for name in received.checksums:
        if name not in sent:
            raise _sync_error(name, f"a tensor at {engine} that was not sent", "the tensors that were sent alone")
    if not sent or (left_out := min(received.expected - received.loaded, default=None)):
        name = left_out if sent else "weights"
        raise _sync_error(name, f"no new value, or part of one, at {engine}", "every parameter filled by what was sent")


def _sync_error(name: str, got: str, expected: str) -> WeightSyncError:
    return WeightSyncError(
        f"weightSync: {name}: got {got}; expected {expected}. "
        "Fix: start the job again; if it repeats, model and engine differ, or the transport is broken"
    )


def _hex(value: int | None) -> str:
    return "none" if value is None else f"{value:016x}"
