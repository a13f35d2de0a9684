"""What the object stores hold."""

import ray

_RESOURCE = "object_store_memory"


def object_store_bytes() -> int:
    """Bytes in the object stores of all nodes, as the nodes last told: they do several times a second."""
    return int(ray.cluster_resources().get(_RESOURCE, 0) - ray.available_resources().get(_RESOURCE, 0))
