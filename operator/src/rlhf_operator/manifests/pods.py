"""Pod templates: one container that runs Ray, under the `restricted` Pod Security Standard."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_api import RLHFJobSpec
from rlhf_api.pods import EnvVar, PodSettings

from rlhf_operator.manifests.base import Manifest, Place
from rlhf_operator.manifests.override import overridden
from rlhf_operator.manifests.ports import Port
from rlhf_operator.manifests.resources import PodResources
from rlhf_operator.manifests.security import CONTAINER_SECURITY, POD_SECURITY
from rlhf_operator.pod_layout import (
    CODE_VOLUME,
    CONFIG_VOLUME,
    LAST_WORDS,
    LOGS_VOLUME,
    MOUNTS,
    SCRATCH_DIR,
    SCRATCH_VOLUME,
    SHARED_MEMORY_VOLUME,
    TMP_VOLUME,
)

CONTAINER = "ray"
"""The one container of each pod."""


@dataclass(frozen=True)
class Pod:
    """What one kind of a cluster's pods is made of."""

    path: str
    """Its settings' place in the manifest."""
    settings: PodSettings
    """Where it goes and what it is told."""
    resources: PodResources
    """Its share of a machine."""
    ports: Sequence[Port]
    """Its ports."""
    is_head: bool = False
    """It is the head, which runs the driver."""
    scales: bool = False
    """It runs KubeRay's autoscaler too, which speaks to the API server."""


def pod_template(place: Place, spec: RLHFJobSpec, image: str, pod: Pod) -> Manifest:
    """The template of a kind of pods, its override laid over it.

    Raises:
        SpecError: when the override touches what the operator must decide itself, or breaks the security standard.
    """
    template: Manifest = {"metadata": {"labels": place.labels}, "spec": _pod_spec(place, spec, image, pod)}
    return overridden(template, pod.settings.pod_template, f"{pod.path}.podTemplate")


def _pod_spec(place: Place, spec: RLHFJobSpec, image: str, pod: Pod) -> Manifest:
    made: Manifest = {
        "automountServiceAccountToken": pod.scales,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "containers": [_container(spec, image, pod)],
        "volumes": _volumes(place, spec, pod),
    }
    if pod.is_head:
        made["restartPolicy"] = "Never"  # a restarted head knows nothing of the cluster: it has to go as a pod
    if spec.image_pull_secrets:
        made["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image_pull_secrets]
    return made | _scheduling(pod.settings)


def _scheduling(settings: PodSettings) -> Manifest:
    fields = {
        *("node_selector", "tolerations", "affinity", "topology_spread_constraints"),
        *("priority_class_name", "runtime_class_name", "scheduler_name"),
    }
    given = settings.model_dump(mode="json", by_alias=True, include=fields, exclude_none=True)
    return {field: value for field, value in given.items() if value not in ({}, [])}


def _container(spec: RLHFJobSpec, image: str, pod: Pod) -> Manifest:
    made: Manifest = {"name": CONTAINER, "image": image}
    if spec.image_pull_policy:
        made["imagePullPolicy"] = spec.image_pull_policy
    return made | {
        "ports": [{"name": port.name, "containerPort": port.number, "protocol": "TCP"} for port in pod.ports],
        "env": _environment(spec, pod),
        "resources": {"requests": pod.resources.requests, "limits": pod.resources.limits},
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": LAST_WORDS,
        "volumeMounts": _mounts(spec, pod),
    }


def _environment(spec: RLHFJobSpec, pod: Pod) -> list[Manifest]:
    """Variables by name: the operator's, over which those of the job go, over which those of the pods go."""
    ours = [EnvVar(name="HOME", value=SCRATCH_DIR), EnvVar(name="RAY_USAGE_STATS_ENABLED", value="0")]
    if not pod.resources.has_gpus:  # where NVIDIA's runtime is the default one, an image may ask for all that there are
        ours.append(EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="void"))
    variables = {variable.name: variable for variable in (*ours, *spec.env, *pod.settings.env)}
    return [
        variable.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        for variable in variables.values()
    ]


def _mounts(spec: RLHFJobSpec, pod: Pod) -> list[Manifest]:
    absent = {name for name, there in ((CONFIG_VOLUME, pod.is_head), (CODE_VOLUME, bool(spec.code))) if not there}
    mounts: list[Manifest] = [
        {"name": name, "mountPath": path} | ({"readOnly": True} if name in (CONFIG_VOLUME, CODE_VOLUME) else {})
        for name, path in MOUNTS.items()
        if name not in absent
    ]
    for volume in spec.storage:
        mount: Manifest = {"name": volume.name, "mountPath": volume.mount_path}
        mounts.append(mount | ({"readOnly": True} if volume.read_only else {}))
    return mounts


def _volumes(place: Place, spec: RLHFJobSpec, pod: Pod) -> list[Manifest]:
    shared: Manifest = {"medium": "Memory"}
    if pod.resources.shared_memory:
        shared["sizeLimit"] = pod.resources.shared_memory
    volumes: list[Manifest] = [{"name": CONFIG_VOLUME, "configMap": {"name": place.name}}] if pod.is_head else []
    volumes += [{"name": CODE_VOLUME, "configMap": {"name": spec.code.config_map}}] if spec.code else []
    volumes += [{"name": name, "emptyDir": {}} for name in (SCRATCH_VOLUME, TMP_VOLUME, LOGS_VOLUME)]
    volumes.append({"name": SHARED_MEMORY_VOLUME, "emptyDir": shared})
    for volume in spec.storage:
        claim: Manifest = {"claimName": volume.persistent_volume_claim}
        claim |= {"readOnly": True} if volume.read_only else {}
        volumes.append({"name": volume.name, "persistentVolumeClaim": claim})
    return volumes
