"""What the driver concludes from signs of life. Pure: no socket, thread, clock or Ray.

    expect -> hello, beat, trace, lost -> questions -> answer -> verdict

A member whose connection ends, that was silent for long, or that never said hello, is suspected, and its node is asked.
The first verdict stands: what fails later follows from it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlhf_runtime.single_controller.probe import WORKING_SHARE, Finding, ProcessId, State
from rlhf_runtime.single_controller.pulse import Beat
from rlhf_runtime.single_controller.verdict import Member, Verdict

SILENCE_SECONDS = 8.0
"""Without a sign of life for so long, a member is suspected."""
BIRTH_SECONDS = 15.0
"""As long may pass before its hello: what it imports comes first."""
PATIENCE_SECONDS = 120.0
"""How long a process that works may be silent: it holds Python's lock, as some imports and extensions do."""
PROBE_SECONDS = 15.0
"""How long a node may take to answer a question."""
PROBE_AGAIN_SECONDS = 3.0
"""From an answer to the next question about the same member."""
COLLECTIVE_SHARE = 0.9
"""Share of a group's time-out that its ranks may wait for one of them, so that this is told before torch gives up."""
STILL_SECONDS = 120.0
"""A member that stands in a call for so long without using a CPU is told of. It may wait for something outside, as a
reward does for a server, so that is no verdict."""
TRACE_LINES = 60
"""Most lines that are kept of what a crash wrote."""

_FATAL = re.compile(r"Fatal Python error: (.*)")
_FRAME = re.compile(r'File "(?:.*/)?(.+)", line (\d+) in (.+)')
_SHOWN_FRAMES = 3


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
    worked: float = 0.0
    """When it last did that, stood elsewhere, used a CPU or waited for other ranks."""
    still: bool = False
    """Whether it was told of as standing still since."""
    trace: list[str] = field(default_factory=list)
    """What its process wrote besides beats since the latest one."""
    obituary: str = ""
    """What Ray told of its death before its hello."""
    asked: float | None = None
    """When its node was asked about it; None while no answer is due."""
    answered: float = float("-inf")
    """When its node last answered."""
    waits: bool = False
    """Whether the node found it waiting, and there was no beat since."""

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
        self._stopped: set[tuple[str, int | None]] = set()
        """Node and number of processes that were stopped before their hello, and ended."""
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
        ward.heard = ward.moved = ward.worked = now
        return ward

    def stillborn(self, token: str, rank: int, pid: int | None, reason: str) -> None:
        """A worker died before it could say hello."""
        ward = self._groups[token][rank] if token in self._groups else None
        if ward is not None and ward.process is None:
            ward.member, ward.obituary = replace(ward.member, pid=pid), reason
            self._tell_of_stillborn()

    def beat(self, ward: Ward, beat: Beat, now: float) -> None:
        """A member lives."""
        last = ward.beat
        if (beat.activity, beat.since, beat.collectives) != (last.activity, last.since, last.collectives):
            ward.moved = now
        used = beat.cpu_seconds - last.cpu_seconds
        if ward.moved == now or beat.at != last.at or beat.waits or used >= WORKING_SHARE * (now - ward.heard):
            ward.worked, ward.still = now, False
        ward.beat, ward.heard, ward.waits = beat, now, False
        ward.trace.clear()
        if beat.stopped and self._is_watched(ward):
            self._settle(ward, f"a stopped child process ({'; '.join(beat.stopped)}), now killed ({ward.doing()})")

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
            ward.heard = ward.worked = now

    def questions(self, now: float) -> list[Question]:
        """What is to be asked now; each has to be answered within `PROBE_SECONDS`."""
        for ward in self._wards():
            if ward.asked is not None and now - ward.asked > PROBE_SECONDS:
                self.answer(Question(ward, ()), None, now)
        due = []
        for ward in self._wards():
            if self._is_suspect(ward, now) and not self._was_asked(ward, now):
                ward.asked = now
                due.append(Question(ward, _fatal_states(ward, now)))
        return due

    def answer(self, question: Question, finding: Finding | None, now: float) -> None:
        """What a node answered about a member, or that it did not."""
        ward = question.ward
        ward.asked, ward.answered = None, now
        if not self._is_watched(ward):
            return
        if finding is None:
            if ward.process is not None and self._is_suspect(ward, now):
                self._settle(ward, f"no sign of life and no answer from its node ({ward.doing()})")
        elif finding.state == "gone":
            self._settle(ward, f"a dead worker ({_killed(ward, finding)}, {ward.doing()})")
        elif finding.state in question.fatal:
            self._note_standstill(ward, finding, now)
        else:
            ward.waits = finding.state == "waiting"
        self._tell_of_stillborn()

    def _note_standstill(self, asked: Ward, finding: Finding, now: float) -> None:
        """A process was ended. Before its hello none can be asked for by its number, so it may be any on that node."""
        node = asked.member.node_id
        for ward in self._wards():
            if ward.process is not None and (ward.member.node_id, ward.process.pid) == (node, finding.pid):
                self._settle(ward, f"{_standstill(ward, finding.state, now)} ({ward.doing()}), now killed")
        self._stopped.add((node, finding.pid))

    def _tell_of_stillborn(self) -> None:
        """Settle deaths before a hello, unless a look that may have found and ended a stopped process is not over."""
        for ward in self._wards():
            node = ward.member.node_id
            if not ward.obituary or any(w.suspected and w.member.node_id == node for w in self._wards()):
                continue
            if (node, ward.member.pid) in self._stopped:
                self._settle(ward, f"a stopped worker ({ward.doing()}), now killed")
            else:
                self._settle(ward, f"a dead worker ({ward.obituary}, {ward.doing()})")

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

    def standing(self, now: float) -> list[str]:
        """Members that have just been found to stand still in a call, for people."""
        still = [
            ward
            for ward in self._wards()
            if ward.beat.activity and not ward.still and now - ward.worked > STILL_SECONDS and ward.channel is not None
        ]
        for ward in still:
            ward.still = True
        return [f"{ward.member}: {ward.doing()} for {now - ward.worked:.0f} s without using a CPU" for ward in still]

    def killed_children(self, member: Member) -> tuple[str, ...]:
        """Child processes of a member that ended by a signal."""
        wards = (ward for ward in self._wards() if (ward.member.group, ward.member.rank) == (member.group, member.rank))
        return next((tuple(ward.beat.killed) for ward in wards), ())

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
        if ward.process is None:
            return now - ward.heard > BIRTH_SECONDS
        return ward.channel is None or now - ward.heard > SILENCE_SECONDS

    def _was_asked(self, ward: Ward, now: float) -> bool:
        """Whether its node is being, or was just, asked about it, or about any process before its hello."""
        same = [ward]
        if ward.process is None:
            others = (other for other in self._wards() if other.process is None)
            same = [other for other in others if other.member.node_id == ward.member.node_id]
        return any(other.suspected or now - other.answered <= PROBE_AGAIN_SECONDS for other in same)

    def fail(self, reason: str) -> None:
        """Nobody watches from now on."""
        self.verdict = self.verdict or Verdict(None, reason)

    def _settle(self, ward: Ward, got: str) -> None:
        self.verdict = self.verdict or Verdict(ward.member, got)


def _fatal_states(ward: Ward, now: float) -> tuple[State, ...]:
    """In which states a suspect cannot go on.

    One that lost nothing but its connection may, unless it is stopped; one that waits has to be found so twice, as a
    beat may be on its way.
    """
    if ward.channel is None:
        return ("stopped",)
    if now - ward.heard > PATIENCE_SECONDS:
        return ("stopped", "waiting", "working")
    return ("stopped", "waiting") if ward.waits else ("stopped",)


def _standstill(ward: Ward, state: State, now: float) -> str:
    """A worker that was ended as it did not go on."""
    if state == "stopped":
        return "a stopped worker"
    what = "stuck" if state == "waiting" else "busy"
    return f"a {what} worker that gave no sign of life for {now - ward.heard:.0f} s"


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
