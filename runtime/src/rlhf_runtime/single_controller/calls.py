"""What a group's caller gets of a call: its result, now or later, and when each rank worked on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """One rank's work on one call, in seconds since the epoch on its worker's clock."""

    group: str
    role: str | None
    """Role of a colocated group; none where the group has one class."""
    method: str
    rank: int
    start: float
    end: float


class WorkerFuture:
    """The result of a call that was not waited for."""

    def __init__(self, collect: Callable[[], Any]):
        self._collect: Callable[[], Any] | None = collect
        self._result: Any = None

    def get(self) -> Any:
        """Wait for the result, or raise what a worker raised. Once it is there, nothing of it is kept in Ray."""
        if self._collect is not None:
            self._result = self._collect()
            self._collect = None
        return self._result
