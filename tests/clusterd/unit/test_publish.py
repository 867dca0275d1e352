"""ConfigMaps for others: whatever happens on the way, what is written last is right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from evertrain import aio
from evertrain.clusterd import publish
from evertrain.clusterd.publish import Publisher, config_map
from evertrain.kube.port import CONFIG_MAP, ApiError, Kind
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


async def test_who_waits_for_a_config_map_does_not_wait_for_what_is_put_later():
    kube = FakeKube()
    publisher = Publisher(kube, rate=100_000)
    puts = iter(range(1_000_000))

    def before(verb: str, kind: Kind, name: str) -> None:
        publisher.put(config_map("n", "a", {"x": str(next(puts))}))  # there is always something new

    kube.before = before
    async with running(publisher), aio.timeout(60):
        publisher.put(config_map("n", "a", {"x": "mine"}))
        await publisher.until_written("n", "a")
        await publisher.until_written("n", "a")
        assert next(puts) < 20


async def test_who_waits_for_a_config_map_does_so_until_it_could_be_written():
    kube = FakeKube()
    publisher = Publisher(kube, rate=1000)
    refused = 3

    def before(verb: str, kind: Kind, name: str) -> None:
        nonlocal refused
        if verb == "create" and refused:
            refused -= 1
            raise ApiError(503, "ServiceUnavailable", "away")

    kube.before = before
    async with running(publisher), aio.timeout(60):
        publisher.put(config_map("n", "a", {"x": "mine"}))
        await publisher.until_written("n", "a")
        assert says(kube) == "mine" and not refused
        publisher.remove("n", "a")
        await publisher.until_written("n", "a")
        assert says(kube) is None
        await publisher.until_written("n", "b")


async def test_one_that_can_not_be_dealt_with_does_not_stop_the_others(caplog):
    kube = FakeKube()
    publisher = Publisher(kube, rate=1000, workers=1)

    def before(verb: str, kind: Kind, name: str) -> None:
        if name == "poisoned":
            raise TypeError("no such thing")

    kube.before = before
    async with running(publisher), aio.timeout(60):
        publisher.put(config_map("n", "poisoned", {"x": "1"}))
        publisher.put(config_map("n", "a", {"x": "2"}))
        await publisher.until_written("n", "a")
        assert says(kube) == "2" and "n/poisoned is not written" in caplog.text
        kube.before = lambda verb, kind, name: None
        await publisher.until_written("n", "poisoned")


async def test_what_others_delete_or_change_is_written_again_when_it_is_seen():
    kube = FakeKube()
    publisher = Publisher(kube, rate=1000)
    item = config_map("n", "a", {"x": "1"}, {"of": "ours"})
    async with running(publisher), aio.timeout(60):
        publisher.put(item)
        await publisher.until_written("n", "a")
        await kube.delete(CONFIG_MAP, "a", "n")
        publisher.seen("n", "a", None)
        await publisher.until_written("n", "a")
        assert says(kube) == "1"
        there = await kube.patch(CONFIG_MAP, "a", "n", {"data": {"x": "0"}})
        publisher.seen("n", "a", there)
        await publisher.until_written("n", "a")
        assert says(kube) == "1"
        publisher.remove("n", "a")
        await publisher.until_written("n", "a")
        publisher.seen("n", "a", None)
        publisher.seen("n", "of somebody else", None)
        await publisher.until_written("n", "a")
        assert says(kube) is None


async def test_what_nobody_watches_is_looked_at_in_rounds(monkeypatch):
    monkeypatch.setattr(publish, "LEAST_GAP", 0.001)
    kube = FakeKube()
    publisher = Publisher(kube, rate=1000, upkeep=0.01)
    one, two = (config_map("n", name, {"x": "1"}) for name in "ab")
    async with running(publisher), aio.timeout(60):
        publisher.put(one)
        publisher.put(two)
        await publisher.until_written("n", "a")
        await publisher.until_written("n", "b")
        await kube.delete(CONFIG_MAP, "a", "n")
        await kube.patch(CONFIG_MAP, "b", "n", {"data": {"x": "0"}})
        while [each["data"] for each in kube.items(CONFIG_MAP)] != [{"x": "1"}, {"x": "1"}]:
            await asyncio.sleep(0.001)


async def test_a_round_goes_on_when_the_api_server_is_away(monkeypatch):
    monkeypatch.setattr(publish, "LEAST_GAP", 0.001)
    kube = FakeKube()
    publisher = Publisher(kube, rate=1000, upkeep=0.01)
    asked = 0

    def before(verb: str, kind: Kind, name: str) -> None:
        nonlocal asked
        asked += 1
        if 10 < asked < 20:
            raise ConnectionError("nobody there")

    kube.before = before
    async with running(publisher), aio.timeout(60):
        publisher.put(config_map("n", "a", {"x": "1"}))
        while asked < 30:
            await asyncio.sleep(0.001)
        await kube.delete(CONFIG_MAP, "a", "n")
        while says(kube) is None:
            await asyncio.sleep(0.001)
