"""From the plan's groups to worker groups: which class runs a role, and which roles share a process.

Training roles of a group share one process and its GPU. A rollout engine is always a process of its own: beside
training roles it takes no GPU from Ray and sees those of its siblings. A reward worker computes with Python alone,
unless there are reward models: then it uses the bundle's GPU too, which is its siblings' where it has some.
"""

from rlhf_api import RuntimeConfig
from rlhf_api.roles import TORCH_ROLES, Role
from rlhf_api.runtime_config import WorkerGroup

from rlhf_runtime.single_controller import (
    HealthMonitor,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Worker,
    WorkerGroupView,
    create_colocated_worker_cls,
)
from rlhf_runtime.workers.critic import CriticWorker
from rlhf_runtime.workers.policy import PolicyWorker
from rlhf_runtime.workers.reference import ReferenceWorker
from rlhf_runtime.workers.reward import RewardWorker
from rlhf_runtime.workers.rollout import RolloutWorker

WORKERS: dict[Role, type[Worker]] = {
    "policy": PolicyWorker,
    "critic": CriticWorker,
    "reference": ReferenceWorker,
    "rollout": RolloutWorker,
    "reward": RewardWorker,
}

RoleGroups = dict[Role, RayWorkerGroup | WorkerGroupView]
"""What the driver commands a role through."""


def spawn_worker_groups(config: RuntimeConfig, pools: ResourcePoolManager, health: HealthMonitor) -> RoleGroups:
    """Start the workers of every role, side by side; `RayWorkerGroup.wait_ready` waits for them.

    An engine that shares a GPU is started when the training roles on it are ready.

    Args:
        config: What each worker is constructed with.
        pools: The created pools, by group name.
        health: Watches the workers.
    """
    roles: RoleGroups = {}
    for group in config.groups:
        roles |= _spawn_group(config, group, pools.pools[group.name], health)
    return roles


def _spawn_group(config: RuntimeConfig, group: WorkerGroup, pool: RayResourcePool, health: HealthMonitor) -> RoleGroups:
    init = {role: RayClassWithInitArgs(WORKERS[role], config) for role in group.roles}
    roles: RoleGroups = {}
    training = None
    if shared := {role: init[role] for role in group.roles if role in TORCH_ROLES}:
        training = RayWorkerGroup(
            pool,
            create_colocated_worker_cls(shared),
            name=f"{group.name}/training",
            device=group.device,
            num_cpus=1,
            timeout_seconds=max(600.0, 1.2 * config.weight_sync.timeout_seconds),  # for a rank that waits in a sync
            health=health,
        )
        roles |= training.spawn(shared)
    if "reward" in init and training:
        roles["reward"] = _reward_group(config, group, pool, health, training)
    if "rollout" in init:
        roles["rollout"] = RayWorkerGroup(
            pool,
            init["rollout"],
            name=f"{group.name}/rollout",
            device=group.device,
            num_cpus=1,
            visible_devices_from=training,
            bundles_per_worker=group.workers // config.engines,
            health=health,
        )
    if "reward" in init and not training:
        roles["reward"] = _reward_group(config, group, pool, health, roles.get("rollout"))
    return roles


def _reward_group(
    config: RuntimeConfig,
    group: WorkerGroup,
    pool: RayResourcePool,
    health: HealthMonitor,
    siblings: RayWorkerGroup | None,
) -> RayWorkerGroup:
    on_gpu = group.device == "cuda" and group.gpus_per_worker > 0 and any(reward.model for reward in config.rewards)
    reward = RayWorkerGroup(
        pool,
        RayClassWithInitArgs(RewardWorker, config),
        name=f"{group.name}/reward",
        device="cuda" if on_gpu else "cpu",
        num_cpus=1,
        num_gpus=None if on_gpu else 0,
        visible_devices_from=siblings if on_gpu else None,
        health=health,
    )
    if on_gpu and siblings:
        reward.wait_ready()  # an engine on the same GPU measures what is left of its memory
    return reward
