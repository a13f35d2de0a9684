"""Bundles, the nodes that hold them, and the arithmetic that says whether they fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_api import FieldError, RLHFJobSpec
from rlhf_api.placement import EPSILON, PlacementGroup, Strategy, capacity, gpu_capacity, room
from rlhf_api.pools import NodePool, cpu_count
from rlhf_api.roles import TORCH_ROLES

from rlhf_operator.defaults import resolved
from rlhf_operator.validate import groups_of

POOL_SHARE = 0.001
"""What a bundle takes of its pool's resource, of which a node has 1."""

_STRICTEST_FIRST: tuple[Strategy, ...] = ("STRICT_PACK", "STRICT_SPREAD", "PACK", "SPREAD")


def pool_resource(pool: str) -> str:
    """The Ray resource that keeps a placement group on its pool."""
    return f"pool-{pool}"


def bundle_of(group: PlacementGroup) -> dict[str, float]:
    """Ray resources of one worker's bundle: a CPU a process, its GPUs, and its pool."""
    processes = bool(TORCH_ROLES.intersection(group.roles)) + ("rollout" in group.roles) + ("reward" in group.roles)
    bundle = {"CPU": float(processes), pool_resource(group.pool): POOL_SHARE}
    return bundle | ({"GPU": group.gpus_per_worker} if group.gpus_per_worker else {})


def node_of(pool: NodePool, groups: Sequence[PlacementGroup]) -> dict[str, float]:
    """Ray resources of one node of a pool; without `pool.cpu` any node has CPUs for all of the pool's groups."""
    needed = sum(bundle_of(group)["CPU"] * group.workers for group in groups if group.pool == pool.name)
    node = {"CPU": needed if pool.cpu is None else float(math.floor(cpu_count(pool.cpu)))}
    node |= {"GPU": float(pool.gpus_per_node)} if pool.gpus_per_node else {}
    return node | {pool_resource(pool.name): 1.0}


def placing_order(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Groups as they should be placed one after another: those that are hardest to place first."""

    def key(group: PlacementGroup) -> tuple[int, float, int]:
        return _STRICTEST_FIRST.index(resolved(group.strategy)), -(group.gpus_per_worker or 0.0), -group.workers

    return sorted(groups, key=key)


def misfits(spec: RLHFJobSpec) -> list[FieldError]:
    """The groups that find no room on their pool beside the others; pure."""
    errors = []
    paths = {id(group): path for path, group, pool in groups_of(spec) if pool}
    known = [group for _, group, pool in groups_of(spec) if pool]
    for index, pool in enumerate(spec.node_pools):
        groups = [group for group in known if group.pool == pool.name]
        nodes = [_Node.fresh(node_of(pool, groups))] * pool.nodes
        placed: list[PlacementGroup] = []
        for group in placing_order(groups):
            capacities = [node.capacity(bundle_of(group)) for node in nodes]
            strategy: Strategy = resolved(group.strategy)
            most = room(capacities, strategy)
            if most < group.workers:
                where = f"spec.nodePools[{index}]"
                errors.append(_misfit(paths[id(group)], group, (where, pool), node_of(pool, groups), placed, most))
                continue
            counts = _spread_over(capacities, group.workers, strategy)
            nodes = [node.without(bundle_of(group), count) for node, count in zip(nodes, counts, strict=True)]
            placed.append(group)
        known = [group for group in known if group.pool != pool.name]
    return errors


@dataclass(frozen=True)
class _Node:
    """What is free on a node; of GPUs the share of each, since a share of a GPU cannot be had from two."""

    resources: dict[str, float]
    gpus: tuple[float, ...]

    @classmethod
    def fresh(cls, resources: dict[str, float]) -> "_Node":
        return cls(
            {key: value for key, value in resources.items() if key != "GPU"}, (1.0,) * int(resources.get("GPU", 0))
        )

    def capacity(self, bundle: dict[str, float]) -> int:
        gpus = bundle.get("GPU", 0.0)
        others = capacity(self.resources, {key: need for key, need in bundle.items() if key != "GPU"})
        return min(others, gpu_capacity(self.gpus, gpus)) if gpus else others

    def without(self, bundle: dict[str, float], count: int) -> "_Node":
        """The node once `count` bundles, which fit, were placed on it."""
        left = {key: free - count * bundle.get(key, 0.0) for key, free in self.resources.items()}
        need, gpus = bundle.get("GPU", 0.0), list(self.gpus)
        if need > 1:
            whole = [index for index, share in enumerate(gpus) if share >= 1][: round(need) * count]
            gpus = [0.0 if index in whole else share for index, share in enumerate(gpus)]
        for _ in range(count if 0 < need <= 1 else 0):
            tightest = min((share, index) for index, share in enumerate(gpus) if share >= need - EPSILON)[1]
            gpus[tightest] -= need
        return replace(self, resources=left, gpus=tuple(gpus))


def _spread_over(capacities: Sequence[int], count: int, strategy: Strategy) -> list[int]:
    """How many of `count` bundles, which fit, go on each node."""
    counts, left = [0] * len(capacities), count
    if strategy in ("PACK", "STRICT_PACK"):
        enough = [(held, index) for index, held in enumerate(capacities) if held >= count]
        fullest = sorted(((held, index) for index, held in enumerate(capacities)), reverse=True)
        for held, index in [min(enough)] if enough else fullest:
            counts[index] = min(held, left)
            left -= counts[index]
        return counts
    while left > 0:
        emptiest = sorted(
            (index for index, held in enumerate(capacities) if held > counts[index]), key=counts.__getitem__
        )
        for index in emptiest[:left]:
            counts[index] += 1
        left -= min(left, len(emptiest))
    return counts


def _misfit(
    path: str,
    group: PlacementGroup,
    where: tuple[str, NodePool],
    node: dict[str, float],
    placed: Sequence[PlacementGroup],
    most: int,
) -> FieldError:
    (pool_path, pool), bundle = where, bundle_of(group)
    strategy: Strategy = resolved(group.strategy)
    unit = _scarcest(node, bundle, pool)
    need, have = bundle[unit], node.get(unit, 0.0)
    manner = {"STRICT_PACK": " on one node", "STRICT_SPREAD": ", one a node"}.get(strategy, "")
    beside = "".join(f", beside {other.workers} of `{other.name}`" for other in placed)
    holds = f"{pool.nodes} node{'s' * (pool.nodes > 1)} with {have:g} {unit}{'s' * (have != 1)} each"
    return FieldError(
        path,
        f"{group.workers} bundle{'s' * (group.workers > 1)} of {need:g} {unit} with {strategy}{manner}",
        f"at most {most} (pool `{pool.name}` has {holds}{beside})",
        f"lower `{'gpusPerWorker' if unit == 'GPU' and need > have else 'workers'}`, "
        f"or raise {_ways_out(unit, capacity(node, bundle), strategy)} of {pool_path}",
    )


def _scarcest(node: dict[str, float], bundle: dict[str, float], pool: NodePool) -> str:
    """The resource of which a node holds the fewest bundles; GPUs where several do, CPUs only where they are given."""
    counts = {
        key: capacity(node, {key: bundle[key]}) for key in ("GPU", "CPU", pool_resource(pool.name)) if key in bundle
    }
    if pool.cpu is None and "GPU" in counts:
        del counts["CPU"]
    return min(counts, key=counts.__getitem__)


def _ways_out(unit: str, held: int, strategy: Strategy) -> str:
    """What more of would help, where a node by itself holds so many bundles."""
    field = {"GPU": "`gpusPerNode`", "CPU": "`cpu`"}.get(unit, "`nodes`")
    if held and strategy == "STRICT_SPREAD":
        return "`nodes`"
    return field if not held or strategy == "STRICT_PACK" or field == "`nodes`" else f"{field} or `nodes`"
