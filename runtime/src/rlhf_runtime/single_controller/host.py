"""The actor around a worker: it starts the worker in steps, and every call of a group goes through its `host_call`.

What others call on the actor's handle is watched and timed as well, and told with the next answer to the group.
"""

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import ray

from rlhf_runtime.single_controller.pulse import Beacon, Pulse
from rlhf_runtime.single_controller.worker import Rendezvous, Seat, Worker

Run = tuple[str, float, float]
"""A method, when it started and when it ended, in seconds since the epoch on the worker's clock."""


@dataclass(frozen=True)
class Answer:
    """What a call gave, and when it ran, in seconds since the epoch on the worker's clock."""

    value: Any
    start: float
    end: float
    direct: tuple[Run, ...] = ()
    """What ran since the latest answer, called on the actor's handle and not by its group."""


def hosted(cls: type[Worker]) -> type[Worker]:
    """The worker class as an actor, whose own `__init__` runs once its seat and process group are there."""

    class Host(cls):  # type: ignore[misc, valid-type]
        def __init__(self, seat: Seat, timeout_seconds: float, beacon: Beacon | None):
            self._host_pulse = Pulse(beacon, seat.rank) if beacon else None
            if self._host_pulse:
                self._host_pulse.start()
            self._host_busy = False
            self._host_direct: list[Run] = []
            self.seat = replace(seat, address=ray.util.get_node_ip_address())
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
            with self._host_activity("join"):
                self._host_rendezvous.join(address)

        def host_construct(self, joined: int | None, *args: Any, **kwargs: Any) -> None:
            with self._host_activity("__init__"):
                cls.__init__(self, *args, **kwargs)

        def host_call(self, path: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Answer:
            """Call the method that a path names: `(method,)`, or `(role, method)` of a colocated role."""
            *role, method = path
            start = time.time()
            with self._host_activity(".".join(path)):
                target = self.worker_of(*role) if role else self
                value = getattr(target, method)(*args, **kwargs)
            direct, self._host_direct = tuple(self._host_direct), []
            return Answer(value, start, time.time(), direct)

        @contextmanager
        def _host_activity(self, name: str) -> Iterator[None]:
            """Tell the health monitor what this worker does meanwhile."""
            tell = self._host_pulse.tell if self._host_pulse else lambda activity: None
            tell((name, time.time()))
            self._host_busy = True
            try:
                yield
            except Exception:  # not the SystemExit that ends the process here
                self._host_busy = False
                tell(None)
                raise
            self._host_busy = False
            tell(None)

    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(Host, name, _watched(method))
    Host.__name__ = Host.__qualname__ = cls.__name__
    return Host


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as others find it on the actor: within a call it is a part of that, alone it is one of its own."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._host_busy:
            return method(self, *args, **kwargs)
        start = time.time()
        try:
            with self._host_activity(method.__name__):
                return method(self, *args, **kwargs)
        finally:
            self._host_direct.append((method.__name__, start, time.time()))

    return call
