"""ConfigMaps for others: whatever happens on the way, what is written last is right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from evertrain import aio
from evertrain.clusterd.publish import Publisher, config_map
from evertrain.kube.port import CONFIG_MAP, Kind
from tests.kube.fake import FakeKube


@contextlib.asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.ensure_future(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def says(kube: FakeKube) -> str | None:
    items = kube.items(CONFIG_MAP)
    return items[0]["data"]["x"] if items else None


async def test_back_to_what_it_was_while_it_is_written():
    kube = FakeKube()
    publisher = Publisher(kube, rate=1000)
    one, two = (config_map("n", "a", {"x": text}) for text in ("1", "2"))
    async with running(publisher), aio.timeout(30):
        publisher.put(one)
        while not publisher.written(one):
            await asyncio.sleep(0)
        changed = 0

        def before(verb: str, kind: Kind, name: str) -> None:
            nonlocal changed
            if verb == "replace":
                changed += 1
                if changed == 1:
                    publisher.put(one)

        kube.before = before
        publisher.put(two)
        while changed < 2:
            await asyncio.sleep(0.01)
        while not publisher.written(one):
            await asyncio.sleep(0)
        assert says(kube) == "1"
