"""The daemon of a node as a whole, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from evertrain import aio
from evertrain.kube.port import CONFIG_MAP, EVENT, NODE, ApiError
from evertrain.noded import codes
from evertrain.noded.announce import BURST, OCCUR, RECOVERY, SIMILAR, Announcer
from evertrain.noded.daemon import NodeDaemon
from evertrain.noded.faults import NodeFault
from evertrain.noded.sources import Sources
from evertrain.wire import faultinfo as wire
from tests import virtual_time
from tests.kube.fake import FakeKube


class Broken:
    """A detector that can't bear what was there before."""

    name = "broken"

    def resume(self, faults: Sequence[NodeFault]) -> None:
        raise RuntimeError("a defect of the detector")

    async def run(self, tell: Any) -> None:
        await asyncio.Event().wait()


def test_what_keeps_it_from_starting_is_told() -> None:
    async def run() -> None:
        kube = FakeKube()
        sources = Sources(kube, "node-0")
        reading = asyncio.ensure_future(sources.run())
        try:
            async with aio.timeout(60):
                await NodeDaemon(kube, "node-0", sources, detectors=[Broken()]).run()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    with pytest.raises(RuntimeError, match="a defect of the detector"):
        aio.run(run())


class Silent:
    """Has nothing to say."""

    name = "links"

    async def run(self, tell: Any) -> None:
        await asyncio.Event().wait()


class Failing:
    """Sees nothing that is wrong as soon as it can look."""

    name = "nvidia"

    def __init__(self) -> None:
        self.mended = False

    async def run(self, tell: Any) -> None:
        if not self.mended:
            raise OSError("no answer from the driver")
        tell([])
        await asyncio.Event().wait()


def test_what_was_published_before_stays_until_its_detector_can_look() -> None:
    async def run() -> None:
        kube = FakeKube()
        gpu = wire.NodeFault("GPU", 1, (codes.GPU_LOST,), "SeparateNode")
        link = wire.NodeFault("Network", 2, (codes.LINK_DOWN,), "PreSeparateNode")
        info = wire.NodeInfo((gpu, link), "UnHealthy")
        metadata = {"name": wire.NODE_PREFIX + "node-0", "namespace": wire.NODE_NAMESPACE, "labels": wire.LABELS}
        await kube.create(CONFIG_MAP, {"metadata": metadata, "data": {wire.NODE_INFO: wire.encode_node(info)}})
        sources = Sources(kube, "node-0")
        reading = asyncio.ensure_future(sources.run())
        failing = Failing()
        daemon = NodeDaemon(kube, "node-0", sources, detectors=[Silent(), failing])
        running = asyncio.ensure_future(daemon.run())

        def found() -> list[str]:
            return sorted(fault.code for fault, _ in daemon.faults)

        await asyncio.sleep(30)
        assert found() == [codes.LINK_DOWN, codes.GPU_LOST]
        await asyncio.sleep(600)
        assert found() == [codes.GPU_LOST], "who only fails has not looked; who says nothing has"
        failing.mended = True
        await asyncio.sleep(120)
        assert found() == []
        for task in (running, reading):
            task.cancel()
        await asyncio.gather(running, reading, return_exceptions=True)

    virtual_time.run(run())


def test_a_fault_that_comes_and_goes_keeps_the_api_server_in_peace() -> None:
    async def run() -> None:
        kube = FakeKube()
        announcer = Announcer(kube, "node-0", clock=lambda: 1_700_000_000.0 + asyncio.get_running_loop().time())
        running = asyncio.ensure_future(announcer.run())
        link = NodeFault(code=codes.LINK_DOWN, device="Network", id=2, since_ms=1)
        for number in range(1000):
            announcer.tell((OCCUR if number % 2 == 0 else RECOVERY, link, "PreSeparateFault"), "u-1")
            await asyncio.sleep(1)
        events = {event["reason"]: event for event in kube.items(EVENT)}
        assert len(kube.items(EVENT)) == 2 and all(event["count"] > 50 for event in events.values())
        assert len(kube.calls) == BURST + 1000 // 60, "one a minute, after the first hundred"
        assert events[OCCUR]["involvedObject"]["uid"] == "u-1" and events[OCCUR]["action"] == "PreSeparateFault"
        assert events[OCCUR]["firstTimestamp"] < events[OCCUR]["lastTimestamp"]
        await asyncio.sleep(86_400)
        kube.objects.clear()  # Events expire
        announcer.tell((OCCUR, link, "SeparateFault"), "u-1")
        for number in range(40):
            announcer.tell((OCCUR, replace(link, note=f"attempt {number}"), "SeparateFault"), "u-1")
            await asyncio.sleep(1)
        messages = [event["message"] for event in kube.items(EVENT)]
        assert len(messages) == SIMILAR + 1 and sum("combined" in message for message in messages) == 1
        assert "attempt 39" in next(message for message in messages if "combined" in message)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtual_time.run(run())


@pytest.mark.parametrize("forbidden", [False, True])
def test_what_is_published_goes_with_its_node(forbidden: bool) -> None:
    """`forbidden`: who may not delete a ConfigMap may not give one that is there an owner."""

    async def run() -> None:
        kube = FakeKube()

        async def make_node() -> str:
            node = {"metadata": {"name": "node-0"}, "status": {"capacity": {"huawei.com/Ascend910": "2"}}}
            return str((await kube.create(NODE, node))["metadata"]["uid"])

        def owners() -> dict[str, list[str]]:
            found = {}
            for item in kube.items(CONFIG_MAP):
                references = item["metadata"].get("ownerReferences") or []
                found[item["metadata"]["name"]] = [each["uid"] for each in references if each["kind"] == "Node"]
            return found

        def collect_garbage() -> None:
            there = {item["metadata"]["uid"] for item in kube.items(NODE)}
            for item in kube.items(CONFIG_MAP):
                if not there.issuperset(owners()[item["metadata"]["name"]]):
                    kube.remove(CONFIG_MAP, item["metadata"]["name"], item["metadata"]["namespace"])

        device, info = wire.DEVICE_PREFIX + "node-0", wire.NODE_PREFIX + "node-0"
        first = await make_node()
        # From a noded that gave it no owner.
        metadata = {"name": device, "namespace": wire.DEVICE_NAMESPACE, "labels": wire.LABELS}
        await kube.create(CONFIG_MAP, {"metadata": metadata, "data": {}})
        patch = kube.patch

        async def guarded(kind: Any, name: str, namespace: Any, change: Any, **options: Any) -> Any:
            if forbidden and "ownerReferences" in change.get("metadata", {}):
                raise ApiError(403, "Forbidden", "cannot set an ownerRef on a resource you can't delete")
            return await patch(kind, name, namespace, change, **options)

        kube.patch = guarded  # type: ignore[method-assign]
        sources = Sources(kube, "node-0")
        daemon = NodeDaemon(kube, "node-0", sources)
        tasks = [asyncio.ensure_future(sources.run()), asyncio.ensure_future(daemon.run())]
        await asyncio.sleep(1)
        daemon.tell("links", [NodeFault(code=codes.LINK_DOWN, device="Network", id=2, since_ms=1)])
        await asyncio.sleep(10)
        old: dict[str, list[str]] = {device: []} if forbidden else {}
        assert owners() == {device: [first], info: [first], **old}
        kube.remove(NODE, "node-0")
        await asyncio.sleep(5)
        collect_garbage()  # what was written meanwhile
        await asyncio.sleep(3600)
        assert owners() == old, "nothing is written for a node that is not there"
        second = await make_node()
        await asyncio.sleep(10)
        assert owners() == {device: [second], info: [second], **old}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    virtual_time.run(run())
