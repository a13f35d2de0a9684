"""One answer for all who ask, good for a while."""

import asyncio

import pytest
from operator_world import expire
from rlhf_operator.shared_answer import SharedAnswer


def answers(*given):
    """An answer that is asked for anew each time with the next of these, and how often it was."""
    asked = []

    async def ask():
        asked.append(len(asked))
        await asyncio.sleep(0)
        found = given[len(asked) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    return SharedAnswer(ask), asked


def test_all_who_come_while_it_is_on_its_way_get_the_same():
    async def scenario():
        shared, asked = answers(("a", 60.0))
        assert await asyncio.gather(shared.get(), shared.get()) == ["a", "a"]
        assert await shared.get() == "a"
        assert len(asked) == 1

    asyncio.run(scenario())


def test_an_answer_is_good_for_its_time():
    async def scenario():
        shared, _ = answers(("a", 0.0), ("b", 60.0), ("c", 60.0))
        assert [await shared.get() for _ in range(3)] == ["a", "b", "b"]
        expire(shared)
        assert shared.last == "b"
        assert await shared.get() == "c"

    asyncio.run(scenario())


def test_a_failure_is_told_to_all_and_not_kept():
    async def scenario():
        shared, asked = answers(ValueError("boom"), ("a", 60.0))
        failures = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
        assert [str(failure) for failure in failures] == ["boom", "boom"]
        assert await shared.get() == "a"
        assert len(asked) == 2

    asyncio.run(scenario())


def test_one_who_stops_waiting_takes_the_answer_from_nobody():
    async def scenario():
        shared, _ = answers(("a", 60.0))
        first, second = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == "a"

    asyncio.run(scenario())
