"""Defaults that depend on other fields. Literal defaults stand in the contract's models."""

from typing import TypeVar

from rlhf_api import RLHFJob, RLHFJobSpec
from rlhf_api.algorithm import Algorithm
from rlhf_api.placement import Placement, PlacementGroup
from rlhf_api.pools import NodePool
from rlhf_api.roles import ROLES, Models, ReferenceSource
from rlhf_api.training import Training

T = TypeVar("T")


def resolved(value: T | None) -> T:
    """A field that `apply_defaults` fills.

    Raises:
        ValueError: when it was not called.
    """
    if value is None:
        raise ValueError("a derived default is missing: apply_defaults was not called")
    return value


def apply_defaults(job: RLHFJob) -> RLHFJob:
    """The job with every derived default written out. Pure; applying it again changes nothing.

    A group on a pool that does not exist is left as it is: `validate` names the mistake.
    """
    spec = job.spec
    pools = [_pool(pool) for pool in spec.node_pools]
    derived = {
        "models": _models(spec.models),
        "algorithm": _algorithm(spec),
        "training": _training(spec.training),
        "node_pools": pools,
        "placement": _placement(spec.placement or _colocated(pools[0]), pools),
    }
    return job.model_copy(update={"spec": spec.model_copy(update=derived)})


def _models(models: Models) -> Models:
    policy, reference = models.policy, models.reference
    if reference is None or (reference.path is None and reference.random is None):
        reference = ReferenceSource(path=policy.path, random=policy.random)
    return models.model_copy(update={"critic": models.critic or policy, "reference": reference})


def _algorithm(spec: RLHFJobSpec) -> Algorithm:
    ppo = spec.algorithm.ppo
    whole_batch = spec.data.batch_size * spec.rollout.samples_per_prompt
    derived = ppo.model_copy(update={"mini_batch_size": ppo.mini_batch_size or whole_batch})
    return spec.algorithm.model_copy(update={"ppo": derived})


def _training(training: Training) -> Training:
    return training.model_copy(update={"critic_optimizer": training.critic_optimizer or training.optimizer})


def _pool(pool: NodePool) -> NodePool:
    return pool.model_copy(update={"device": pool.device or ("cuda" if pool.gpus_per_node > 0 else "cpu")})


def _colocated(pool: NodePool) -> Placement:
    return Placement(groups=[PlacementGroup(name="all", pool=pool.name, roles=list(ROLES))])


def _placement(placement: Placement, pools: list[NodePool]) -> Placement:
    gpus = {pool.name: float(pool.gpus_per_node > 0) for pool in reversed(pools)}
    groups = [
        group.model_copy(
            update={
                "strategy": group.strategy or placement.strategy,
                "gpus_per_worker": gpus.get(group.pool) if group.gpus_per_worker is None else group.gpus_per_worker,
            }
        )
        for group in placement.groups
    ]
    return placement.model_copy(update={"groups": groups})
