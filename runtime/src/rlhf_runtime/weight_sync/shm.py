"""The `shm` transport: CUDA IPC's twin on CPU, registered with vLLM's weight-transfer factories.

The sending rank makes one buffer in shared memory for the life of the job, and engines map it in the handshake. Each
bucket of an update is one call to the engines, which says what lies where.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from rlhf_runtime.weight_sync.bucket_receiver import BucketReceiver
from rlhf_runtime.weight_sync.bucket_sender import BucketInitInfo, BucketSender, lists_of
from rlhf_runtime.weight_sync.buckets import Bucket, tensor_specs
from rlhf_runtime.weight_sync.buffer import create_buffer, map_buffer
from rlhf_runtime.weight_sync.pipeline import Wait
from rlhf_runtime.weight_sync.receive import RecordedReceive

BACKEND = "rlhf_shm"


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Where the buffer is."""

    path: str
    size: int
    """Bytes."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """What lies in the buffer, one entry a tensor."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    """Bytes from the buffer's start."""

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Name and view of each tensor in the buffer, uint8."""
        specs = tensor_specs(self.names, self.dtype_names, self.shapes)
        return list(Bucket(0, tuple(specs), tuple(self.offsets), len(buffer)).views(buffer))


class ShmWeightTransferEngine(BucketReceiver):
    """The engine's side."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the buffer."""
        self._buffer = map_buffer(Path(init_info.path), init_info.size)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load what lies in the buffer."""
        self.load_from(self._buffer, update_info.views(self._buffer))

    def shutdown(self) -> None:
        """Unmap the buffer."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


class RecordedShmWeightTransferEngine(RecordedReceive, ShmWeightTransferEngine):
    """The engine's side, with a record of what arrived."""


@dataclass
class ShmTrainerInitInfo(BucketInitInfo):
    """The trainer's settings."""

    backend: ClassVar[str] = BACKEND


class ShmSender(BucketSender):
    """The trainer's side."""

    init_info_cls = ShmTrainerInitInfo

    def join(self, init_info: BucketInitInfo) -> None:
        """Make the buffer and have every engine map it.

        Raises:
            WeightSyncError: when shared memory is too small, or an engine is on another machine.
        """
        size = sum(self.plan.slot_bytes)
        with create_buffer(size) as (buffer, path):
            self.slots = self.plan.slots(buffer)
            self.client.init_weight_transfer_engine({"path": str(path), "size": size})

    def start(self, bucket: Bucket) -> Wait:
        """Tell the engines what lies in the bucket; they answer once it is loaded."""
        base = self.slots[bucket.slot].storage_offset()
        info = {**lists_of(bucket.specs), "offsets": [base + offset for offset in bucket.offsets]}
        return self.client.begin("update_weights", info).wait

    def shutdown(self) -> None:
        """Unmap the buffer."""
        self.slots = ()


WeightTransferEngineFactory.register_engine(BACKEND, RecordedShmWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, ShmSender)
