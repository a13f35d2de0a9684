"""A gloo group of our own: the sending trainer rank, and every worker of every engine.

Nobody picks a port: gloo finds the rest of the group through the store that they meet at.
"""

import socket
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Thread
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work

from rlhf_runtime.weight_sync.meeting import POLL_SECONDS, Meeting, lost
from rlhf_runtime.weight_sync.pipeline import Wait

POLL = timedelta(seconds=POLL_SECONDS)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the network that `host` is reached through; nothing is sent."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class BroadcastGroup:
    """Rank 0 sends, everyone else receives."""

    def __init__(self, meeting: Meeting, rank: int, size: int, host: str, timeout_seconds: float) -> None:
        """Join, which waits for all others.

        Args:
            meeting: Where the group meets.
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
        self._meeting = meeting
        self._count, self._moves = count(), dict[int, Work]()
        try:
            self._group: ProcessGroupGloo | None = meeting.join(
                lambda store: ProcessGroupGloo(store, rank, size, options)
            )
        except RuntimeError as error:
            raise lost(str(error)) from error

    def start(self, data: torch.Tensor, timeout_seconds: float) -> Wait:
        """Begin to send or receive `data`, uint8 [N], which belongs to the group until the returned wait is over.

        The wait raises `ConnectionLostError` when another process closed the group, died, or took too long.
        """
        if self._group is None:
            raise lost("the group is closed")
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(timeout_seconds, 0.001))
        move = next(self._count)
        self._moves[move] = self._group.broadcast([data], options)
        return partial(self._wait, move)

    def _wait(self, move: int) -> None:
        """Wait for a move. Gloo does not notice a connection that breaks in the middle of a message it receives."""
        while not self._ended(move):
            self._meeting.require_everyone()
        del self._moves[move]

    def _ended(self, move: int) -> bool:
        """Give a move a moment. No frame holds it, as an error's traceback would keep the connections open with it."""
        with suppress(RuntimeError):
            self._moves[move].wait(POLL)
            return True
        if not self._moves[move].is_completed():
            return False
        try:
            # It may have ended well since the moment was over: this alone tells.
            self._moves[move].wait(POLL)
        except RuntimeError as error:
            raise lost(str(error)) from error
        return True

    def close(self) -> None:
        """Leave the group: whoever waits for this process fails within `POLL`.

        Gloo closes its connections with the last reference to the group and its moves, and waits for what was started;
        so that is left to a thread.
        """
        if self._group is None:
            return
        self._meeting.leave()
        last: list[Any] = [self._group, *self._moves.values()]
        self._group = None
        self._moves = {}
        Thread(target=last.clear, daemon=True).start()
