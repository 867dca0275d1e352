"""Who begins to listen in the middle of something hears what it has to know, once."""

from __future__ import annotations

import asyncio

from evertrain import aio
from evertrain.clusterd.actor import Actor
from evertrain.clusterd.keep import Keeper
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Effect, Event, JobSeen, Signal, Subscribed
from tests.kube.fake import FakeKube

JOB = Job("U", "train", "default")


class Stopping:
    """Stops the training when the job changes, and once more for who comes back."""

    state, deadline, worth_keeping = "X", None, False

    def __init__(self) -> None:
        self.stops = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, JobSeen | Subscribed) or (isinstance(event, JobSeen) and event.job is None):
            return []
        self.stops += 1
        return [Signal("stopTrain", f"uuid-{self.stops}")]

    def dump(self) -> bytes:
        return b"{}"

    def may_start_om(self) -> bool:
        return True


async def test_what_came_before_it_was_heard_of_is_not_for_a_new_listener() -> None:
    async def carry(job: Job, effect: Effect) -> str:
        return ""

    actor = Actor(JOB, Stopping(), Keeper(FakeKube(), JOB), carry)
    actor.put(JobSeen(JOB))
    subscribing = asyncio.ensure_future(actor.signals())
    await asyncio.sleep(0)  # it is there, but the machine does not know yet
    running = asyncio.ensure_future(actor.run())
    try:
        async with aio.timeout(30):
            line = await subscribing
            signal = await anext(line)
            assert signal.uuid == "uuid-2", "the stop that was meant for somebody else is not repeated to it"
            actor.put(JobSeen(JOB))
            assert (await anext(line)).uuid == "uuid-3"
            actor.put(JobSeen(None))
            assert [each async for each in line] == []
            await running
    finally:
        running.cancel()
