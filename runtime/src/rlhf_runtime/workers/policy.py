"""The policy: the model that is trained."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlhf_api import RuntimeConfig

from rlhf_runtime.algorithms.aggregation import token_weights
from rlhf_runtime.algorithms.kl import kl_penalty
from rlhf_runtime.algorithms.losses import policy_loss
from rlhf_runtime.algorithms.masking import masked
from rlhf_runtime.engines.torch_engine import PREFIX, TorchEngine
from rlhf_runtime.hugging_face import Trained
from rlhf_runtime.models import model_folder
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import lengths
from rlhf_runtime.single_controller.decorator import Dispatch, register
from rlhf_runtime.weight_sync import SendReport
from rlhf_runtime.workers.minibatch import (
    DEALT,
    DEALT_AND_BACK,
    PICKED_UP,
    Totals,
    count_over_ranks,
    mini_batches,
    per_token,
    sequences_of,
    token_mask,
)
from rlhf_runtime.workers.saved import TrainedWorker

USED = ("old_log_probs", "advantages", "ref_log_probs")
"""Columns that the loss looks at, of those that the driver gives."""


class PolicyWorker(TrainedWorker):
    """One rank of the policy."""

    role = "policy"

    def __init__(self, config: RuntimeConfig) -> None:
        self.settings = config.algorithm.settings
        self.sync = config.weight_sync
        self.workers_per_engine = config.rollout.tensor_parallel_size
        self.engine = TorchEngine(
            model_folder(config, "policy"),
            head="lm",
            device=self.device,
            micro_batch_tokens=config.training.micro_batch_tokens,
            dtype=config.training.dtype,
            recompute=config.training.activation_checkpointing,
            optimizer=config.training.policy_optimizer,
            temperature=config.rollout.temperature,
            entropy_gradient=self.settings.entropy_coefficient > 0,
        )
        # Brings vLLM, ten seconds: here, beside the start of the engines, and not where the driver imports this class.
        from rlhf_runtime.weight_sync.sender import WeightSender

        self._sender_cls = WeightSender

    @register(DEALT_AND_BACK, blocking=False)
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropy`, ragged [B, R*] float32, at the sampling temperature."""
        log_probs, entropy = self.engine.score(sequences_of(batch))
        return per_token(batch, {"old_log_probs": log_probs, "entropy": entropy})

    @register(DEALT, blocking=False)
    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on `old_log_probs`, `advantages`, and `ref_log_probs` where the KL is part of the loss.

        Without `old_log_probs` they are those of the one optimizer step, which `scored` gives afterwards.

        Returns:
            The same metrics on every rank: means over tokens of all steps, means over steps of `policy_loss` and
            `grad_norm`, the last step's `learning_rate`, and as `ratio_max_deviation` the largest |ratio - 1| of the
            first step, which is 0 but for rounding.

        Raises:
            NumericalError: when loss or gradient is not finite.
        """
        totals = Totals(self.device, "tokens", "loss", "clipped", "kl", "steps", "grad_norm")
        first = torch.zeros((), device=self.device)
        parts = list(mini_batches(batch, self.settings.mini_batch_size, self.settings.epochs, self.world_size))
        assert "old_log_probs" in batch.columns or len(parts) == 1, "weights that change before all rows were scored"
        for index, part in enumerate(parts):
            deviation = self._train(part, totals)
            first = deviation if index == 0 else first
        dist.all_reduce(first, op=dist.ReduceOp.MAX)
        sums = totals.over_ranks()
        tokens, steps = max(sums["tokens"], 1.0), max(sums["steps"], 1.0)
        return {
            "policy_loss": sums["loss"] * self.world_size / steps,
            "clip_fraction": sums["clipped"] / tokens,
            "approx_kl": sums["kl"] / tokens,
            "ratio_max_deviation": first.item(),
            "grad_norm": sums["grad_norm"] / steps,
            "learning_rate": self.engine.learning_rate,
        }

    @register(PICKED_UP, blocking=False)
    def scored(self) -> DataProto:
        """What `compute_log_probs` would have given before the last `update`, which had to do without it."""
        return self._scored

    @register(blocking=False)
    def digests(self) -> dict[str, int]:
        """Of each rank, what all of them have to agree on: see `TorchEngine.digests`."""
        return self.engine.digests()

    def _train(self, batch: DataProto, totals: Totals) -> torch.Tensor:
        """One optimizer step; this rank's largest |ratio - 1|, a scalar."""
        mask, rows = token_mask(batch).to(self.device), lengths(batch.batch["response_ids"]).to(self.device)
        deviation = torch.zeros((), device=self.device)
        counts, settings = count_over_ranks(mask, rows), self.settings
        if counts.tokens == 0:
            return deviation
        weights = token_weights(mask, rows, counts, settings.loss_aggregation, settings.loss_constant)
        flat = {name: batch.batch[name].values().to(self.device) for name in USED if name in batch.columns}
        new = torch.zeros(2, len(mask), device=self.device)  # log-probabilities and entropies

        def loss(outputs: tuple[torch.Tensor, ...], at: torch.Tensor) -> torch.Tensor:
            counted, weight = mask[at], weights[at]
            log_probs, entropy = (masked(output, counted) for output in outputs)
            new[:, at] = torch.stack(outputs).detach()
            old, advantages = flat.get("old_log_probs", new[0])[at], flat["advantages"][at]
            part = policy_loss(log_probs, old, advantages, counted, settings.clip_range, settings.dual_clip)
            totals.add(counted.sum(), (weight * part.losses).sum(), part.clipped, part.kl, 0.0, 0.0)
            torch.maximum(deviation, part.ratio_deviation, out=deviation)
            losses = part.losses - settings.entropy_coefficient * entropy
            if settings.kl.in_loss:
                reference = masked(flat["ref_log_probs"][at], counted)
                losses = losses + settings.kl.coefficient * kl_penalty(log_probs, reference, settings.kl)
            return (weight * losses).sum()

        step = self.engine.train_step(sequences_of(batch), loss)
        totals.add(0.0, 0.0, 0.0, 0.0, 1.0, step.grad_norm)
        if "old_log_probs" not in flat:
            self._scored = per_token(batch, {"old_log_probs": new[0].cpu(), "entropy": new[1].cpu()})
        return deviation

    @register(Dispatch.ONE_TO_ALL)
    def connect_engines(self, engines: list[Any]) -> None:
        """Take the rollout engines, given by their actor handles, which receive this policy's weights from now on."""
        self._sender = self._sender_cls(
            self.engine.module,
            PREFIX,
            self.sync,
            engines,
            self.rank,
            workers_per_engine=self.workers_per_engine,
            host=self.seat.address,
        )

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, afresh: bool) -> SendReport:
        """Send the weights to every connected engine, over a new connection where `afresh`.

        Raises:
            WeightSyncError: when an engine could not take them, or cannot be reached over the config's path.
        """
        return self._sender.send(afresh)

    @register(Dispatch.ONE_TO_ALL)
    def export(self, folder: str, trained: Trained) -> None:
        """Write the policy as a Hugging Face folder, with what it was trained to.

        Raises:
            CheckpointError: when it cannot be written.
        """
        self.engine.export(Path(folder), trained)
