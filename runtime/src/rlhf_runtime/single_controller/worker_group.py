"""Worker groups: one actor a bundle, driven as one object.

    RayClassWithInitArgs + RayResourcePool -> actors seated by (node, bundle) -> rank 0's store -> all join -> __init__

The start is submitted as a whole and not waited for, so that groups start beside each other. Each method that
`register` marked becomes a method of the group. The workers are plain actors besides: any method can be called on
their handles.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_runtime.single_controller.colocated import ColocatedWorker
from rlhf_runtime.single_controller.decorator import (
    MODES,
    Call,
    Execute,
    PerRank,
    Registration,
    Shared,
    registered_methods,
)
from rlhf_runtime.single_controller.gather import Member, gather
from rlhf_runtime.single_controller.resource_pool import RayResourcePool
from rlhf_runtime.single_controller.worker import RayClassWithInitArgs, Rendezvous, Seat, Worker, assign_seats

_INLINE = (bool, int, float, type(None), ray.ObjectRef, ActorHandle)
"""Types that travel inside each call; everything else is put into the object store, once a call."""


@dataclass(frozen=True)
class WorkerFuture:
    """The result of a call that was not waited for."""

    _wait: Callable[[], Any]

    def get(self) -> Any:
        """Wait for the result, or raise what a worker raised."""
        return self._wait()


class RayWorkerGroup:
    """Workers of one class, one a bundle of a pool. They start in the background; `wait_ready` waits for that.

    Args:
        pool: The created pool.
        ray_cls_with_init: The worker class and its arguments.
        device: `cpu` or `cuda`; obeyed, never guessed.
        num_cpus: Ray CPUs that each worker takes out of its bundle.
        num_gpus: Ray GPUs that each worker takes out of its bundle; default all of them.
        env_vars: Environment of the workers.
        visible_devices_from: A group on the same pool whose GPUs the workers see, bundle by bundle, without taking any
            of their own (the hybrid engine).
        name: Name for messages; default the pool's.
        timeout_seconds: How long ranks wait for each other, at the start and in collectives.
    """

    def __init__(
        self,
        pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        device: str = "cpu",
        num_cpus: float = 0.0,
        num_gpus: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        visible_devices_from: "RayWorkerGroup | None" = None,
        name: str | None = None,
        timeout_seconds: float = 600.0,
    ):
        self.name = name or pool.name
        self.cls = ray_cls_with_init.cls
        self._pool = pool
        self._workers: list[ActorHandle] = []
        self._ready = False
        gpus = pool.bundle.get("GPU", 0.0) if num_gpus is None else num_gpus
        environments = [dict(env_vars or {}) for _ in range(pool.workers)]
        if visible_devices_from is not None:
            gpus = 0.0
            for environment, devices in zip(environments, self._siblings(visible_devices_from), strict=True):
                environment.update(devices)
        seats = assign_seats(self.name, pool.bundle_nodes, device)
        self._members = [Member(self.name, seat.rank, pool.node_address(bundle)) for seat, bundle in seats]
        actor = ray.remote(num_cpus=num_cpus, num_gpus=gpus)(_hosted(self.cls))
        try:
            for (seat, bundle), environment in zip(seats, environments, strict=True):
                options: dict[str, Any] = {"runtime_env": {"env_vars": environment}} if environment else {}
                strategy = PlacementGroupSchedulingStrategy(pool.placement_group, bundle)
                self._workers.append(
                    actor.options(scheduling_strategy=strategy, **options).remote(seat, timeout_seconds)
                )
            self._start(ray_cls_with_init)
        except BaseException:
            self.shutdown()
            raise
        _attach(self, self.cls, self._call)

    def _siblings(self, group: "RayWorkerGroup") -> list[dict[str, str]]:
        """Environment a rank that shows it the devices of the other group's worker on its bundle."""
        if group._pool is not self._pool:
            raise ValueError(f"visible_devices_from: got a group on pool `{group._pool.name}`; expected the same pool")
        if "GPU" not in self._pool.bundle:
            return [{} for _ in range(group.world_size)]
        # vLLM takes what is free of a GPU while it starts, so the sibling's model has to be there before.
        group.wait_ready()
        visible = gather(group._submit("host_devices", Call((), {})), group._members)
        return [
            {"CUDA_VISIBLE_DEVICES": devices, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} for devices in visible
        ]

    def _start(self, init: RayClassWithInitArgs) -> None:
        """Submit the start of all workers; each step waits, in the workers, for the one before."""
        self._entered = joined = self._submit("host_enter", Call((), {}))
        if self.cls.needs_process_group:
            address = self._workers[0].host_open_store.remote(self._entered[0])
            joined = self._submit("host_join", Call((PerRank(self._entered), Shared(address)), {}))
        args, kwargs = map(Shared, init.args), {name: Shared(value) for name, value in init.kwargs.items()}
        self._constructed = self._submit("host_construct", Call((PerRank(joined), *args), kwargs))

    def wait_ready(self) -> None:
        """Wait until every worker's `__init__` is done.

        Raises:
            RLHFError: as a worker's start raised it; the workers are gone then.
        """
        if self._ready:
            return
        try:
            pids = gather(self._entered, self._members)
            self._members = [replace(member, pid=pid) for member, pid in zip(self._members, pids, strict=True)]
            gather(self._constructed, self._members)
        except BaseException:
            self.shutdown()
            raise
        self._ready = True

    @property
    def workers(self) -> list[ActorHandle]:
        """Handles in rank order."""
        return list(self._workers)

    @property
    def world_size(self) -> int:
        """How many workers."""
        return len(self._workers)

    def spawn(self, roles: Iterable[str]) -> dict[str, "WorkerGroupView"]:
        """A view a role on workers that `create_colocated_worker_cls` made."""
        if not issubclass(self.cls, ColocatedWorker):
            raise TypeError(f"spawn: got {self.cls.__name__}; expected a class of create_colocated_worker_cls")
        classes = self.cls.role_classes
        return {role: WorkerGroupView(self, role, classes[role]) for role in roles}

    def shutdown(self) -> None:
        """Kill the workers. Their pool stays."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _call(self, method: str, how: Registration, *args: Any, **kwargs: Any) -> Any:
        return self._run((method,), how, args, kwargs)

    def _call_role(self, role: str, method: str, how: Registration, *args: Any, **kwargs: Any) -> Any:
        return self._run(("call_role", role, method), how, args, kwargs)

    def _run(self, method: tuple[str, ...], how: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dispatch, submit, and collect now or later. `method` is the actor's method and its leading arguments."""
        mode = MODES[how.dispatch_mode]
        call = mode.dispatch(self.world_size, args, kwargs)
        ranks = 1 if how.execute_mode is Execute.RANK_ZERO else self.world_size
        refs = self._submit(method[0], replace(call, args=(*map(Shared, method[1:]), *call.args)), ranks)

        def wait() -> Any:
            self.wait_ready()
            return mode.collect(call, gather(refs, self._members[:ranks]))

        return wait() if how.blocking else WorkerFuture(wait)

    def _submit(self, method: str, call: Call, ranks: int | None = None) -> list[ray.ObjectRef]:
        """One call a rank, on the first `ranks` of them."""
        workers = self._workers[:ranks]
        args = [_by_rank(argument, len(workers)) for argument in call.args]
        kwargs = {name: _by_rank(argument, len(workers)) for name, argument in call.kwargs.items()}
        return [
            getattr(worker, method).remote(
                *(argument[rank] for argument in args), **{name: values[rank] for name, values in kwargs.items()}
            )
            for rank, worker in enumerate(workers)
        ]


class WorkerGroupView:
    """One role of a colocated group: that role's methods on the group's workers."""

    def __init__(self, group: RayWorkerGroup, role: str, cls: type[Worker]):
        self.group = group
        self.role = role
        _attach(self, cls, partial(group._call_role, role))

    @property
    def workers(self) -> list[ActorHandle]:
        """Handles in rank order; a role's method is `handle.call_role.remote(role, method, ...)`."""
        return self.group.workers

    @property
    def world_size(self) -> int:
        """How many workers."""
        return self.group.world_size

    def wait_ready(self) -> None:
        """Wait until every worker's `__init__` is done, or raise what it raised."""
        self.group.wait_ready()

    def shutdown(self) -> None:
        """Kill the workers, which are those of the group's other roles too."""
        self.group.shutdown()


def _attach(target: object, cls: type[Worker], call: Callable[..., Any]) -> None:
    """Give a group or view the registered methods of a worker class."""
    for name, registration in registered_methods(cls).items():
        if hasattr(target, name):
            raise ValueError(f"{cls.__name__}.{name}: got a name that worker groups use; expected another")
        setattr(target, name, partial(call, name, registration))


def _by_rank(argument: Shared | PerRank, ranks: int) -> list[Any]:
    """What each call carries of an argument."""
    if isinstance(argument, PerRank):
        return list(argument.values)
    value = argument.value
    return [value if isinstance(value, _INLINE) else ray.put(value)] * ranks


def _hosted(cls: type[Worker]) -> type[Worker]:
    """The worker class as an actor, whose own `__init__` runs once its seat and process group are there."""

    class Host(cls):  # type: ignore[misc, valid-type]
        def __init__(self, seat: Seat, timeout_seconds: float):
            self.seat = seat
            self._host_rendezvous = Rendezvous(seat, timeout_seconds)
            self._host_rendezvous.prepare_environment()

        def host_enter(self) -> int:
            self._host_rendezvous.require_device()
            return os.getpid()

        def host_devices(self) -> str:
            return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])

        # The steps below take the results of those before them only to start after these, and to fail as they did.

        def host_open_store(self, entered: int) -> tuple[str, int]:
            return self._host_rendezvous.open_store(ray.util.get_node_ip_address())

        def host_join(self, entered: int, address: tuple[str, int]) -> None:
            self._host_rendezvous.join(address)

        def host_construct(self, joined: int | None, *args: Any, **kwargs: Any) -> None:
            cls.__init__(self, *args, **kwargs)

    Host.__name__ = Host.__qualname__ = cls.__name__
    return Host
