"""From a job to everything that its run needs, decided and said."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_api import RLHFJob, RLHFJobSpec, RuntimeConfig, SpecError
from rlhf_api.placement import PlacementGroup, Strategy
from rlhf_api.pools import Device
from rlhf_api.roles import ModelSource, Role
from rlhf_api.runtime_config import SCHEMA_VERSION, LocalNode, RoleModels, SyncPath, TrainingLoop, WorkerGroup

from rlhf_operator.defaults import apply_defaults, resolved
from rlhf_operator.placement import bundle_of, misfits, node_of, placing_order
from rlhf_operator.validate import groups_of, validate

MIB = 1024 * 1024


@dataclass(frozen=True)
class Row:
    """One line of the placement table."""

    group: str
    """The group's name."""
    pool: str
    """Its pool."""
    nodes: int
    """Nodes of the pool."""
    device: Device
    """What its roles compute on."""
    roles: tuple[Role, ...]
    """Its roles."""
    workers: int
    """Workers a role, and bundles."""
    bundle: dict[str, float]
    """Ray resources of one bundle."""
    strategy: Strategy
    """How bundles spread over nodes."""


@dataclass(frozen=True)
class Plan:
    """What will run and where."""

    job: RLHFJob
    """The job with every default explicit."""
    config: RuntimeConfig
    """The runtime's whole input. Its groups stand in the order in which they should be placed."""
    rows: tuple[Row, ...]
    """The placement table, in the manifest's order."""
    notes: tuple[str, ...]
    """What was decided or ignored, a sentence each."""


def build_plan(job: RLHFJob, run_dir: str, python_path: Sequence[str] = ()) -> Plan:
    """Plan a job. Pure.

    1. write out every derived default
    2. check fields against each other, and bundles against pools
    3. turn groups into bundles, and choose the way that weights take
    4. say what was decided and what is ignored

    Args:
        job: as it was written.
        run_dir: where the run's files go.
        python_path: folders of reward functions.

    Raises:
        SpecError: with every problem of steps 2 and 3.
    """
    full = apply_defaults(job)
    errors = validate(full) + misfits(full.spec)
    if errors:
        raise SpecError(errors)
    rows = tuple(_row(full.spec, group) for _, group, _ in groups_of(full.spec))
    config = _runtime_config(full, rows, run_dir, python_path)
    return Plan(full, config, rows, (*_decisions(job.spec, rows), *_ignored(job, rows)))


def _row(spec: RLHFJobSpec, group: PlacementGroup) -> Row:
    pool = next(pool for pool in spec.node_pools if pool.name == group.pool)
    device: Device = resolved(pool.device)
    strategy: Strategy = resolved(group.strategy)
    return Row(group.name, pool.name, pool.nodes, device, tuple(group.roles), group.workers, bundle_of(group), strategy)


def _runtime_config(full: RLHFJob, rows: Sequence[Row], run_dir: str, python_path: Sequence[str]) -> RuntimeConfig:
    spec = full.spec
    by_name = {row.group: row for row in rows}
    groups = [group for _, group, _ in groups_of(spec)]
    return RuntimeConfig(
        schema_version=SCHEMA_VERSION,
        name=full.metadata.name,
        run_dir=run_dir,
        seed=spec.data.seed,
        models=_models(spec),
        rewards=spec.rewards,
        data=spec.data,
        algorithm=spec.algorithm.ppo,
        rollout=spec.rollout,
        training=TrainingLoop(
            steps=spec.training.steps,
            policy_optimizer=spec.training.optimizer,
            critic_optimizer=resolved(spec.training.critic_optimizer),
            micro_batch_tokens=spec.training.micro_batch_tokens,
        ),
        groups=[_worker_group(by_name[group.name]) for group in placing_order(groups)],
        engines=next(row.workers for row in rows if "rollout" in row.roles),
        weight_sync=_sync_path(spec, rows),
        python_path=list(python_path),
        observability=spec.observability,
        local_nodes=[
            LocalNode(pool=pool.name, device=resolved(pool.device), resources=node_of(pool, groups))
            for pool in spec.node_pools
            for _ in range(pool.nodes)
        ],
    )


def _models(spec: RLHFJobSpec) -> RoleModels:
    reference = resolved(spec.models.reference)
    return RoleModels(
        policy=spec.models.policy,
        critic=resolved(spec.models.critic),
        reference=ModelSource(path=reference.path, random=reference.random),
    )


def _worker_group(row: Row) -> WorkerGroup:
    return WorkerGroup(
        name=row.group,
        roles=list(row.roles),
        workers=row.workers,
        device=row.device,
        gpus_per_worker=row.bundle.get("GPU", 0.0),
        bundle=row.bundle,
        strategy=row.strategy,
        fallback=[],
    )


def _sync_path(spec: RLHFJobSpec, rows: Sequence[Row]) -> SyncPath:
    row = next(row for row in rows if "rollout" in row.roles)
    means = "CUDA IPC, on the GPU that both use" if row.device == "cuda" else "shared memory"
    return SyncPath(
        transport="ipc" if row.device == "cuda" else "shm",
        reason=f"policy and rollout share group `{row.group}`, whose device is `{row.device}`: weights take {means}",
        bucket_bytes=spec.weight_sync.bucket_mib * MIB,
        verify=spec.weight_sync.verify == "checksum",
        timeout_seconds=spec.weight_sync.timeout_seconds,
    )


def _decisions(written: RLHFJobSpec, rows: Sequence[Row]) -> list[str]:
    notes = []
    if written.placement is None:
        notes.append(f"placement was left out: every role is colocated in one group on pool `{rows[0].pool}`")
    idle = [pool.name for pool in written.node_pools if pool.name not in {row.pool for row in rows}]
    if idle:
        notes.append(f"no group uses {', '.join(f'pool `{name}`' for name in idle)}")
    return notes


def _ignored(job: RLHFJob, rows: Sequence[Row]) -> list[str]:
    """Fields that were given and mean nothing on this machine."""
    device = next(row.device for row in rows if "rollout" in row.roles)
    unused = {"cpu": "gpu_memory_utilization", "cuda": "kv_cache_gib"}[device]
    engine = [
        f"spec.rollout.{name}"
        for name in job.spec.rollout.model_dump(include={unused}, exclude_unset=True, by_alias=True)
    ]
    volumes = [f"spec.storage[{index}].readOnly" for index, volume in enumerate(job.spec.storage) if volume.read_only]
    given = [f"metadata.{name}" for name in ("namespace", "labels", "annotations") if getattr(job.metadata, name)]
    given += ["spec.image"] if job.spec.image else []
    fields = {"gpu_resource", "memory", "shared_memory", "node_selector", "tolerations"}
    for index, pool in enumerate(job.spec.node_pools):
        dumped = pool.model_dump(include=fields, exclude_defaults=True, by_alias=True)
        given += [f"spec.nodePools[{index}].{name}" for name in dumped]
    ignored = [f"{name} is ignored on this machine" for name in (*given, *volumes)]
    return [*ignored, *(f"{name} is ignored: rollouts run on device `{device}`" for name in engine)]
