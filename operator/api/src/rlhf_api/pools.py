"""Node pools: what machines a job runs on."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from rlhf_api.base import ApiModel, DnsLabel, field_problem

Device = Literal["cuda", "cpu"]

_QUANTITY = re.compile(r"^\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?$")


_CPU_FIX = 'write a form such as "64" or "500m"'


def _check_quantity(value: Any) -> Any:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not (isinstance(text, str) and _QUANTITY.fullmatch(text)):
        raise field_problem(repr(value), "a Kubernetes quantity", 'write a form such as "64", "500m" or "512Gi"')
    return value


def _check_cpus(value: Any) -> Any:
    text = str(_check_quantity(value))
    if not text.removesuffix("m").replace(".", "", 1).isdigit() or not cpu_count(text) > 0:
        raise field_problem(repr(value), "a number of CPUs above 0, or thousandths of one with `m`", _CPU_FIX)
    return value


Quantity = Annotated[int | float | str, BeforeValidator(_check_quantity)]
"""A Kubernetes quantity: a number, or a string such as `500m` or `512Gi`."""
Cpus = Annotated[int | float | str, BeforeValidator(_check_cpus)]
"""A Kubernetes quantity of CPUs, such as 64, "64" or "500m"."""


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
    nodes: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many nodes. On this machine each becomes a local Ray node."""
    device: Device | None = None
    """What roles on this pool compute on. Obeyed, never guessed. Default: `cuda` where gpusPerNode > 0, else `cpu`."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1000)] = 0
    """GPUs a node."""
    gpu_resource: str = "nvidia.com/gpu"
    """Kubernetes resource name of the GPUs. Ignored on this machine."""
    cpu: Cpus | None = None
    """CPUs a node. Default: what the plan needs."""
    memory: Quantity | None = None
    """Memory a node. Ignored on this machine."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm a node. Ignored on this machine."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels a node must have. Ignored on this machine."""
    tolerations: list[Toleration] = Field(default_factory=list)
    """Taints that are tolerated. Ignored on this machine."""
