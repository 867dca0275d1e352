"""The cache: whatever happens to its watches, it ends up with what the server has, and its listeners know."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from evertrain import aio
from evertrain.kube.cache import Cache
from evertrain.kube.port import POD, ApiError, Kind, Object
from tests.kube.fake import FakeKube


def pod(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "namespace": "default", "labels": labels}}


@contextlib.asynccontextmanager
async def running(cache: Cache) -> AsyncIterator[None]:
    task = asyncio.ensure_future(cache.run())
    try:
        await asyncio.wait_for(cache.synced.wait(), 5)
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def contents(items: list[Object]) -> dict[str, str]:
    return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in items}


class Mirror:
    """What somebody knows who only listens."""

    def __init__(self, cache: Cache) -> None:
        self.items: dict[str, Object] = {}
        cache.listen(self.changed)

    def changed(self, before: Object | None, after: Object | None) -> None:
        name = (after or before or {})["metadata"]["name"]
        assert self.items.get(name) == before
        if after is None:
            del self.items[name]
        else:
            self.items[name] = after


def test_follows_and_selects() -> None:
    async def test() -> None:
        kube = FakeKube()
        await kube.create(POD, pod("a", job="x"))
        cache = Cache(kube, POD)
        cache.index("job", lambda item: item["metadata"]["labels"].get("job"))
        async with running(cache):
            assert [item["metadata"]["name"] for item in cache.select("job", "x")] == ["a"]
            await kube.create(POD, pod("b", job="x"))
            assert await cache.until(lambda: len(cache.select("job", "x")) == 2, 5)
            await kube.patch(POD, "a", "default", {"metadata": {"labels": {"job": "y"}}})
            assert await cache.until(lambda: len(cache.select("job", "y")) == 1, 5)
            assert [item["metadata"]["name"] for item in cache.select("job", "x")] == ["b"]
            kube.remove(POD, "b")
            assert await cache.until(lambda: cache.get("b", "default") is None, 5)
            assert cache.select("job", "x") == []
            assert not await cache.until(lambda: False, 0.01)

    aio.run(test())


def test_only_what_was_asked_for() -> None:
    async def test() -> None:
        kube = FakeKube()
        cache = Cache(kube, POD, labels="job=x")
        async with running(cache):
            await kube.create(POD, pod("a", job="y"))
            await kube.create(POD, pod("b", job="x"))
            assert await cache.until(lambda: len(cache) > 0, 5)
            assert contents(list(cache)).keys() == {"b"}

    aio.run(test())


def test_an_object_that_was_replaced_unseen_is_two_events() -> None:
    async def test() -> None:
        kube = FakeKube()
        await kube.create(POD, pod("a"))
        cache = Cache(kube, POD)
        mirror = Mirror(cache)
        seen: list[tuple[bool, bool]] = []
        cache.listen(lambda before, after: seen.append((before is not None, after is not None)))
        await cache.refresh()
        kube.remove(POD, "a")
        await kube.create(POD, pod("a"))
        await cache.refresh()
        assert seen == [(False, True), (True, False), (False, True)]
        assert contents(list(mirror.items.values())) == contents(kube.items(POD))

    aio.run(test())


def test_a_server_that_was_set_back_is_listed_again() -> None:
    """From a backup, for example: it has never heard of the version that we saw."""

    async def test() -> None:
        kube = FakeKube()
        cache = Cache(kube, POD)
        refused = 0

        def before(verb: str, kind: Kind, name: str) -> None:
            nonlocal refused
            if verb == "list":
                refused = -1
            elif verb == "watch" and refused >= 0:
                refused += 1
                raise ApiError(504, "Timeout", "Too large resource version: 7, current: 3")

        async with running(cache):
            kube.before = before
            kube.objects.clear()
            await kube.create(POD, pod("other"))
            kube.history.clear()
            kube.cut_watches()
            assert await cache.until(lambda: len(cache) == 1, 5)
        assert contents(list(cache)).keys() == {"other"}

    aio.run(test())


def test_trouble_of_all_kinds_loses_nothing() -> None:
    """Watches cut, history forgotten, requests refused, while objects come and go."""

    async def test() -> None:
        kube = FakeKube()
        cache = Cache(kube, POD)
        mirror = Mirror(cache)
        chance = random.Random(7)
        refusing = False

        def before(verb: str, kind: Kind, name: str) -> None:
            if refusing and verb in ("list", "watch"):
                raise ConnectionError("no route")

        kube.before = before
        async with running(cache):
            for number in range(300):
                match chance.randrange(8):
                    case 0 | 1 | 2:
                        await kube.create(POD, pod(f"p{number}"))
                    case 3 | 4 if kube.items(POD):
                        kube.remove(POD, chance.choice(kube.items(POD))["metadata"]["name"])
                    case 5 if kube.items(POD):
                        kube.annotate(POD, chance.choice(kube.items(POD))["metadata"]["name"], {"n": str(number)})
                    case 6:
                        kube.cut_watches()
                    case 7:
                        refusing = chance.random() < 0.3
                        if chance.random() < 0.5:
                            kube.forget_history()
                            kube.cut_watches()
                if chance.random() < 0.2:
                    await asyncio.sleep(0.001)
            refusing = False
            assert await cache.until(lambda: contents(list(cache)) == contents(kube.items(POD)), 10)
            assert mirror.items == {item["metadata"]["name"]: item for item in cache}

    aio.run(test())


def test_an_object_that_a_listener_can_not_bear_ends_nothing() -> None:
    async def test() -> None:
        kube = FakeKube()
        cache = Cache(kube, POD)

        def listener(before: Object | None, after: Object | None) -> None:
            if after is not None and after["metadata"]["name"] == "odd":
                raise RecursionError("nobody has thought of that")

        cache.listen(listener)
        mirror = Mirror(cache)
        async with running(cache):
            await kube.create(POD, pod("odd"))
            await kube.create(POD, pod("even"))
            assert await cache.until(lambda: len(cache) == 2, 5)
            assert mirror.items.keys() == {"odd", "even"}

    aio.run(test())


def test_who_waits_for_a_change_can_be_cancelled_at_the_very_moment_of_one() -> None:
    async def test() -> None:
        kube = FakeKube()
        cache = Cache(kube, POD)
        await cache.refresh()
        waiting = asyncio.create_task(cache.until(lambda: False, None))
        await asyncio.sleep(0)
        await kube.create(POD, pod("news"))
        await cache.refresh()  # wakes it, and before it has run
        waiting.cancel()
        done, _ = await asyncio.wait([waiting], timeout=5)
        assert done and waiting.cancelled()

    aio.run(test())
