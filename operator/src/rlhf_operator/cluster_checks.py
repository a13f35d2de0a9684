"""What is asked of a job on a cluster beyond what is asked of it anywhere: paths, volumes, resources, variables."""

import posixpath
import re
from collections.abc import Callable, Iterator

from rlhf_api import FieldError, RLHFJob, RLHFJobSpec
from rlhf_api.quantity import quantity_value

from rlhf_operator.kuberay import HEAD_GROUP, LEAST_RAY
from rlhf_operator.pod_layout import MOUNTS, RESERVED_ENV
from rlhf_operator.volumes import below, volume_of

Check = Callable[[RLHFJobSpec], Iterator[FieldError]]

MIB = 2**20
LEAST_MEMORY = 512 * MIB
"""Memory of a pod in which Ray starts."""
LEAST_SHARED_MEMORY = 128 * MIB
"""Shared memory that holds the smallest object store that Ray takes."""
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def check_cluster(job: RLHFJob) -> list[FieldError]:
    """Every problem of a job on a cluster; pure. What is wrong anywhere is `validate`'s to say."""
    return [*_names_of_ours(job), *(error for check in CHECKS for error in check(job.spec))]


def cluster_notes(spec: RLHFJobSpec) -> list[str]:
    """What a user may not expect of a job on a cluster, a sentence each."""
    notes = [
        f"{field}: `{path}` is on no storage, so it has to be in the image"
        for field, path in _input_paths(spec).items()
        if posixpath.isabs(path) and volume_of(path, spec.storage) is None
    ]
    notes += [
        f"spec.nodePools[{index}].memory was left out: its pods may be evicted when a node runs out"
        for index, pool in enumerate(spec.node_pools)
        if pool.memory is None
    ]
    if spec.checkpoint is None:
        notes.append("spec.checkpoint was left out: every try starts anew, and model and log go with the cluster")
    return notes


def _input_paths(spec: RLHFJobSpec) -> dict[str, str]:
    """Every path that is read, by its field."""
    models, evaluation = spec.models, spec.data.evaluation
    paths = {
        "spec.models.policy.path": models.policy.path,
        "spec.models.critic.path": models.critic.path if models.critic else None,
        "spec.models.reference.path": models.reference.path if models.reference else None,
        "spec.data.prompts.path": spec.data.prompts.path,
        "spec.data.evaluation.prompts.path": evaluation.prompts.path if evaluation else None,
    }
    paths |= {
        f"spec.rewards[{i}].model.path": reward.model.path for i, reward in enumerate(spec.rewards) if reward.model
    }
    return {field: path for field, path in paths.items() if path is not None}


def _names_of_ours(job: RLHFJob) -> Iterator[FieldError]:
    name, code = job.metadata.name, job.spec.code
    if code and re.fullmatch(rf"{re.escape(name)}-[0-9]+", code.config_map):
        expected = f"another than `{name}-` and a number: so the operator names the ConfigMaps of this job"
        yield FieldError("spec.code.configMap", f"`{code.config_map}`", expected, "rename it")


def _absolute_inputs(spec: RLHFJobSpec) -> Iterator[FieldError]:
    for field, path in _input_paths(spec).items():
        if not posixpath.isabs(path):
            yield FieldError(field, f"`{path}`", "an absolute path on a cluster", "start it at a storage's mountPath")


def _checkpoints_outlive_pods(spec: RLHFJobSpec) -> Iterator[FieldError]:
    checkpoint = spec.checkpoint
    if checkpoint is None or volume_of(checkpoint.path, spec.storage):
        return
    got = (
        f"`{checkpoint.path}`, in the run's folder" if not posixpath.isabs(checkpoint.path) else f"`{checkpoint.path}`"
    )
    expected = "a path on a storage, which every pod sees and which outlives them"
    fix = "add a writable storage that several nodes can mount, and write a path such as /checkpoints/my-job"
    yield FieldError("spec.checkpoint.path", got, expected, fix)


def _volumes_of_ours(spec: RLHFJobSpec) -> Iterator[FieldError]:
    for index, volume in enumerate(spec.storage):
        path = f"spec.storage[{index}]"
        if volume.name in MOUNTS:
            expected, fix = f"another than {', '.join(MOUNTS)}, which pods have anyway", "choose another name"
            yield FieldError(f"{path}.name", f"`{volume.name}`", expected, fix)
        hidden = [own for own in MOUNTS.values() if below(own, volume.mount_path) is not None]
        if hidden:
            got, fix = f"`{volume.mount_path}`", "mount it elsewhere, such as at /data"
            yield FieldError(f"{path}.mountPath", got, f"a path that does not hide {', '.join(hidden)}", fix)
        if ":" in volume.mount_path:
            fix = "choose another path"
            yield FieldError(f"{path}.mountPath", f"`{volume.mount_path}`", "a path without `:`", fix)


def _enough_memory(spec: RLHFJobSpec) -> Iterator[FieldError]:
    memories = [(f"spec.nodePools[{i}]", pool.memory, pool.shared_memory) for i, pool in enumerate(spec.node_pools)]
    for path, memory, shared in [("spec.head", spec.head.memory, None), *memories]:
        if memory is not None and quantity_value(memory) < LEAST_MEMORY:
            expected = f"at least {LEAST_MEMORY // MIB}Mi, in which Ray starts"
            yield FieldError(f"{path}.memory", f"{memory}", expected, "raise it")
        if shared is None:
            continue
        if quantity_value(shared) < LEAST_SHARED_MEMORY:
            expected = f"at least {LEAST_SHARED_MEMORY // MIB}Mi, to hold Ray's object store"
            yield FieldError(f"{path}.sharedMemory", f"{shared}", expected, "raise it, or leave it out")
        if memory is not None and quantity_value(shared) >= quantity_value(memory):
            expected = f"less than the pool's memory {memory}, of which it is a part"
            yield FieldError(f"{path}.sharedMemory", f"{shared}", expected, "lower it, or leave it out")


def _device_resources(spec: RLHFJobSpec) -> Iterator[FieldError]:
    for index, pool in enumerate(spec.node_pools):
        names = {"gpuResource": pool.gpu_resource} if pool.gpus_per_node else {}
        names |= {"rdma.resource": pool.rdma.resource} if pool.rdma else {}
        for field, name in names.items():
            if not _RESOURCE.fullmatch(name):
                expected, fix = (
                    "a resource of a device plugin",
                    "write such as nvidia.com/gpu or nvidia.com/mig-1g.10gb",
                )
                yield FieldError(f"spec.nodePools[{index}].{field}", f"`{name}`", expected, fix)
        if len(names) != len(set(names.values())):
            path, fix = f"spec.nodePools[{index}].rdma.resource", "name the network device's own"
            yield FieldError(path, f"`{pool.gpu_resource}`", "another than gpuResource", fix)


def _group_names(spec: RLHFJobSpec) -> Iterator[FieldError]:
    for index, pool in enumerate(spec.node_pools):
        if pool.name == HEAD_GROUP:
            fix = "choose another name"
            yield FieldError(f"spec.nodePools[{index}].name", f"`{pool.name}`", "another than KubeRay's own", fix)


def _ray_version(spec: RLHFJobSpec) -> Iterator[FieldError]:
    major, minor, _ = map(int, spec.ray_version.split("."))
    if (major, minor) < LEAST_RAY:
        expected = f"at least {'.'.join(map(str, LEAST_RAY))}, which asks for a token as KubeRay and the operator do"
        fix = "build the image on a newer one, and write its version"
        yield FieldError("spec.rayVersion", spec.ray_version, expected, fix)


def _variables(spec: RLHFJobSpec) -> Iterator[FieldError]:
    lists = {"spec.env": spec.env, "spec.head.env": spec.head.env}
    lists |= {f"spec.nodePools[{index}].env": pool.env for index, pool in enumerate(spec.node_pools)}
    for path, variables in lists.items():
        for index, variable in enumerate(variables):
            if variable.name in RESERVED_ENV:
                expected = "another variable: the operator and KubeRay set this one"
                yield FieldError(f"{path}[{index}].name", f"`{variable.name}`", expected, "remove it")


CHECKS: tuple[Check, ...] = (
    _absolute_inputs,
    _checkpoints_outlive_pods,
    _volumes_of_ours,
    _enough_memory,
    _device_resources,
    _group_names,
    _ray_version,
    _variables,
)
