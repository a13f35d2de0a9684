"""Tensors in safetensors files, one a rank, each with some rows of every tensor; read by any number of ranks.

    rank r: rows [a, b) of each tensor -> ROLE-r-of-R.safetensors -> any rank: the rows that it needs, of all files

The header's metadata says where the rows of a tensor belong, and carries notes of the rank.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhf_runtime.checkpoint.manifest import FileRecord
from rlhf_runtime.checkpoint.store import flush, write_error
from rlhf_runtime.errors import CheckpointError


@dataclass(frozen=True)
class Shard:
    """Some rows of a tensor, on the CPU; of one without dimensions all of it."""

    rows: torch.Tensor
    """[r, ...]"""
    first: int
    """Where they begin in the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


@dataclass(frozen=True)
class State:
    """What a rank saves."""

    shards: Mapping[str, Shard]
    """By tensor name; those without rows are left out."""
    notes: Mapping[str, Any]
    """Whatever JSON can hold."""


def shard_file(role: str, rank: int, world_size: int) -> str:
    """Name of a rank's file."""
    return f"{role}-{rank:05d}-of-{world_size:05d}.safetensors"


def write_shards(path: Path, state: State) -> FileRecord:
    """Write a rank's file, in a folder that exists, and wait until it is on the disk.

    Raises:
        CheckpointError: when it cannot be written.
    """
    filled = {name: shard for name, shard in state.shards.items() if shard.rows.numel()}
    places = {name: [shard.first, shard.shape] for name, shard in filled.items()}
    metadata = {"places": json.dumps(places), "notes": json.dumps(state.notes)}
    try:
        save_file({name: shard.rows for name, shard in filled.items()}, path, metadata)
        path.chmod(path.parent.stat().st_mode & 0o666)  # as other files have it: safetensors leaves it to the owner
        flush(path)
        return FileRecord.of(path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, str(error)) from None


class ShardReader(AbstractContextManager["ShardReader"]):
    """The tensors of a role, as all of its ranks wrote them.

    Args:
        folder: A whole checkpoint.
        role: The role.
        world_size: How many ranks wrote it.
    """

    def __init__(self, folder: Path, role: str, world_size: int) -> None:
        self._role = role
        paths = [folder / shard_file(role, rank, world_size) for rank in range(world_size)]
        self._files = [safe_open(path, framework="pt") for path in paths]
        metadata = [file.metadata() for file in self._files]
        self.notes: list[dict[str, Any]] = [json.loads(entry["notes"]) for entry in metadata]
        self._places: list[dict[str, tuple[int, list[int]]]] = [json.loads(entry["places"]) for entry in metadata]

    def __exit__(self, *_: object) -> None:
        self._files = []  # unmaps them

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every whole tensor."""
        return {name: tuple(shape) for places in self._places for name, (_, shape) in places.items()}

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows of a tensor, on the CPU: as `parts`, in one.

        Returns:
            [count, ...], or all of a tensor without dimensions.
        """
        parts = self.parts(name, first, count)
        return torch.cat(parts) if self.shapes[name] else parts[0]

    def parts(self, name: str, first: int = 0, count: int | None = None) -> list[torch.Tensor]:
        """Rows of a tensor as the files hold them, mapped: what is not looked at takes no memory.

        Args:
            name: The tensor.
            first: The first row.
            count: How many; all from the first on by default.

        Returns:
            Each [some, ...], in order; one for a tensor without dimensions.

        Raises:
            CheckpointError: when the files don't hold them.
        """
        shape = self.shapes.get(name)
        if shape is None:
            raise self.misfit(name, "no such tensor", "one of that name")
        last = (shape[0] if shape else 0) if count is None else first + count
        parts = [part for part in self._parts(name, first, last) if part is not None]
        if shape and sum(map(len, parts)) != last - first:
            raise self.misfit(name, f"{sum(map(len, parts))} rows", f"{last - first}")
        return parts

    def _parts(self, name: str, first: int, last: int) -> Iterator[torch.Tensor | None]:
        """What each file holds of rows [first, last), in order."""
        for file, places in zip(self._files, self._places, strict=True):
            if name not in places:
                continue
            start, shape = places[name]
            if not shape:
                yield file.get_tensor(name)
                continue
            rows = file.get_slice(name)
            begin, end = max(first - start, 0), min(last - start, rows.get_shape()[0])
            yield rows[begin:end] if begin < end else None

    def misfit(self, name: str, got: str, expected: str) -> CheckpointError:
        """What is said of a checkpoint that does not hold what a model needs."""
        return CheckpointError(
            f"checkpoint: {self._role}, {name}: got {got}; expected {expected}. Fix: resume with the release and the "
            f"model that wrote it, or start anew"
        )


class BackgroundWrite:
    """One file that is being written by a thread of its own.

    Args:
        write: Writes it and gives its record.
    """

    def __init__(self, write: Callable[[], FileRecord]) -> None:
        threads = ThreadPoolExecutor(max_workers=1)
        self._record = threads.submit(write)
        threads.shutdown(wait=False)

    def record(self, wait: bool) -> FileRecord | None:
        """The file's record, or None where it is not written yet.

        Args:
            wait: Whether to wait until it is.

        Raises:
            CheckpointError: when it could not be written.
        """
        return self._record.result() if wait or self._record.done() else None
