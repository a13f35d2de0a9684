"""How long a job may take, as a whole and before it trains.

Both clocks stop while a job is suspended and begin anew when it is resumed, as those of a Kubernetes Job do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from rlhf_api.status import ConditionType, RLHFJobStatus

from rlhf_operator.conditions import condition_of, is_true
from rlhf_operator.observe import parse_time
from rlhf_operator.terms import Terms


@dataclass(frozen=True)
class Deadline:
    """A deadline that runs."""

    reason: str
    message: str
    seconds_left: float
    """0 or less once it has passed."""


def deadlines(terms: Terms, status: RLHFJobStatus, now: datetime) -> Iterator[Deadline]:
    """The deadlines that run now; none while the job is suspended."""
    if is_true(status, "Suspended") or status.start_time is None:
        return
    if terms.active_deadline_seconds is not None:
        message = f"The job ran for longer than its activeDeadlineSeconds of {terms.active_deadline_seconds}."
        left = terms.active_deadline_seconds - _seconds_since(status.start_time, now)
        yield Deadline("ActiveDeadlineExceeded", message, left)
    if not is_true(status, "Training"):
        limit = terms.pre_running_deadline_seconds
        since = max([status.start_time, *(_since(status, kind) for kind in ("Training", "Suspended"))])
        message = f"The job did not train within its preRunningDeadlineSeconds of {limit}: {_obstacle(status)}"
        yield Deadline("PreRunningDeadlineExceeded", message, limit - _seconds_since(since, now))


def _since(status: RLHFJobStatus, kind: ConditionType) -> str:
    condition = condition_of(status, kind)
    return condition.last_transition_time if condition else ""


def _seconds_since(time: str, now: datetime) -> float:
    return (now - parse_time(time)).total_seconds()


def _obstacle(status: RLHFJobStatus) -> str:
    """What it waited for last, and what ended its last try where that does not tell."""
    kind: ConditionType = "Training" if is_true(status, "ClusterReady") else "ClusterReady"
    condition = condition_of(status, kind)
    told = condition.message if condition else "it waited for its cluster."
    last = status.failures[-1] if status.failures else None
    return told if last is None or last.message in told else f"{told} Before that, {last.reason}: {last.message}"
