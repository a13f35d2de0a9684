"""Keys to be worked on: each at most once at a time, many at once, again after a while, and later after errors."""

import asyncio
import heapq
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlhf_operator.observe import Key

log = logging.getLogger(__name__)

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 60.0
Work = Callable[[Key], Awaitable[float | None]]
"""Works on a key, and tells after how many seconds to do so again; None for not before the next event."""


class RetrySoon(Exception):  # noqa: N818  (no error: the world moved on, and is looked at anew)
    """What was known turned out to be old: work on the key again at once, without a word."""


@dataclass
class Waits:
    """What a queue tells about itself."""

    started: Callable[[float], None] = field(default=lambda seconds: None)
    """Called when work starts, with the seconds that its key waited beyond its time."""
    finished: Callable[[str, float], None] = field(default=lambda result, seconds: None)
    """Called when work ends, with `ok`, `retry` or `error`, and the seconds that it took."""


class WorkQueue:
    """A queue of keys. What is added while it is worked on is worked on again afterwards, once.

    For one event loop.
    """

    def __init__(self, work: Work, concurrency: int, waits: Waits | None = None) -> None:
        self._work, self._waits = work, waits or Waits()
        self._slots = asyncio.Semaphore(concurrency)
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._active: dict[Key, float | None] = {}
        self._errors: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._due) + len(self._active)

    @property
    def idle(self) -> bool:
        """Whether nothing is worked on, and nothing is due."""
        now = asyncio.get_running_loop().time()
        return not self._active and not any(due <= now for due in self._due.values())

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Have a key worked on after a delay, or earlier where that was asked for before."""
        due = asyncio.get_running_loop().time() + delay
        if key in self._active:
            before = self._active[key]
            self._active[key] = due if before is None else min(before, due)
        elif due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._changed.set()

    async def run(self) -> None:
        """Work until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                while self._heap and self._heap[0][0] <= loop.time():
                    due, key = heapq.heappop(self._heap)
                    if self._due.get(key) == due:
                        await self._start(key, due)
                wait = self._heap[0][0] - loop.time() if self._heap else None
                try:
                    await asyncio.wait_for(self._changed.wait(), wait)
                except TimeoutError:
                    continue
        finally:
            for task in self._tasks:
                task.cancel()

    async def _start(self, key: Key, due: float) -> None:
        await self._slots.acquire()
        if self._due.get(key) != due:  # it was asked for earlier, and done, while there was no slot
            self._slots.release()
            return
        del self._due[key]
        self._active[key] = None
        self._waits.started(asyncio.get_running_loop().time() - due)
        task = asyncio.create_task(self._do(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, key: Key) -> None:
        loop = asyncio.get_running_loop()
        start, result = loop.time(), "ok"
        try:
            again = await self._work(key)
            self._errors.pop(key, None)
        except RetrySoon:
            again, result = 0.05, "retry"
        except Exception as error:
            again, result = self._backoff(key), "error"
            known = type(error).__module__.startswith("rlhf_operator")
            log.warning("%s/%s: %s: %s; again in %.1f s", *key, type(error).__name__, error, again, exc_info=not known)
        finally:
            self._slots.release()
            asked = self._active.pop(key, None)
        self._waits.finished(result, loop.time() - start)
        if asked is not None:
            self.add(key, max(asked - loop.time(), FIRST_BACKOFF if result == "error" else 0.0))
        if again is not None:
            self.add(key, again)

    def _backoff(self, key: Key) -> float:
        """Seconds to wait after an error: twice as long after each further one, and never the same for all."""
        count = self._errors.get(key, 0)
        self._errors[key] = count + 1
        return float(min(FIRST_BACKOFF * 2.0 ** min(count, 10), LONGEST_BACKOFF)) * random.uniform(0.75, 1.25)
