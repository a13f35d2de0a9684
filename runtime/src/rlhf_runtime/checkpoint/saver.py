"""Checkpoints taken while training goes on, one at a time.

    begin ─ ranks copy their state ─ training goes on ─ look ─ look ─ all is written ─ finish

What a rank copied is written by a thread of its own; the driver completes the checkpoint at the end of a later step.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_runtime.checkpoint.driver_state import METRICS, STATE, DriverState, write_metrics
from rlhf_runtime.checkpoint.manifest import FORMAT_VERSION, MODEL_FILES, FileRecord, Manifest
from rlhf_runtime.checkpoint.shards import shard_file
from rlhf_runtime.checkpoint.store import CheckpointStore, told
from rlhf_runtime.hugging_face import tokenizer_files
from rlhf_runtime.single_controller.calls import WorkerFuture

if TYPE_CHECKING:
    from rlhf_runtime.types import StepMetrics

logger = logging.getLogger(__name__)


class SavedGroup(Protocol):
    """The group of a role that is saved: see `SavedWorker`."""

    world_size: int

    def save(self, folder: str) -> WorkerFuture:
        """Begin to write."""

    def saved(self, wait: bool) -> WorkerFuture:
        """The record of each rank's file, None where it is not written yet."""


@dataclass
class _Write:
    """A checkpoint that is being written."""

    step: int
    weight_version: int
    folder: Path
    files: dict[str, FileRecord]
    """Those of the driver."""
    copies: list[WorkerFuture]
    """Done once every rank has copied its state."""


class Saver:
    """Takes checkpoints, one at a time.

    Args:
        store: Where they go.
        groups: The roles that are saved.
        model: The policy's first folder.
        trained_from: What the job is: see `identity.py`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        groups: Mapping[str, SavedGroup],
        model: Path,
        trained_from: Mapping[str, Any],
    ) -> None:
        self._store = store
        self._groups = groups
        self._model = model
        self._trained_from = dict(trained_from)
        self._write: _Write | None = None
        self.finished: Manifest | None = None
        """That of the latest complete checkpoint."""

    def begin(self, step: int, weight_version: int, state: DriverState, rows: "Sequence[StepMetrics]") -> None:
        """Begin the checkpoint of a step, once the one before is complete.

        Training may go on at once: what it asks of a rank next waits there until the copy is made.

        Raises:
            CheckpointError: when one of the two cannot be written.
        """
        self.look(wait=True)
        folder = self._store.begin(step)
        copies = [group.save(str(folder)) for group in self._groups.values()]
        with told(folder):
            state.write(folder)
            write_metrics(folder, rows)
            (folder / MODEL_FILES).mkdir()
            for file in (self._model / "config.json", *tokenizer_files(self._model)):
                shutil.copyfile(file, folder / MODEL_FILES / file.name)
            own = [folder / STATE, folder / METRICS, *sorted((folder / MODEL_FILES).iterdir())]
            files = {str(path.relative_to(folder)): FileRecord.of(path) for path in own}
        self._write = _Write(step, weight_version, folder, files, copies)

    def look(self, wait: bool = False) -> None:
        """Complete the checkpoint that is being written, if all of it is.

        Args:
            wait: Whether to wait until it is.

        Raises:
            CheckpointError: when it cannot be written.
        """
        if (write := self._write) is None:
            return
        for copy in write.copies:
            copy.get()
        answers = {role: group.saved(wait) for role, group in self._groups.items()}
        records = {role: answer.get() for role, answer in answers.items()}
        if any(record is None for ranks in records.values() for record in ranks):
            return
        files = {
            shard_file(role, rank, len(ranks)): record
            for role, ranks in records.items()
            for rank, record in enumerate(ranks)
        }
        self._write = None
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            step=write.step,
            weight_version=write.weight_version,
            ranks={role: len(ranks) for role, ranks in records.items()},
            trained_from=self._trained_from,
            files=write.files | files,
        )
        logger.info("Checkpoint of step %d: %s", write.step, self._store.finish(manifest))
        self.finished = manifest
