"""What every sink of a run's results has in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_api import RuntimeConfig

from rlhf_runtime.report.summary import Summary
from rlhf_runtime.types import StepMetrics


@dataclass(frozen=True)
class Sample:
    """One response, kept to be read."""

    prompt: str
    """The prompt."""
    response: str
    """What the policy made of it."""
    score: float
    """Its reward."""
    weight_version: int
    """Version of the weights that generated it."""


class Sink(Protocol):
    """A place that results go to. `close` is called once after `start`, whether or not the run was finished."""

    def start(self, config: RuntimeConfig) -> None:
        """Open it."""

    def step(self, metrics: StepMetrics, samples: Sequence[Sample]) -> None:
        """Take a finished step: its metrics and the samples that are kept of it."""

    def close(self, summary: Summary) -> None:
        """Take the summary and close."""
