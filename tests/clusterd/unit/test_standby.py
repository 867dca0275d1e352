"""Two ClusterDs, a Lease and a clock of their own: who stands by serves within 5 seconds, never beside the other.

A real one is killed by tests/clusterd/integration/test_hub_process.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from evertrain import aio
from evertrain.clusterd import __main__ as command
from evertrain.kube.lease import LostLeadership
from evertrain.kube.port import Kind
from tests import virtual_time
from tests.kube.fake import FakeKube

ANSWER = 0.1
"""Seconds that the API server takes."""
BEGIN = 0.5
"""That ClusterD itself has, of the 5."""
PHASES = [number / 10 for number in range(12)]
"""Seconds after a renewal: more than from one to the next."""


class Replica:
    """A ClusterD as `python -m evertrain.clusterd --leader-elect` leads it."""

    def __init__(self, cluster: FakeKube, served: list[Replica]) -> None:
        self.kube, self._served = Line(cluster), served
        self.ready, self.port = asyncio.Event(), 1
        options = command.parser().parse_args(["--leader-elect"])
        self.task = asyncio.create_task(command.lead(self.kube, self, "127.0.0.1:1", options))  # type: ignore[arg-type]

    async def run(self) -> None:
        assert not self._served, "two serve"
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
    """It notices itself, and stops before the other one begins."""

    async def test() -> None:
        first, second = await pair(phase)
        first.kube.cut = True
        async with aio.timeout(5 - BEGIN):
            await second.ready.wait()
        with pytest.raises(LostLeadership):
            await first.task
        await second.die()

    virtual_time.run(test())
