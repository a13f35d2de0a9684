"""The `gloo` transport: NCCL broadcast's twin on CPU, registered with vLLM's weight-transfer factories.

The sending rank is rank 0 of a group with every worker of every engine. The handshake lists the tensors, and both ends
cut the list into the same buckets; an update is one call to the engines.
"""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from rlhf_runtime.weight_sync.broadcast import BroadcastGroup, address_towards
from rlhf_runtime.weight_sync.bucket_receiver import BucketReceiver, Layout
from rlhf_runtime.weight_sync.bucket_sender import BucketInitInfo, BucketSender
from rlhf_runtime.weight_sync.buckets import Bucket
from rlhf_runtime.weight_sync.meeting import Meeting, group_rank, join_engines
from rlhf_runtime.weight_sync.pipeline import Wait, receive_buckets
from rlhf_runtime.weight_sync.receive import RecordedReceive

BACKEND = "rlhf_gloo"


@dataclass
class GlooInitInfo(Layout):
    """Where the group meets, and how the weights come."""

    host: str
    port: int
    rank_offset: int
    """Rank of the engine's first worker."""
    world_size: int
    """Processes of the group."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: an update is all of the handshake's tensors."""


class GlooWeightTransferEngine(BucketReceiver):
    """The engine's side."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _meeting: Meeting | None = None
    _group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group.

        Raises:
            ConnectionLostError: when not all of the group came.
        """
        size, timeout = init_info.world_size, self.timeout_seconds
        # First, so that whatever fails after it is told to the others.
        self._meeting = Meeting.find(init_info.host, init_info.port, size, timeout)
        rank = group_rank(self.parallel_config, init_info.rank_offset)
        host = address_towards(init_info.host, init_info.port)
        self._group = BroadcastGroup(self._meeting, rank, size, host, timeout)
        plan = init_info.plan
        self.take_slots(plan, tuple(torch.empty(size, dtype=torch.uint8) for size in plan.slot_bytes))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load every bucket, each while the next is on its way.

        Raises:
            ConnectionLostError: when the sender or another receiver left, or was late.
        """
        deadline = time.monotonic() + self.timeout_seconds

        def start(bucket: Bucket) -> Wait:
            return self._group.start(self.slots[bucket.slot][: bucket.used], deadline - time.monotonic())

        receive_buckets(self.plan, start, self.load)

    def shutdown(self) -> None:
        """Leave the group; whoever waits for this worker fails. Its last moves may still write into the buffers."""
        if self._meeting is not None:
            self._meeting.leave()
        if self._group is not None:
            self._group.close()
        self.drop_slots()


class RecordedGlooWeightTransferEngine(RecordedReceive, GlooWeightTransferEngine):
    """The engine's side, with a record of what arrived."""


@dataclass
class GlooTrainerInitInfo(BucketInitInfo):
    """The trainer's settings."""

    backend: ClassVar[str] = BACKEND


class GlooSender(BucketSender):
    """The trainer's side."""

    init_info_cls = GlooTrainerInitInfo
    _group: BroadcastGroup | None = None

    def join(self, init_info: BucketInitInfo, layout: dict[str, Any]) -> None:
        """Open a meeting and build a group with every worker of every engine.

        Raises:
            WeightSyncError: as an engine raised it, or when not all came.
        """
        self.slots = tuple(torch.empty(size, dtype=torch.uint8) for size in self.plan.slot_bytes)
        timeout, size = self.client.timeout_seconds, self.client.world_size
        meeting = Meeting.open(init_info.host, size, timeout)
        joining = self.client.begin_init(
            {
                "host": init_info.host,
                "port": meeting.port,
                "rank_offset": 1,
                "world_size": size,
                **layout,
            }
        )
        self._group = join_engines(meeting, joining, lambda: BroadcastGroup(meeting, 0, size, init_info.host, timeout))

    def start(self, bucket: Bucket) -> Wait:
        """Broadcast a bucket."""
        return self._group.start(self.slots[bucket.slot][: bucket.used], self.client.remaining())

    def send_all(self) -> None:
        """Broadcast every bucket while the engines receive.

        Raises:
            WeightSyncError: as an engine raised it, or when the connection broke.
        """
        update = self.client.begin("update_weights", {})
        try:
            super().send_all()
        except Exception as error:
            # Engines that wait for more fail now, and say so.
            self.shutdown()
            raise update.cause_of(error) from error
        update.wait()

    def shutdown(self) -> None:
        """Leave the group; engines that wait for more fail."""
        if self._group is not None:
            self._group.close()


WeightTransferEngineFactory.register_engine(BACKEND, RecordedGlooWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, GlooSender)
