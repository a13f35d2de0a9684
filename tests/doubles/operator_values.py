"""Small values that the tests of the operator's pure parts are made of."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from rlhf_api.pools import NodePool
from rlhf_api.status import Condition, ConditionType, Failure, RLHFJobStatus
from rlhf_operator.observe import ClusterView, RayCondition, format_time
from rlhf_operator.terms import Terms

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def terms(**changes: Any) -> Terms:
    made: dict[str, Any] = {
        "suspend": False,
        "backoff_limit": 3,
        "infrastructure_backoff_limit": 3,
        "active_deadline_seconds": None,
        "pre_running_deadline_seconds": 1800,
        "ttl_seconds_after_finished": None,
        "has_checkpoints": False,
        "pools": [NodePool(name="train", nodes=2, gpus_per_node=8)],
    }
    return Terms(**made | changes)


def condition(
    kind: ConditionType, holds: bool, reason: str = "Because", since: float = 0, message: str = ""
) -> Condition:
    return Condition(
        type=kind,
        status="True" if holds else "False",
        reason=reason,
        message=message,
        last_transition_time=format_time(at(since)),
        observed_generation=1,
    )


def status(*conditions: Condition, **fields: Any) -> RLHFJobStatus:
    return RLHFJobStatus(conditions=list(conditions), **{"start_time": format_time(START)} | fields)


def failure(seconds: float = 0) -> Failure:
    return Failure(kind="Program", cluster=1, try_=1, reason="R", message="m", time=format_time(at(seconds)))


def cluster(conditions: Mapping[str, bool] | None = None, head_reason: str = "", **changes: Any) -> ClusterView:
    """A RayCluster of one worker whose head and worker are ready, but for the changes."""
    told = {"HeadPodReady": True, "RayClusterProvisioned": True, **(conditions or {})}
    made: dict[str, Any] = {
        "namespace": "team",
        "name": "math-1",
        "uid": "uid-c",
        "resource_version": "1",
        "owner": "uid-j",
        "job": "math",
        "number": 1,
        "created": START,
        "deleting": False,
        "suspended": False,
        "ready_workers": 1,
        "fewest": {"train": 1},
        "scales": False,
        "head_service": "math-1-head-svc",
        "conditions": {
            kind: RayCondition(holds, head_reason if kind == "HeadPodReady" else "", "") for kind, holds in told.items()
        },
    }
    return ClusterView(**made | changes)
