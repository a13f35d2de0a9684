"""A dead, stopped or awaited worker ends what the driver waits for and is named: real Ray, two local nodes."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from rlhf_api.runtime_config import LocalNode
from rlhf_runtime.errors import InfrastructureError
from rlhf_runtime.single_controller import (
    HealthMonitor,
    LocalCluster,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
    watch,
)
from rlhf_runtime.single_controller.resource_pool import reserve

# Workers cannot import a test file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BOUND_SECONDS = 30
"""By when a run has to end."""


def raise_signal(signum: int) -> None:
    """A signal to the calling process."""
    os.kill(os.getpid(), signum)


@dataclass(frozen=True)
class OnArrival:
    """Gives a signal to the process that it is sent to, as soon as it is read there."""

    signum: int

    def __reduce__(self):
        return raise_signal, (self.signum,)


def beats() -> bool:
    """Whether this process waits for its next beat, and so has said hello and can tell of its end."""
    pulse = next(thread for thread in threading.enumerate() if thread.name == "pulse")
    names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[pulse.ident])}
    return {"_speak", "wait"} <= names


class Plain(Worker):
    needs_process_group = False

    def __init__(self, signum: int | None = None, *_: object):
        if signum is not None and self.rank == 1:
            while not beats():
                time.sleep(0.05)
            raise_signal(signum)

    @register()
    def pid(self) -> int:
        return os.getpid()

    @register(blocking=False)
    def work(self, signum: int | None = None) -> None:
        time.sleep(1)
        if signum is not None and self.rank == 1:
            raise_signal(signum)
        time.sleep(600)

    @register()
    def leave(self) -> None:
        time.sleep(1)
        if self.rank == 1:
            sys.exit(3)

    @register()
    def fail_with_a_child(self) -> None:
        """As a tensor-parallel engine does of which one process is killed."""
        part = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="VllmWorker-1")
        part.start()
        time.sleep(2)
        part.kill()
        part.join()
        raise RuntimeError("cancelled")

    @register()
    def call(self, peer: ActorHandle, signum: int) -> None:
        """What a policy does that sends weights to an engine."""
        ray.get(peer.work.remote(signum))


class StoppedOnTheWay(Plain):
    first = OnArrival(signal.SIGSTOP)


class KilledOnTheWay(Plain):
    first = OnArrival(signal.SIGKILL)


class Ranked(Worker):
    @register()
    def reduce(self) -> None:
        import torch

        if self.rank == 1:
            time.sleep(600)
        torch.distributed.all_reduce(torch.ones(1))


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str], RayResourcePool]]:
    """Makes pools of one bundle on each of two nodes."""
    nodes = [LocalNode(pool=name, device="cpu", resources={"CPU": 4.0, name: 1.0}) for name in ("a", "b")]
    with LocalCluster(nodes):
        made = {name: RayResourcePool(name, 2, {"CPU": 1.0}, "STRICT_SPREAD") for name in ("actor", "rollout")}
        reserve(list(made.values()), 60)
        yield made.__getitem__


@pytest.fixture
def health(pools: object) -> Iterator[HealthMonitor]:
    with HealthMonitor() as monitor:
        yield monitor


@pytest.fixture
def start(pools: Callable[[str], RayResourcePool], health: HealthMonitor) -> Iterator[Callable[..., RayWorkerGroup]]:
    groups = []

    def _start(name: str, cls: type[Worker] = Plain, *arguments: object) -> RayWorkerGroup:
        init = RayClassWithInitArgs(cls, *arguments)
        groups.append(RayWorkerGroup(pools(name), init, timeout_seconds=120.0, health=health))
        return groups[-1]

    yield _start
    for group in groups:
        group.shutdown()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 4.0)
    monkeypatch.setattr(watch, "BIRTH_SECONDS", 4.0)


def told(wait: Callable[[], object]) -> str:
    """What is raised, in time."""
    begin = time.monotonic()
    with pytest.raises(InfrastructureError) as error:
        wait()
    assert time.monotonic() - begin < BOUND_SECONDS
    return str(error.value)


def test_a_worker_killed_in_a_call_is_named(start) -> None:
    group = start("actor")
    pid = group.pid()[1]
    message = told(group.work(signal.SIGKILL).get)
    assert message.startswith(f"group `actor`, rank 1 (pid {pid} on node")
    assert "got a dead worker (killed by SIGKILL, or ended by os._exit, " in message


def test_a_worker_stopped_in_a_call_is_named_killed_and_gone(start) -> None:
    group = start("actor")
    pid = group.pid()[1]
    message = told(group.work(signal.SIGSTOP).get)
    assert message.startswith(f"group `actor`, rank 1 (pid {pid} on node")
    assert "got a stopped worker (in work at test_health.py:" in message
    deadline = time.monotonic() + BOUND_SECONDS
    while os.path.exists(f"/proc/{pid}"):  # its end takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("signum", "got"), [(signal.SIGKILL, "dead"), (signal.SIGSTOP, "stopped")])
def test_an_idle_worker_ends_the_wait_for_another_group(start, signum: int, got: str) -> None:
    busy, idle = start("rollout"), start("actor")
    pid = idle.pid()[1]
    future = busy.work()
    os.kill(pid, signum)
    message = told(future.get)
    assert message.startswith(f"group `actor`, rank 1 (pid {pid} on node")
    assert f"got a {got} worker" in message
    assert "between calls" in message


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("signum", "got"),
    [(signal.SIGSEGV, "fatal: Segmentation fault"), (signal.SIGTERM, "SIGTERM at"), (signal.SIGSTOP, "stopped")],
)
def test_a_worker_that_does_not_get_through_its_start_is_named(start, signum: int, got: str) -> None:
    message = told(start("actor", Plain, signum).wait_ready)
    assert "group `actor`, rank 1 (pid " in message
    assert got in message
    assert "in __init__" in message


@pytest.mark.usefixtures("impatient")
def test_a_worker_stopped_before_it_can_say_who_it_is_is_named(start) -> None:
    message = told(start("actor", StoppedOnTheWay).wait_ready)
    assert "group `actor`, rank " in message
    assert "got a stopped worker (before its start)" in message


def test_a_worker_killed_before_it_can_say_who_it_is_ends_the_wait_for_another_group(start) -> None:
    busy = start("rollout")
    future = busy.work()
    start("actor", KilledOnTheWay)
    message = told(future.get)
    assert re.match(r"group `actor`, rank \d \(pid \d+ on node", message)
    assert "got a dead worker (its process ended without a word, as by SIGKILL, before its start)" in message


def test_a_call_that_fails_with_another_worker_is_told_as_that_workers_end(start) -> None:
    policy, engines = start("actor"), start("rollout")
    pid = engines.pid()[1]
    message = told(lambda: policy.call(engines.workers[1], signal.SIGKILL))
    assert message.startswith(f"group `rollout`, rank 1 (pid {pid} on node")


def test_an_error_that_a_killed_child_process_explains_is_told_as_that(start) -> None:
    message = told(start("actor").fail_with_a_child)
    assert re.match(
        r"group `actor`, rank \d \(pid \d+ on node .*\): got a dead child process \(VllmWorker-1, pid ", message
    )
    assert "by SIGKILL), then cancelled" in message


def test_an_exit_code_is_told(start) -> None:
    message = told(start("actor").leave)
    assert "it ended itself, in leave" in message
    assert "exit code 3" in message


def test_a_rank_that_does_not_come_to_a_collective_is_named(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "COLLECTIVE_SHARE", 0.05)  # of two minutes
    message = told(start("actor", Ranked).reduce)
    assert "group `actor`, rank 1 (pid " in message
    assert "got a collective without it: rank 1 in reduce at test_health.py:" in message
    assert "while rank 0 waited" in message
    assert "in all_reduce (in reduce at test_health.py:" in message


def test_an_end_on_purpose_is_told_of_nobody(start, health: HealthMonitor) -> None:
    group, other = start("actor"), start("rollout")
    group.pid()
    pids = other.pid()
    group.shutdown()
    assert other.pid() == pids
    assert health.verdict(within=3.0) is None
