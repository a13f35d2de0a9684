"""Node pools: what machines a job runs on."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_api.base import DnsLabel, Integer, field_problem
from rlhf_api.pods import PodSettings, Rdma
from rlhf_api.quantity import Cpus, Quantity

Device = Literal["cuda", "cpu"]


class NodePool(PodSettings):
    """A set of like nodes."""

    name: DnsLabel
    """The pool's name, which `placement` refers to."""
    nodes: Annotated[Integer, Field(ge=1, le=1000)] = 1
    """How many nodes. On this machine each becomes a local Ray node."""
    min_nodes: Annotated[Integer, Field(ge=1, le=1000)] | None = None
    """Fewest nodes of a pool that scales, for pools of rollouts alone. Default: `nodes`. Ignored on this machine."""
    max_nodes: Annotated[Integer, Field(ge=1, le=1000)] | None = None
    """Most nodes of a pool that scales. Default: `nodes`. Ignored on this machine."""
    device: Device | None = None
    """What roles on this pool compute on. Obeyed, never guessed. Default: `cuda` where gpusPerNode > 0, else `cpu`."""
    gpus_per_node: Annotated[Integer, Field(ge=0, le=1000)] = 0
    """GPUs a node."""
    gpu_resource: Annotated[str, Field(min_length=1, max_length=253)] = "nvidia.com/gpu"
    """Kubernetes resource name of the GPUs. Ignored on this machine."""
    cpu: Cpus | None = None
    """CPUs a node. Default: what the plan needs."""
    memory: Quantity | None = None
    """Memory a node. Ignored on this machine."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm a node. Ignored on this machine."""
    rdma: Rdma | None = None
    """Network devices for RDMA. Ignored on this machine."""

    @model_validator(mode="after")
    def _nodes_within_bounds(self) -> Self:
        fewest, most = self.node_bounds
        if not fewest <= self.nodes <= most:
            got = f"minNodes {fewest}, nodes {self.nodes}, maxNodes {most}"
            raise field_problem(got, "minNodes <= nodes <= maxNodes", "change one of them")
        return self

    @property
    def node_bounds(self) -> tuple[int, int]:
        """Fewest and most nodes; the same where the pool does not scale."""
        return self.min_nodes or self.nodes, self.max_nodes or self.nodes

    @property
    def scales(self) -> bool:
        """Whether its number of nodes may change while it runs."""
        fewest, most = self.node_bounds
        return fewest < most
