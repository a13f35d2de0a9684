"""What the kernel knows of a process: gone, stopped, at work or waiting. Runs on the process' own node."""

import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["gone", "stopped", "working", "waiting"]
"""`working` uses a CPU or waits for a disk; `waiting` does neither."""

SAMPLE_SECONDS = 1.0
"""How long a process is looked at before it is said to wait."""
WORKING_SHARE = 0.1
"""Share of one CPU from which on a process works; the threads of Ray that every worker has use less."""

_STOPPED = "T"
_DEAD = ("Z", "X")
_DISK = "D"


@dataclass(frozen=True)
class ProcessId:
    """One process, told apart from a later one that was given its number."""

    pid: int
    """Its number."""
    started: int
    """When the kernel started it, in clock ticks since boot."""


@dataclass(frozen=True)
class Finding:
    """What was found."""

    state: State
    """Of the process."""
    oom_kills: int
    """How many processes of this node's cgroup the kernel has killed for memory."""
    pid: int | None = None
    """Number of the process."""


@dataclass(frozen=True)
class Reading:
    """One look at a process."""

    states: frozenset[str]
    """The kernel's letters for all of its threads."""
    cpu_ticks: int
    """CPU time that it has used, in clock ticks."""
    started: int
    """As in `ProcessId`."""
    parent: int
    """Process id of its parent."""

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP."""
        return _STOPPED in self.states

    @property
    def cpu_seconds(self) -> float:
        """CPU time that it has used."""
        return self.cpu_ticks / os.sysconf("SC_CLK_TCK")

    @classmethod
    def of(cls, pid: int) -> "Reading | None":
        """The reading of a process that is there and no zombie."""
        try:
            fields = _stat(Path(f"/proc/{pid}/stat"))
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            return None
        if fields[0] in _DEAD:
            return None
        states = {fields[0]}
        for thread in threads:
            try:
                states.add(_stat(thread / "stat")[0])
            except OSError:
                continue  # the thread ended while we looked
        return cls(frozenset(states), int(fields[11]) + int(fields[12]), int(fields[19]), int(fields[1]))


def this_process() -> ProcessId:
    """The calling process."""
    reading = Reading.of(os.getpid())
    return ProcessId(os.getpid(), reading.started if reading else 0)


def oom_kills() -> int:
    """How many processes of this process' cgroup the kernel has killed for memory; 0 where it does not say."""
    for path in _memory_events():
        try:
            counts = dict(line.split()[:2] for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return 0


def examine(process: ProcessId, fatal: Collection[State]) -> Finding:
    """Look at a process, and end it by SIGKILL where it is in one of the `fatal` states."""
    state = _state(process)
    if state != "gone" and state in fatal:
        _kill(process.pid)
    return Finding(state, oom_kills(), process.pid)


def examine_siblings() -> Finding:
    """Look for a stopped process among those that this one's parent started, and end it by SIGKILL.

    On a Ray node these are its workers: so is found what was stopped before it could say who it is.
    """
    for entry in Path("/proc").iterdir():
        reading = Reading.of(int(entry.name)) if entry.name.isdigit() else None
        if reading and reading.parent == os.getppid() and reading.stopped:
            _kill(int(entry.name))
            return Finding("stopped", oom_kills(), int(entry.name))
    return Finding("working", oom_kills())


def _state(process: ProcessId) -> State:
    first = Reading.of(process.pid)
    if first is None or first.started != process.started:
        return "gone"
    if first.stopped:
        return "stopped"
    time.sleep(SAMPLE_SECONDS)
    second = Reading.of(process.pid)
    if second is None or second.started != process.started:
        return "gone"
    if second.stopped:
        return "stopped"
    used = second.cpu_seconds - first.cpu_seconds
    return "working" if used >= WORKING_SHARE * SAMPLE_SECONDS or _DISK in second.states else "waiting"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _stat(path: Path) -> list[str]:
    """The fields of a stat file from the state on: the name before it may hold spaces and parentheses."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _memory_events() -> list[Path]:
    """Where the kernel may count what it killed for memory: cgroup v2 and v1, as this process and as a container sees.

    Inside a container the paths of v1 are often the host's, which its own mount does not have.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [Path(f"/sys/fs/cgroup{path}/memory.events"), Path("/sys/fs/cgroup/memory.events")]
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            found += [Path(f"{root}{path}/memory.oom_control"), root / "memory.oom_control"]
    return found
