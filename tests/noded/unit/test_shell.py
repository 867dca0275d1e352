"""The daemon of a node as a whole, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from evertrain import aio
from evertrain.kube.port import CONFIG_MAP
from evertrain.noded import codes
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
