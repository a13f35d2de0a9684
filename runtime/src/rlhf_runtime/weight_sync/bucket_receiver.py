"""What the engine's side of our transports has in common."""

from abc import ABC
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from rlhf_runtime.weight_sync.receive import held_weights


class BucketReceiver(WeightTransferEngine[Any, Any], ABC):
    """A receiver of checkpoint weights on CPU."""

    timeout_seconds: float
    """How long an update may take; `RecordedReceive` reads it from the handshake."""

    def start_weight_update(self) -> None:
        """Put the model back into the form of its checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one part of an update; the base class waits for an accelerator, which is not there."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Bring the model into the form that it computes in."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def load_from(self, buffer: torch.Tensor, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load weights that lie in a buffer which is overwritten afterwards."""
        self.model.load_weights(weights)
        storage = buffer.untyped_storage().data_ptr()
        # The loader keeps tensors until their layer is complete; only those of a layer cut between buckets are left.
        for arguments in held_weights(self.model):
            for key, value in arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == storage:
                    arguments[key] = value.clone()
