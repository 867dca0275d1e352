"""The wall clock is set while a recovery waits: it waits as long as it would have, neither for ever nor less."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from evertrain.clusterd.actor import Actor
from evertrain.clusterd.clock import SteadyClock
from evertrain.clusterd.keep import Keeper
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover import names, timing
from evertrain.clusterd.recover.events import Effect, JobSeen, ProcessFault
from evertrain.clusterd.recover.machine import Recovery
from tests import virtual_time
from tests.clusterd.recover_world import World
from tests.kube.fake import FakeKube

WALL = 1.8e9


async def carry(job: Job, effect: Effect) -> str:
    return ""


@pytest.mark.parametrize("by", [0.0, -3600.0, 1000.0, 0.5])
@pytest.mark.parametrize("seen", [False, True], ids=["quiet", "seen"])
def test_a_wait_lasts_as_long_as_it_is_however_the_clock_is_set(by: float, seen: bool):
    async def story() -> None:
        loop, world, numbers, offset = asyncio.get_running_loop(), World("recover,dump"), itertools.count(), 0.0
        machine = Recovery(world.job.uid, make_uuid=lambda: f"uuid-{next(numbers)}")
        actor = Actor(
            world.job, machine, Keeper(FakeKube(), world.job), carry, clock=lambda: WALL + loop.time() + offset
        )
        running = asyncio.ensure_future(actor.run())
        actor.put(JobSeen(world.job))
        line = await actor.signals()
        await actor.tell(ProcessFault({3: "1"}))
        began, offset = loop.time(), by
        while machine.state == names.STOPPED and loop.time() < began + 10 * timing.REPORT:
            if seen:  # whatever happens meanwhile
                actor.put(JobSeen(world.job))
            await asyncio.sleep(1)
        assert timing.REPORT - 1 <= loop.time() - began <= timing.REPORT + 1
        line.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    test: Coroutine[Any, Any, None] = story()
    virtual_time.run(test)


def test_a_steady_clock_follows_when_it_is_set_and_not_when_it_is_adjusted():
    async def story() -> None:
        loop, offset = asyncio.get_running_loop(), 0.0
        clock = SteadyClock(lambda: WALL + loop.time() + offset)
        assert clock.was_set() == 0 and clock.now() == WALL
        offset = 0.9
        await asyncio.sleep(10)
        assert clock.was_set() == 0 and clock.now() == WALL + 10
        offset = -100
        assert clock.was_set() == pytest.approx(-100) and clock.now() == pytest.approx(WALL - 90)
        assert clock.was_set() == 0

    virtual_time.run(story())
