"""Where the sender and every worker of every engine meet before they build a group, and learn that one has left.

Neither gloo nor NCCL can be made to give up on a process that does not come, so nobody starts to build before all are
here, and nobody waits for what is being built once one of them has left.
"""

import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, Self, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from rlhf_runtime import store
from rlhf_runtime.errors import ConnectionLostError
from rlhf_runtime.weight_sync.client import EngineCall, background

T = TypeVar("T")

POLL_SECONDS = 1.0
"""How often a process that waits for data looks whether the others are still there."""


class Meeting:
    """One process's place in a meeting, which serves for one group."""

    def __init__(self, place: TCPStore, size: int, timeout_seconds: float) -> None:
        """Take the store.

        Args:
            place: The store.
            size: Processes that are to come.
            timeout_seconds: How long they may take.
        """
        self._store, self._size, self._timeout_seconds = place, size, timeout_seconds

    @classmethod
    def open(cls, host: str, size: int, timeout_seconds: float) -> Self:
        """A new meeting at a free port of this machine's address `host`."""
        return cls(store.open_store(host, timeout_seconds), size, timeout_seconds)

    @classmethod
    def find(cls, host: str, port: int, size: int, timeout_seconds: float) -> Self:
        """The meeting that another process opened.

        Raises:
            ConnectionLostError: when it does not answer.
        """
        try:
            place = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise lost(str(error)) from error
        return cls(place, size, timeout_seconds)

    @property
    def port(self) -> int:
        """Where it is."""
        return self._store.port

    def join(self, build: Callable[[Store], T]) -> T:
        """Wait for everyone, then build the group.

        Args:
            build: Makes this process's part of the group, in a thread of its own; gets a store for that.

        Raises:
            ConnectionLostError: when another process left or did not come in time, or the group was not built in time.
            Exception: as `build` raised it.
        """
        deadline = time.monotonic() + self._timeout_seconds
        # A connection of its own: one that waits lets no other thread use it.
        place = self._store.clone()
        try:
            if place.add("here", 1) == self._size:
                place.set("go", "")
            place.wait(["go"])
        except RuntimeError as error:
            raise lost(str(error)) from error
        self.require_everyone()
        building = background(lambda: build(PrefixStore("group", place)))
        while not wait([building], POLL_SECONDS).done:
            self.require_everyone()
            if time.monotonic() > deadline:
                raise lost(f"no group within {self._timeout_seconds:g} s")
        return building.result()

    def require_everyone(self) -> None:
        """Look whether all are still there.

        Raises:
            ConnectionLostError: when one of them left.
        """
        try:
            left = self._store.check(["left"])
        except RuntimeError as error:
            raise lost(str(error)) from error
        if left:
            raise lost("a process left the group")

    def leave(self) -> None:
        """Tell the others, who leave too: at once while they wait for all to come, else within `POLL_SECONDS`."""
        try:
            self._store.set("left", "")
            self._store.set("go", "")
        except RuntimeError:
            return  # the sender's process has ended, and the store with it: the others see that too


def join_engines(meeting: Meeting, joining: EngineCall, join: Callable[[], T]) -> T:
    """The sender's side of a handshake: what `join` gives, once every engine has joined too.

    Args:
        meeting: Where they meet.
        joining: The handshake, on its way to the engines.
        join: Joins the meeting.

    Raises:
        Exception: what went wrong first, on an engine or here; everyone else is told to leave.
    """
    joined = background(join)
    try:
        joining.wait()
        return joined.result()
    except Exception as error:
        meeting.leave()
        # Engines that were told to leave by one that failed may have answered before it.
        raise joining.cause_of(error) from error


def group_rank(engine: Any, rank_offset: int) -> int:
    """A worker's rank in the group, by vLLM's `ParallelConfig` of its engine and the rank of the engine's first."""
    return rank_offset + engine.data_parallel_index * engine.world_size + engine.rank


def lost(why: str) -> ConnectionLostError:
    """The error of whoever waited in vain."""
    return ConnectionLostError(
        f"weightSync: got a broken connection between trainer and engines ({why}); expected all of them to stay "
        "until every bucket arrived. Fix: see which of them failed first, and the network between their nodes"
    )
