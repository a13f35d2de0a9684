"""The critic: a value for every response token."""

import torch
from rlhf_api import RuntimeConfig

from rlhf_runtime.algorithms.losses import value_loss
from rlhf_runtime.algorithms.masking import masked
from rlhf_runtime.engines.torch_engine import TorchEngine
from rlhf_runtime.models import model_folder
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import lengths
from rlhf_runtime.single_controller.decorator import register
from rlhf_runtime.workers.minibatch import (
    DEALT,
    DEALT_AND_BACK,
    Totals,
    count_over_ranks,
    mini_batches,
    per_token,
    sequences_of,
    token_mask,
)
from rlhf_runtime.workers.saved import TrainedWorker


class CriticWorker(TrainedWorker):
    """One rank of the critic."""

    role = "critic"

    def __init__(self, config: RuntimeConfig) -> None:
        assert config.algorithm.ppo is not None, "a critic without ppo"
        self.ppo = config.algorithm.ppo
        self.engine = TorchEngine(
            model_folder(config, "critic"),
            head="value",
            device=self.device,
            micro_batch_tokens=config.training.micro_batch_tokens,
            dtype=config.training.dtype,
            recompute=config.training.activation_checkpointing,
            optimizer=config.training.critic_optimizer,
        )

    @register(DEALT_AND_BACK, blocking=False)
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values`, ragged [B, R*] float32: what each response token is expected to earn, judged before it is known."""
        (values,) = self.engine.score(sequences_of(batch))
        return per_token(batch, {"values": values})

    @register(DEALT, blocking=False)
    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on `values` and `returns`; the same metrics on every rank.

        Raises:
            NumericalError: when loss or gradient is not finite.
        """
        totals = Totals(self.device, "tokens", "loss", "clipped", "steps", "grad_norm")
        for part in mini_batches(batch, self.ppo.mini_batch_size, self.ppo.epochs, self.world_size):
            self._train(part, totals)
        sums = totals.over_ranks()
        tokens = max(sums["tokens"], 1.0)
        return {
            "value_loss": sums["loss"] / tokens,
            "value_clip_fraction": sums["clipped"] / tokens,
            "critic_grad_norm": sums["grad_norm"] / max(sums["steps"], 1.0),
            "explained_variance": self._explained_variance(batch),
        }

    @register(blocking=False)
    def digests(self) -> dict[str, int]:
        """Of each rank, what all of them have to agree on: see `TorchEngine.digests`."""
        return self.engine.digests()

    def _train(self, batch: DataProto, totals: Totals) -> None:
        """One optimizer step."""
        mask = token_mask(batch).to(self.device)
        counts = count_over_ranks(mask, lengths(batch.batch["response_ids"]).to(self.device))
        if counts.tokens == 0:
            return
        old_values = batch.batch["values"].values().to(self.device)
        returns = batch.batch["returns"].values().to(self.device)

        def loss(outputs: tuple[torch.Tensor, ...], at: torch.Tensor) -> torch.Tensor:
            part = value_loss(outputs[0], old_values[at], returns[at], mask[at], self.ppo.value_clip_range)
            total = part.losses.sum()
            totals.add(mask[at].sum(), total, part.clipped, 0.0, 0.0)
            return total / counts.tokens

        step = self.engine.train_step(sequences_of(batch), loss)
        totals.add(0.0, 0.0, 0.0, 1.0, step.grad_norm)

    def _explained_variance(self, batch: DataProto) -> float:
        """`1 - Var(returns - old values) / Var(returns)` over all ranks; 0 where all returns are equal."""
        mask = token_mask(batch)
        returns = masked(batch.batch["returns"].values(), mask).double()
        errors = returns - masked(batch.batch["values"].values(), mask).double()
        totals = Totals(self.device, "tokens", "return", "return2", "error", "error2")
        totals.add(mask.sum(), returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum())
        sums = totals.over_ranks()
        tokens = max(sums["tokens"], 1.0)
        variance = sums["return2"] / tokens - (sums["return"] / tokens) ** 2
        unexplained = sums["error2"] / tokens - (sums["error"] / tokens) ** 2
        return 1 - unexplained / variance if variance > 1e-12 else 0.0
