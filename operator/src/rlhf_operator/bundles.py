"""What groups ask of their pools: equal bundles, and the nodes that hold them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_api import RLHFJobSpec
from rlhf_api.placement import PlacementGroup, Strategy
from rlhf_api.pools import Device, NodePool
from rlhf_api.quantity import cpu_count
from rlhf_api.roles import TORCH_ROLES

from rlhf_operator.defaults import resolved
from rlhf_operator.validate import groups_of

POOL_SHARE = 0.001
"""What a bundle takes of its pool's resource, of which a node has 1."""


@dataclass(frozen=True)
class Bundles:
    """The equal bundles of a group.

    An engine that spreads over several devices is one bundle where the rollout's devices are its own; beside training
    roles, which take a bundle a rank, it uses as many neighbouring ones.
    """

    path: str
    """The group's place in the manifest."""
    group: PlacementGroup
    """The group, its defaults applied."""
    pool: NodePool
    """Its pool."""
    tensor_parallel: int
    """Devices of each of its rollout engines; 1 without a rollout."""
    strategies: tuple[Strategy, ...]
    """How they spread over nodes: the strategy to take, then those to fall back to."""

    @property
    def devices(self) -> int:
        """Devices of a bundle."""
        return 1 if TORCH_ROLES.intersection(self.group.roles) else self.tensor_parallel

    @property
    def neighbours(self) -> int:
        """Bundles of an engine, which must lie on one node."""
        return self.tensor_parallel // self.devices

    @property
    def count(self) -> int:
        """How many bundles."""
        return max(self.group.workers // self.devices, 1)

    @property
    def gpus(self) -> float:
        """GPUs of a bundle."""
        return resolved(self.group.gpus_per_worker) * self.devices

    @property
    def resources(self) -> dict[str, float]:
        """Ray resources of a bundle: a CPU a process, its GPUs, and its pool."""
        roles = self.group.roles
        processes = bool(TORCH_ROLES.intersection(roles)) + self.devices * ("rollout" in roles) + ("reward" in roles)
        bundle = {"CPU": float(processes), pool_resource(self.pool.name): POOL_SHARE}
        return bundle | ({"GPU": self.gpus} if self.gpus else {})

    @property
    def device(self) -> Device:
        """What its roles compute on."""
        return resolved(self.pool.device)

    @property
    def strategy(self) -> Strategy:
        """How they spread over nodes, if nothing hinders it."""
        return self.strategies[0]

    @property
    def on_one_node(self) -> bool:
        """Whether all of them lie on one node, come what may."""
        return self.pool.nodes == 1 or self.count == 1 or self.strategies == ("STRICT_PACK",)


def bundles_of(spec: RLHFJobSpec) -> list[Bundles]:
    """The bundles of every group whose pool exists, in the manifest's order."""
    return [
        Bundles(
            path,
            group,
            pool,
            spec.rollout.tensor_parallel_size if "rollout" in group.roles else 1,
            strategies_of(group),
        )
        for path, group, pool in groups_of(spec)
        if pool
    ]


def strategies_of(group: PlacementGroup) -> tuple[Strategy, ...]:
    """The strategy of a group and its fallbacks, each once."""
    return tuple(dict.fromkeys((resolved(group.strategy), *group.fallback)))


def pool_resource(pool: str) -> str:
    """The Ray resource that keeps a placement group on its pool."""
    return f"pool-{pool}"


def node_of(pool: NodePool, groups: Sequence[Bundles]) -> dict[str, float]:
    """Ray resources of one node of a pool; without `pool.cpu` any node has CPUs for all of the pool's groups."""
    needed = sum(group.resources["CPU"] * group.count for group in groups if group.pool.name == pool.name)
    node = {"CPU": needed if pool.cpu is None else float(math.floor(cpu_count(pool.cpu)))}
    node |= {"GPU": float(pool.gpus_per_node)} if pool.gpus_per_node else {}
    return node | {pool_resource(pool.name): 1.0}
