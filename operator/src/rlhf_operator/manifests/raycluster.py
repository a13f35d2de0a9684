"""The RayCluster: a head without GPUs, and a group of workers a node pool."""

import copy
from collections.abc import Sequence

from rlhf_api import FieldError, SpecError
from rlhf_api.pools import NodePool

from rlhf_operator.cluster_plan import ClusterPlan
from rlhf_operator.kuberay import API_VERSION, KIND, STAY_LOST
from rlhf_operator.manifests.base import Manifest, Place, metadata
from rlhf_operator.manifests.names import QUEUE_LABEL
from rlhf_operator.manifests.pods import Pod, pod_template
from rlhf_operator.manifests.ports import HEAD_PORTS, WORKER_PORTS
from rlhf_operator.manifests.resources import head_resources, pool_resources
from rlhf_operator.manifests.security import CONTAINER_SECURITY
from rlhf_operator.pod_layout import MOUNTS, TMP_VOLUME

IDLE_SECONDS = 60
"""Seconds after which the autoscaler gives back a node that nothing runs on."""


def ray_cluster(place: Place, plan: ClusterPlan) -> Manifest:
    """The RayCluster of a job.

    Raises:
        SpecError: with every problem of the pods' overrides, and of labels that are the operator's.
    """
    spec, errors = plan.job.spec, _reserved_keys(place, plan)
    scaling = [pool for pool in spec.node_pools if pool.scales]
    made: Manifest = {
        "rayVersion": spec.ray_version,
        "authOptions": {"mode": "token"},
        **({"suspend": True} if spec.suspend else {}),
        **(_autoscaling() if scaling else {}),
    }
    pods = [Pod("spec.head", spec.head, head_resources(spec.head), HEAD_PORTS, True, bool(scaling))]
    for index, pool in enumerate(spec.node_pools):
        pods.append(Pod(f"spec.nodePools[{index}]", pool, pool_resources(pool, plan.groups), WORKER_PORTS))
    templates = []
    for pod in pods:
        try:
            templates.append(pod_template(place, spec, plan.image, pod))
        except SpecError as error:
            errors += error.errors
    if errors:
        raise SpecError(errors)
    (head, *groups), (head_template, *group_templates) = pods, templates
    made["headGroupSpec"] = {"rayStartParams": head.resources.ray_start_params, "template": head_template}
    made["workerGroupSpecs"] = [
        _worker_group(pool, pod.resources.ray_start_params, template)
        for pool, pod, template in zip(spec.node_pools, groups, group_templates, strict=True)
    ]
    labels, annotations = _carried(plan)
    described = metadata(place, labels, {**annotations, STAY_LOST: "true"})
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": described, "spec": made}


def _worker_group(pool: NodePool, params: dict[str, str], template: Manifest) -> Manifest:
    fewest, most = pool.node_bounds
    sizes = {"replicas": pool.nodes, "minReplicas": fewest, "maxReplicas": most}
    return {"groupName": pool.name, **sizes, "rayStartParams": params, "template": template}


def _autoscaling() -> Manifest:
    """KubeRay's autoscaler, a second container of the head, under the same standard."""
    options = {
        "version": "v2",
        "idleTimeoutSeconds": IDLE_SECONDS,
        "securityContext": copy.deepcopy(CONTAINER_SECURITY),
        "env": [{"name": "HOME", "value": MOUNTS[TMP_VOLUME]}],
        "volumeMounts": [{"name": TMP_VOLUME, "mountPath": MOUNTS[TMP_VOLUME]}],
    }
    return {"enableInTreeAutoscaling": True, "autoscalerOptions": options}


def _carried(plan: ClusterPlan) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations that the RayCluster carries for others; a queue's moves here from the job."""
    given, labels = plan.job.spec.ray_cluster, plan.job.metadata.labels
    queue = {QUEUE_LABEL: labels[QUEUE_LABEL]} if QUEUE_LABEL in labels else {}
    return {**queue, **given.labels}, dict(given.annotations)


def _reserved_keys(place: Place, plan: ClusterPlan) -> list[FieldError]:
    given: dict[str, Sequence[str]] = {
        "labels": [key for key in plan.job.spec.ray_cluster.labels if key in place.labels],
        "annotations": [key for key in plan.job.spec.ray_cluster.annotations if key == STAY_LOST],
    }
    return [
        FieldError(f"spec.rayCluster.{field}", f"`{key}`", "another key: the operator sets this one", "remove it")
        for field, keys in given.items()
        for key in keys
    ]
