"""When a job holds no machines, or must give them back.

Suspension counts against no limit and stops both deadlines. A user suspends by `spec.suspend`: the cluster goes, and a
new one resumes from the newest checkpoint. A queue such as Kueue suspends the RayCluster: it stays, without pods.
"""

from dataclasses import dataclass

from rlhf_operator import conditions
from rlhf_operator.observe import ClusterView
from rlhf_operator.terms import Terms


@dataclass(frozen=True)
class Suspension:
    """Why a job is suspended."""

    reason: str
    message: str
    keeps_cluster: bool
    """Whether the RayCluster stays, to be resumed by whoever suspended it."""


def suspension(terms: Terms, cluster: ClusterView | None) -> Suspension | None:
    """Why a job is to be suspended now; None if it is not."""
    if terms.suspend:
        message = "Suspended by spec.suspend: no cluster is kept. Set it to false to resume from the newest checkpoint."
        return Suspension(conditions.SUSPENDED_BY_SPEC, message, keeps_cluster=False)
    if cluster and cluster.suspended:
        message = f"RayCluster {cluster.name} is suspended: it waits in its queue, and starts when that lets it."
        return Suspension(conditions.SUSPENDED_BY_QUEUE, message, keeps_cluster=True)
    return None
