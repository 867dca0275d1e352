"""The daemon of a node as a whole, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from evertrain.noded.daemon import NodeDaemon
from evertrain.noded.faults import NodeFault
from evertrain.noded.sources import Sources
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
            async with asyncio.timeout(60):
                await NodeDaemon(kube, "node-0", sources, detectors=[Broken()]).run()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    with pytest.raises(RuntimeError, match="a defect of the detector"):
        asyncio.run(run())
