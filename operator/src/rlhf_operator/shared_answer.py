"""One answer for all who ask, good for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """An answer that many need and that is asked for once: who comes while it is on its way waits for the same one.

    For one event loop at a time.
    """

    def __init__(self, ask: Callable[[], Awaitable[tuple[T, float]]]) -> None:
        """Ask nothing yet.

        Args:
            ask: gets the answer, and for how many seconds it is good. What it raises goes to all who wait, and the next
                one asks anew.
        """
        self._ask = ask
        self._answer: tuple[T, float] | None = None
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The answer."""
        if self._answer and time.monotonic() < self._answer[1]:
            return self._answer[0]
        if self._task is None:
            self._task = asyncio.create_task(self._refresh())
        return await asyncio.shield(self._task)

    @property
    def last(self) -> T | None:
        """The last answer, however old; None before the first."""
        return self._answer[0] if self._answer else None

    async def _refresh(self) -> T:
        try:
            answer, seconds = await self._ask()
            self._answer = answer, time.monotonic() + seconds
            return answer
        finally:
            self._task = None
