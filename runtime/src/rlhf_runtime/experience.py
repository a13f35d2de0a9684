"""The driver's arithmetic: scored rollouts become experience, and a finished step becomes a line of metrics."""

from collections.abc import Mapping

import torch
from rlhf_api import RuntimeConfig
from rlhf_api.algorithm import GRPO, PPO, RLOO, ReinforcePlusPlus

from rlhf_runtime.algorithms.advantages import gae, rewards_to_go, token_rewards
from rlhf_runtime.algorithms.groups import groups_with_signal, grpo_advantages, overlong_penalty, rloo_advantages
from rlhf_runtime.algorithms.kl import kl_divergence, kl_penalty
from rlhf_runtime.algorithms.masking import whiten
from rlhf_runtime.errors import NumericalError
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import from_padded, from_values, lengths, to_padded
from rlhf_runtime.types import StepMetrics
from rlhf_runtime.weight_sync import SyncReport

OVERLONG = "overlong_penalty"
"""Dense column [B] float32: what a response near the length limit loses, where the job asks for that."""


def scored_by_update(config: RuntimeConfig) -> bool:
    """Whether the policy's old log-probabilities are those that its update computes anyway.

    So it is where the update is one optimizer step, and no reward needs them before.
    """
    settings = config.algorithm.settings
    samples = config.data.batch_size * config.rollout.samples_per_prompt
    one_step = settings.epochs == 1 and (settings.mini_batch_size is None or settings.mini_batch_size >= samples)
    return one_step and (settings.kl.location == "loss" or settings.kl.coefficient == 0)


def add_advantages(batch: DataProto, config: RuntimeConfig, kl_coefficient: float) -> DataProto:
    """Add what the algorithm makes of the scores: `advantages`, with a critic its targets `returns` too.

    Args:
        batch: `scores` [B], and where the algorithm looks at them `old_log_probs`, `ref_log_probs` and `values`.
        config: The job.
        kl_coefficient: Weight of the KL in the reward at this step.

    Returns:
        The batch with its new columns, ragged [B, R*] float32; of overlong responses the penalty as `OVERLONG`.

    Raises:
        NumericalError: when log-probabilities, values or scores hold a NaN or Inf.
    """
    settings, counts = config.algorithm.settings, lengths(batch.batch["response_ids"])
    batch = _with_overlong_penalty(batch, config)
    mask = torch.arange(int(counts.max())) < counts.unsqueeze(1)  # [B, T]
    rewards = _rewards(batch, config, kl_coefficient, mask)
    groups = _groups(batch, config)
    made = {}
    match settings:
        case PPO():
            values = to_padded(batch.batch["values"], 0.0)
            advantages, returns = gae(rewards, values, mask, settings.gamma, settings.lambda_)
            made["returns"] = from_padded(returns, counts)
        case GRPO():
            own = grpo_advantages(rewards.sum(1), groups, settings.normalize_by_std)
            advantages = own.unsqueeze(1).expand_as(rewards)
        case RLOO():
            advantages = rloo_advantages(rewards.sum(1), groups).unsqueeze(1).expand_as(rewards)
        case ReinforcePlusPlus():
            advantages = rewards_to_go(rewards, mask)
    made["advantages"] = from_padded(whiten(advantages, mask) if settings.whiten else advantages, counts)
    _require_finite(batch, made["advantages"])
    return batch.union(DataProto.from_dict(made))


def _with_overlong_penalty(batch: DataProto, config: RuntimeConfig) -> DataProto:
    overlong = config.algorithm.grpo and config.algorithm.grpo.overlong
    if not overlong:
        return batch
    counts = lengths(batch.batch["response_ids"])
    column = overlong_penalty(counts, config.data.max_response_length, overlong.buffer, overlong.penalty)
    return batch.union(DataProto.from_dict({OVERLONG: column}))


def _rewards(batch: DataProto, config: RuntimeConfig, kl_coefficient: float, mask: torch.Tensor) -> torch.Tensor:
    """Reward of each token, [B, T]: the outcome on the last one, and the KL on each where it is part of the reward."""
    columns, kl = batch.batch, config.algorithm.settings.kl
    outcomes = columns["scores"] + columns[OVERLONG] if OVERLONG in batch.columns else columns["scores"]
    plus_plus = config.algorithm.reinforce_plus_plus
    if plus_plus and plus_plus.baseline:
        outcomes = grpo_advantages(outcomes, _groups(batch, config), normalize_by_std=False)
    if kl.location == "loss" or kl_coefficient == 0:
        return token_rewards(outcomes, torch.zeros(mask.shape), mask, 0.0)
    penalty = kl_penalty(columns["old_log_probs"].values(), columns["ref_log_probs"].values(), kl)
    padded = to_padded(from_values(penalty, lengths(columns["response_ids"])), 0.0)
    return token_rewards(outcomes, padded, mask, kl_coefficient)


def _groups(batch: DataProto, config: RuntimeConfig) -> torch.Tensor:
    """Which rows are samples of one prompt, [B] int64: not by the prompt, which may come twice in a step."""
    return batch.batch["sample_index"] // config.rollout.samples_per_prompt


def _require_finite(batch: DataProto, advantages: torch.Tensor) -> None:
    if torch.isfinite(advantages.values()).all():
        return
    there = [name for name in _INGREDIENTS if name in batch.columns]
    bad = [name for name in there if not torch.isfinite(_flat(batch.batch[name])).all()]
    raise NumericalError(
        f"advantages: got a NaN or Inf in {', '.join(bad) or 'the returns'}; expected finite numbers. "
        "Fix: lower the learning rate, or look at the last samples in the run folder"
    )


_INGREDIENTS = ("old_log_probs", "ref_log_probs", "values", "scores")


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
        trained: Metrics of the updates, and of how the batch came about.
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
        **_where_measured(batch, config),
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


def _where_measured(batch: DataProto, config: RuntimeConfig) -> StepMetrics:
    """What only some jobs have; the KL in nats a token, by k3 whatever the penalty is made of, so that jobs compare."""
    columns, found = batch.batch, StepMetrics()
    if "ref_log_probs" in batch.columns:
        kl = kl_divergence(columns["old_log_probs"].values(), columns["ref_log_probs"].values(), "k3")
        found["kl"] = kl.mean().item()
    if config.algorithm.settings.compares_samples:
        signal = groups_with_signal(columns["scores"], _groups(batch, config))
        found["signal_share"] = signal.float().mean().item()
    if OVERLONG in batch.columns:
        found[OVERLONG] = columns[OVERLONG].mean().item()
    return found


def _flat(column: torch.Tensor) -> torch.Tensor:
    return column.values() if column.is_nested else column
