"""All objects of one cluster of a job."""

from dataclasses import dataclass

from rlhf_operator.cluster_plan import ClusterPlan
from rlhf_operator.manifests.base import Manifest, Owner

ENTRYPOINT = "python -m rlhf_runtime /etc/rlhf/runtime.json"
"""The driver's command line on the head."""


@dataclass(frozen=True)
class Rendered:
    """The objects of one cluster of a job."""

    name: str
    """Name of the RayCluster."""
    objects: tuple[Manifest, ...]
    """What to apply, in this order; the RayCluster is the last."""
    entrypoint: str
    """Command line of the driver, for Ray's job API."""

    @property
    def ray_cluster(self) -> Manifest:
        """The RayCluster among the objects."""
        return self.objects[-1]


def render(plan: ClusterPlan, owner: Owner | None, cluster: int) -> Rendered:
    """The objects of a job's cluster. Pure and deterministic.

    Args:
        plan: the job's plan.
        owner: the RLHFJob on the API server, which the objects go with; None where there is none (`rlhf render`).
        cluster: number of the cluster, from 1.

    Raises:
        SpecError: when an override of the pod template touches what the operator must decide itself.
    """
    raise NotImplementedError
