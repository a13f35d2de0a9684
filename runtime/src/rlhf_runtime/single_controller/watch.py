"""What the driver concludes from signs of life. Pure: no socket, thread, clock or Ray.

    expect -> hello, beat, trace, lost -> questions -> answer -> verdict

A member whose connection ends, that was silent for long, or that never said hello, is suspected, and its node is asked.
The first verdict stands: what fails later follows from it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlhf_runtime.errors import InfrastructureError
from rlhf_runtime.single_controller.probe import Finding, ProcessId, State
from rlhf_runtime.single_controller.pulse import Beat

SILENCE_SECONDS = 10.0
"""Without a sign of life for so long, a member is suspected."""
PATIENCE_SECONDS = 120.0
"""How long a process that works may be silent: it holds Python's lock, as some imports and extensions do."""
PROBE_SECONDS = 15.0
"""How long a node may take to answer a question."""
PROBE_AGAIN_SECONDS = 5.0
"""From an answer to the next question about the same member."""
COLLECTIVE_SHARE = 0.9
"""Share of a group's time-out that its ranks may wait for one of them, so that this is told before torch gives up."""
TRACE_LINES = 60
"""Most lines that are kept of what a crash wrote."""

_FATAL = re.compile(r"Fatal Python error: (.*)")
_FRAME = re.compile(r'File "(?:.*/)?(.+)", line (\d+) in (.+)')
_SHOWN_FRAMES = 3


@dataclass(frozen=True)
class Member:
    """One worker as messages name it."""

    group: str
    rank: int
    node: str
    """Address of its node."""
    pid: int | None = None
    node_id: str = ""
    """Ray's id of its node."""
    roles: tuple[str, ...] = ()
    """The roles that share its process, where there are several."""

    def __str__(self) -> str:
        pid = "not started" if self.pid is None else f"pid {self.pid}"
        roles = f": {', '.join(self.roles)}" if self.roles else ""
        return f"group `{self.group}`, rank {self.rank} ({pid} on node {self.node}{roles})"


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot go on."""

    member: Member
    """Whose fault it is."""
    got: str
    """What was found, for people."""

    def error(self, detail: str = "") -> InfrastructureError:
        """The error that tells it.

        Args:
            detail: What else is known of it.
        """
        got = f"{self.got}; {detail}" if detail else self.got
        return InfrastructureError(
            f"{self.member}: got {got}; expected an answer. Fix: look in the node's logs for what ended it, such as "
            f"memory running out"
        )


@dataclass(eq=False)
class Ward:
    """A member and what is known of it. Times are the monitor's own, in seconds."""

    member: Member
    timeout: float | None
    """How long ranks of its group wait for each other; None where they never do."""
    heard: float
    """When it gave its latest sign of life; at first, when it was expected."""
    process: ProcessId | None = None
    """None until it said hello."""
    oom_kills: int = 0
    channel: object = None
    """The connection that it speaks over, if any."""
    took_leave: bool = False
    beat: Beat = field(default_factory=Beat)
    moved: float = 0.0
    """When it last called another method or began another collective."""
    trace: list[str] = field(default_factory=list)
    """What its process wrote besides beats since the latest one."""
    obituary: str = ""
    """What Ray told of its death before its hello."""
    asked: float | None = None
    """When its node was asked about it; None while no answer is due."""
    answered: float = float("-inf")
    """When its node last answered."""

    @property
    def suspected(self) -> bool:
        """Whether an answer about it is due."""
        return self.asked is not None

    def doing(self) -> str:
        """What its latest beat said, for people."""
        if self.process is None:
            return "before its start"
        parts = (f"in {self.beat.activity}" if self.beat.activity else "", f"at {self.beat.at}" if self.beat.at else "")
        return " ".join(filter(None, parts)) or "between calls"


@dataclass(frozen=True)
class Question:
    """What a node is to be asked about a member."""

    ward: Ward
    fatal: tuple[State, ...]
    """States in which the process is to be ended."""


class Watch:
    """All members of a run, by the token of their group."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Ward]] = {}
        self.verdict: Verdict | None = None

    def expect(self, token: str, members: Sequence[Member], timeout: float | None, now: float) -> None:
        """A group is being started."""
        self._groups[token] = [Ward(member, timeout, heard=now) for member in members]

    def forget(self, token: str) -> None:
        """A group is about to be ended on purpose."""
        self._groups.pop(token, None)

    def hello(
        self, token: str, rank: int, process: ProcessId, oom_kills: int, channel: object, now: float
    ) -> Ward | None:
        """A worker connected; None where no such member is expected."""
        wards = self._groups.get(token, [])
        if not 0 <= rank < len(wards):
            return None
        ward = wards[rank]
        ward.member = replace(ward.member, pid=process.pid)
        ward.process, ward.oom_kills = process, oom_kills
        ward.channel, ward.took_leave = channel, False
        ward.heard = ward.moved = now
        return ward

    def stillborn(self, token: str, rank: int, pid: int | None, reason: str) -> None:
        """A worker died before it could say hello."""
        ward = self._groups[token][rank] if token in self._groups else None
        if ward is None or ward.process is not None:
            return
        ward.member = replace(ward.member, pid=pid)
        ward.obituary = f"a dead worker ({reason}, {ward.doing()})"
        if not ward.suspected:  # or the look at it may have found it stopped, and ended it
            self._settle(ward, ward.obituary)

    def beat(self, ward: Ward, beat: Beat, now: float) -> None:
        """A member lives."""
        if (beat.activity, beat.since, beat.collectives) != (
            ward.beat.activity,
            ward.beat.since,
            ward.beat.collectives,
        ):
            ward.moved = now
        ward.beat, ward.heard = beat, now
        ward.trace.clear()

    def bye(self, ward: Ward) -> None:
        """A member ends itself."""
        ward.took_leave = True

    def trace(self, ward: Ward, line: str) -> None:
        """A line of what a crash writes."""
        if line.strip() and len(ward.trace) < TRACE_LINES:
            ward.trace.append(line.strip())

    def lost(self, ward: Ward, channel: object) -> None:
        """A member's connection ended."""
        if ward.channel is not channel:
            return  # it is back over another
        ward.channel = None
        if self._is_watched(ward) and (ward.trace or ward.took_leave):
            self._settle(ward, f"a dead worker ({_last_words(ward)}, {ward.doing()})")

    def overslept(self, now: float) -> None:
        """The monitor itself did not run for a while, so that no silence until now means anything."""
        for ward in self._wards():
            ward.heard = now

    def questions(self, now: float) -> list[Question]:
        """What is to be asked now; each has to be answered within `PROBE_SECONDS`."""
        due = []
        for ward in self._wards():
            if ward.asked is not None:
                if now - ward.asked > PROBE_SECONDS:
                    self.answer(Question(ward, ()), None, now)
            elif self._is_suspect(ward, now) and now - ward.answered > PROBE_AGAIN_SECONDS:
                ward.asked = now
                due.append(Question(ward, _fatal_states(ward, now)))
        return due

    def answer(self, question: Question, finding: Finding | None, now: float) -> None:
        """What a node answered about a member, or that it did not."""
        ward = question.ward
        ward.asked, ward.answered = None, now
        if not self._is_watched(ward):
            return
        if finding is not None and finding.state == "gone":
            self._settle(ward, f"a dead worker ({_killed(ward, finding)}, {ward.doing()})")
        elif finding is not None and finding.state in question.fatal:
            found = self._holder(ward, finding)
            silent = "" if finding.state == "stopped" else f" that gave no sign of life for {now - found.heard:.0f} s"
            what = {"stopped": "stopped", "waiting": "stuck", "working": "busy"}[finding.state]
            self._settle(found, f"a {what} worker{silent} ({found.doing()}), now killed")
        elif ward.obituary:
            self._settle(ward, ward.obituary)
        elif finding is None and ward.process is not None and self._is_suspect(ward, now):
            self._settle(ward, f"no sign of life and no answer from its node ({ward.doing()})")

    def _holder(self, ward: Ward, finding: Finding) -> Ward:
        """The member whose process was found: where it did not say hello, its node was asked for any."""
        for other in self._wards():
            if other.process and other.process.pid == finding.pid and other.member.node_id == ward.member.node_id:
                return other
        ward.member = replace(ward.member, pid=finding.pid)
        return ward

    def compare_ranks(self, now: float) -> None:
        """Find the ranks that the others of their group wait for too long."""
        for wards in self._groups.values():
            timeout = wards[0].timeout
            if timeout is None or any(ward.process is None for ward in wards):
                continue
            most = max(ward.beat.collectives for ward in wards)
            missing = [ward for ward in wards if ward.beat.collectives < most]
            waiting = [ward for ward in wards if ward.beat.collectives == most]
            waited = now - min(ward.moved for ward in waiting)
            if missing and waited > COLLECTIVE_SHARE * timeout:
                self._settle(missing[0], _missing(missing, waiting, waited))

    def all_heard_since(self, time: float) -> bool:
        """Whether every member that has started gave a sign of life after a time, and no answer is due."""
        started = [ward for ward in self._wards() if ward.process is not None]
        return not self.suspicious and all(ward.heard > time and ward.channel is not None for ward in started)

    @property
    def suspicious(self) -> bool:
        """Whether an answer about any member is due."""
        return any(ward.suspected for ward in self._wards())

    def _wards(self) -> Iterator[Ward]:
        for wards in self._groups.values():
            yield from wards

    def _is_watched(self, ward: Ward) -> bool:
        return any(other is ward for other in self._wards())

    def _is_suspect(self, ward: Ward, now: float) -> bool:
        lost = ward.process is not None and ward.channel is None
        return lost or now - ward.heard > SILENCE_SECONDS

    def _settle(self, ward: Ward, got: str) -> None:
        self.verdict = self.verdict or Verdict(ward.member, got)


def _fatal_states(ward: Ward, now: float) -> tuple[State, ...]:
    """In which states a suspect cannot go on; one that lost nothing but its connection may, unless it is stopped."""
    if ward.channel is None:
        return ("stopped",)
    if now - ward.heard > PATIENCE_SECONDS:
        return ("stopped", "waiting", "working")
    return ("stopped", "waiting")


def _last_words(ward: Ward) -> str:
    """What ended a process that could still tell."""
    if not ward.trace:
        return "it ended itself"
    fatal = _FATAL.match(ward.trace[0])
    frames = [f"{file}:{line} {name}" for file, line, name in _FRAME.findall("\n".join(ward.trace))]
    place = f" at {' < '.join(frames[:_SHOWN_FRAMES])}" if frames else ""
    return (f"fatal: {fatal[1]}" if fatal else "SIGTERM") + place


def _killed(ward: Ward, finding: Finding) -> str:
    """What ended a process that said nothing."""
    if finding.oom_kills > ward.oom_kills:
        return "killed by the kernel as memory ran out"
    return "killed by SIGKILL, or ended by os._exit"


def _missing(missing: Sequence[Ward], waiting: Sequence[Ward], waited: float) -> str:
    """A collective that some ranks did not come to, for people."""
    ranks = ", ".join(str(ward.member.rank) for ward in waiting)
    where = next((ward.beat.waits for ward in waiting if ward.beat.waits), "a collective")
    late = "; ".join(f"rank {ward.member.rank} {ward.doing()}" for ward in missing)
    return (
        f"a collective without it: {late}, while rank {ranks} waited {waited:.0f} s in {where} ({waiting[0].doing()})"
    )
