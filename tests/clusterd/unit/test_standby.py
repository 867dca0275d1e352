"""Two ClusterDs, a Lease and a clock of their own: who stands by serves within 5 seconds, never beside the other, and
who has lost the lead stands by.

A real one is killed, and loses its lease, in tests/clusterd/integration/test_hub_process.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from evertrain import aio
from evertrain.clusterd import __main__ as command
from evertrain.kube.port import ApiError, Kind
from tests import virtual_time
from tests.kube.fake import FakeKube

ANSWER = 0.1
"""Seconds that the API server takes."""
BEGIN = 0.9
"""That ClusterD itself has, of the 5."""
READ = 3.0
"""That it needs to read what is large, while another one leads."""
PHASES = [number / 10 for number in range(12)]
"""Seconds after a renewal: more than from one to the next."""


class Replica:
    """A ClusterD as `python -m evertrain.clusterd --leader-elect` leads it."""

    def __init__(self, cluster: FakeKube, served: list[Replica]) -> None:
        self.kube, self._served = Line(cluster), served
        self.looks_on, self.ready, self.port = asyncio.Event(), asyncio.Event(), 1
        self.made, self.trouble = 0, list[Exception]()
        options = command.parser().parse_args(["--leader-elect"])
        self.task = asyncio.create_task(command.lead(self.kube, self.make, "127.0.0.1:1", options))  # type: ignore[arg-type]

    def make(self) -> Replica:
        self.looks_on.clear()
        self.ready.clear()
        self.made += 1
        return self

    async def run(self, leads: asyncio.Event) -> None:
        await asyncio.sleep(READ)
        self.looks_on.set()
        await leads.wait()
        assert not self._served, "two serve"
        if self.trouble:
            raise self.trouble.pop()
        self._served.append(self)
        self.ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._served.remove(self)

    async def die(self) -> None:
        """As a kill would: it says nothing any more."""
        self.kube.cut = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Line(FakeKube):
    """One replica's way to the API server."""

    def __init__(self, cluster: FakeKube) -> None:
        super().__init__()
        self.objects, self.cut = cluster.objects, False

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Any:
        await self._pass()
        return await super().get(kind, name, namespace)

    async def replace(self, kind: Kind, item: Any) -> Any:
        await self._pass()
        return await super().replace(kind, item)

    async def _pass(self) -> None:
        if self.cut:
            raise ConnectionError("cut off")
        await asyncio.sleep(ANSWER)


async def pair(phase: float) -> tuple[Replica, Replica]:
    cluster, served = FakeKube(), list[Replica]()
    first = Replica(cluster, served)
    await first.ready.wait()
    await asyncio.sleep(10)
    second = Replica(cluster, served)
    await asyncio.sleep(10 + phase)
    assert not second.ready.is_set()
    return first, second


def test_who_has_not_read_what_is_large_does_not_take_the_lease() -> None:
    async def test() -> None:
        cluster = FakeKube()
        replica = Replica(cluster, [])
        await asyncio.sleep(READ - 0.1)
        assert not cluster.objects
        await replica.ready.wait()
        assert cluster.objects
        await replica.die()

    virtual_time.run(test())


@pytest.mark.parametrize("phase", PHASES)
def test_one_is_killed(phase: float) -> None:
    async def test() -> None:
        first, second = await pair(phase)
        await first.die()
        async with aio.timeout(5 - BEGIN):
            await second.ready.wait()
        await second.die()

    virtual_time.run(test())


@pytest.mark.parametrize("phase", PHASES)
def test_one_is_cut_off(phase: float) -> None:
    """It notices itself, stops before the other one begins, and stands by from then on."""

    async def test() -> None:
        first, second = await pair(phase)
        first.kube.cut = True
        async with aio.timeout(5 - BEGIN):
            await second.ready.wait()
        await asyncio.sleep(60)
        assert not first.task.done() and not first.ready.is_set()
        first.kube.cut = False
        await asyncio.sleep(60)
        assert not first.ready.is_set()
        await second.die()
        async with aio.timeout(5 - BEGIN):
            await first.ready.wait()
        await first.die()

    virtual_time.run(test())


def test_the_api_server_is_away_again_and_again() -> None:
    """As when the control plane is upgraded. Nobody ends, and each time one takes over again."""

    async def test() -> None:
        both = await pair(0)
        for time in range(1, 4):
            for each in both:
                each.kube.cut = True
            await asyncio.sleep(60)
            assert not any(each.ready.is_set() for each in both)
            for each in both:
                each.kube.cut = False
            async with aio.timeout(5 - BEGIN):
                await next_ready(both)
            assert sum(each.made for each in both) == 2 + time, "a ClusterD is of one use"
            assert not any(each.task.done() for each in both)
            await asyncio.sleep(10)
        for each in both:
            await each.die()

    virtual_time.run(test())


async def next_ready(replicas: tuple[Replica, ...]) -> None:
    waiting = [asyncio.ensure_future(each.ready.wait()) for each in replicas]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


@pytest.mark.parametrize(
    "trouble, passes",
    [
        (ConnectionError("refused"), True),
        (TimeoutError("no answer"), True),
        (ApiError(503, "ServiceUnavailable", "it comes up"), True),
        (aio.ExceptionGroup("", [ApiError(429, "TooManyRequests", "later")]), True),
        (ApiError(403, "Forbidden", "pods is forbidden"), False),
        (aio.ExceptionGroup("", [ConnectionError("refused"), ValueError("a defect")]), False),
        (OSError("cannot listen on 127.0.0.1:1"), False),
    ],
)
def test_who_can_not_begin_tries_again_if_that_may_pass(trouble: Exception, passes: bool) -> None:
    async def test() -> None:
        served = list[Replica]()
        replica = Replica(FakeKube(), served)
        replica.trouble.append(trouble)
        if passes:
            await replica.ready.wait()
            await replica.die()
        else:
            with pytest.raises(type(trouble)):
                await replica.task

    virtual_time.run(test())
