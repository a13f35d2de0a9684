"""The folder of a run's checkpoints: written aside, renamed when complete, the oldest removed.

    .step-000020-partial ─ finish ─ step-000020 ─ beyond `keep` ─ .step-000020-removed ─ gone
                                        └─ found damaged ─ step-000020.damaged

A checkpoint has its name once all of it is on the disk, and loses it before any of it goes.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rlhf_api.checkpoint import CHECKPOINT_FOLDERS

from rlhf_runtime.checkpoint.manifest import Checkpoint, DamagedError, Manifest, reading
from rlhf_runtime.errors import CheckpointError

PARTIAL, REMOVED = "partial", "removed"


@dataclass(frozen=True)
class Found:
    """What a folder of checkpoints holds."""

    checkpoint: Checkpoint | None = None
    """The newest whole one."""
    damaged: tuple[tuple[Path, str], ...] = ()
    """Newer ones, the newest first, and what is wrong with each."""
    unfinished: tuple[Path, ...] = ()
    """What was being written or removed when its run ended."""

    @property
    def step(self) -> int:
        """Steps that are finished."""
        return self.checkpoint.manifest.step if self.checkpoint else 0

    @property
    def notes(self) -> list[str]:
        """What was passed over, a sentence each."""
        partial = [path for path in self.unfinished if path.name.endswith(PARTIAL)]
        return [
            *(f"Passed over {path}: it was not finished" for path in partial),
            *(f"Passed over {path}, which is damaged: {reason}" for path, reason in self.damaged),
        ]


class CheckpointStore:
    """A folder of checkpoints, of which one process writes at a time.

    Args:
        folder: It need not exist yet.
        keep: How many checkpoints stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def find(self) -> Found:
        """The newest whole checkpoint, and what was passed over on the way. Changes nothing.

        Raises:
            CheckpointError: when the storage fails, so that what it holds is not known.
        """
        with reading(self.folder):
            unfinished = tuple(sorted(self._folders(".step-*")))
            steps = self._steps()
        damaged = []
        for folder in steps:
            try:
                return Found(Checkpoint.open(folder), tuple(damaged), unfinished)
            except DamagedError as error:
                damaged.append((folder, str(error)))
        return Found(None, tuple(damaged), unfinished)

    def newest(self) -> Path | None:
        """The newest finished checkpoint, without a look into it.

        Raises:
            OSError: when the storage fails.
        """
        return next(iter(self._steps()), None)

    def clear(self, found: Found) -> None:
        """Make room for new ones: remove what is unfinished, and rename what is damaged.

        Raises:
            CheckpointError: when that is not possible.
        """
        with told(self.folder):
            for path in found.unfinished:
                shutil.rmtree(path)
            for path, _ in found.damaged:
                target = path.with_name(f"{path.name}.damaged")
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)

    def begin(self, step: int) -> Path:
        """Make the folder that the checkpoint of a step is written in, on which `finish` has to follow.

        Raises:
            CheckpointError: when it cannot be made.
        """
        partial = self._hidden(step, PARTIAL)
        with told(partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return partial

    def finish(self, manifest: Manifest) -> Path:
        """Complete the checkpoint whose files have all been written, and remove the oldest ones.

        Raises:
            CheckpointError: when a file is not there, or the folder cannot be written to.
        """
        partial = self._hidden(manifest.step, PARTIAL)
        final = self.folder / f"step-{manifest.step:06d}"
        for name in manifest.files:
            if not (partial / name).is_file():
                raise CheckpointError(
                    f"checkpoint.path: got {partial} without {name}, which a worker wrote; expected a folder that all "
                    f"nodes share. Fix: choose a path on such a storage"
                )
        with told(partial):
            manifest.write(partial)
            for path in (*partial.rglob("*"), partial):
                flush(path)
            self._remove(final)
            partial.rename(final)
            flush(self.folder)
            for old in self._steps()[self._keep :]:
                self._remove(old)
        return final

    def _steps(self) -> list[Path]:
        """Finished checkpoints, the newest first."""
        return sorted(self._folders(CHECKPOINT_FOLDERS), key=_step_of, reverse=True)

    def _folders(self, pattern: str) -> list[Path]:
        """Folders whose names match; `glob` would take one that cannot be read for an empty one."""
        try:
            with os.scandir(self.folder) as entries:
                return [Path(entry) for entry in entries if fnmatchcase(entry.name, pattern) and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _remove(self, folder: Path) -> None:
        if folder.exists():
            hidden = self._hidden(_step_of(folder), REMOVED)
            shutil.rmtree(hidden, ignore_errors=True)
            folder.rename(hidden)
            shutil.rmtree(hidden)

    def _hidden(self, step: int, state: str) -> Path:
        return self.folder / f".step-{step:06d}-{state}"


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk.

    Raises:
        OSError: when it cannot be, as on a full disk.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Tell of a disk that is full, or that otherwise refuses.

    Raises:
        CheckpointError: for an OSError.
    """
    try:
        yield
    except OSError as error:
        raise write_error(path, error.strerror or str(error)) from None


def write_error(path: Path, reason: str) -> CheckpointError:
    """What is said of a checkpoint that cannot be written."""
    return CheckpointError(
        f"{path}: got `{reason}` while writing a checkpoint; expected room and the right to write there. Fix: free "
        f"space or lower checkpoint.keep, then go on from the last whole checkpoint with `rlhf run --resume`"
    )
