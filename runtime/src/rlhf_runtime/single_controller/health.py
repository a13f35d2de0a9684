"""The driver's watch over its workers: a dead, stopped or stuck one ends the run, and is named.

    worker ─ Pulse ─ TCP ─ HealthMonitor ─ Watch ─ verdict ─ every worker is ended ─ the driver's calls fail ─ gather
                               └ a look at a suspect's process, on its node

One thread and one socket on the driver. What a verdict means stands in `watch`.
"""

import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import ray
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_runtime.single_controller.probe import Finding, ProcessId, examine, examine_siblings
from rlhf_runtime.single_controller.pulse import Beacon, Beat
from rlhf_runtime.single_controller.ray_errors import pid_of, reason
from rlhf_runtime.single_controller.verdict import Member, Verdict
from rlhf_runtime.single_controller.watch import PROBE_SECONDS, Question, Ward, Watch

TICK_SECONDS = 0.5
"""How often silences are looked at."""
OVERSLEPT_SECONDS = 4.0
"""A tick that comes so late says that this process was stopped or had no CPU, as its workers may have been."""
HELLO_SECONDS = 10.0
"""A connection that has not said hello by then is closed."""
ACCEPT_PAUSE_SECONDS = 0.1
"""Before the next try to accept a connection that could not be, as by a lack of file descriptors."""
MOST_BYTES = 1 << 16
"""Most bytes of one line."""

logger = logging.getLogger(__name__)

Prober = Callable[[Question], "Future[Finding]"]
"""Asks a suspect's node."""


def ask_node(question: Question) -> "Future[Finding]":
    """Ask by a task on the suspect's node; by a thread where it is this one, as no process has to start for that."""
    process, node = question.ward.process, question.ward.member.node_id
    if process is not None and node == ray.get_runtime_context().get_node_id():
        executor = ThreadPoolExecutor(1)
        here = executor.submit(examine, process, question.fatal)
        executor.shutdown(wait=False)
        return here
    task = ray.remote(num_cpus=0)(examine if process else examine_siblings)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    arguments = (process, question.fatal) if process else ()
    there: Future[Finding] = task.options(scheduling_strategy=strategy).remote(*arguments).future()
    return there


@dataclass(eq=False)
class _Connection:
    """One worker's connection."""

    socket: socket.socket
    buffer: bytes = b""
    """The line that is not complete yet."""
    since: float = field(default_factory=time.monotonic)
    """When it was made."""
    ward: Ward | None = None
    """None until it said hello."""


class HealthMonitor:
    """Watches the worker groups that are told to it. A context manager, inside the time that Ray is there.

    Args:
        prober: Asks a suspect's node.
    """

    def __init__(self, prober: Prober = ask_node) -> None:
        self._prober = prober
        self._watch = Watch()
        self._ends: dict[str, Callable[[], None]] = {}
        self._changed = threading.Condition()
        self._probes: list[tuple[Question, Future[Finding]]] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start(ray.util.get_node_ip_address())
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self, host: str) -> None:
        """Listen at this address, on a port that the system chooses."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._address = (host, self._listener.getsockname()[1])
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def watch(self, members: Sequence[Member], timeout_seconds: float | None, end: Callable[[], None]) -> Beacon:
        """Expect a group's workers, and give what their pulses need.

        Args:
            members: In rank order.
            timeout_seconds: How long its ranks wait for each other in collectives; None where they have none.
            end: Ends all of its workers, so that every call on them fails; called upon a verdict, whoever it is about.

        Raises:
            InfrastructureError: when there was a verdict already.
        """
        token = secrets.token_hex()
        with self._changed:
            if self._watch.verdict is not None:
                raise self._watch.verdict.error()
            self._watch.expect(token, members, timeout_seconds, time.monotonic())
            self._ends[token] = end
        return Beacon(*self._address, token)

    def attend(self, beacon: Beacon, starts: Sequence[ray.ObjectRef]) -> None:
        """Take note of workers that die before they can say hello.

        Args:
            beacon: The group's.
            starts: The first call on each of its workers, in rank order.

        Raises:
            InfrastructureError: when there was a verdict since `watch`: its end did not reach the later workers.
        """
        with self._changed:
            if self._watch.verdict is not None:
                raise self._watch.verdict.error()
        for rank, start in enumerate(starts):
            start.future().add_done_callback(partial(self._note_start, beacon.token, rank))

    def _note_start(self, token: str, rank: int, start: "Future[Any]") -> None:
        error = start.exception()
        if isinstance(error, RayActorError | OutOfMemoryError):
            with self._changed:
                self._watch.stillborn(token, rank, pid_of(error), reason(error))

    def forget(self, beacon: Beacon) -> None:
        """The group's workers are about to be ended on purpose."""
        with self._changed:
            self._watch.forget(beacon.token)
            self._ends.pop(beacon.token, None)

    def verdict(self, within: float) -> Verdict | None:
        """Why the run cannot go on, or None where every worker lives.

        Args:
            within: Seconds to wait for a sign of life of every worker; longer where a node was asked and answers.
        """
        asked = time.monotonic()
        with self._changed:
            longest = within + 2 * PROBE_SECONDS
            self._changed.wait_for(lambda: self._watch.verdict or self._is_clear(asked, within), longest)
            return self._watch.verdict

    def killed_children(self, member: Member) -> tuple[str, ...]:
        """A worker's child processes that ended by a signal, for people; known within a second."""
        with self._changed:
            return self._watch.killed_children(member)

    def _is_clear(self, asked: float, within: float) -> bool:
        waited = time.monotonic() - asked
        return self._watch.all_heard_since(asked) or (waited > within and not self._watch.suspicious)

    def close(self) -> None:
        """Stop listening; nothing is left of it."""
        if self._thread is not None:
            self._waker.close()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        """Watch until `close`. Where that fails, nobody would notice a lost worker, so the run ends at once."""
        try:
            self._serve_all()
        except Exception as error:
            logger.exception("The health monitor failed")
            with self._changed:
                self._watch.fail(f"{type(error).__name__}: {error}")
                self._changed.notify_all()
            self._end_groups()

    def _serve_all(self) -> None:
        with selectors.DefaultSelector() as selector, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                last: float | None = time.monotonic()
                while last is not None:
                    last = self._tick(selector, last)
            finally:
                for key in list(selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]

    def _tick(self, selector: selectors.BaseSelector, last: float) -> float | None:
        """Listen for a moment and judge. When that was, for the next one; None when it was the last."""
        ready = [key for key, _ in selector.select(TICK_SECONDS)]
        if any(key.fileobj is self._woken for key in ready):
            return None
        with self._changed:
            for key in ready:
                self._serve(selector, key.data)
            now = time.monotonic()
            if now - last > OVERSLEPT_SECONDS:
                self._watch.overslept(now)
            self._close_silent(selector, now)
            questions = self._judge(now)
            standing = self._watch.standing(now)
            self._changed.notify_all()
        for told in standing:
            logger.warning("%s; it waits for something outside, or is stuck", told)
        self._end_groups()
        self._probes += [(question, self._ask(question)) for question in questions]
        return now

    def _serve(self, selector: selectors.BaseSelector, connection: _Connection | None) -> None:
        """Take a new connection, or read what one has to say."""
        if connection is None:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                time.sleep(ACCEPT_PAUSE_SECONDS)  # the listener stays ready
                return
            selector.register(accepted, selectors.EVENT_READ, _Connection(accepted))
            return
        try:
            received = connection.socket.recv(MOST_BYTES)
        except OSError:
            received = b""
        *lines, connection.buffer = (connection.buffer + received).split(b"\n")
        if not received:
            lines.append(connection.buffer)
        welcome = len(connection.buffer) < MOST_BYTES and all(self._hear(connection, line) for line in lines)
        if received and welcome:
            return
        selector.unregister(connection.socket)
        connection.socket.close()
        if connection.ward is not None:
            self._watch.lost(connection.ward, connection)

    def _close_silent(self, selector: selectors.BaseSelector, now: float) -> None:
        """Close connections over which nobody said who it is."""
        for key in list(selector.get_map().values()):
            if key.data is not None and key.data.ward is None and now - key.data.since > HELLO_SECONDS:
                selector.unregister(key.fileobj)
                key.data.socket.close()

    def _hear(self, connection: _Connection, line: bytes) -> bool:
        """One line. Whether more of them are wanted: not from strangers."""
        now = time.monotonic()
        try:
            said = json.loads(line) if line.startswith(b"{") else None
            if connection.ward is None:
                connection.ward = self._welcome(said or {}, connection, now)
            elif said is None:
                self._watch.trace(connection.ward, line.decode(errors="replace"))
            elif "bye" in said:
                self._watch.bye(connection.ward)
            else:
                self._watch.beat(connection.ward, Beat(**said), now)
        except (ValueError, TypeError, KeyError):
            return False
        return connection.ward is not None

    def _welcome(self, hello: dict[str, Any], connection: _Connection, now: float) -> Ward | None:
        process = ProcessId(hello["pid"], hello["started"])
        return self._watch.hello(hello["token"], hello["rank"], process, hello["oom_kills"], connection, now)

    def _judge(self, now: float) -> list[Question]:
        """Conclude from what is known, and say what else has to be asked."""
        answered = [(question, future) for question, future in self._probes if future.done()]
        self._probes = [(question, future) for question, future in self._probes if not future.done()]
        for question, future in answered:
            self._watch.answer(question, None if future.exception() else future.result(), now)
        self._watch.compare_ranks(now)
        return [] if self._watch.verdict else self._watch.questions(now)

    def _end_groups(self) -> None:
        """Upon a verdict, end every group once, whether or not the end of another fails."""
        with self._changed:
            if self._watch.verdict is None:
                return
            ends = list(self._ends.values())
            self._ends.clear()
        # Outside the lock, as Ray may take its time.
        for end in ends:
            try:
                end()
            except Exception:
                logger.exception("A worker group could not be ended")

    def _ask(self, question: Question) -> "Future[Finding]":
        try:
            return self._prober(question)
        except Exception as error:  # a node that cannot be asked does not answer
            failed: Future[Finding] = Future()
            failed.set_exception(error)
            return failed
