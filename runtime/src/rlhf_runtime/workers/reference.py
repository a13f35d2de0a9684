"""The reference: the frozen model that KL is measured against."""

from rlhf_api import RuntimeConfig

from rlhf_runtime.engines.torch_engine import TorchEngine
from rlhf_runtime.models import model_folder
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.single_controller.decorator import register
from rlhf_runtime.single_controller.worker import Worker
from rlhf_runtime.workers.minibatch import DEALT_AND_BACK, per_token, sequences_of


class ReferenceWorker(Worker):
    """One rank of the reference."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.engine = TorchEngine(
            model_folder(config, "reference"),
            head="lm",
            device=self.device,
            micro_batch_tokens=config.training.micro_batch_tokens,
            dtype=config.training.dtype,
            temperature=config.rollout.temperature,
        )

    @register(DEALT_AND_BACK, blocking=False)
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Add `ref_log_probs`, ragged [B, R*] float32, at the sampling temperature; the other columns stay behind."""
        log_probs, _ = self.engine.score(sequences_of(batch))
        return per_token(batch, {"ref_log_probs": log_probs})
