"""Nodes that are switched off and on, that fail, and that end with the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from evertrain import aio
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.fleet import Fleet
from evertrain.embedded.podlogs import LogRequest, LogsUnavailable
from evertrain.embedded.power import OFF, ON, ORDER, STATE, VIRTUAL
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import Store
from evertrain.kube.port import NODE, AlreadyExists, Kube, Object


class FakeNode:
    """Registers itself and waits for its end."""

    def __init__(self, kube: Kube, name: str, diary: list[str]) -> None:
        self._kube, self.name, self._diary = kube, name, diary
        self._ended = False
        self.fail = asyncio.Event()

    async def run(self) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}}
        with contextlib.suppress(AlreadyExists):
            await self._kube.create(NODE, node)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await self._kube.patch(NODE, self.name, None, ready, status=True)
        self._diary.append(f"{self.name} runs")
        try:
            await self.fail.wait()
            raise RuntimeError("a defect")
        except asyncio.CancelledError:
            if not self._ended:
                self._diary.append(f"{self.name} lost its power")
            raise

    async def stop(self) -> None:
        self._ended = True
        self._diary.append(f"{self.name} ended")

    async def log(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]:
        yield f"{self.name} has it".encode()


class World:
    def __init__(self) -> None:
        self.api = Api(Store(None), Registry.builtin())
        bootstrap(self.api)
        self.kube = LocalKube(self.api)
        self.diary: list[str] = []
        self.made: list[FakeNode] = []

    def fleet(self) -> Fleet:
        return Fleet(self.kube, ["node-0", "node-1"], self._make)

    def _make(self, name: str) -> FakeNode:
        self.made.append(FakeNode(self.kube, name, self.diary))
        return self.made[-1]

    async def order(self, name: str, power: str) -> None:
        await self.kube.patch(NODE, name, None, {"metadata": {"annotations": {ORDER: power}}})
        await self.until(name, power)

    async def written(self, line: str, times: int = 1) -> None:
        while self.diary.count(line) < times:
            await asyncio.sleep(0)

    async def until(self, name: str, power: str) -> None:
        listing = await self.kube.list(NODE)
        if any(n["metadata"]["name"] == name and _state(n) == power for n in listing.items):
            return
        async for change in self.kube.watch(NODE, resource_version=listing.resource_version):
            if change.object["metadata"]["name"] == name and _state(change.object) == power:
                return


def _state(node: Object) -> str:
    return str((node["metadata"].get("annotations") or {}).get(STATE, ""))


async def read(fleet: Fleet, node: str) -> bytes:
    pod: Object = {"metadata": {"name": "p"}, "spec": {"nodeName": node}}
    return b"".join([piece async for piece in fleet.log(pod, LogRequest(container="c"))])


def test_nodes_are_switched_off_and_on_and_stay_off_over_a_restart() -> None:
    async def scenario() -> None:
        world = World()
        async with world.fleet() as fleet:
            assert sorted(world.diary) == ["node-0 runs", "node-1 runs"]
            await world.until("node-0", ON)
            world.diary.clear()
            await world.order("node-1", OFF)
            assert world.diary == ["node-1 lost its power"]
            assert await read(fleet, "node-0") == b"node-0 has it"
            with pytest.raises(LogsUnavailable, match="node node-1 does not run"):
                await read(fleet, "node-1")
            await world.order("node-1", ON)
            await world.written("node-1 runs")
            await world.order("node-1", OFF)
            world.diary.clear()
        assert world.diary == ["node-0 ended"]
        world.diary.clear()
        async with world.fleet():
            await world.written("node-0 runs")
        assert world.diary == ["node-0 runs", "node-0 ended"]

    aio.run(asyncio.wait_for(scenario(), 10))


def test_a_node_that_fails_is_made_anew(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evertrain.embedded.fleet.AGAIN", 0.0)

    async def scenario() -> None:
        world = World()
        async with world.fleet():
            world.made[0].fail.set()
            await world.written("node-0 runs", times=2)
        assert sorted(world.diary[-2:]) == ["node-0 ended", "node-1 ended"]

    aio.run(asyncio.wait_for(scenario(), 10))
    assert "node node-0 has failed" in caplog.text


def test_nodes_of_an_earlier_start_with_more_of_them_are_removed_and_others_are_not() -> None:
    async def scenario() -> None:
        world = World()
        for name, labels in (("node-2", {VIRTUAL: "true"}), ("of-somebody-else", {"a": "b"})):
            metadata = {"name": name, "labels": labels}
            await world.kube.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        async with world.fleet():
            names = {node["metadata"]["name"] for node in (await world.kube.list(NODE)).items}
            assert names == {"node-0", "node-1", "of-somebody-else"}

    aio.run(asyncio.wait_for(scenario(), 10))
