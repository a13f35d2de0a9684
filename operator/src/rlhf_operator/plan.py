"""From a job to everything that its run needs, decided and said."""

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rlhf_api import FieldError, RLHFJob, RLHFJobSpec, RuntimeConfig, SpecError
from rlhf_api.base import ApiModel
from rlhf_api.checkpoint import CHECKPOINT_FOLDERS, Checkpoint
from rlhf_api.pods import PodSettings
from rlhf_api.pools import Device
from rlhf_api.roles import ModelSource
from rlhf_api.runtime_config import EXPORT, SCHEMA_VERSION, LocalNode, RoleModels, SyncPath, TrainingLoop, WorkerGroup

from rlhf_operator.bundles import Bundles, node_of
from rlhf_operator.defaults import apply_defaults, resolved
from rlhf_operator.placement import Placing, place, placing_order
from rlhf_operator.sync_path import sync_path
from rlhf_operator.validate import validate
from rlhf_operator.volumes import below

CLUSTER_FIELDS = (
    "image",
    "image_pull_policy",
    "image_pull_secrets",
    "ray_version",
    "suspend",
    "head",
    "ray_cluster",
    "env",
    "backoff_limit",
    "infrastructure_backoff_limit",
    "active_deadline_seconds",
    "pre_running_deadline_seconds",
    "ttl_seconds_after_finished",
)
"""Fields of a spec that mean something on a cluster alone."""
CLUSTER_POOL_FIELDS = (
    "min_nodes",
    "max_nodes",
    "gpu_resource",
    "memory",
    "shared_memory",
    "rdma",
    *PodSettings.model_fields,
)
"""Fields of a node pool that mean something on a cluster alone."""


@dataclass(frozen=True)
class Plan:
    """What will run and where."""

    job: RLHFJob
    """The job with every default explicit."""
    config: RuntimeConfig
    """The runtime's whole input. Its groups stand in the order in which they should be placed."""
    groups: tuple[Bundles, ...]
    """Where each group goes, in the manifest's order."""
    notes: tuple[str, ...]
    """What was decided or ignored, a sentence each."""


def build_plan(job: RLHFJob, run_dir: str, python_path: Sequence[str] = (), here: bool = True) -> Plan:
    """Plan a job. Pure.

    1. write out every derived default
    2. turn groups into bundles, and find room for them on their pools
    3. choose the way that weights take
    4. check fields against each other, and where checkpoints go against the run's own files
    5. say what was decided and what is ignored

    Args:
        job: as it was written.
        run_dir: where the run's files go.
        python_path: folders of reward functions.
        here: the job runs on this machine, which starts Ray's nodes and has no use for what says how a cluster does.

    Raises:
        SpecError: with every problem of steps 2 to 4.
    """
    full = apply_defaults(job)
    placing = place(full.spec)
    sync = sync_path(full.spec.weight_sync, placing.groups)
    errors = [*validate(full), *_checkpoints_apart(full.spec, run_dir), *placing.errors]
    errors += sync if isinstance(sync, list) else []
    if errors or isinstance(sync, list):
        raise SpecError(errors if job.spec.placement else [_of_one_group(error, placing) for error in errors])
    config = _runtime_config(full, placing.groups, sync, run_dir, python_path)
    notes = [*_decisions(job.spec, placing), *_idle_settings(job.spec, config.group_of("rollout").device)]
    if here:
        notes += _ignored(job)
    else:
        config = config.model_copy(update={"local_nodes": None})
    return Plan(full, config, placing.groups, tuple(notes))


def _runtime_config(
    full: RLHFJob, groups: Sequence[Bundles], sync: SyncPath, run_dir: str, python_path: Sequence[str]
) -> RuntimeConfig:
    spec = full.spec
    rollout = next(group for group in groups if "rollout" in group.group.roles)
    return RuntimeConfig(
        schema_version=SCHEMA_VERSION,
        name=full.metadata.name,
        run_dir=run_dir,
        seed=spec.data.seed,
        models=_models(spec),
        rewards=spec.rewards,
        data=spec.data,
        algorithm=spec.algorithm,
        rollout=spec.rollout,
        training=TrainingLoop(
            steps=spec.training.steps,
            policy_optimizer=spec.training.optimizer,
            critic_optimizer=spec.training.critic_optimizer,
            micro_batch_tokens=spec.training.micro_batch_tokens,
            dtype=spec.training.dtype,
            activation_checkpointing=spec.training.activation_checkpointing,
        ),
        groups=[_worker_group(group) for group in placing_order(groups)],
        engines=rollout.group.workers // rollout.tensor_parallel,
        weight_sync=sync,
        checkpoint=_checkpoint(spec, run_dir),
        python_path=list(python_path),
        observability=spec.observability,
        local_nodes=[
            LocalNode(pool=pool.name, device=resolved(pool.device), resources=node_of(pool, groups))
            for pool in spec.node_pools
            for _ in range(pool.nodes)
        ],
    )


def _checkpoint(spec: RLHFJobSpec, run_dir: str) -> Checkpoint | None:
    written = spec.checkpoint
    return written and written.model_copy(update={"path": posixpath.join(run_dir, written.path)})


def _checkpoints_apart(spec: RLHFJobSpec, run_dir: str) -> Iterator[FieldError]:
    """Refuse checkpoints that go when the trained model is written, and a run folder that goes as an old checkpoint."""
    if spec.checkpoint is None:
        return
    run, path = map(posixpath.normpath, (run_dir, posixpath.join(run_dir, spec.checkpoint.path)))
    got = f"`{spec.checkpoint.path}`"
    inside, around = (below(*pair) or "" for pair in ((path, run), (run, path)))
    if inside.startswith((f"{EXPORT}/", f".{EXPORT}-")) or inside == EXPORT:
        expected = f"a folder outside of `{EXPORT}`, which the trained model takes the place of"
        yield FieldError("spec.checkpoint.path", got, expected, "choose another, such as `checkpoints`")
    elif fnmatchcase(around.partition("/")[0], CHECKPOINT_FOLDERS):
        expected = "a folder in which the run's own is not called as checkpoints are"
        yield FieldError("spec.checkpoint.path", got, expected, "choose another path, or rename the job")


def _models(spec: RLHFJobSpec) -> RoleModels:
    reference = spec.models.reference
    return RoleModels(
        policy=spec.models.policy,
        critic=spec.models.critic,
        reference=ModelSource(path=reference.path, random=reference.random) if reference else None,
    )


def _worker_group(bundles: Bundles) -> WorkerGroup:
    return WorkerGroup(
        name=bundles.group.name,
        roles=list(bundles.group.roles),
        workers=bundles.count,
        device=bundles.device,
        gpus_per_worker=bundles.gpus,
        bundle=bundles.resources,
        strategy=bundles.strategy,
        fallback=list(bundles.strategies[1:]),
    )


def _of_one_group(error: FieldError, placing: Placing) -> FieldError:
    """An error with what it is about, where that is the placement that nobody wrote."""
    if "spec.placement" not in str(error):
        return error
    workers = _workers(placing.groups[0].group.workers)
    return replace(error, fix=f"{error.fix}; spec.placement was left out, which makes one group of {workers}")


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _decisions(written: RLHFJobSpec, placing: Placing) -> list[str]:
    notes, used = list(placing.notes), [group.pool.name for group in placing.groups]
    if written.placement is None:
        roles = ", ".join(written.algorithm.roles)
        workers = _workers(placing.groups[0].group.workers)
        notes.append(f"placement was left out: {roles} are colocated in one group of {workers} on pool `{used[0]}`")
    idle = [pool.name for pool in written.node_pools if pool.name not in used]
    if idle:
        notes.append(f"no group uses {', '.join(f'pool `{name}`' for name in idle)}")
    if written.weight_sync.verify == "none":
        notes.append("weights are not compared after a sync: spec.weightSync.verify is 'none'")
    return notes


def _idle_settings(spec: RLHFJobSpec, device: Device) -> list[str]:
    """Settings that were given and mean nothing to rollouts on `device`."""
    unused = {"cpu": "gpu_memory_utilization", "cuda": "kv_cache_gib"}[device]
    named = spec.rollout.model_dump(include={unused}, exclude_unset=True, by_alias=True)
    return [f"spec.rollout.{name} is ignored: rollouts run on device `{device}`" for name in named]


def _ignored(job: RLHFJob) -> list[str]:
    """Fields that were given and mean nothing on this machine."""
    volumes = [f"spec.storage[{index}].readOnly" for index, volume in enumerate(job.spec.storage) if volume.read_only]
    given = [f"metadata.{name}" for name in ("namespace", "labels", "annotations") if getattr(job.metadata, name)]
    given += [f"spec.{name}" for name in _given(job.spec, CLUSTER_FIELDS)]
    for index, pool in enumerate(job.spec.node_pools):
        given += [f"spec.nodePools[{index}].{name}" for name in _given(pool, CLUSTER_POOL_FIELDS)]
    return [f"{name} is ignored on this machine" for name in (*given, *volumes)]


def _given(model: ApiModel, fields: Sequence[str]) -> list[str]:
    """Those of the fields that were given another value than their default, by their YAML names and in this order."""
    dumped = model.model_dump(include=set(fields), exclude_defaults=True)
    return [type(model).model_fields[name].alias or name for name in fields if name in dumped]
