"""Resource pools: placement groups that are checked against the cluster before they are made."""

import logging
import math
import time
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from rlhf_api.placement import Strategy, capacity, room
from rlhf_api.runtime_config import WorkerGroup

from rlhf_runtime.errors import PlacementError

logger = logging.getLogger(__name__)

_NODES_SHOWN = 8

_RULES: dict[Strategy, str] = {
    "STRICT_PACK": "all on one node",
    "STRICT_SPREAD": "each on a node of its own",
    "PACK": "on as few nodes as possible",
    "SPREAD": "on as many nodes as possible",
}


class RayResourcePool:
    """Equal bundles held as one placement group. `reserve` creates it.

    Args:
        name: The group's name, for messages.
        workers: How many bundles.
        bundle: Ray resources of each.
        strategy: How they spread over nodes.
        fallback: Strategies to take, in this order, where the one before cannot be had.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        bundle: Mapping[str, float],
        strategy: Strategy,
        fallback: Sequence[Strategy] = (),
    ):
        self.name = name
        self.workers = workers
        self.bundle = {key: float(need) for key, need in bundle.items() if need > 0}
        self._asked = (strategy, *fallback)
        self._left = list(self._asked)
        self._given_up: dict[Strategy, str] = {}
        self._group: PlacementGroup | None = None

    @property
    def placement_group(self) -> PlacementGroup:
        """Ray's placement group.

        Raises:
            PlacementError: when the pool was not reserved, or was removed.
        """
        if self._group is None:
            raise PlacementError(f"placement group `{self.name}`: got none; expected one. Fix: reserve it first")
        return self._group

    @property
    def strategy(self) -> Strategy:
        """The strategy taken, once the pool is reserved."""
        return self._left[0]

    def check(self, nodes: Mapping[str, Mapping[str, float]]) -> None:
        """Give up the strategies under which nodes of these total resources, by address, could never hold the group.

        Raises:
            PlacementError: with need and have per bundle and node, when there is no other.
        """
        capacities = [capacity(node, self.bundle) for node in nodes.values()]
        never = {strategy: held for strategy in self._left if (held := room(capacities, strategy)) < self.workers}
        if len(never) < len(self._left):
            for strategy, held in never.items():
                self._give_up(strategy, f"room for {held} of {self.workers} bundles on all nodes")
            return
        held = sorted(nodes.items(), key=lambda node: -capacity(node[1], self.bundle))
        have = [
            f"{address} ({_resources({key: node.get(key, 0.0) for key in self.bundle})}) room for "
            f"{capacity(node, self.bundle)}"
            for address, node in held[:_NODES_SHOWN]
        ]
        if len(held) > _NODES_SHOWN:
            have.append(f"{len(held) - _NODES_SHOWN} more nodes no more than that")
        raise PlacementError(
            f"placement group `{self.name}`: got {'; '.join(have) or 'no node'}; expected room for {self._need}. "
            f"Fix: add nodes or resources, or ask for fewer workers or another strategy"
        )

    def request(self) -> None:
        """Ask Ray for the bundles without waiting."""
        self._group = placement_group([self.bundle] * self.workers, strategy=self.strategy, name=self.name)

    def wait(self, timeout_seconds: float, since: float) -> None:
        """Wait until the bundles are reserved, at most until `timeout_seconds` after the monotonic time `since`.

        Each strategy is given an equal share of the time that is left to it and those after it.

        Raises:
            PlacementError: when they are not in time under any; the request is withdrawn then.
        """
        while True:
            share = (since + timeout_seconds - time.monotonic()) / len(self._left)
            if self.placement_group.wait(max(math.ceil(share), 1)):  # Ray counts whole seconds
                return
            self.remove()
            free = ray.available_resources()
            have = _resources({key: free.get(key, 0.0) for key in self.bundle})
            self._give_up(self.strategy, f"{have} free in the whole cluster after {time.monotonic() - since:.0f} s")
            self.request()

    def _give_up(self, strategy: Strategy, reason: str) -> None:
        """Go on with the next strategy, saying so.

        Raises:
            PlacementError: when there is none, telling why each was given up.
        """
        self._given_up[strategy] = reason
        if self._left == [strategy]:
            got = "; ".join(f"{name}: {why}" for name, why in self._given_up.items()) if self._asked[1:] else reason
            raise PlacementError(
                f"placement group `{self.name}`: got {got}; expected room for {self._need}. "
                f"Fix: wait for other work to end, add nodes, or raise the time-out"
            )
        was_next = strategy == self.strategy
        self._left.remove(strategy)
        if was_next:
            logger.warning("Placement group %s: not %s (%s), trying %s", self.name, strategy, reason, self.strategy)

    def remove(self) -> None:
        """Give the bundles back, killing what runs in them."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    @property
    def bundle_nodes(self) -> list[str]:
        """Id of the node that holds each bundle, by bundle index."""
        nodes = placement_group_table(self.placement_group)["bundles_to_node_id"]
        return [nodes[index] for index in range(self.workers)]

    @property
    def _need(self) -> str:
        bundles = "bundle" if self.workers == 1 else "bundles"
        strategies = ", else under ".join(f"{strategy} ({_RULES[strategy]})" for strategy in self._asked)
        return f"{self.workers} {bundles} of {_resources(self.bundle)} under {strategies}"


class ResourcePoolManager:
    """The pools of a job.

    Args:
        groups: The worker groups of the job; each becomes a pool.
        timeout_seconds: How long all of them together may take to be ready.
    """

    def __init__(self, groups: Sequence[WorkerGroup], timeout_seconds: float):
        self._timeout = timeout_seconds
        self.pools = {
            group.name: RayResourcePool(group.name, group.workers, group.bundle, group.strategy, group.fallback)
            for group in groups
        }

    def create(self) -> None:
        """Reserve all pools, or none; see `reserve`."""
        reserve(list(self.pools.values()), self._timeout)


def reserve(pools: Sequence[RayResourcePool], timeout_seconds: float) -> None:
    """Have Ray hold the bundles of all pools, or of none.

    Raises:
        PlacementError: naming the first pool that the cluster could never hold, alone or beside the others, before
            anything is made; or that was not had in time, after all requests were withdrawn.
    """
    nodes = _cluster_nodes()
    for pool in pools:
        pool.check(nodes)
    check_together(pools, nodes)
    since = time.monotonic()
    try:
        for pool in pools:
            pool.request()
        for pool in pools:
            pool.wait(timeout_seconds, since)
    except BaseException:
        for pool in pools:
            pool.remove()
        raise


def check_together(pools: Sequence[RayResourcePool], nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Refuse pools that compete for the same nodes and ask for more than those have.

    Pools that can only live on some nodes must fit those in sum. It never refuses what fits; fragments that no sum
    shows are left to the bounded wait.
    """
    homes = [frozenset(name for name, node in nodes.items() if capacity(node, pool.bundle)) for pool in pools]
    for home in set(homes):
        inside = [pool for pool, other in zip(pools, homes, strict=True) if other <= home]
        for key in sorted({key for pool in inside for key in pool.bundle}):
            need = sum(pool.workers * pool.bundle.get(key, 0.0) for pool in inside)
            have = sum(nodes[name].get(key, 0.0) for name in home)
            if need > have + 1e-6:
                wants = ", ".join(f"`{pool.name}` {pool.workers} of {_resources(pool.bundle)}" for pool in inside)
                raise PlacementError(
                    f"placement groups {wants}: got {have:g} {key} on the {len(home)} node(s) that they share; "
                    f"expected {need:g}. Fix: add nodes or resources, or ask for fewer workers"
                )


def node_addresses() -> dict[str, str]:
    """Address of every node, by its id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def _cluster_nodes() -> dict[str, dict[str, float]]:
    """Total resources of the nodes that are alive, by a name that is told to people."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}": node["Resources"] for node in alive}


def _resources(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{key}: {amount:g}" for key, amount in resources.items()) + "}"
