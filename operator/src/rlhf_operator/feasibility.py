"""Whether the cluster's nodes can hold a job's pools: need and have, pool by pool. Pure.

It looks at what nodes have in all, not at what others use of it: a busy node becomes free, one that is too small does
not grow. It warns and never refuses, since an autoscaler may add nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_api.pods import Toleration
from rlhf_api.pools import NodePool
from rlhf_api.quantity import quantity_value

from rlhf_operator import conditions
from rlhf_operator.node_affinity import lets_onto


@dataclass(frozen=True)
class Node:
    """A node that takes pods."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...]
    """Key, value and effect of those that keep pods away."""
    capacity: Mapping[str, float]
    """What it has for pods, by resource name."""


@dataclass(frozen=True)
class Feasibility:
    """The verdict of all pools together."""

    holds: bool | None
    """None where nodes may not be listed."""
    reason: str
    message: str


def node_of(obj: Mapping[str, Any]) -> Node:
    """A node as the API server gives it; cordoned ones count, since they come back."""
    spec, status = obj.get("spec", {}), obj.get("status", {})
    return Node(
        name=obj["metadata"]["name"],
        labels=obj["metadata"].get("labels") or {},
        taints=tuple(
            (taint["key"], taint.get("value", ""), taint["effect"])
            for taint in spec.get("taints") or ()
            if taint["effect"] != "PreferNoSchedule" and not taint["key"].startswith("node.kubernetes.io/")
        ),
        capacity={name: float(quantity_value(value)) for name, value in (status.get("allocatable") or {}).items()},
    )


def feasibility(pools: Sequence[NodePool], nodes: Sequence[Node] | None) -> Feasibility:
    """Whether there are nodes for each pool by itself: by selector, node affinity, taints, devices, CPUs and memory.

    Args:
        pools: the job's pools.
        nodes: all nodes; None where they may not be listed.
    """
    if nodes is None:
        message = "The operator may not list nodes, so whether the pools fit is for the scheduler to say."
        return Feasibility(None, conditions.NODES_UNKNOWN, message)
    short = [text for pool in pools if (text := _shortage(pool, nodes))]
    if short:
        message = f"{'; '.join(short)}. Add such nodes, or change the pool; an autoscaler may be about to."
        return Feasibility(False, conditions.TOO_FEW_NODES, message)
    return Feasibility(True, conditions.NODES_FIT, "The cluster has nodes for every pool.")


def _shortage(pool: NodePool, nodes: Sequence[Node]) -> str | None:
    """What a pool lacks, with need and have; None if nothing."""
    wanted = _wanted(pool)
    selected = [
        node
        for node in nodes
        if pool.node_selector.items() <= node.labels.items() and lets_onto(pool.affinity, node.name, node.labels)
    ]
    open_to = [node for node in selected if all(_tolerated(taint, pool.tolerations) for taint in node.taints)]
    large = [node for node in open_to if all(node.capacity.get(name, 0) >= amount for name, amount in wanted.items())]
    if not wanted and not pool.node_selector and not pool.affinity:
        return None
    fit = sum(_pods_on(node, wanted) for node in large)
    need = pool.node_bounds[0]
    if fit >= need:
        return None
    size = ", ".join(f"{_amount(name, amount)} {name}" for name, amount in wanted.items()) or "no size given"
    counts = f"{len(selected)} match selector and affinity, {len(open_to)} of them without an untolerated taint"
    return f"pool `{pool.name}` needs {need} nodes of {size}; the cluster has room for {fit} ({counts})"


def _wanted(pool: NodePool) -> dict[str, float]:
    wanted = {pool.gpu_resource: float(pool.gpus_per_node)} if pool.gpus_per_node else {}
    wanted |= {pool.rdma.resource: float(pool.rdma.count)} if pool.rdma else {}
    wanted |= {"cpu": float(quantity_value(pool.cpu))} if pool.cpu is not None else {}
    return wanted | ({"memory": float(quantity_value(pool.memory))} if pool.memory is not None else {})


def _pods_on(node: Node, wanted: Mapping[str, float]) -> int:
    """How many of a pool's pods an empty node holds."""
    return min((int(node.capacity[name] // amount) for name, amount in wanted.items() if amount), default=1)


def _tolerated(taint: tuple[str, str, str], tolerations: Sequence[Toleration]) -> bool:
    key, value, effect = taint
    return any(
        toleration.effect in (None, effect)
        and toleration.key in (None, key)
        and (toleration.operator == "Exists" or (toleration.value or "") == value)
        for toleration in tolerations
    )


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:g}Gi" if name == "memory" else f"{amount:g}"
