"""Which role runs where, and the arithmetic that says whether it fits."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.base import ApiModel, DnsLabel, Integer
from rlhf_api.roles import Role

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Ray's placement group strategies: STRICT_PACK one node, STRICT_SPREAD a node each, the others as far as they can."""


EPSILON = 1e-9
"""Slack for sums of fractions."""


class PlacementGroup(ApiModel):
    """Roles that share workers and devices (the hybrid engine)."""

    name: DnsLabel
    """The group's name."""
    pool: DnsLabel
    """The node pool that it runs on."""
    roles: Annotated[list[Role], Field(min_length=1, max_length=8)]
    """Roles of the group. Policy, critic and reference share a process; rollout and reward have one of their own."""
    workers: Annotated[Integer, Field(ge=1, le=1_000_000)] = 1
    """Workers a role: ranks of a trained model, devices of a rollout, of which an engine takes tensorParallelSize."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs a worker; fractions allowed. Default: 1 on a pool with GPUs, else 0."""
    strategy: Strategy | None = None
    """How workers spread over the pool's nodes. Default: the placement's strategy."""
    fallback: Annotated[list[Strategy], Field(max_length=8)] = Field(default_factory=list)
    """Strategies to take, in this order, where the one before cannot be had."""


class Placement(ApiModel):
    """All groups of a job; each role stands in exactly one."""

    strategy: Strategy = "PACK"
    """The strategy of groups that name none."""
    groups: Annotated[list[PlacementGroup], Field(min_length=1, max_length=64)]
    """Disjoint groups of roles."""


def capacity(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many of these bundles a node with these free resources holds; a fraction of `GPU` is what is left of one."""
    whole, part = divmod(node.get("GPU", 0.0), 1)
    counts = [
        gpu_capacity([1.0] * int(whole) + [part], need)
        if key == "GPU"
        else math.floor(node.get(key, 0.0) / need + EPSILON)
        for key, need in bundle.items()
        if need > 0
    ]
    return min(counts, default=0)


def gpu_capacity(free: Sequence[float], need: float) -> int:
    """How many bundles of `need` GPUs fit, given what is free of each GPU, from 0 to 1.

    As in Ray, a share of a GPU comes from one GPU, and more than one are whole: two GPUs hold two bundles of 0.6.
    """
    if need <= 1:
        return sum(math.floor(share / need + EPSILON) for share in free)
    return math.floor(sum(share >= 1 for share in free) / need)


def room(capacities: Sequence[int], strategy: Strategy) -> int:
    """The most bundles that can be placed under `strategy` on nodes that hold so many each."""
    match strategy:
        case "STRICT_PACK":
            return max(capacities, default=0)
        case "STRICT_SPREAD":
            return sum(1 for held in capacities if held)
        case _:
            return sum(capacities)
