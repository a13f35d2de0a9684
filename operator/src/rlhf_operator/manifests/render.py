"""All objects of one cluster of a job."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rlhf_api import FieldError, SpecError

from rlhf_operator.cluster_plan import ClusterPlan
from rlhf_operator.manifests.base import Manifest, Owner, Place
from rlhf_operator.manifests.configmap import config_map
from rlhf_operator.manifests.networkpolicy import network_policy
from rlhf_operator.manifests.raycluster import ray_cluster
from rlhf_operator.pod_layout import CONFIG_DIR, RUNTIME_FILE

_DRIVER = f"python -m rlhf_runtime {CONFIG_DIR}/{RUNTIME_FILE}"


@dataclass(frozen=True)
class Rendered:
    """The objects of one cluster of a job."""

    name: str
    """Name of each of them."""
    objects: tuple[Manifest, ...]
    """What to make, in this order; the RayCluster is the last."""

    @property
    def around(self) -> tuple[Manifest, ...]:
        """What has to be there before the RayCluster is."""
        return self.objects[:-1]

    @property
    def ray_cluster(self) -> Manifest:
        """The RayCluster, which is created and then left alone.

        Its worker groups are one value to the API server, so applying it again would take back what an autoscaler or a
        queue changed in them.
        """
        return self.objects[-1]


def entrypoint(submission_id: str, resume: bool) -> str:
    """Command line of the driver on the head, for Ray's job API.

    Args:
        submission_id: Ray's id of this try.
        resume: an earlier try of this job may have left checkpoints to go on from.
    """
    return f"{_DRIVER} --try {submission_id}{' --resume' if resume else ''}"


def render(
    plan: ClusterPlan,
    owner: Owner | None,
    cluster: int,
    operator_namespace: str | None = None,
    api_server: Sequence[str] = (),
) -> Rendered:
    """The objects of a job's cluster. Pure and deterministic.

    Args:
        plan: the job's plan.
        owner: the RLHFJob on the API server, which the objects go with; None where there is none (`rlhf render`).
        cluster: number of the cluster, from 1.
        operator_namespace: where the operator's pod runs, which may reach the cluster; None for any namespace.
        api_server: networks, as CIDRs, that the API server's service proxy comes from, which may reach the head.

    Raises:
        SpecError: with every problem that shows in the objects alone: overrides of pod templates that touch what the
            operator must decide itself, a config larger than a ConfigMap.
    """
    job = plan.job.metadata
    place = Place(job.name, cluster, owner.namespace if owner else job.namespace, owner)
    kinds = (
        partial(config_map, place, plan.config),
        partial(network_policy, place, operator_namespace, api_server),
        partial(ray_cluster, place, plan),
    )
    made, errors = list[Manifest](), list[FieldError]()
    for kind in kinds:
        try:
            made.append(kind())
        except SpecError as error:
            errors += error.errors
    if errors:
        raise SpecError(errors)
    return Rendered(place.name, tuple(made))
