"""Conditions of a job: their reasons, which programs may rely on, and the one way to set them. Pure."""

from datetime import datetime
from typing import Final

from rlhf_api.status import Condition, ConditionType, RLHFJobStatus

from rlhf_operator.observe import format_time, parse_time

ACCEPTED: Final = "Accepted"
"""Accepted: the spec can be run."""
INVALID_SPEC: Final = "InvalidSpec"
"""Accepted: it cannot; the message has every problem."""

NODES_FIT: Final = "NodesFit"
"""PlacementFeasible: the cluster has such nodes."""
TOO_FEW_NODES: Final = "TooFewNodes"
"""PlacementFeasible: it has not, unless an autoscaler adds some."""
NODES_UNKNOWN: Final = "NodesUnknown"
"""PlacementFeasible: nodes may not be listed."""

CREATING: Final = "Creating"
"""ClusterReady: the RayCluster is about to be made."""
CREATE_REFUSED: Final = "CreateRefused"
"""ClusterReady: the API server did not take one of its objects."""
NAME_TAKEN: Final = "NameTaken"
"""ClusterReady: another's RayCluster, or a dying one, has the name."""
WAITING_FOR_PREDECESSOR: Final = "WaitingForPredecessor"
"""ClusterReady: an earlier RayCluster of this job, or a pod of it, is still there."""
WAITING_FOR_PODS: Final = "WaitingForPods"
"""ClusterReady: pods start."""
PODS_NOT_STARTING: Final = "PodsNotStarting"
"""ClusterReady: pods cannot start; the message has Kubernetes' reasons."""
ALL_PODS_READY: Final = "AllPodsReady"
"""ClusterReady: head and workers are ready."""

WAITING_FOR_CLUSTER: Final = "WaitingForCluster"
"""Training: the cluster is not ready yet."""
BACKING_OFF: Final = "BackingOff"
"""Training: a pause before the next try."""
SUBMITTING: Final = "Submitting"
"""Training: the driver is given to Ray's job API."""
DRIVER_STARTING: Final = "DriverStarting"
"""Training: Ray has it, and starts it."""
DRIVER_RUNNING: Final = "DriverRunning"
"""Training: it runs."""

NOT_SUSPENDED: Final = "NotSuspended"
"""Suspended: it is not."""
SUSPENDED_BY_SPEC: Final = "SuspendedBySpec"
"""Suspended: by `spec.suspend`."""
SUSPENDED_BY_QUEUE: Final = "SuspendedByQueue"
"""Suspended: its RayCluster is, by a queue such as Kueue."""

FINISHED: Final = "Finished"
"""ClusterReady, Training: no longer, since the job has ended."""

MESSAGE_LENGTH = 8000
"""Characters of a message that are told; a status must stay small."""

UNSEEN = frozenset({CREATING, CREATE_REFUSED, NAME_TAKEN})
"""Reasons of ClusterReady while the RayCluster has not been seen yet: its absence is no loss then."""


def condition_of(status: RLHFJobStatus, kind: ConditionType) -> Condition | None:
    """The condition of a type, where it was ever told."""
    return next((condition for condition in status.conditions if condition.type == kind), None)


def is_true(status: RLHFJobStatus, kind: ConditionType) -> bool:
    """Whether a condition holds."""
    condition = condition_of(status, kind)
    return condition is not None and condition.status == "True"


def reason_of(status: RLHFJobStatus, kind: ConditionType) -> str | None:
    """Why a condition is as it is; None where it was never told."""
    condition = condition_of(status, kind)
    return condition.reason if condition else None


def changed_at(status: RLHFJobStatus, kind: ConditionType) -> datetime | None:
    """Since when a condition is as it is; None where it was never told."""
    condition = condition_of(status, kind)
    return parse_time(condition.last_transition_time) if condition else None


def with_condition(
    status: RLHFJobStatus,
    kind: ConditionType,
    holds: bool | None,
    reason: str,
    message: str,
    generation: int,
    now: datetime,
) -> RLHFJobStatus:
    """A status that tells this condition; its time moves only when `holds` changes.

    Args:
        status: what was told so far.
        kind: the condition.
        holds: None for unknown.
        reason: one of this module's words, or a failure's.
        message: for people.
        generation: of the spec that it is told about.
        now: the time.
    """
    before = condition_of(status, kind)
    value = {True: "True", False: "False", None: "Unknown"}[holds]
    told = Condition(
        type=kind,
        status=value,  # type: ignore[arg-type]
        reason=reason,
        message=message if len(message) <= MESSAGE_LENGTH else f"{message[: MESSAGE_LENGTH - 1]}…",
        last_transition_time=(before.last_transition_time if before and before.status == value else format_time(now)),
        observed_generation=generation,
    )
    conditions = [told if condition.type == kind else condition for condition in status.conditions]
    return status.model_copy(update={"conditions": conditions if before else [*conditions, told]})
