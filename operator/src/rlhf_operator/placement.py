"""Whether bundles find room on their pools, and under which of their strategies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf_api import FieldError, RLHFJobSpec
from rlhf_api.placement import EPSILON, Strategy, capacity, gpu_capacity, room
from rlhf_api.pools import NodePool

from rlhf_operator.bundles import Bundles, bundles_of, node_of, pool_resource, strategies_of

_STRICTEST_FIRST: tuple[Strategy, ...] = ("STRICT_PACK", "STRICT_SPREAD", "PACK", "SPREAD")


@dataclass(frozen=True)
class Placing:
    """Where the groups of a job go."""

    groups: tuple[Bundles, ...]
    """All groups in the manifest's order. Their first strategy is one that fits, where any does."""
    notes: tuple[str, ...]
    """Strategies that were passed over, a sentence each."""
    errors: tuple[FieldError, ...]
    """The groups that find no room on their pool beside the others, or whose engines might be torn apart."""


def place(spec: RLHFJobSpec) -> Placing:
    """Find room for every group under the first of its strategies that fits beside the other groups. Pure."""
    groups, notes = bundles_of(spec), list[str]()
    while True:
        misfits, torn = _attempt(groups)
        passed = next((misfit for misfit in misfits if len(misfit.bundles.strategies) > 1), None)
        if passed is None:
            errors = (*(misfit.error(spec.node_pools) for misfit in misfits), *torn)
            return Placing(tuple(groups), tuple(notes), errors)
        notes.append(passed.note())
        later = replace(passed.bundles, strategies=passed.bundles.strategies[1:])
        groups = [later if group is passed.bundles else group for group in groups]


def placing_order(groups: Sequence[Bundles]) -> list[Bundles]:
    """Groups as they should be placed one after another: those that are hardest to place first."""
    return sorted(groups, key=lambda group: (_STRICTEST_FIRST.index(group.strategy), -group.gpus, -group.count))


def _attempt(groups: Sequence[Bundles]) -> tuple[list["_Misfit"], list[FieldError]]:
    """Place each group under its first strategy."""
    free = {group.pool.name: [_Node.fresh(node_of(group.pool, groups))] * group.pool.nodes for group in groups}
    misfits, torn, placed = list[_Misfit](), list[FieldError](), list[Bundles]()
    for group in placing_order(groups):
        nodes, bundle = free[group.pool.name], group.resources
        capacities = [node.capacity(bundle) for node in nodes]
        if room(capacities, group.strategy) < group.count:
            beside = tuple(other for other in placed if other.pool is group.pool)
            misfits.append(_Misfit(group, node_of(group.pool, groups), tuple(capacities), beside))
            continue
        torn += _torn_engines(group, capacities)
        counts = _spread_over(capacities, group.count, group.strategy)
        free[group.pool.name] = [node.without(bundle, count) for node, count in zip(nodes, counts, strict=True)]
        placed.append(group)
    return misfits, torn


def _torn_engines(group: Bundles, capacities: Sequence[int]) -> Iterator[FieldError]:
    """Whether neighbouring bundles of one engine might come to lie on two nodes.

    Ray packs a node as full as it can before it takes the next, whichever it begins with. How it spreads more bundles
    than nodes is not said.
    """
    if group.neighbours == 1 or len(capacities) == 1:
        return
    odd = next((held for held in capacities if held % group.neighbours and held < group.count), None)
    safe = {"STRICT_PACK"} if odd else {"STRICT_PACK", "PACK"}
    if tearing := [strategy for strategy in group.strategies if strategy not in safe]:
        room_left = f", one with room for {odd} bundle{'s' * (odd > 1)}" if odd else ""
        yield FieldError(
            group.path,
            f"{' and '.join(tearing)} over {len(capacities)} nodes{room_left}",
            f"the {group.neighbours} neighbouring bundles of an engine (tensorParallelSize) on one node",
            "use STRICT_PACK, or give the rollout a group of its own",
        )


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


@dataclass(frozen=True)
class _Misfit:
    """A group that finds no room under its first strategy, and what it meets."""

    bundles: Bundles
    node: dict[str, float]
    """What a node of the pool has."""
    capacities: tuple[int, ...]
    """How many of the bundles each node still holds."""
    beside: tuple[Bundles, ...]
    """The groups that were placed on the pool before."""

    def note(self) -> str:
        """That the next strategy is taken, and why."""
        first, second = self.bundles.strategies[:2]
        why = f"at most {room(self.capacities, first)} fit of {self._wanted([first])} ({self._pool()})"
        return f"group `{self.bundles.group.name}` falls back to {second}: {why}"

    def error(self, pools: Sequence[NodePool]) -> FieldError:
        """What was wanted, what there is under each strategy, and what would help."""
        pool, unit = self.bundles.pool, self._scarcest()
        most = {strategy: room(self.capacities, strategy) for strategy in strategies_of(self.bundles.group)}
        lower = "`workers`"
        if self.bundles.resources[unit] > self.node.get(unit, 0.0):
            by_unit = "`gpusPerWorker`" if unit == "GPU" else lower
            lower = by_unit if self.bundles.devices == 1 else "spec.rollout.tensorParallelSize"
        way_out = _ways_out(unit, capacity(self.node, self.bundles.resources), max(most, key=most.__getitem__))
        return FieldError(
            self.bundles.path,
            self._wanted(list(most)),
            f"at most {' or '.join(str(held) for held in most.values())} ({self._pool()})",
            f"lower {lower}, or raise {way_out} of spec.nodePools[{pools.index(pool)}]",
        )

    def _wanted(self, strategies: Sequence[Strategy]) -> str:
        manners = {"STRICT_PACK": " on one node", "STRICT_SPREAD": ", one a node"}
        ways = " or ".join(f"{strategy}{manners.get(strategy, '')}" for strategy in strategies)
        count, unit = self.bundles.count, self._scarcest()
        return f"{count} bundle{'s' * (count > 1)} of {self.bundles.resources[unit]:g} {unit} with {ways}"

    def _pool(self) -> str:
        pool, unit = self.bundles.pool, self._scarcest()
        have = self.node.get(unit, 0.0)
        beside = "".join(f", beside {other.count} of `{other.group.name}`" for other in self.beside)
        nodes = f"{pool.nodes} node{'s' * (pool.nodes > 1)}"
        return f"pool `{pool.name}` has {nodes} with {have:g} {unit}{'s' * (have != 1)} each{beside}"

    def _scarcest(self) -> str:
        """The resource of which a node holds the fewest bundles; GPUs where several do, CPUs only where given."""
        bundle, pool = self.bundles.resources, self.bundles.pool
        keys = [key for key in ("GPU", "CPU", pool_resource(pool.name)) if key in bundle]
        if pool.cpu is None and "GPU" in keys:
            keys.remove("CPU")
        return min(keys, key=lambda key: capacity(self.node, {key: bundle[key]}))


def _ways_out(unit: str, held: int, strategy: Strategy) -> str:
    """What more of would help, where a node by itself holds so many bundles."""
    field = {"GPU": "`gpusPerNode`", "CPU": "`cpu`"}.get(unit, "`nodes`")
    if held and strategy == "STRICT_SPREAD":
        return "`nodes`"
    return field if not held or strategy == "STRICT_PACK" or field == "`nodes`" else f"{field} or `nodes`"
