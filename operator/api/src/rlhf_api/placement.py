"""Which role runs where, and the arithmetic that says whether it fits."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.base import ApiModel, DnsLabel, PositiveInt
from rlhf_api.roles import Role

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Ray's placement group strategies: STRICT_PACK one node, STRICT_SPREAD a node each, the others as far as they can."""


class PlacementGroup(ApiModel):
    """Roles that share workers and devices (the hybrid engine)."""

    planned: ClassVar[frozenset[str]] = frozenset({"fallback"})

    name: DnsLabel
    """The group's name."""
    pool: DnsLabel
    """The node pool that it runs on."""
    roles: Annotated[list[Role], Field(min_length=1)]
    """Roles of the group. Policy, critic and reference share a process; rollout and reward have one of their own."""
    workers: PositiveInt = 1
    """Workers a role: ranks of a trained model, engines of a rollout."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs a worker; fractions allowed. Default: 1 on a pool with GPUs, else 0."""
    strategy: Strategy | None = None
    """How workers spread over the pool's nodes. Default: the placement's strategy."""


class Placement(ApiModel):
    """All groups of a job; each role stands in exactly one."""

    strategy: Strategy = "PACK"
    """The strategy of groups that name none."""
    groups: Annotated[list[PlacementGroup], Field(min_length=1)]
    """Disjoint groups of roles."""


def capacity(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many of these bundles one node with these resources holds."""
    counts = [math.floor(node.get(key, 0.0) / need + 1e-9) for key, need in bundle.items() if need > 0]
    return min(counts, default=0)


def fits(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], count: int, strategy: Strategy) -> bool:
    """Whether `count` equal bundles can be placed on `nodes` under `strategy`."""
    capacities = [capacity(node, bundle) for node in nodes]
    match strategy:
        case "STRICT_PACK":
            return max(capacities, default=0) >= count
        case "STRICT_SPREAD":
            return sum(1 for held in capacities if held) >= count
        case _:
            return sum(capacities) >= count
