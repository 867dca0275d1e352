"""When a ConfigMap is written: at once, not too often, now and then, and not at all if it says so already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, Kind, NotFound
from evertrain.noded.sheet import Sheet
from tests import virtual_time
from tests.kube.fake import FakeKube, refused


@dataclass(frozen=True)
class Text:
    text: str

    def render(self, there: Mapping[str, str], now: float) -> dict[str, str | None]:
        return {"text": self.text, "at": str(now), "gone": None}

    def annotations(self) -> dict[str, str]:
        return {"note": self.text}

    def age(self, data: Mapping[str, str], now: float) -> float | None:
        return now - float(data["at"]) if data.get("text") == self.text and "gone" not in data else None


class World:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.now = asyncio.get_running_loop().time
        self.sheet = self.make()
        self.cache = Cache(self.kube, CONFIG_MAP, "mindx-dl")
        self.cache.listen(lambda before, after: self.sheet.seen(after))

    def make(self, **settings: Any) -> Sheet:
        settings = {"every": 300.0, "labels": {"a": "b"}, "clock": lambda: 1000.0 + self.now(), **settings}
        return Sheet(self.kube, "name", "mindx-dl", **settings)

    @property
    def data(self) -> dict[str, str]:
        found: dict[str, str] = self.kube.find(CONFIG_MAP, "name", "mindx-dl")["data"]
        return found

    @property
    def writes(self) -> int:
        return len(self.kube.calls)


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(world.sheet.run()), asyncio.create_task(world.cache.run())]
    await world.cache.synced.wait()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check(test: Any) -> None:
    async def work() -> None:
        await test(World())

    virtual_time.run(work())


def test_the_first_change_is_written_at_once_and_further_ones_a_second_later() -> None:
    async def test(world: World) -> None:
        async with running(world):
            await asyncio.sleep(100)
            assert world.writes == 0, "nobody has said what is wanted"
            began = world.now()
            world.sheet.want(Text("a"))
            await asyncio.sleep(0.1)
            assert world.data == {"text": "a", "at": str(1000.0 + began)}
            item = world.kube.find(CONFIG_MAP, "name", "mindx-dl")["metadata"]
            assert item["labels"] == {"a": "b"} and item["annotations"] == {"note": "a"}
            for text in "bcdefgh":
                world.sheet.want(Text(text))
                await asyncio.sleep(0.05)
            assert world.data["text"] == "a"
            await asyncio.sleep(0.6)
            assert world.data["text"] == "h"
            assert sum(verb == "patch" for verb, _, _ in world.kube.calls) == 1, "only the last of them"

    check(test)


def test_what_has_not_changed_is_written_again_only_after_its_time() -> None:
    async def test(world: World) -> None:
        async with running(world):
            world.sheet.want(Text("a"))
            await asyncio.sleep(0.1)
            writes = world.writes
            for _ in range(20):
                world.sheet.want(Text("a"))
                await asyncio.sleep(14)
            assert world.writes == writes
            await asyncio.sleep(25)
            assert world.writes == writes + 1 and float(world.data["at"]) >= 1300
            await asyncio.sleep(3000)
            assert world.writes == writes + 11

    check(test)


def test_one_who_starts_again_writes_nothing_that_is_there() -> None:
    async def test(world: World) -> None:
        async with running(world):
            world.sheet.want(Text("a"))
            await asyncio.sleep(100)
        writes = world.writes
        world.sheet = world.make()
        world.sheet.seen(world.kube.find(CONFIG_MAP, "name", "mindx-dl"))
        async with running(world):
            world.sheet.want(Text("a"))
            await asyncio.sleep(190)
            assert world.writes == writes
            await asyncio.sleep(20)
            assert world.writes == writes + 1

    check(test)


def test_what_others_delete_or_spoil_is_written_again() -> None:
    async def test(world: World) -> None:
        async with running(world):
            world.sheet.want(Text("a"))
            await asyncio.sleep(10)
            world.kube.remove(CONFIG_MAP, "name", "mindx-dl")
            await asyncio.sleep(0.1)
            assert world.data["text"] == "a"
            await asyncio.sleep(10)
            await world.kube.patch(
                CONFIG_MAP, "name", "mindx-dl", {"data": {"text": "spoilt", "gone": "x", "own": "y"}}
            )
            await asyncio.sleep(0.1)
            assert world.data["text"] == "a" and "gone" not in world.data
            assert world.data["own"] == "y", "what we don't know is left alone"

    check(test)


def test_nothing_is_wanted() -> None:
    async def test(world: World) -> None:
        async with running(world):
            world.sheet.want(None)
            await asyncio.sleep(5)
            assert world.writes == 0
            world.sheet.want(Text("a"))
            await asyncio.sleep(5)
            world.sheet.want(None)
            await asyncio.sleep(0.1)
            with pytest.raises(NotFound):
                await world.kube.get(CONFIG_MAP, "name", "mindx-dl")
            writes = world.writes
            await asyncio.sleep(5000)
            assert world.writes == writes

    check(test)


def test_a_server_that_fails_is_asked_again() -> None:
    async def test(world: World) -> None:
        failing = True

        def before(verb: str, kind: Kind, name: str) -> None:
            if failing and verb in ("create", "patch", "delete"):
                raise ConnectionError("nobody there") if world.now() < 20 else refused(500, "", "broken")

        world.kube.before = before
        async with running(world):
            world.sheet.want(Text("a"))
            await asyncio.sleep(60)
            failing = False
            await asyncio.sleep(10.1)
            assert world.data["text"] == "a"
            failing = True
            world.sheet.want(None)
            await asyncio.sleep(60)
            failing = False
            await asyncio.sleep(10.1)
            assert not world.kube.items(CONFIG_MAP)

    check(test)


def test_what_belongs_to_somebody_else_is_left_alone() -> None:
    async def test(world: World) -> None:
        await world.kube.create(
            CONFIG_MAP, {"metadata": {"name": "name", "namespace": "mindx-dl"}, "data": {"text": "x"}}
        )
        writes = world.writes
        world.sheet = world.make(mine=lambda item: bool(item["metadata"].get("labels")))
        async with running(world):
            world.sheet.want(Text("a"))
            await asyncio.sleep(1000)
            assert world.writes == writes
            world.kube.remove(CONFIG_MAP, "name", "mindx-dl")
            await asyncio.sleep(0.1)
            assert world.data["text"] == "a"

    check(test)


def test_a_clock_that_was_set_back_does_not_silence_us() -> None:
    async def test(world: World) -> None:
        shift = 0.0
        world.sheet = world.make(clock=lambda: 1000.0 + world.now() + shift)
        async with running(world):
            world.sheet.want(Text("a"))
            await asyncio.sleep(10)
            shift = -900.0
            writes = world.writes
            world.sheet.seen(world.kube.find(CONFIG_MAP, "name", "mindx-dl"))
            await asyncio.sleep(2)
            assert world.writes == writes + 1 and float(world.data["at"]) < 200

    check(test)
