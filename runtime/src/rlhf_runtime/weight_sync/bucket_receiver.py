"""What the engine's side of our transports has in common."""

from abc import ABC
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo

from rlhf_runtime.weight_sync.buckets import Bucket, BucketPlan, Views, plan_buckets, tensor_specs


@dataclass
class Layout(WeightTransferInitInfo):
    """What the handshake tells about the tensors of every update, in the order that they come."""

    bucket_bytes: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    @property
    def plan(self) -> BucketPlan:
        """Their buckets, as the sender cuts them."""
        return plan_buckets(tensor_specs(self.names, self.dtype_names, self.shapes), self.bucket_bytes)


class BucketReceiver(WeightTransferEngine[Any, Any], ABC):
    """A receiver of checkpoint weights on CPU."""

    timeout_seconds: float
    """How long an update may take; `RecordedReceive` reads it from the handshake."""
    plan: BucketPlan
    slots: tuple[torch.Tensor, ...]
    _views: tuple[Views, ...]

    def take_slots(self, plan: BucketPlan, slots: tuple[torch.Tensor, ...]) -> None:
        """Receive these buckets into these slots from now on."""
        self.plan, self.slots, self._views = plan, slots, plan.views(slots)

    def drop_slots(self) -> None:
        """Let the slots' memory go."""
        self.slots = self._views = ()

    def start_weight_update(self) -> None:
        """Put the model back into the form of its checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        initialize_layerwise_reload(self.model)
        self._layers = [get_layerwise_info(layer) for layer in self.model.modules()]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one part of an update; the base class waits for an accelerator, which is not there."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Bring the model into the form that it computes in."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def load(self, bucket: Bucket) -> None:
        """Load a bucket that lies in its slot, which is overwritten afterwards."""
        self.model.load_weights(self._views[bucket.index])
        soon = [self.slots[slot] for slot in self.plan.used_soon(bucket)]
        # The loader keeps tensors until their layer is complete. Most are complete with the bucket that follows, until
        # which they stay where they are.
        for layer in self._layers:
            for _, bound in layer.loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and any(_lies_in(value, slot) for slot in soon):
                        bound.arguments[key] = value.clone()


def _lies_in(tensor: torch.Tensor, slot: torch.Tensor) -> bool:
    return slot.data_ptr() <= tensor.data_ptr() < slot.data_ptr() + len(slot)
