"""What checkpoints hold of the workers: the state of policy and critic, and every role's random generators."""

from functools import partial
from pathlib import Path
from typing import ClassVar

from rlhf_runtime.checkpoint import randomness
from rlhf_runtime.checkpoint.manifest import FileRecord
from rlhf_runtime.checkpoint.shards import BackgroundWrite, ShardReader, State, shard_file, write_shards
from rlhf_runtime.engines.torch_engine import TorchEngine
from rlhf_runtime.single_controller.decorator import register
from rlhf_runtime.single_controller.worker import Worker

RANDOM = "random"
"""Note with the state of a rank's random generators."""


class SavedWorker(Worker):
    """One rank of a role whose state goes to a file and comes back."""

    role: ClassVar[str]
    _write: BackgroundWrite

    @register(blocking=False)
    def save(self, folder: str) -> None:
        """Copy this rank's state, and begin to write it into a folder that all nodes share."""
        state = self.state()
        path = Path(folder) / shard_file(self.role, self.rank, self.world_size)
        notes = {**state.notes, RANDOM: randomness.capture()}
        self._write = BackgroundWrite(partial(write_shards, path, State(state.shards, notes)))

    @register(blocking=False)
    def saved(self, wait: bool) -> FileRecord | None:
        """The file of the last `save`, or None where it is not written yet and there is no time to wait.

        Raises:
            CheckpointError: when it could not be written.
        """
        return self._write.record(wait)

    @register(blocking=False)
    def load(self, folder: str, ranks: int) -> None:
        """Go on from what `ranks` ranks of this role saved; ranks beyond these keep their own random generators.

        Raises:
            CheckpointError: when it is not this role's state.
        """
        with ShardReader(Path(folder), self.role, ranks) as reader:
            self.restore(reader)
            if self.rank < ranks:
                randomness.restore(reader.notes[self.rank][RANDOM])

    def state(self) -> State:
        """What this rank has beside its random generators, as a copy; nothing by default."""
        return State({}, {})

    def restore(self, reader: ShardReader) -> None:
        """Take that back."""


class TrainedWorker(SavedWorker):
    """One rank of a role that is trained."""

    engine: TorchEngine

    def state(self) -> State:
        """This rank's rows of model and optimizer."""
        return self.engine.state()

    def restore(self, reader: ShardReader) -> None:
        """Take this rank's rows."""
        self.engine.restore(reader)
