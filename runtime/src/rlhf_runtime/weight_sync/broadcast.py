"""A gloo group of our own: the sending trainer rank, and every worker of every engine.

Nobody picks a port: the sender's store binds a free one and tells it to the engines, and gloo finds the rest through
the store.
"""

import socket
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Thread
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from rlhf_runtime.errors import ConnectionLostError
from rlhf_runtime.weight_sync.pipeline import Wait

POLL = timedelta(seconds=1)
"""How often a process that waits for data looks whether the others are still there."""


def open_store(host: str, timeout_seconds: float) -> TCPStore:
    """Bind a free port of this machine's address `host`, for the group to meet at."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))


def find_store(host: str, port: int, timeout_seconds: float) -> TCPStore:
    """The store that another process opened.

    Raises:
        ConnectionLostError: when it does not answer.
    """
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise _lost(str(error)) from error


def address_towards(host: str, port: int) -> str:
    """This machine's address on the network that `host` is reached through; nothing is sent."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class BroadcastGroup:
    """Rank 0 sends, everyone else receives."""

    def __init__(self, store: TCPStore, rank: int, size: int, host: str, timeout_seconds: float) -> None:
        """Join, which waits for all others.

        Args:
            store: Where the group meets.
            rank: This process.
            size: Processes of the group.
            host: This machine's address, as the others reach it.
            timeout_seconds: How long to wait for them.

        Raises:
            ConnectionLostError: when not all came.
        """
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 2
        self._store = PrefixStore("weights", store)
        self._count, self._moves = count(), dict[int, Work]()
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(self._store, rank, size, options)
        except RuntimeError as error:
            raise _lost(str(error)) from error

    def start(self, data: torch.Tensor, timeout_seconds: float) -> Wait:
        """Begin to send or receive `data`, uint8 [N], which belongs to the group until the returned wait is over.

        The wait raises `ConnectionLostError` when another process closed the group, died, or took too long.
        """
        if self._group is None:
            raise _lost("the group is closed")
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(timeout_seconds, 0.001))
        move = next(self._count)
        self._moves[move] = self._group.broadcast([data], options)
        return partial(self._wait, move)

    def _wait(self, move: int) -> None:
        """Wait for a move. No frame holds it, as an error's traceback would keep the connections open with it."""
        while True:
            try:
                self._moves[move].wait(POLL)
                break
            except RuntimeError as error:
                if self._moves[move].is_completed():
                    raise _lost(str(error)) from error
            self._require_everyone()
        del self._moves[move]

    def _require_everyone(self) -> None:
        """Gloo does not notice a connection that breaks in the middle of a message that it receives."""
        try:
            left = self._store.check(["left"])
        except RuntimeError as error:
            raise _lost(str(error)) from error
        if left:
            raise _lost("a process left the group")

    def close(self) -> None:
        """Leave the group: whoever waits for this process fails within `POLL`.

        Gloo closes its connections with the last reference to the group and its moves, and waits for what was started;
        so that is left to a thread.
        """
        if self._group is None:
            return
        with suppress(RuntimeError):
            self._store.set("left", "1")
        last: list[Any] = [self._group, *self._moves.values()]
        self._group = None
        self._moves = {}
        Thread(target=last.clear, daemon=True).start()


def _lost(why: str) -> ConnectionLostError:
    return ConnectionLostError(
        f"weightSync: got a broken connection between trainer and engines ({why}); expected all of them to stay "
        "until every bucket arrived. Fix: see which of them failed first, and the network between their nodes"
    )
