"""What every sink of a run's results has in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_api import RuntimeConfig

from rlhf_runtime.report.summary import Summary
from rlhf_runtime.single_controller.calls import Span
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


@dataclass(frozen=True)
class StepRecord:
    """A finished step."""

    metrics: StepMetrics
    """Its line of `metrics.jsonl`."""
    samples: Sequence[Sample]
    """Some of its responses."""
    spans: Sequence[Span]
    """Which worker worked on what, and when."""
    held_out: Sequence[Sample] = ()
    """Some of the responses to held-out prompts, where there was an evaluation."""


class Sink(Protocol):
    """A place that results go to. `close` is called once after `start`, whether or not the run was finished."""

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None:
        """Open it. `earlier` are the steps that a run goes on after: later ones in it are of steps to come again."""

    def step(self, record: StepRecord) -> None:
        """Take a finished step."""

    def close(self, summary: Summary) -> None:
        """Take the summary and close."""
