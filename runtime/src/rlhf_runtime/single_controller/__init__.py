"""The single controller: one driver program that commands groups of workers over Ray.

    LocalCluster -> ResourcePoolManager -> RayWorkerGroup(pool, RayClassWithInitArgs(cls, ...)) -> group.method(...)

The only package that imports Ray. Worker classes are plain Python and import `worker` and `decorator` alone, so the
names of the other modules are loaded when they are asked for.
"""

from importlib import import_module
from typing import Any

from rlhf_runtime.single_controller.decorator import Call, Dispatch, Execute, Mode, PerRank, Shared, register
from rlhf_runtime.single_controller.worker import RayClassWithInitArgs, Worker

_LAZY = {
    "HealthMonitor": "health",
    "LocalCluster": "local_cluster",
    "RayResourcePool": "resource_pool",
    "RayWorkerGroup": "worker_group",
    "ResourcePoolManager": "resource_pool",
    "Span": "calls",
    "WorkerFuture": "calls",
    "WorkerGroupView": "worker_group",
    "create_colocated_worker_cls": "colocated",
    "reserve": "resource_pool",
}

__all__ = [
    *_LAZY,
    "Call",
    "Dispatch",
    "Execute",
    "Mode",
    "PerRank",
    "RayClassWithInitArgs",
    "Shared",
    "Worker",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
