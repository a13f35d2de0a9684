"""`checkpoint.json`: what a checkpoint is, and by what a whole one is told from a damaged one."""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash
from pydantic import ValidationError
from rlhf_api.base import ApiModel, JsonObject

from rlhf_runtime.errors import CheckpointError

MANIFEST = "checkpoint.json"
MODEL_FILES = "model"
"""Folder of the policy's config and tokenizer inside a checkpoint."""
FORMAT_VERSION = 1
"""Raised whenever an older release could misread a newer checkpoint."""
BLOCK = 1 << 24
"""Bytes that are hashed at a time."""


class DamagedError(Exception):
    """A checkpoint is not what its manifest says; the message says how."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell of a storage that fails, which says nothing of what it holds: another try may find that whole.

    Raises:
        CheckpointError: for an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: got `{error.strerror or error}` while reading a checkpoint; expected a storage that works. Fix: "
            f"mend it, then go on with `rlhf run --resume`; what cannot be read any more has to be removed for that"
        ) from None


class FileRecord(ApiModel):
    """A file as it was written."""

    bytes: int
    """Its size."""
    checksum: str
    """XXH3 of its content, 128 bits in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The record of a file, which is read for it."""
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
            return cls(bytes=file.tell(), checksum=digest.hexdigest())


class Manifest(ApiModel):
    """What a checkpoint is."""

    format_version: int
    """`FORMAT_VERSION` of the release that wrote it."""
    step: int
    """Steps that were finished."""
    weight_version: int
    """Version of the weights in the engines."""
    ranks: dict[str, int]
    """How many ranks each role had."""
    trained_from: JsonObject
    """What it was trained from: see `identity.py`."""
    files: dict[str, FileRecord]
    """Every other file, by its path inside the checkpoint."""

    def write(self, folder: Path) -> None:
        """Write it, with a checksum of its own."""
        document = self.model_dump(mode="json", by_alias=True)
        (folder / MANIFEST).write_text(json.dumps({**document, "checksum": self.checksum}, indent=1))

    @property
    def checksum(self) -> str:
        """Tells it from any other, and so a checkpoint with all that is in it."""
        return _checksum(self.model_dump(mode="json", by_alias=True))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it.

        Raises:
            DamagedError: when it is missing, or not as it was written, or of another format.
            CheckpointError: when the storage fails.
        """
        with _present(folder, MANIFEST) as path:
            content = path.read_bytes()
        try:
            document: dict[str, Any] = json.loads(content)
            claimed = document.pop("checksum")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DamagedError(f"{MANIFEST} is not as it was written") from None
        if claimed != _checksum(document):
            raise DamagedError(f"{MANIFEST} is not as it was written")
        if (version := document.get("formatVersion")) != FORMAT_VERSION:
            raise DamagedError(f"{MANIFEST} is of format {version}, not {FORMAT_VERSION}")
        try:
            return cls.model_validate(document, by_alias=True, by_name=False)
        except ValidationError:
            raise DamagedError(f"{MANIFEST} is not as it was written") from None


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    """Where it is."""
    manifest: Manifest
    """What it is."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read a checkpoint's manifest, and every file to see that it is as it was written.

        Raises:
            DamagedError: naming the first file that is not.
            CheckpointError: when the storage fails.
        """
        manifest = Manifest.read(folder)
        for name, record in manifest.files.items():
            with _present(folder, name) as path:
                size = path.stat().st_size
            if size != record.bytes:
                raise DamagedError(f"{name} has {size} bytes, not {record.bytes}")
        # hashing lets go of the interpreter, so threads read as fast as the disk is
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
            found = threads.map(lambda name: _record(folder, name), manifest.files)
            for (name, record), now in zip(manifest.files.items(), found, strict=True):
                if now != record:
                    raise DamagedError(f"{name} is not as it was written")
        return cls(folder, manifest)


def _record(folder: Path, name: str) -> FileRecord:
    with _present(folder, name) as path:
        return FileRecord.of(path)


@contextmanager
def _present(folder: Path, name: str) -> Iterator[Path]:
    """A checkpoint's file, to be read.

    Raises:
        DamagedError: when there is no file of that name.
        CheckpointError: when the storage fails.
    """
    with reading(folder / name):
        try:
            yield folder / name
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise DamagedError(f"{name} is missing") from None


def _checksum(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())
