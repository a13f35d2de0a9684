"""Worker groups: actors on the bundles of a pool, driven as one object.

    RayClassWithInitArgs + RayResourcePool -> actors seated by (node, bundle) -> rank 0's store -> all join -> __init__

The start is submitted as a whole and not waited for, so that groups start beside each other. Each method that
`register` marked becomes a method of the group. The workers are plain actors besides: any method can be called on
their handles.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_runtime.single_controller.calls import Span, WorkerFuture
from rlhf_runtime.single_controller.colocated import ColocatedWorker
from rlhf_runtime.single_controller.decorator import (
    Call,
    Dispatch,
    Execute,
    Mode,
    PerRank,
    Registration,
    Shared,
    mode_of,
    registered_methods,
)
from rlhf_runtime.single_controller.environment import allowed
from rlhf_runtime.single_controller.gather import gather
from rlhf_runtime.single_controller.health import HealthMonitor
from rlhf_runtime.single_controller.host import Answer, hosted
from rlhf_runtime.single_controller.pulse import Beacon
from rlhf_runtime.single_controller.resource_pool import RayResourcePool, node_addresses
from rlhf_runtime.single_controller.seating import join_devices, seat_workers
from rlhf_runtime.single_controller.verdict import Member
from rlhf_runtime.single_controller.worker import RayClassWithInitArgs, Worker

_INLINE = (bool, int, float, type(None), ray.ObjectRef, ActorHandle)
"""Types that several ranks are given as they are; everything else that they share is put into the object store."""


class RayWorkerGroup:
    """Workers of one class on the bundles of a pool. They start in the background; `wait_ready` waits for that.

    Args:
        pool: The created pool.
        ray_cls_with_init: The worker class and its arguments.
        device: `cpu` or `cuda`; obeyed, never guessed.
        num_cpus: Ray CPUs that each worker takes out of its bundle.
        num_gpus: Ray GPUs that each worker takes out of its bundle; default all of them.
        visible_devices_from: A group on the same pool whose GPUs the workers see, bundle by bundle, without taking any
            of their own (the hybrid engine).
        bundles_per_worker: Neighbouring bundles of one node that a worker holds. It takes its resources out of the
            first and sees the devices of the siblings on all of them, as an engine with tensor parallelism has to.
        name: Name for messages; default the pool's.
        timeout_seconds: How long ranks wait for each other, at the start and in collectives.
        health: Told of the workers, so that one that dies or stands still is named and ends all.
    """

    def __init__(
        self,
        pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        device: str = "cpu",
        num_cpus: float = 0.0,
        num_gpus: float | None = None,
        visible_devices_from: "RayWorkerGroup | None" = None,
        bundles_per_worker: int = 1,
        name: str | None = None,
        timeout_seconds: float = 600.0,
        health: HealthMonitor | None = None,
    ):
        self.name = name or pool.name
        self.cls = ray_cls_with_init.cls
        self._pool = pool
        self._workers: list[ActorHandle] = []
        self._ready = False
        self._health = health
        self._beacon: Beacon | None = None
        self._spans: list[Span] = []
        gpus = pool.bundle.get("GPU", 0.0) if num_gpus is None else num_gpus
        bundle_nodes = pool.bundle_nodes
        seats = seat_workers(self.name, bundle_nodes, device, bundles_per_worker)
        environments = [allowed(os.environ, self.cls.env_allow_list) for _ in seats]
        if visible_devices_from is not None:
            gpus = 0.0
            shown = self._siblings(visible_devices_from, bundles_per_worker)
            environments = [own | devices for own, devices in zip(environments, shown, strict=True)]
        addresses = node_addresses()
        roles = tuple(self.cls.role_classes) if issubclass(self.cls, ColocatedWorker) else ()
        nodes = [bundle_nodes[held[0]] for _, held in seats]
        self._members = [
            Member(self.name, seat.rank, addresses[node], node_id=node, roles=roles)
            for (seat, _), node in zip(seats, nodes, strict=True)
        ]
        if health is not None:
            patience = timeout_seconds if self.cls.needs_process_group else None
            self._beacon = health.watch(self._members, patience, partial(_kill, self._workers))
        actor = ray.remote(num_cpus=num_cpus, num_gpus=gpus)(hosted(self.cls))
        try:
            for (seat, held), environment in zip(seats, environments, strict=True):
                options: dict[str, Any] = {"runtime_env": {"env_vars": environment}} if environment else {}
                strategy = PlacementGroupSchedulingStrategy(pool.placement_group, held[0])
                self._workers.append(
                    actor.options(scheduling_strategy=strategy, **options).remote(seat, timeout_seconds, self._beacon)
                )
            self._start(ray_cls_with_init)
            if health is not None and self._beacon is not None:
                health.attend(self._beacon, self._entered)
        except BaseException:
            self.shutdown()
            raise
        _attach(self, self.cls, self)

    def _siblings(self, group: "RayWorkerGroup", bundles_per_worker: int) -> list[dict[str, str]]:
        """Environment a rank that shows it the devices of the other group's workers on its bundles."""
        if group._pool is not self._pool or group.world_size != self._pool.workers:
            got = f"{group.world_size} workers on pool `{group._pool.name}`"
            raise ValueError(f"visible_devices_from: got {got}; expected one a bundle of the same pool")
        if "GPU" not in self._pool.bundle:
            return [{} for _ in range(self._pool.workers // bundles_per_worker)]
        # vLLM takes what is free of a GPU while it starts, so the sibling's model has to be there before.
        group.wait_ready()
        devices: list[str] = gather(group._submit("host_devices", Call((), {})), group._members, group._health)
        return [
            {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            for visible in join_devices(devices, bundles_per_worker)
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
            pids = gather(self._entered, self._members, self._health)
            self._members = [replace(member, pid=pid) for member, pid in zip(self._members, pids, strict=True)]
            gather(self._constructed, self._members, self._health)
        except BaseException:
            self.shutdown()
            raise
        self._entered, self._constructed = [], []
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
        if self._health is not None and self._beacon is not None:
            self._health.forget(self._beacon)
        _kill(self._workers)
        self._workers = []

    def async_run_method_batch(
        self, method: str, /, *args: Any, mode: Dispatch | Mode = Dispatch.DP_COMPUTE_SHARD, **kwargs: Any
    ) -> WorkerFuture:
        """Call any method of the workers with a batch, without waiting.

        The batch is cut here; each chunk is serialised once and its rank alone gets it, through the object store where
        it is large.

        Args:
            method: Name of the method; `register` need not have marked it.
            args: Its arguments.
            mode: How they reach the ranks.
            kwargs: Its arguments by name.
        """
        return self._call((method,), Registration(mode, Execute.ALL, blocking=False), *args, **kwargs)

    def take_spans(self) -> list[Span]:
        """When each rank worked on the calls that were collected since the last time."""
        taken, self._spans = self._spans, []
        return taken

    def _call(self, path: tuple[str, ...], how: Registration, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method at `path`, `(method,)` or `(role, method)`: its result, or a future where `how` says so."""
        mode = mode_of(how.dispatch_mode)
        call = mode.dispatch(self.world_size, args, kwargs)
        if how.execute_mode is Execute.RANK_ZERO:
            call = replace(call, ranks=(0,))
        refs = self._submit("host_call", call, path)
        future = WorkerFuture(partial(self._collect, path, mode, replace(call, args=(), kwargs={}), refs))
        return future.get() if how.blocking else future

    def _collect(self, path: tuple[str, ...], mode: Mode, call: Call, refs: list[ray.ObjectRef]) -> Any:
        """Wait for a call, keep its spans, and make its results one."""
        self.wait_ready()
        ranks = self._ranks(call)
        answers: list[Answer] = gather(refs, [self._members[rank] for rank in ranks], self._health)
        *role, method = path
        for rank, answer in zip(ranks, answers, strict=True):
            self._spans += [Span(self.name, None, name, rank, start, end) for name, start, end in answer.direct]
            self._spans.append(Span(self.name, role[0] if role else None, method, rank, answer.start, answer.end))
        return mode.collect(call, [answer.value for answer in answers])

    def _ranks(self, call: Call) -> Sequence[int]:
        return range(self.world_size) if call.ranks is None else call.ranks

    def _submit(self, method: str, call: Call, *leading: Any) -> list[ray.ObjectRef]:
        """One call a rank of the actor's own method, with `leading` before the arguments of each."""
        ranks = self._ranks(call)
        args = [_sent(argument, ranks) for argument in call.args]
        kwargs = {name: _sent(argument, ranks) for name, argument in call.kwargs.items()}
        return [
            getattr(self._workers[rank], method).remote(
                *leading, *(values[at] for values in args), **{name: values[at] for name, values in kwargs.items()}
            )
            for at, rank in enumerate(ranks)
        ]


class WorkerGroupView:
    """One role of a colocated group: that role's methods on the group's workers."""

    def __init__(self, group: RayWorkerGroup, role: str, cls: type[Worker]):
        self.group = group
        self.role = role
        _attach(self, cls, group, role)

    @property
    def workers(self) -> list[ActorHandle]:
        """Handles in rank order, which those of the group's other roles are too."""
        return self.group.workers

    @property
    def world_size(self) -> int:
        """How many workers."""
        return self.group.world_size

    def async_run_method_batch(
        self, method: str, /, *args: Any, mode: Dispatch | Mode = Dispatch.DP_COMPUTE_SHARD, **kwargs: Any
    ) -> WorkerFuture:
        """`RayWorkerGroup.async_run_method_batch` on this role."""
        how = Registration(mode, Execute.ALL, blocking=False)
        return self.group._call((self.role, method), how, *args, **kwargs)

    def take_spans(self) -> list[Span]:
        """When each rank worked on this role's calls that were collected since the last time."""
        spans = self.group.take_spans()
        self.group._spans = [span for span in spans if span.role != self.role]
        return [span for span in spans if span.role == self.role]

    def wait_ready(self) -> None:
        """Wait until every worker's `__init__` is done, or raise what it raised."""
        self.group.wait_ready()

    def shutdown(self) -> None:
        """Kill the workers, which are those of the group's other roles too."""
        self.group.shutdown()


def _attach(target: object, cls: type[Worker], group: RayWorkerGroup, *role: str) -> None:
    """Give a group or view the registered methods of a worker class."""
    for method, registration in registered_methods(cls).items():
        if hasattr(target, method):
            raise ValueError(f"{cls.__name__}.{method}: got a name that worker groups use; expected another")
        setattr(target, method, partial(group._call, (*role, method), registration))


def _kill(workers: Sequence[ActorHandle]) -> None:
    """End the workers, as many of them as there are by now."""
    for worker in tuple(workers):
        ray.kill(worker)


def _sent(argument: Shared | PerRank, ranks: Sequence[int]) -> list[Any]:
    """What the call of each of these ranks carries of an argument, so that each value is serialised once.

    Ray itself puts a large one into the object store, and lets a small one travel with its call.
    """
    if isinstance(argument, PerRank):
        return [argument.values[rank] for rank in ranks]
    value = argument.value
    alone = len(ranks) == 1 or isinstance(value, _INLINE)
    return [value if alone else ray.put(value)] * len(ranks)
