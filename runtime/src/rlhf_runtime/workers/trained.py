"""What policy and critic share: their state of training goes to files and comes back."""

from pathlib import Path
from typing import ClassVar

from rlhf_runtime.checkpoint.manifest import FileRecord
from rlhf_runtime.checkpoint.shards import BackgroundWrite, ShardReader, shard_file
from rlhf_runtime.engines.torch_engine import TorchEngine
from rlhf_runtime.single_controller.decorator import register
from rlhf_runtime.single_controller.worker import Worker


class TrainedWorker(Worker):
    """One rank of a role that is trained."""

    role: ClassVar[str]
    engine: TorchEngine
    _write: BackgroundWrite

    @register(blocking=False)
    def save(self, folder: str) -> None:
        """Copy this rank's state, and begin to write it into a folder that all nodes share."""
        self._write = self.engine.save(Path(folder) / shard_file(self.role, self.rank, self.world_size))

    @register(blocking=False)
    def saved(self, wait: bool) -> FileRecord | None:
        """The file of the last `save`, or None where it is not written yet and there is no time to wait.

        Raises:
            CheckpointError: when it could not be written.
        """
        return self._write.record(wait)

    @register(blocking=False)
    def load(self, folder: str, ranks: int) -> None:
        """Go on from the state that `ranks` ranks of this role saved into a folder.

        Raises:
            CheckpointError: when it is not this model's.
        """
        with ShardReader(Path(folder), self.role, ranks) as reader:
            self.engine.load(reader)
