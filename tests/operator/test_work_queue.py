"""Keys are worked on once at a time, not forgotten, and later after errors."""

import asyncio

from rlhf_operator.work_queue import RetrySoon, Waits, WorkQueue

A, B = ("team", "a"), ("team", "b")


def run(scenario, concurrency=10, **waits):
    """Run a scenario with a queue; it is given the queue, and what was worked on."""

    async def made():
        queue = WorkQueue(lambda key: scenario.work(key), concurrency, Waits(**waits))
        task = asyncio.create_task(queue.run())
        try:
            await asyncio.wait_for(scenario.play(queue), 30)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(made())


class Scenario:
    """Records what is worked on; a key's work lasts until it is let go."""

    def __init__(self, results=()) -> None:
        self.started, self.running, self.most = [], set(), 0
        self.gate, self.changed = asyncio.Event(), asyncio.Event()
        self.results = list(results)
        self.gate.set()

    async def work(self, key):
        assert key not in self.running, "two at once on one key"
        self.started.append(key)
        self.running.add(key)
        self.most = max(self.most, len(self.running))
        self.changed.set()
        try:
            await self.gate.wait()
            result = self.results.pop(0) if self.results else None
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            self.running.remove(key)

    async def until(self, count) -> None:
        while len(self.started) < count:
            self.changed.clear()
            await self.changed.wait()


def test_what_comes_while_it_is_worked_on_is_worked_on_once_more():
    class Play(Scenario):
        async def play(self, queue):
            self.gate.clear()
            queue.add(A)
            await self.until(1)
            for _ in range(5):
                queue.add(A)
            self.gate.set()
            await self.until(2)
            while not queue.idle:
                await asyncio.sleep(0)
            assert self.started == [A, A]

    run(Play())


def test_so_many_at_once_and_no_more():
    class Play(Scenario):
        async def play(self, queue):
            self.gate.clear()
            for index in range(9):
                queue.add(("team", str(index)))
            await self.until(3)
            self.gate.set()
            await self.until(9)
            assert self.most == 3

    run(Play(), concurrency=3)


def test_an_earlier_time_wins_over_a_later_one():
    class Play(Scenario):
        async def play(self, queue):
            queue.add(A, 1000)
            queue.add(B, 2000)
            queue.add(B, 0.01)
            await self.until(1)
            assert self.started == [B]

    run(Play())


def test_work_may_ask_to_be_done_again():
    class Play(Scenario):
        async def play(self, queue):
            queue.add(A)
            await self.until(3)

    run(Play([0.01, 0.01]))


def test_what_comes_while_work_fails_is_not_left_to_the_pause_after_errors():
    class Play(Scenario):
        async def play(self, queue):
            queue._errors[A] = 20  # its next pause is the longest
            self.gate.clear()
            queue.add(A)
            await self.until(1)
            queue.add(A)
            self.gate.set()
            await self.until(2)

    run(Play([ValueError("boom")]))


def test_an_error_is_tried_again_and_hinders_no_other_key():
    results = []

    class Play(Scenario):
        async def play(self, queue):
            queue.add(A)
            queue.add(B)
            await self.until(4)

    run(Play([ValueError("boom"), RetrySoon()]), finished=lambda result, _: results.append(result))
    assert sorted(results[:3]) == ["error", "ok", "retry"] or sorted(results[:2]) == ["error", "retry"]
