"""What a run came to, computed from its steps' metrics."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_runtime.types import StepMetrics

FIRST, LAST = 5, 10
"""Steps at the start and at the end of a run whose means are compared."""

RECENT = 10
"""Steps whose mean duration the remaining time is reckoned from."""

STANDARD_ERRORS = 3
"""A difference of means counts from this many of its own standard errors on: below, it is what noise does."""

Verdict = Literal["rose", "fell", "did not rise", "too few steps"]


@dataclass(frozen=True)
class Summary:
    """The result of a run in a few numbers, all finite. None stands for what was not measured."""

    steps: int
    """Finished steps."""
    planned_steps: int
    """Steps that the job asked for."""
    reward_first: float | None
    """Mean reward of the first steps: `FIRST` of them, fewer in a run too short for both windows."""
    reward_last: float | None
    """Mean reward of the last steps: `LAST` of them, or fewer."""
    reward_ratio: float | None
    """reward_last / reward_first; None unless reward_first is positive."""
    reward_standard_error: float | None
    """Standard error of reward_last - reward_first, from the spread between steps within each window."""
    verdict: Verdict
    """Whether the reward rose by more than `STANDARD_ERRORS` standard errors."""
    explained_variance_first: float | None
    """Mean over the same first steps of the share of the returns' variance that the critic explains."""
    explained_variance_last: float | None
    """The same over the last steps."""
    kl_last: float | None
    """Mean KL to the reference over the last steps, in nats a token."""
    evaluation_first: float | None
    """Mean reward on held-out prompts before the first step."""
    evaluation_last: float | None
    """The same at the last evaluation."""
    response_tokens: int
    """Tokens generated in training."""
    seconds: float
    """Sum of the durations of steps and evaluations."""
    weight_version: int | None
    """Version of the weights at the end."""
    sync_path: str | None
    """How weights reached the engines."""

    def render(self) -> str:
        """A few lines for people."""
        if self.reward_first is None or self.reward_last is None:
            return f"No step was finished (of {self.planned_steps})."
        minutes, seconds = divmod(round(self.seconds), 60)
        lines = [
            f"Finished {self.steps} of {self.planned_steps} steps in {minutes}m{seconds:02d}s, "
            f"{self.response_tokens} response tokens, weights v{self.weight_version} by {self.sync_path}.",
            self._reward_line(self.reward_first, self.reward_last),
        ]
        if self.explained_variance_first is not None and self.explained_variance_last is not None:
            change = f"{self.explained_variance_first:.2f} -> {self.explained_variance_last:.2f}"
            lines.append(f"Critic's explained variance {change}.")
        if self.evaluation_first is not None and self.evaluation_last is not None:
            lines.append(f"Reward on held-out prompts {self.evaluation_first:.4f} -> {self.evaluation_last:.4f}.")
        if self.kl_last is not None:
            lines.append(f"KL to the reference {self.kl_last:.4f} at the end.")
        return "\n".join(lines)

    def _reward_line(self, first: float, last: float) -> str:
        numbers = f"{first:.4f} -> {last:.4f}"
        ratio = "" if self.reward_ratio is None else f", {self.reward_ratio:.1f} times"
        match self.verdict:
            case "rose":
                return f"Reward rose: {numbers} (first and last steps{ratio})."
            case "fell":
                return f"REWARD FELL: {numbers} (first and last steps{ratio})."
            case "did not rise":
                noise = STANDARD_ERRORS * (self.reward_standard_error or 0.0)
                return f"REWARD DID NOT RISE: {numbers}; a change within ±{noise:.4f} is noise."
            case _:
                return f"Reward {numbers}: too few steps to tell whether it rose."


def summarize(rows: Sequence[StepMetrics], planned_steps: int) -> Summary:
    """Sum a run up.

    The means of two disjoint windows are compared: a mean of n steps has a standard error of s/√n (s the sample
    standard deviation of the window), and the difference of both the root of the sum of squares (Welch, 1947).
    """
    first = rows[: max(1, min(FIRST, len(rows) // 3))]
    last = rows[max(len(first), len(rows) - LAST) :] or rows[-1:]
    before, after = _finite(first, "reward_mean"), _finite(last, "reward_mean")
    reward_first, reward_last = _mean(before), _mean(after)
    error = _standard_error(before, after)
    held_out = [value for _, value in evaluation_course(rows)]
    return Summary(
        steps=len(rows),
        planned_steps=planned_steps,
        reward_first=reward_first,
        reward_last=reward_last,
        reward_ratio=reward_last / reward_first
        if reward_first and reward_last is not None and reward_first > 0
        else None,
        reward_standard_error=error,
        verdict=_verdict(reward_first, reward_last, error),
        explained_variance_first=_mean(_finite(first, "explained_variance")),
        explained_variance_last=_mean(_finite(last, "explained_variance")),
        kl_last=_mean(_finite(last, "kl")),
        evaluation_first=held_out[0] if held_out else None,
        evaluation_last=held_out[-1] if held_out else None,
        response_tokens=int(sum(_finite(rows, "response_tokens"))),
        seconds=sum(map(seconds_of, rows)),
        weight_version=int(rows[-1]["weight_version"]) if rows and "weight_version" in rows[-1] else None,
        sync_path=str(rows[-1]["sync_path"]) if rows and "sync_path" in rows[-1] else None,
    )


def evaluation_course(rows: Sequence[StepMetrics]) -> list[tuple[int, float]]:
    """Steps and mean rewards of the evaluations; 0 is before the first step."""
    keys = ((-1, "eval/start/reward_mean"), (0, "eval/reward_mean"))
    return [(int(row["step"]) + shift, value) for row in rows for shift, key in keys for value in _finite([row], key)]


def seconds_of(row: StepMetrics) -> float:
    """How long a step took, with its evaluations."""
    return sum(sum(_finite([row], key)) for key in ("time/step", "time/eval", "time/eval/start"))


def remaining_seconds(rows: Sequence[StepMetrics], planned_steps: int) -> float:
    """What the steps after these, at least one, will take, by the last ones."""
    recent = [seconds_of(row) for row in rows[-RECENT:]]
    return (planned_steps - int(rows[-1]["step"])) * sum(recent) / len(recent)


def _verdict(first: float | None, last: float | None, error: float | None) -> Verdict:
    if first is None or last is None or error is None:
        return "too few steps"
    threshold = STANDARD_ERRORS * error + 1e-6 * max(abs(first), abs(last))  # equal rewards differ by rounding alone
    if abs(last - first) <= threshold:
        return "did not rise"
    return "rose" if last > first else "fell"


def _standard_error(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Standard error of the difference of two means; None where a window has under 3 steps to judge its spread by."""
    if min(len(before), len(after)) < 3:
        return None
    return math.sqrt(sum(statistics.variance(window) / len(window) for window in (before, after)))


def _finite(rows: Sequence[StepMetrics], key: str) -> list[float]:
    values = (row.get(key) for row in rows)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
