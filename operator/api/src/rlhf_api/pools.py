"""Node pools: what machines a job runs on."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from rlhf_api.base import ApiModel, DnsLabel, PositiveInt, field_problem

Device = Literal["cuda", "cpu"]

_QUANTITY = re.compile(r"^\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?$")


def _check_quantity(value: int | float | str) -> int | float | str:
    if isinstance(value, str) and not _QUANTITY.match(value):
        raise field_problem(repr(value), "a Kubernetes quantity", 'write a form such as "64", "500m" or "512Gi"')
    return value


Quantity = Annotated[int | float | str, AfterValidator(_check_quantity)]
"""A Kubernetes quantity: a number, or a string such as `500m` or `512Gi`."""


def cpu_count(quantity: int | float | str) -> float:
    """CPUs in a quantity: `500m` is 0.5, `64` is 64."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


class Toleration(ApiModel):
    """A Kubernetes toleration."""

    key: str | None = None
    """Taint key; none matches every key."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How key and value are compared."""
    value: str | None = None
    """Taint value for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; none matches every effect."""
    toleration_seconds: int | None = None
    """Seconds that a `NoExecute` taint is tolerated."""


class NodePool(ApiModel):
    """A set of like nodes."""

    planned: ClassVar[frozenset[str]] = frozenset({"minNodes", "maxNodes"})

    name: DnsLabel
    """The pool's name, which `placement` refers to."""
    nodes: PositiveInt = 1
    """How many nodes. On this machine each becomes a local Ray node."""
    device: Device | None = None
    """What roles on this pool compute on. Obeyed, never guessed. Default: `cuda` where gpusPerNode > 0, else `cpu`."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs a node."""
    gpu_resource: str = "nvidia.com/gpu"
    """Kubernetes resource name of the GPUs. Ignored on this machine."""
    cpu: Quantity | None = None
    """CPUs a node. Default: what the plan needs."""
    memory: Quantity | None = None
    """Memory a node. Ignored on this machine."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm a node. Ignored on this machine."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels a node must have. Ignored on this machine."""
    tolerations: list[Toleration] = Field(default_factory=list)
    """Taints that are tolerated. Ignored on this machine."""
