"""The trainer's way to command the engines: calls on their actors that end by a deadline."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from threading import Thread
from typing import Any, Self, TypeVar

from rlhf_runtime.errors import ConnectionLostError, WeightSyncError

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How long engines may take to say why a connection broke."""


class EngineCall:
    """One step of an update on every engine, on its way."""

    def __init__(self, step: str, futures: Sequence[Future[None]], client: "EngineClient") -> None:
        self._step, self._futures, self._client = step, list(futures), client

    def wait(self) -> None:
        """Wait for every engine, or for the first failure.

        Raises:
            WeightSyncError: as an engine raised it, or when the deadline passed.
            Exception: of another kind, when an engine is gone.
        """
        done, late = wait(self._futures, self._client.remaining(), FIRST_EXCEPTION)
        if cause := root_cause(_errors(done)):
            raise cause
        if late:
            engines = [index for index, future in enumerate(self._futures) if future in late]
            raise WeightSyncError(
                f"weightSync.timeoutSeconds: got no answer to {self._step} from engines {engines} within "
                f"{self._client.timeout_seconds:g} s; expected one. Fix: raise it, or see what holds these engines up"
            )

    def cause_of(self, error: Exception) -> Exception:
        """What is behind an error met beside this step: it, or what an engine raised, given a moment to say so."""
        done, _ = wait(self._futures, min(GRACE_SECONDS, self._client.remaining()))
        return root_cause([*_errors(done), error]) or error


def _errors(done: Iterable[Future[None]]) -> list[Exception]:
    return [error for future in done if isinstance(error := future.exception(), Exception)]


class EngineClient:
    """VLLM's `VLLMWeightSyncClient` for several engines, with one deadline for all of an update's calls."""

    def __init__(self, engines: Sequence[Any], workers_per_engine: int, verify: bool, timeout_seconds: float) -> None:
        """Take the engines.

        Args:
            engines: Actor handles whose `transfer_weights(step, info)` returns a reference with a `future()`.
            workers_per_engine: Workers of each, its tensor-parallel size.
            verify: Whether engines take checksums of what arrives.
            timeout_seconds: How long an update may take, from `restart` on.
        """
        self._engines = list(engines)
        self._workers_per_engine = workers_per_engine
        self._verify = verify
        self.timeout_seconds = timeout_seconds
        self.restart()

    @property
    def world_size(self) -> int:
        """Processes that hold the weights: the sender and every worker of every engine."""
        return 1 + len(self._engines) * self._workers_per_engine

    def restart(self) -> None:
        """Set the clock for a new update."""
        self._deadline = time.monotonic() + self.timeout_seconds

    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def begin(self, step: str, info: Mapping[str, Any] | None = None) -> EngineCall:
        """Start a step on every engine."""
        return self._begin(step, [info] * len(self._engines))

    def begin_init(self, info: Mapping[str, Any]) -> EngineCall:
        """Start the handshake; where ranks are given, those of an engine follow those of the one before."""
        infos = []
        for index in range(len(self._engines)):
            own = {**info, "verify": self._verify, "timeout_seconds": self.timeout_seconds}
            if "rank_offset" in own:
                own["rank_offset"] += index * self._workers_per_engine
            infos.append(own)
        return self._begin("init_weight_transfer_engine", infos)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The handshake."""
        self.begin_init(init_info).wait()

    def abandon_weight_update(self) -> None:
        """Leave whatever update or connection was there, on every engine."""
        self.begin("abandon_weight_update").wait()

    def start_weight_update(self) -> None:
        """Begin an update."""
        self.begin("start_weight_update").wait()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one part of an update."""
        self.begin("update_weights", update_info).wait()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update; the version is the driver's to give, once the weights are verified."""
        self.begin("finish_weight_update").wait()

    def _begin(self, step: str, infos: Sequence[Mapping[str, Any] | None]) -> EngineCall:
        references = [
            engine.transfer_weights.remote(step, info) for engine, info in zip(self._engines, infos, strict=True)
        ]
        return EngineCall(step, [reference.future() for reference in references], self)


@dataclass(frozen=True)
class StepFailure:
    """What a worker of an engine answers when it failed in a step.

    An error that is raised, or returned, ends vLLM's call to all workers, and the answers of the others are then taken
    for those to the next call.
    """

    kind: type[WeightSyncError]
    message: str

    @classmethod
    def of(cls, step: str, error: Exception) -> Self:
        """The failure that an error means."""
        if isinstance(error, WeightSyncError):
            return cls(type(error), str(error))
        return cls(
            WeightSyncError,
            f"weightSync: got {type(error).__name__} ({error}) in {step}; expected the engine to take the weights. "
            "Fix: see the engine's log",
        )


def raise_failure(answers: Iterable[StepFailure | None]) -> None:
    """Raise what made the workers of an engine fail, if any did.

    Raises:
        WeightSyncError: as a worker raised it.
    """
    if error := root_cause(answer.kind(answer.message) for answer in answers if answer is not None):
        raise error


def root_cause(errors: Iterable[Exception]) -> Exception | None:
    """Of errors that one failure caused on several processes, the one that tells most about it.

    That is the loss of an engine, or else what an engine itself raised, or else a connection that broke.
    """
    return min(errors, key=_remoteness, default=None)


def _remoteness(error: Exception) -> int:
    return isinstance(error, WeightSyncError) + isinstance(error, ConnectionLostError)


def background(work: Callable[[], T]) -> Future[T]:
    """Start work beside this thread that nothing can end, and that nobody waits for when the process ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
