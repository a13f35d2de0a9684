"""What a pod asks of Kubernetes, and what its Ray node offers: the two sides of one arithmetic."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_api.pods import Head
from rlhf_api.pools import NodePool
from rlhf_api.quantity import quantity_value

from rlhf_operator.bundles import Bundles, node_of

MIB = 2**20
SHARED_SHARE = 0.5
"""Size of /dev/shm, where none is given, as a share of the pod's memory, of which it is a part."""
STORE_SHARE = 0.3
"""Most of a pod's memory that Ray's object store takes."""
STORE_OF_SHARED = 0.7
"""Most of /dev/shm that it takes: NCCL, torch and weight sync live there too."""


@dataclass(frozen=True)
class PodResources:
    """One pod's share of a machine, and what of it Ray is told."""

    requests: dict[str, str]
    """By Kubernetes resource."""
    limits: dict[str, str]
    """By Kubernetes resource."""
    shared_memory: str | None
    """Size of /dev/shm; none leaves it to the kubelet."""
    object_store: int | None
    """Bytes of Ray's object store; none leaves it to Ray."""
    ray: dict[str, float]
    """What the Ray node offers."""

    @property
    def has_gpus(self) -> bool:
        """Whether Ray is offered GPUs."""
        return self.ray.get("GPU", 0.0) > 0

    @property
    def ray_start_params(self) -> dict[str, str]:
        """Parameters of `ray start` as KubeRay passes them on: to a shell, so JSON stands in quotes.

        CPUs and GPUs are told in full: what is left out would be counted on the machine, and beside custom resources
        KubeRay does not look at the limits. Custom resources are whole: Ray's autoscaler takes nothing else.
        """
        custom = {key: int(amount) for key, amount in self.ray.items() if key not in ("CPU", "GPU")}
        params = {"num-cpus": f"{self.ray['CPU']:.0f}", "num-gpus": f"{self.ray.get('GPU', 0.0):.0f}"}
        params |= {"resources": f"'{json.dumps(custom)}'"} if custom else {}
        return params | ({"object-store-memory": str(self.object_store)} if self.object_store else {})


def pool_resources(pool: NodePool, groups: Sequence[Bundles]) -> PodResources:
    """Resources of one pod of a pool: a node each.

    Without `cpu` a pod asks for its part of the CPUs that the pool's groups need, while Ray may place all of them on
    any one node, as the planner reckons.
    """
    ray = node_of(pool, groups)
    devices = {pool.gpu_resource: str(pool.gpus_per_node)} if pool.gpus_per_node else {}
    devices |= {pool.rdma.resource: str(pool.rdma.count)} if pool.rdma else {}
    memory = {"memory": str(pool.memory)} if pool.memory is not None else {}
    cpu = {"cpu": str(pool.cpu)} if pool.cpu is not None else {}
    needed = {"cpu": str(max(1, math.ceil(ray["CPU"] / pool.nodes)))}
    shared = _shared_memory(memory, pool.shared_memory)
    return PodResources(
        requests={**(cpu or needed), **memory, **devices},
        limits={**cpu, **memory, **devices},
        shared_memory=None if shared is None else _quantity(shared, pool.shared_memory),
        object_store=_object_store(memory, shared),
        ray=ray,
    )


def head_resources(head: Head) -> PodResources:
    """Resources of the head: none of it is offered to Ray, so that no role lands there. Its CPUs may burst."""
    memory = {"memory": str(head.memory)}
    shared = _shared_memory(memory, None)
    return PodResources(
        requests={"cpu": str(head.cpu), **memory},
        limits=memory,
        shared_memory=None if shared is None else _quantity(shared, None),
        object_store=_object_store(memory, shared),
        ray={"CPU": 0.0, "GPU": 0.0},
    )


def _shared_memory(memory: Mapping[str, str], given: int | str | None) -> int | None:
    """Bytes of /dev/shm."""
    if given is not None:
        return int(quantity_value(given))
    return int(int(quantity_value(memory["memory"])) * SHARED_SHARE) if memory else None


def _quantity(size: int, given: int | str | None) -> str:
    return str(given) if given is not None else f"{size // MIB}Mi"


def _object_store(memory: Mapping[str, str], shared: int | None) -> int | None:
    """Bytes of the object store, which lies in /dev/shm."""
    if shared is None:
        return None
    most = int(shared * STORE_OF_SHARED)
    return min(most, int(int(quantity_value(memory["memory"])) * STORE_SHARE)) if memory else most
