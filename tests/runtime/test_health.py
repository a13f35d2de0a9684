"""Signs of life of real processes over real sockets, without Ray."""

import errno
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from rlhf_runtime.errors import InfrastructureError
from rlhf_runtime.single_controller import health, probe, watch
from rlhf_runtime.single_controller.health import HealthMonitor
from rlhf_runtime.single_controller.probe import Finding
from rlhf_runtime.single_controller.pulse import Beacon
from rlhf_runtime.single_controller.verdict import Member
from rlhf_runtime.single_controller.watch import Question

WORKER = """
import ctypes, os, sys, threading
from rlhf_runtime.single_controller import pulse

beats = threading.Semaphore(0)
send = pulse._send

def counted(connection, line):
    send(connection, line)
    beats.release()

pulse._send = counted
host, port, token, rank = sys.argv[1:]
worker = pulse.Pulse(pulse.Beacon(host, int(port), token), int(rank))
worker.tell(("policy.update", 0.0))
worker.start()
beats.acquire(), beats.acquire()
print("up", flush=True)
exec(sys.stdin.read())
"""
"""Says `up` once its hello and a beat are sent, then does what it is told, and ends."""


class Workers:
    """A group of one or more real processes under a monitor that asks about them on this machine."""

    def __init__(self, monitor: HealthMonitor) -> None:
        self.monitor = monitor
        self.processes: list[subprocess.Popen] = []
        self.ended = threading.Event()

    def start(self, number: int = 1) -> Beacon:
        members = [Member("actor", rank, "10.0.0.1") for rank in range(number)]
        self.beacon = self.monitor.watch(members, 600.0, self.ended.set)
        for rank in range(number):
            arguments = [self.beacon.host, str(self.beacon.port), self.beacon.token, str(rank)]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        for process in self.processes:
            assert process.stdout.readline() == "up\n"
        return self.beacon

    def tell(self, code: str, rank: int = 0) -> None:
        """Have a worker do this and end."""
        self.processes[rank].stdin.write(code)
        self.processes[rank].stdin.close()


def on_this_machine(executor: ThreadPoolExecutor) -> Callable[[Question], "Future[Finding]"]:
    return lambda question: executor.submit(probe.examine, question.ward.process, question.fatal)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 3.0)
    threads = threading.active_count()
    with ThreadPoolExecutor() as executor:
        monitor = HealthMonitor(on_this_machine(executor))
        monitor.start("127.0.0.1")
        workers = Workers(monitor)
        yield workers
        monitor.close()
    for process in workers.processes:
        with process:
            process.kill()
    assert threading.active_count() == threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(monitor._address)


def message(workers: Workers, within: float = 20.0) -> str:
    """What is told of a death that the monitor has not heard of yet."""
    assert workers.ended.wait(within), "no verdict"
    return str(workers.monitor.verdict(0).error())


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL, or ended by os._exit"),
        ("os._exit(3)", "killed by SIGKILL, or ended by os._exit"),
        ("ctypes.string_at(0)", "fatal: Segmentation fault at __init__.py:"),
        ("os.abort()", "fatal: Aborted at <string>:1 <module>"),
        ("os.kill(os.getpid(), 15)", "SIGTERM at <string>:1 <module>"),
        ("sys.exit(3)", "it ended itself"),
    ],
    ids=["SIGKILL", "os._exit", "SIGSEGV", "SIGABRT", "SIGTERM", "sys.exit"],
)
def test_a_death_is_told_with_its_cause(workers: Workers, code: str, cause: str) -> None:
    workers.start()
    workers.tell(code)
    told = message(workers)
    assert told.startswith(f"group `actor`, rank 0 (pid {workers.processes[0].pid} on node 10.0.0.1): got a dead")
    assert f"({cause}" in told
    assert "in policy.update" in told


def test_a_stopped_worker_is_found_killed_and_named_and_the_others_are_not(workers: Workers) -> None:
    workers.start(2)
    workers.processes[1].send_signal(signal.SIGSTOP)
    assert f"rank 1 (pid {workers.processes[1].pid} on node 10.0.0.1): got a stopped worker" in message(workers)
    assert workers.processes[1].wait(10) == -signal.SIGKILL
    assert workers.processes[0].poll() is None


def test_a_worker_that_holds_python_and_waits_is_stuck(workers: Workers) -> None:
    workers.start()
    workers.tell("ctypes.PyDLL(None).sleep(600)")  # as a deadlock in an extension does
    assert "got a stuck worker that gave no sign of life for" in message(workers)
    assert workers.processes[0].wait(10) == -signal.SIGKILL


def test_a_worker_that_holds_python_and_works_is_not_harmed(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 1.0)
    asked = threading.Event()
    answer = workers.monitor._watch.answer

    def note(question: Question, finding: Finding | None, now: float) -> None:
        answer(question, finding, now)
        asked.set()

    monkeypatch.setattr(workers.monitor._watch, "answer", note)
    workers.start()
    workers.tell("import re; re.match('(a+)+b', 'a' * 32)")
    assert asked.wait(20)
    assert workers.monitor.verdict(0) is None
    assert workers.processes[0].poll() is None


def test_an_end_on_purpose_is_no_death(workers: Workers) -> None:
    beacon = workers.start(2)
    workers.monitor.forget(beacon)
    for process in workers.processes:
        process.kill()
        process.wait()
    assert workers.monitor.verdict(within=2.0) is None
    assert not workers.ended.is_set()


def test_every_worker_heard_of_is_a_quick_answer(workers: Workers) -> None:
    workers.start(2)
    assert workers.monitor.verdict(within=600.0) is None


def test_a_forked_child_neither_hides_its_parents_death_nor_is_taken_for_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 600.0)  # only the end of the connection can tell
    workers.start()
    child = "pid = os.fork()\nif pid == 0: os.kill(os.getpid(), 11)\nos.waitpid(pid, 0)\n"
    lingers = "if os.fork() == 0:\n  import time\n  time.sleep(30)\n  os._exit(0)\n"
    workers.tell(f"{child}{lingers}os.kill(os.getpid(), 9)")
    assert "killed by SIGKILL" in message(workers)


def test_a_monitor_that_is_gone_harms_no_worker(workers: Workers) -> None:
    workers.start()
    workers.monitor.close()
    workers.tell("import time; time.sleep(2.5); os._exit(7)")
    assert workers.processes[0].wait(20) == 7


def test_a_child_that_a_signal_ended_is_known(workers: Workers) -> None:
    workers.start()
    start = (
        "part = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(60,), name='part'); part.start()"
    )
    end = "time.sleep(1.5); part.kill(); part.join(); time.sleep(60)"
    workers.tell(f"import multiprocessing, time; {start}; {end}")
    deadline = time.monotonic() + 20
    while not (killed := workers.monitor.killed_children(Member("actor", 0, "10.0.0.1"))):
        assert time.monotonic() < deadline
        workers.monitor.verdict(within=5.0)
    assert re.fullmatch(r"part, pid \d+, by SIGKILL", killed[0])
    assert workers.monitor.verdict(0) is None


def test_strangers_are_turned_away(workers: Workers) -> None:
    beacon = workers.start()
    for line in (b'{"token": "x", "rank": 0, "pid": 1, "started": 1, "oom_kills": 0}\n', b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((beacon.host, beacon.port), timeout=10) as stranger:
            stranger.sendall(line)
            assert stranger.recv(1) == b""
    assert workers.monitor.verdict(within=2.0) is None


def test_a_group_that_comes_after_the_verdict_is_refused_with_it(workers: Workers) -> None:
    workers.start()
    workers.tell("os.abort()")
    told = message(workers)
    with pytest.raises(InfrastructureError) as error:
        workers.monitor.watch([Member("late", 0, "10.0.0.1")], None, workers.ended.set)
    assert str(error.value) == told


def test_a_stopped_child_process_is_ended_and_named_with_its_parent(workers: Workers) -> None:
    workers.start()
    start = (
        "part = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(600,), name='VllmWorker-1')\n"
        "part.start(); os.kill(part.pid, 19)\n"
    )
    # As a tensor-parallel engine, it waits for what never comes.
    workers.tell(f"import multiprocessing, time\n{start}part.join(); time.sleep(600)")
    told = message(workers, within=30.0)
    assert re.search(r"got a stopped child process \(VllmWorker-1, pid \d+\), now killed \(in policy.update", told)
    pid = int(re.search(r"VllmWorker-1, pid (\d+)", told)[1])
    deadline = time.monotonic() + 10
    while probe.Reading.of(pid) is not None:
        assert time.monotonic() < deadline, "the child is left, stopped"


def test_an_end_that_fails_keeps_no_other_group_alive(workers: Workers) -> None:
    def fail() -> None:
        raise RuntimeError("Ray is gone")

    workers.monitor.watch([Member("rollout", 0, "10.0.0.1")], None, fail)
    workers.start()
    workers.tell("os.abort()")
    assert "got a dead worker" in message(workers)


def test_a_monitor_that_fails_ends_the_run_and_says_so(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(now: float) -> None:
        raise ZeroDivisionError("a bug")

    workers.start()
    monkeypatch.setattr(workers.monitor._watch, "compare_ranks", fail)
    assert message(workers) == (
        "health monitor: got ZeroDivisionError: a bug; expected a watch over all workers. Fix: run again"
    )
    assert workers.monitor.verdict(within=600.0) is not None


def test_a_connection_that_cannot_be_accepted_is_tried_again(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError(errno.EMFILE, "Too many open files")] * 3)
    accept, accepted = socket.socket.accept, threading.Event()

    def short_of_files(self: socket.socket) -> tuple:
        for error in failures:
            raise error
        accepted.set()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", short_of_files)
    workers.start()
    assert accepted.wait(20)
    assert workers.monitor.verdict(within=600.0) is None


def test_a_connection_over_which_nobody_says_hello_is_closed(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HELLO_SECONDS", 0.5)
    beacon = workers.start()
    with socket.create_connection((beacon.host, beacon.port), timeout=10) as silent:
        assert silent.recv(1) == b""
    assert workers.monitor.verdict(within=600.0) is None


def test_workers_made_while_another_group_failed_are_refused(workers: Workers) -> None:
    late = workers.monitor.watch([Member("late", 0, "10.0.0.1")], None, lambda: None)
    workers.start()
    workers.tell("os.abort()")
    told = message(workers)
    with pytest.raises(InfrastructureError) as error:
        workers.monitor.attend(late, [])
    assert str(error.value) == told
