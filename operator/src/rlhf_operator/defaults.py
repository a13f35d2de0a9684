"""Defaults that depend on other fields. Literal defaults stand in the contract's models."""

from collections.abc import Sequence
from typing import TypeVar

from rlhf_api import RLHFJob, RLHFJobSpec
from rlhf_api.algorithm import Algorithm
from rlhf_api.data import Data
from rlhf_api.placement import Placement, PlacementGroup
from rlhf_api.pools import NodePool
from rlhf_api.roles import Models, ReferenceSource, Role
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
    placement = _placement(spec.placement or _colocated(pools[0], spec.algorithm.roles), pools)
    derived = {
        "models": _models(spec.models, spec.algorithm, placement),
        "data": _data(spec.data),
        "algorithm": _algorithm(spec),
        "training": _training(spec.training, spec.algorithm),
        "node_pools": pools,
        "placement": placement,
    }
    return job.model_copy(update={"spec": spec.model_copy(update=derived)})


def _models(models: Models, algorithm: Algorithm, placement: Placement) -> Models:
    """Critic and reference start as the policy does, where there is one."""
    policy, critic, reference = models.policy, models.critic, models.reference
    placed = any("reference" in group.roles for group in placement.groups)
    if placed and (reference is None or (reference.path is None and reference.random is None)):
        reference = ReferenceSource(path=policy.path, random=policy.random)
    if algorithm.ppo and critic is None:
        critic = policy
    return models.model_copy(update={"critic": critic, "reference": reference})


def _data(data: Data) -> Data:
    evaluation = data.evaluation
    if evaluation and evaluation.max_response_length is None:
        evaluation = evaluation.model_copy(update={"max_response_length": data.max_response_length})
    return data.model_copy(update={"evaluation": evaluation})


def _algorithm(spec: RLHFJobSpec) -> Algorithm:
    settings = spec.algorithm.settings
    mini_batch = settings.mini_batch_size or spec.data.batch_size * spec.rollout.samples_per_prompt
    constant = settings.loss_constant
    if settings.loss_aggregation == "constant" and constant is None:
        constant = float(mini_batch * spec.data.max_response_length)
    derived = settings.model_copy(update={"mini_batch_size": mini_batch, "loss_constant": constant})
    return spec.algorithm.with_settings(derived)


def _training(training: Training, algorithm: Algorithm) -> Training:
    critic = training.critic_optimizer or (training.optimizer if algorithm.ppo else None)
    return training.model_copy(update={"critic_optimizer": critic})


def _pool(pool: NodePool) -> NodePool:
    return pool.model_copy(update={"device": pool.device or ("cuda" if pool.gpus_per_node > 0 else "cpu")})


def _colocated(pool: NodePool, roles: Sequence[Role]) -> Placement:
    """One group with a worker for each GPU of a pool, or a single one where it has none."""
    workers = max(pool.nodes * pool.gpus_per_node, 1)
    return Placement(groups=[PlacementGroup(name="all", pool=pool.name, roles=list(roles), workers=workers)])


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
