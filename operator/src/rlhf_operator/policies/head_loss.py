"""When a cluster is given up: its head, and with it Ray's whole state, is gone or cannot be reached, or never came.

A pod that its own containers ended is replaced by KubeRay at once, and so for ever where each ends as the one before.
Giving up the cluster puts the pauses and the limit of tries between them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from rlhf_api.status import RLHFJobStatus

from rlhf_operator import conditions
from rlhf_operator.conditions import reason_of
from rlhf_operator.observe import ClusterView, DriverView, PodView, parse_time

HEAD_GONE = "HeadPodNotFound"
"""KubeRay's word for a head without a pod, which it does not replace once the cluster was provisioned."""
HEAD_ENDED = frozenset({"PodFailed", "Error", "OOMKilled", "StartError", "ContainerCannotRun"})
"""Its words for one that its own containers ended: it deletes that, and where none was provisioned makes another."""
STARTED = frozenset({conditions.DRIVER_STARTING, conditions.DRIVER_RUNNING})
"""Reasons of Training once Ray has told of the try: it can only forget it by starting anew."""


@dataclass(frozen=True)
class Loss:
    """Why a cluster is given up."""

    reason: str
    message: str


def loss(
    status: RLHFJobStatus,
    cluster: ClusterView | None,
    driver: DriverView | None,
    now: datetime,
    patience_seconds: float,
    silent_since: datetime | None = None,
    pods: Iterable[PodView] = (),
) -> Loss | None:
    """Why the current cluster counts as lost; None if it does not.

    Args:
        status: what was told so far; it names a current cluster.
        cluster: that cluster, None where there is none by a fresh look.
        driver: Ray's word about the current try, None where it was not asked.
        now: the time.
        patience_seconds: how long Ray's job API may stay away.
        silent_since: when this process first found it so: of the time before nobody knows whether it answered.
        pods: the cluster's, where they were looked at.
    """
    if cluster is None or cluster.deleting:
        if reason_of(status, "ClusterReady") in conditions.UNSEEN:
            return None
        return Loss("ClusterLost", f"RayCluster {status.ray_cluster} was deleted by another.")
    head = cluster.conditions.get("HeadPodReady")
    if cluster.provisioned and head and not head.status and head.reason == HEAD_GONE:
        return Loss("HeadLost", f"The head pod of RayCluster {cluster.name} is gone, and Ray's state with it.")
    ended = next((pod for pod in pods if pod.ended), None)
    if ended and not cluster.provisioned:
        return Loss("PodFailed", f"Pod {ended.name} failed before its cluster was whole: {ended.trouble}.")
    if driver and driver.state == "unknown" and reason_of(status, "Training") in STARTED:
        return Loss("HeadRestarted", f"Ray no longer knows {status.submission_id}: its head was started anew.")
    if driver and driver.state == "unreachable" and status.unreachable_since:
        told = parse_time(status.unreachable_since)
        if (now - max(told, silent_since or told)).total_seconds() >= patience_seconds:
            message = f"Ray's job API did not answer for {patience_seconds:g} s: {driver.message}"
            return Loss("JobApiUnreachable", message)
    return None
