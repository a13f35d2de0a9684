"""The nouns of a step in the order in which they flow.

    Prompt --generate--> Rollout --score, value, log-probabilities--> Experience --update--> StepMetrics

`Rollout` and `Experience` name the columns that a `DataProto` holds at that point. B is the number of samples of a
step (prompts × samples a prompt). A ragged column is a jagged nested tensor [B, R*]: row i has as many entries as
response i has tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch


@dataclass(frozen=True)
class Prompt:
    """One row of the data set."""

    index: int
    """Row in the data set."""
    text: str
    """The prompt."""
    token_ids: list[int]
    """Its tokens, at least one."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other fields, for reward functions."""


@dataclass(frozen=True)
class PromptSets:
    """The prompts of a job."""

    training: list[Prompt]
    """What is trained on."""
    evaluation: list[Prompt] = field(default_factory=list)
    """Held-out ones, if any."""


class Rollout(TypedDict):
    """Columns once responses were generated."""

    prompt_ids: torch.Tensor
    """Ragged [B, P*] int64."""
    response_ids: torch.Tensor
    """Ragged [B, R*] int64; the end-of-sequence token is part of it where one was sampled."""
    rollout_log_probs: torch.Tensor
    """Ragged [B, R*] float32: the engine's log-probability of each sampled token at the sampling temperature."""
    weight_version: torch.Tensor
    """[B] int64: version of the weights that generated the row."""
    prompt: np.ndarray
    """[B] str (non-tensor)."""
    response: np.ndarray
    """[B] str (non-tensor)."""
    columns: np.ndarray
    """[B] dict (non-tensor): the data row's other fields."""


class Experience(Rollout):
    """Columns once everything that the update needs is known."""

    old_log_probs: torch.Tensor
    """Ragged [B, R*] float32: the policy's own log-probabilities before the update."""
    entropy: torch.Tensor
    """Ragged [B, R*] float32: the policy's entropy at each response position, in nats."""
    ref_log_probs: NotRequired[torch.Tensor]
    """Ragged [B, R*] float32: the reference's log-probabilities, where there is one."""
    values: NotRequired[torch.Tensor]
    """Ragged [B, R*] float32: the critic's value before each response token, where there is one."""
    scores: torch.Tensor
    """[B] float32: weighted sum of the rewards."""
    advantages: torch.Tensor
    """Ragged [B, R*] float32."""
    returns: NotRequired[torch.Tensor]
    """Ragged [B, R*] float32: targets of the critic, where there is one."""


StepMetrics = dict[str, float | int | str]
"""One line of `metrics.jsonl`."""
