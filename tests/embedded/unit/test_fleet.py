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
from evertrain.embedded.power import (
    CUT,
    JOINED,
    NETWORK_ORDER,
    NETWORK_REFUSED,
    NETWORK_STATE,
    OFF,
    ON,
    ORDER,
    STATE,
    VIRTUAL,
    Cables,
)
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import Store
from evertrain.kube.port import NODE, AlreadyExists, Kube, Object

CABLES = (NETWORK_ORDER, NETWORK_STATE, NETWORK_REFUSED)


class FakeNode:
    """Registers itself and waits for its end."""

    def __init__(self, kube: Kube, name: str, diary: list[str]) -> None:
        self._kube, self.name, self._diary = kube, name, diary
        self._ended = False
        self.fail = asyncio.Event()
        self.shared = self._cut = False

    async def run(self) -> None:
        if self._cut:
            await self.fail.wait()
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

    async def plug(self, wanted: str) -> None:
        if self.shared:
            raise OSError("it has no cables")
        self._cut = wanted == CUT
        self._diary.append(f"{self.name} {wanted}")

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

    async def order_network(self, name: str, wanted: str) -> None:
        await self.kube.patch(NODE, name, None, {"metadata": {"annotations": {NETWORK_ORDER: wanted}}})
        await self.until(name, wanted, NETWORK_STATE)

    async def written(self, line: str, times: int = 1) -> None:
        while self.diary.count(line) < times:
            await asyncio.sleep(0)

    async def until(self, name: str, wanted: str, key: str = STATE) -> None:
        listing = await self.kube.list(NODE)
        if any(n["metadata"]["name"] == name and _annotation(n, key) == wanted for n in listing.items):
            return
        async for change in self.kube.watch(NODE, resource_version=listing.resource_version):
            if change.object["metadata"]["name"] == name and _annotation(change.object, key) == wanted:
                return

    async def cables(self, name: str, order: str) -> tuple[str, str, str]:
        """After that order: what stays of it, what is so, and what is not possible."""
        node = await self.kube.patch(NODE, name, None, {"metadata": {"annotations": {NETWORK_ORDER: order}}})
        version = node["metadata"]["resourceVersion"]
        async for change in self.kube.watch(NODE, resource_version=version, fields=f"metadata.name={name}"):
            kept, state, refused = (_annotation(change.object, key) for key in CABLES)
            return kept, state, refused
        raise AssertionError("nothing has happened")


def _annotation(node: Object, key: str) -> str:
    return str((node["metadata"].get("annotations") or {}).get(key, ""))


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


def test_a_cut_is_kept_over_a_restart_and_while_a_node_is_off() -> None:
    async def scenario() -> None:
        world = World()
        async with world.fleet():
            await world.order_network("node-1", CUT)
            assert world.diary.count("node-1 cut") == 1 and "node-0 cut" not in world.diary
            await world.order("node-1", OFF)
            world.diary.clear()
            await world.order("node-1", ON)
            await world.written("node-1 cut")
            await world.until("node-1", CUT, NETWORK_STATE)
        world.diary.clear()
        async with world.fleet():
            await world.written("node-1 cut")
            assert "node-0 cut" not in world.diary
            await world.order_network("node-1", JOINED)
            assert world.diary.count("node-1 joined") == 1
        world.diary.clear()
        async with world.fleet():
            await world.written("node-1 runs")
        assert "node-1 cut" not in world.diary, "it was joined"

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


def test_an_order_for_cables_that_is_refused_is_answered_each_time_and_does_not_stay() -> None:
    async def scenario() -> None:
        world = World()
        async with world.fleet():
            await world.until("node-0", ON)
            for node in world.made:
                node.shared = True
            for _ in range(2):
                assert await world.cables("node-0", CUT) == ("", "", "cut is not possible: it has no cables")
            for node in world.made:
                node.shared = False
            assert await world.cables("node-0", CUT) == (CUT, CUT, "")
            for node in world.made:
                node.shared = True
            assert await world.cables("node-0", JOINED) == (CUT, CUT, "joined is not possible: it has no cables")

    aio.run(asyncio.wait_for(scenario(), 10))


def test_a_node_that_was_cut_off_is_so_from_the_start_and_nobody_waits_for_it() -> None:
    async def scenario() -> None:
        world = World()
        async with world.fleet():
            await world.until("node-0", ON)
            assert await world.cables("node-0", CUT) == (CUT, CUT, "")
        silent = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
        await world.kube.patch(NODE, "node-0", None, silent, status=True)
        world.diary.clear()
        async with world.fleet():
            await world.written("node-1 runs")
            assert sorted(world.diary) == ["node-0 cut", "node-1 runs"]

    aio.run(asyncio.wait_for(scenario(), 10))


def test_what_is_cut_stays_so_when_more_is() -> None:
    cables = Cables()
    assert str(cables) == JOINED and str(cables.without()) == CUT
    assert str(cables.without("nic1")) == str(cables.without("nic1").without("nic1")) == "without nic1"
    assert str(cables.without("nic1").without("nic0")) == "without nic0,nic1"
    assert str(cables.without("nic1").without()) == str(cables.without().without("nic1")) == CUT
    slow = cables.without("nic1").worse(50.0, None).worse(None, 0.00001)
    assert str(slow) == "without nic1; delayed by 50ms; losing 0.00001%"
    assert str(slow.worse(0.0, 0.0)) == "without nic1"


def test_what_is_wrong_with_cables_is_read_as_it_is_written() -> None:
    for each in (Cables(), Cables().without(), Cables().without("nic0").worse(0.5, 100.0), Cables().worse(6e4, 0.1)):
        assert Cables.parse(str(each)) == each
    assert Cables.parse("") == Cables()
    assert str(Cables.parse("without nic1,nic0")) == "without nic0,nic1"
    for wrong in ("broken", "without nic2", "losing 101%", "delayed by 50", "without nic0; ", "delayed by 1e9ms"):
        assert Cables.parse(wrong) is None
