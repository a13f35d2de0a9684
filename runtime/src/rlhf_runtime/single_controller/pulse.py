"""The sign of life of a worker: one thread and one connection to the driver's monitor, a line of JSON a second.

    hello  {"token", "rank", "pid", "started", "oom_kills"}
    beat   {"activity", "since", "collectives", "at", "waits", "cpu_seconds", "killed", "stopped"}
           each second, and when a call begins or ends
    bye    {"bye": true}
           before the process ends itself

What comes between is text: a fatal signal writes its name and the stack straight to the connection. A monitor that
cannot be reached, or is gone, never harms the worker. Imports neither Ray nor torch.
"""

import atexit
import faulthandler
import json
import multiprocessing.process
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from dataclasses import asdict, dataclass, field
from types import FrameType

from rlhf_runtime.single_controller.probe import Reading, oom_kills, this_process

BEAT_SECONDS = 1.0
"""From one beat to the next."""
PAUSE_SECONDS = 0.1
"""At least so long between beats, however short the calls are."""
STOPPED_SECONDS = 8.0
"""A child process that is stopped for so long is ended: what waits for it would wait for ever."""
IO_SECONDS = 5.0
"""How long a connection or a line may take."""

Activity = tuple[str, float] | None
"""The method that runs and since when, in seconds since the epoch; None between calls."""

_STDERR = 2
_CHILDREN = 4
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_OURS = f"{os.sep}rlhf_runtime{os.sep}"
_HOST = os.path.dirname(__file__)
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_DECORATORS = frozenset({"wrapper", "inner", "decorate_context"})


@dataclass(frozen=True)
class Beacon:
    """Where a group's workers send their signs of life."""

    host: str
    """Address of the driver's node."""
    port: int
    """Port of the monitor."""
    token: str = field(repr=False)
    """Secret that tells the monitor which group it is."""


@dataclass(frozen=True)
class Beat:
    """What a worker does."""

    activity: str | None = None
    """The method that runs."""
    since: float = 0.0
    """Since when, in seconds since the epoch on the worker's clock."""
    collectives: int = 0
    """How many collectives of its process group it has begun; ranks that wait for others are ahead of them."""
    at: str = ""
    """Where its main thread stands outside of libraries, as `file.py:line function`."""
    waits: str = ""
    """The function of torch.distributed that one of its threads stands in."""
    cpu_seconds: float = 0.0
    """CPU time that it and its child processes have used."""
    killed: tuple[str, ...] = ()
    """Its latest child processes that ended by a signal, for people."""
    stopped: tuple[str, ...] = ()
    """Its latest child processes that were stopped and so ended here, for people."""


class Pulse:
    """Sends beats from the process that it is made in, until `stop` or the end of the process.

    Args:
        beacon: Where to.
        rank: Rank in the group.
    """

    def __init__(self, beacon: Beacon, rank: int) -> None:
        self._beacon = beacon
        self._rank = rank
        self._activity: Activity = None
        self._news = threading.Event()
        self._stopped = False
        self._socket: socket.socket | None = None
        self._children = Children()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Connect and beat in the background."""
        os.register_at_fork(after_in_child=self._hang_up)
        atexit.register(self.stop)
        self._thread.start()

    def tell(self, activity: Activity) -> None:
        """Say at once what the worker does from now on."""
        self._activity = activity
        self._news.set()

    def stop(self) -> None:
        """Take leave, so that the end of this process is not taken for a death by signal."""
        self._stopped = True
        self._news.set()
        self._thread.join(IO_SECONDS)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._socket = socket.create_connection((self._beacon.host, self._beacon.port), timeout=IO_SECONDS)
                self._speak(self._socket)
            except OSError:
                self._news.clear()
                self._news.wait(BEAT_SECONDS)
            finally:
                self._hang_up()

    def _speak(self, connection: socket.socket) -> None:
        """Beat over one connection until it breaks or the pulse is stopped.

        Its time-out makes the connection one that never blocks, so that a crash is not held up by a monitor that does
        not read.
        """
        process = this_process()
        hello = {"token": self._beacon.token, "rank": self._rank, "oom_kills": oom_kills()} | asdict(process)
        _send(connection, hello)
        faulthandler.enable(file=connection, all_threads=False)
        faulthandler.register(signal.SIGTERM, file=connection, all_threads=False, chain=True)
        while True:
            self._news.clear()
            self._children.look()
            _send(connection, asdict(beat_of(self._activity, self._children)))
            time.sleep(PAUSE_SECONDS)
            self._news.wait(BEAT_SECONDS - PAUSE_SECONDS)
            if self._stopped:
                _send(connection, {"bye": True})
                return

    def _hang_up(self) -> None:
        """Close the connection, here or in a forked child, which would keep it open beyond the worker's death."""
        if self._socket is not None:
            faulthandler.enable(file=_STDERR, all_threads=False)  # its number may become another file's
            faulthandler.unregister(signal.SIGTERM)
            self._socket.close()
            self._socket = None


class Children:
    """The processes that this one has started by multiprocessing, such as those of a tensor-parallel engine."""

    def __init__(self) -> None:
        self._alive: set[multiprocessing.process.BaseProcess] = set()
        self._stopped_for: dict[multiprocessing.process.BaseProcess, float] = {}
        """Seconds for which each was seen stopped at every look; a look that came late says nothing of the time before,
        as this process may have been stopped along with them."""
        self._looked = time.monotonic()
        self.killed: tuple[str, ...] = ()
        """The latest ones that ended by a signal, for people."""
        self.cpu_seconds = 0.0
        """CPU time that those have used which are alive."""
        self.stopped: tuple[str, ...] = ()
        """The latest ones that were stopped and ended here."""

    def look(self) -> None:
        """See what became of them, and end those that are stopped. Leaves it to their owner to wait for them."""
        self._alive |= multiprocessing.process._children  # type: ignore[attr-defined]
        last, self._looked = self._looked, time.monotonic()
        seconds, self.cpu_seconds = min(self._looked - last, BEAT_SECONDS), 0.0
        processes = {child: child._popen for child in self._alive}  # type: ignore[attr-defined]
        for child, process in processes.items():
            if process is not None and process.returncode is None:
                reading = Reading.of(process.pid)
                self.cpu_seconds += reading.cpu_seconds if reading else 0.0
                stopped_for = self._stopped_for.get(child, 0.0) + seconds if reading and reading.stopped else 0.0
                if stopped_for > STOPPED_SECONDS:
                    child.kill()
                    self.stopped = (*self.stopped, f"{child.name}, pid {process.pid}")[-_CHILDREN:]
                    stopped_for = 0.0
                self._stopped_for[child] = stopped_for
                continue
            self._alive.remove(child)
            self._stopped_for.pop(child, None)
            if process is not None and process.returncode < 0:
                by = signal.Signals(-process.returncode).name
                self.killed = (*self.killed, f"{child.name}, pid {process.pid}, by {by}")[-_CHILDREN:]


def beat_of(activity: Activity, children: Children) -> Beat:
    """What this process does now."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    method, since = activity or (None, 0.0)
    waits = next(filter(None, map(_collective, frames.values())), "")
    return Beat(
        activity=method,
        since=since,
        collectives=_collectives_begun(),
        at=_place(main),
        waits=waits,
        cpu_seconds=time.process_time() + children.cpu_seconds,
        killed=children.killed,
        stopped=children.stopped,
    )


def _collectives_begun() -> int:
    """The count that torch keeps for the default process group; 0 where there is none."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        group = module.GroupMember.WORLD  # type: ignore[union-attr]
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0


def _place(frame: FrameType | None) -> str:
    """The innermost frame that is a worker's and no library's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if (_OURS in file and not file.startswith(_HOST)) or not file.startswith((*_LIBRARIES, _HOST, "<")):
            return f"{os.path.basename(file)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _collective(frame: FrameType | None) -> str:
    """The innermost function of torch.distributed on a stack."""
    while frame is not None:
        name = frame.f_code.co_name
        if _DISTRIBUTED in frame.f_code.co_filename and name not in _DECORATORS:
            return name
        frame = frame.f_back
    return ""


def _send(connection: socket.socket, line: dict[str, object]) -> None:
    connection.sendall(json.dumps(line).encode() + b"\n")
