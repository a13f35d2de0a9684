"""Nodes that KWOK plays: GPUs, labels and taints as a real cluster's, with no machine behind them."""

from dataclasses import dataclass, field
from typing import Any

ANNOTATION = "kwok.x-k8s.io/node"


@dataclass(frozen=True)
class GpuNodes:
    """Like nodes of one pool.

    Attributes:
        name: Prefix of their names: `train` makes `train-0`, `train-1`, ...
        count: How many.
        gpus: GPUs of each; 0 makes a CPU node.
        gpu_resource: Name of the extended resource, of any vendor, or a MIG slice.
        labels: Labels of each.
        taints: Taints of each, as Kubernetes writes them.
        cpu: CPUs of each.
        memory: Memory of each.
    """

    name: str
    count: int = 1
    gpus: int = 8
    gpu_resource: str = "nvidia.com/gpu"
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[dict[str, str], ...] = ()
    cpu: str = "128"
    memory: str = "2Ti"

    @property
    def names(self) -> list[str]:
        """Names of the nodes."""
        return [f"{self.name}-{index}" for index in range(self.count)]

    def render(self) -> list[dict[str, Any]]:
        """The Node objects."""
        resources = {"cpu": self.cpu, "memory": self.memory, "pods": "2000", "ephemeral-storage": "1Ti"}
        if self.gpus:
            resources[self.gpu_resource] = str(self.gpus)
        return [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "annotations": {ANNOTATION: "fake"},
                    "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **self.labels},
                },
                "spec": {"taints": list(self.taints)},
                "status": {"capacity": resources, "allocatable": resources},
            }
            for name in self.names
        ]
