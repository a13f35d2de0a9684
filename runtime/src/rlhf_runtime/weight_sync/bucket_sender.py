"""What the sending side of our transports has in common."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from rlhf_runtime.weight_sync.buckets import Bucket, BucketPlan, TensorSpec, Views, lists_of, plan_buckets
from rlhf_runtime.weight_sync.client import EngineClient
from rlhf_runtime.weight_sync.pipeline import Wait, send_buckets


@dataclass
class BucketInitInfo(TrainerInitInfo):
    """The trainer's settings; each transport has a subclass under its own `backend`."""

    backend: ClassVar[str] = "rlhf_buckets"
    bucket_bytes: int
    """Bytes of the buffers that buckets take turns in; a tensor larger than one of them gets a buffer of its own."""
    host: str
    """This node's address, as the engines reach it."""


class BucketSender(TrainerWeightTransferEngine[BucketInitInfo]):
    """The trainer's side. Only the sending rank has buffers; they are made once and used in every update."""

    init_info_cls = BucketInitInfo
    client: EngineClient
    source: WeightSource

    @classmethod
    def trainer_init(cls, init_info: BucketInitInfo, *, client: Any, source: WeightSource | None = None) -> Self:
        """Make the buffers and join the engines.

        Raises:
            WeightSyncError: when that cannot be.
        """
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            specs = [TensorSpec(meta.name, meta.dtype, tuple(meta.shape)) for meta in engine.source.metadata()]
            engine.plan = plan_buckets(specs, init_info.bucket_bytes)
            layout = {"bucket_bytes": init_info.bucket_bytes, **lists_of(specs)}
            engine.join(init_info, layout)
            engine.views = engine.plan.views(engine.slots)
        return engine

    plan: BucketPlan
    """How the model is cut into buckets."""
    slots: tuple[torch.Tensor, ...]
    """The buffers that they travel in, uint8."""
    views: tuple[Views, ...]
    """Each bucket's tensors in them."""

    @abstractmethod
    def join(self, init_info: BucketInitInfo, layout: dict[str, Any]) -> None:
        """Make the buffers and join the engines, whose handshake has to contain `layout`."""

    @abstractmethod
    def start(self, bucket: Bucket) -> Wait:
        """Start the move of a bucket that lies in its slot."""

    def send_weights(self) -> None:
        """Send every tensor; all ranks call it, since gathering is collective."""
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        starting = self.client.begin("start_weight_update")
        try:
            # The first bucket is filled while the engines make ready for it.
            self.send_all()
        except Exception as error:
            raise starting.cause_of(error) from error
        self.client.finish_weight_update()

    def send_all(self) -> None:
        """Move every bucket."""
        send_buckets(self.plan, self.views, self.source, self.start)
