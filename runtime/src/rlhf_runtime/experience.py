"""The driver's arithmetic: scored rollouts become experience, and a finished step becomes a line of metrics."""

from collections.abc import Mapping

import torch
from rlhf_api import RuntimeConfig
from rlhf_api.algorithm import PPO

from rlhf_runtime.algorithms.advantages import gae, token_rewards
from rlhf_runtime.algorithms.kl import kl_divergence
from rlhf_runtime.algorithms.masking import whiten
from rlhf_runtime.errors import NumericalError
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import from_padded, from_values, lengths, to_padded
from rlhf_runtime.types import StepMetrics
from rlhf_runtime.weight_sync import SyncReport


def add_advantages(batch: DataProto, ppo: PPO) -> DataProto:
    """Add whitened `advantages` and `returns` (both ragged [B, R*] float32) by GAE over each response.

    Raises:
        NumericalError: when log-probabilities, values or scores hold a NaN or Inf.
    """
    columns = batch.batch
    counts = lengths(columns["response_ids"])  # [B]
    values = to_padded(columns["values"], 0.0)  # [B, T]
    mask = torch.arange(values.shape[1]) < counts.unsqueeze(1)
    coefficient = ppo.kl.coefficient if ppo.kl.location == "reward" else 0.0
    kl = to_padded(from_values(reference_kl(batch, ppo), counts), 0.0)
    rewards = token_rewards(columns["scores"], kl, mask, coefficient)
    advantages, returns = gae(rewards, values, mask, ppo.gamma, ppo.lambda_)
    if not torch.isfinite(returns).all():
        bad = [name for name in _INGREDIENTS if not torch.isfinite(_flat(columns[name])).all()]
        raise NumericalError(
            f"advantages: got a NaN or Inf in {', '.join(bad) or 'the returns'}; expected finite numbers. "
            "Fix: lower the learning rate, or look at the last samples in the run folder"
        )
    tensors = {"advantages": from_padded(whiten(advantages, mask), counts), "returns": from_padded(returns, counts)}
    return batch.union(DataProto.from_dict(tensors))


_INGREDIENTS = ("old_log_probs", "ref_log_probs", "values", "scores")


def reference_kl(batch: DataProto, ppo: PPO) -> torch.Tensor:
    """KL of every response token from the reference, flat [N], by the job's estimator."""
    columns = batch.batch
    return kl_divergence(columns["old_log_probs"].values(), columns["ref_log_probs"].values(), ppo.kl.estimator)


def step_metrics(
    step: int,
    batch: DataProto,
    config: RuntimeConfig,
    trained: Mapping[str, float],
    synced: SyncReport,
    seconds: Mapping[str, float],
    store_bytes: int,
) -> StepMetrics:
    """One line of `metrics.jsonl`.

    Args:
        step: Number of the step, from 1.
        batch: The step's experience.
        config: The job.
        trained: Metrics of the updates.
        synced: The sync that ended the step.
        seconds: Wall time of each phase, of the whole step as `step`, and what `timing.phase_seconds` tells besides.
        store_bytes: What Ray's object stores hold.
    """
    columns = batch.batch
    counts = lengths(columns["response_ids"]).float()
    tokens = int(counts.sum())
    gap = columns["rollout_log_probs"].values() - columns["old_log_probs"].values()
    return {
        "step": step,
        "reward_mean": columns["scores"].mean().item(),
        "reward_std": columns["scores"].std(correction=0).item(),
        **{name: column.mean().item() for name, column in columns.items() if name.startswith("reward/")},
        "kl": reference_kl(batch, config.algorithm).mean().item(),
        "entropy": columns["entropy"].values().mean().item(),
        "rollout_log_prob_gap": gap.abs().max().item(),
        "response_length": counts.mean().item(),
        "response_tokens": tokens,
        "tokens_per_second": tokens / seconds["step"],
        **trained,
        "weight_version": synced.version,
        "sync_path": config.weight_sync.transport,
        "sync_bytes": synced.bytes,
        "object_store_bytes": store_bytes,
        **{f"time/{phase}": value for phase, value in seconds.items()},
    }


def _flat(column: torch.Tensor) -> torch.Tensor:
    return column.values() if column.is_nested else column
