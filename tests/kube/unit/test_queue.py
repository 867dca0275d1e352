"""The work queue: no key is lost, none is worked on twice at once."""

from __future__ import annotations

import asyncio
import random

import pytest

from evertrain import aio
from evertrain.kube.queue import WorkQueue


def test_a_key_waits_once() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for key in ("a", "b", "a", "a"):
            queue.add(key)
        assert len(queue) == 2
        assert [await queue.get(), await queue.get()] == ["a", "b"]

    aio.run(test())


def test_a_key_that_changes_while_it_is_worked_on_comes_again_afterwards() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        key = await queue.get()
        queue.add("a")
        with pytest.raises(TimeoutError):
            async with aio.timeout(0.02):
                await queue.get()
        queue.done(key)
        assert await asyncio.wait_for(queue.get(), 1) == "a"

    aio.run(test())


def test_later_and_earlier() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue()
        loop = asyncio.get_running_loop()
        began = loop.time()
        queue.add_after("slow", 30)
        queue.add_after("a", 30)
        queue.add_after("a", 0.03)
        queue.add_after("a", 30)
        assert await asyncio.wait_for(queue.get(), 5) == "a"
        assert 0.025 < loop.time() - began < 5
        queue.done("a")
        with pytest.raises(TimeoutError):
            async with aio.timeout(0.02):
                await queue.get()

    aio.run(test())


def test_a_worker_that_waits_for_later_hears_of_now() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("later", 30)
        waiting = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.add("now")
        assert await asyncio.wait_for(waiting, 1) == "now"

    aio.run(test())


def test_failures_wait_longer_each_time_until_they_are_forgotten() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(first_delay=0.001, max_delay=0.004)
        delays = [queue.retry("a") for _ in range(5)]
        assert delays[0] <= 0.001 < delays[2] <= 0.004
        assert max(delays) <= 0.004
        queue.forget("a")
        assert queue.retry("a") <= 0.001

    aio.run(test())


def test_many_workers_and_keys() -> None:
    async def test() -> None:
        queue: WorkQueue[int] = WorkQueue()
        wanted = dict.fromkeys(range(20), 0)
        seen = dict.fromkeys(range(20), 0)
        busy: set[int] = set()
        chance = random.Random(1)

        async def work() -> None:
            while True:
                key = await queue.get()
                assert key not in busy
                busy.add(key)
                state = wanted[key]
                await asyncio.sleep(chance.random() / 1000)
                seen[key] = state
                busy.discard(key)
                queue.done(key)

        workers = [asyncio.ensure_future(work()) for _ in range(4)]
        for _ in range(500):
            key = chance.randrange(20)
            wanted[key] += 1
            queue.add(key)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        async with aio.timeout(10):
            while len(queue) or busy:
                await asyncio.sleep(0.002)
        assert seen == wanted
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    aio.run(test())
