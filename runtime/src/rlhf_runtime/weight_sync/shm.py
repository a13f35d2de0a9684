"""The `shm` transport: CUDA IPC's twin on CPU, registered with vLLM's weight-transfer factories.

The sending rank makes one buffer in shared memory for the life of the job, and engines map it in the handshake, which
also lists the tensors. Each bucket of an update is one call to the engines.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from rlhf_runtime.weight_sync.bucket_receiver import BucketReceiver, Layout
from rlhf_runtime.weight_sync.bucket_sender import BucketInitInfo, BucketSender
from rlhf_runtime.weight_sync.buckets import Bucket
from rlhf_runtime.weight_sync.buffer import create_buffer, map_buffer
from rlhf_runtime.weight_sync.pipeline import Wait
from rlhf_runtime.weight_sync.receive import RecordedReceive

BACKEND = "rlhf_shm"


@dataclass
class ShmInitInfo(Layout):
    """Where the buffer is."""

    path: str


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """Which bucket lies in its slot."""

    bucket: int
    """Its place among the buckets."""


class ShmWeightTransferEngine(BucketReceiver):
    """The engine's side."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the buffer."""
        plan = init_info.plan
        self.take_slots(plan, plan.slots(map_buffer(Path(init_info.path), sum(plan.slot_bytes))))

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load a bucket."""
        self.load(self.plan.buckets[update_info.bucket])

    def shutdown(self) -> None:
        """Unmap the buffer."""
        self.drop_slots()


class RecordedShmWeightTransferEngine(RecordedReceive, ShmWeightTransferEngine):
    """The engine's side, with a record of what arrived."""


@dataclass
class ShmTrainerInitInfo(BucketInitInfo):
    """The trainer's settings."""

    backend: ClassVar[str] = BACKEND


class ShmSender(BucketSender):
    """The trainer's side."""

    init_info_cls = ShmTrainerInitInfo

    def join(self, init_info: BucketInitInfo, layout: dict[str, Any]) -> None:
        """Make the buffer and have every engine map it.

        Raises:
            WeightSyncError: when shared memory is too small, or an engine is on another machine.
        """
        with create_buffer(sum(self.plan.slot_bytes)) as (buffer, path):
            self.slots = self.plan.slots(buffer)
            self.client.init_weight_transfer_engine({"path": str(path), **layout})

    def start(self, bucket: Bucket) -> Wait:
        """Tell the engines of the bucket; they answer once it is loaded."""
        return self.client.begin("update_weights", {"bucket": bucket.index}).wait

    def shutdown(self) -> None:
        """Unmap the buffer."""
        self.slots = self.views = ()


WeightTransferEngineFactory.register_engine(BACKEND, RecordedShmWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, ShmSender)
