"""What is told as Kubernetes Events: each change of a job that a person would want to know of. Pure.

An event's name follows from the change it tells, so that telling it again changes nothing.
"""

import hashlib
from datetime import datetime
from typing import Literal

from rlhf_api.status import Condition, RLHFJobStatus

from rlhf_operator import conditions
from rlhf_operator.conditions import condition_of
from rlhf_operator.kube import Object
from rlhf_operator.manifests import MANAGER
from rlhf_operator.observe import JobView, format_time

TROUBLE = frozenset(
    {
        conditions.INVALID_SPEC,
        conditions.TOO_FEW_NODES,
        conditions.CREATE_REFUSED,
        conditions.NAME_TAKEN,
        conditions.PODS_NOT_STARTING,
    }
)
"""Reasons that are told as warnings."""
STEPS = frozenset({conditions.CREATING, conditions.SUBMITTING})
"""Reasons of a condition that does not hold yet, which are steps that the operator takes."""
NOTE_LENGTH = 1000
"""Characters of an event's message; the API server takes 1024."""


def events_of(job: JobView, after: RLHFJobStatus, now: datetime) -> list[Object]:
    """The events of a change of status, in the order of its conditions, failures last.

    Args:
        job: the job with its status before.
        after: its status now.
        now: the time.
    """
    before = job.status
    told = [
        _event(job, _kind(condition), condition.reason, condition.message, after, now)
        for condition in after.conditions
        if _is_news(condition_of(before, condition.type), condition)
    ]
    failures = (after.program_failures or 0) + (after.infrastructure_failures or 0)
    if failures > (before.program_failures or 0) + (before.infrastructure_failures or 0):
        last = after.failures[-1]
        told.append(_event(job, "Warning", last.reason, last.message, after, now))
    return told


def _is_news(before: Condition | None, after: Condition) -> bool:
    if before and (before.status, before.reason) == (after.status, after.reason):
        return False
    if after.reason in TROUBLE or after.reason in STEPS:
        return True
    return after.status == "True" and after.type not in ("Accepted", "PlacementFeasible")


def _kind(condition: Condition) -> Literal["Normal", "Warning"]:
    return "Warning" if condition.reason in TROUBLE or condition.type == "Failed" else "Normal"


def _event(job: JobView, kind: str, reason: str, message: str, status: RLHFJobStatus, now: datetime) -> Object:
    parts = (job.uid, kind, reason, message, str(status.cluster), str(status.tries), format_time(now))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": job.manifest["apiVersion"],
            "kind": job.manifest["kind"],
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message if len(message) <= NOTE_LENGTH else f"{message[: NOTE_LENGTH - 1]}…",
        "source": {"component": MANAGER},
        "firstTimestamp": format_time(now),
        "lastTimestamp": format_time(now),
        "count": 1,
    }
