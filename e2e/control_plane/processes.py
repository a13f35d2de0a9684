"""Processes that end with whoever started them, each with a log of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.05


class StartError(Exception):
    """A process ended, or was not ready in time; the message ends with the last lines of its log."""


@dataclass
class Process:
    """One program that runs.

    Attributes:
        name: Name of the program, and of its log.
        command: Program and arguments.
        log: File that holds what it says.
        env: Environment beside the caller's.
    """

    name: str
    command: Sequence[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the program; it dies with this process, however that ends."""
        # Linux tells a child when its parent is gone: a test session that is killed leaves nothing behind.
        guard = [tool, "--pdeathsig", "KILL"] if (tool := shutil.which("setpriv")) else []
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *self.command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | self.env
            )

    @property
    def pid(self) -> int:
        """Id of the process, which has been started."""
        assert self._process
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself or was stopped."""
        return self._process is None or self._process.poll() is not None

    def stop(self, patience: float = 0) -> None:
        """Ends the program: with `patience` seconds for an orderly end, then at once."""
        if self._process is None:
            return
        if patience and not self.ended:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stops it from answering: connections stay open and silent."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets a paused program go on."""
        os.kill(self.pid, signal.SIGCONT)

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until(self, what: str, ready: Callable[[], bool], seconds: float = 60) -> None:
        """Waits for a condition for as long as the program runs.

        Args:
            what: What is waited for, in words.
            ready: Tells whether it is so.
            seconds: How long to wait at most.

        Raises:
            StartError: When the program ended, or the time is over.
        """
        end = time.monotonic() + seconds
        while not ready():
            if self.ended:
                raise StartError(f"{self.name} ended while waiting for {what}; {self.log}:\n{self.tail()}")
            if time.monotonic() > end:
                raise StartError(f"{self.name}: no {what} within {seconds:.0f} s; {self.log}:\n{self.tail()}")
            time.sleep(POLL_SECONDS)


def reserve_port() -> socket.socket:
    """A free port of the loopback interface that nobody else is given while the socket is open.

    The socket does not listen. Who binds with SO_REUSEPORT, as kube-apiserver does with --permit-port-sharing, takes
    the port over without a moment in which another could.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    return holder
