"""Queues of streams: nothing lost that counts, nothing kept without end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from evertrain.clusterd.services.publisher import Everyone, Line, OneEach, Overrun
from evertrain.clusterd.services.registry import Registry


async def rest(line: Any) -> list[Any]:
    return [item async for item in line]


async def test_all_in_order_and_then_the_end() -> None:
    line: Line[int] = Line()
    for number in range(100):
        line.put(number)
    line.end()
    line.put(100)
    assert await rest(line) == list(range(100))


async def test_a_reader_that_waits_is_woken() -> None:
    line: Line[int] = Line()
    reading = asyncio.ensure_future(rest(line))
    for number in range(3):
        await asyncio.sleep(0)
        line.put(number)
    line.end()
    assert await reading == [0, 1, 2]


async def test_of_each_key_the_newest_waits() -> None:
    line: Line[tuple[str, int]] = Line(key=lambda item: item[0], limit=2)
    for number in range(1000):
        line.put(("a", number))
        line.put(("b", number))
    line.end()
    assert await rest(line) == [("a", 999), ("b", 999)]


async def test_too_many_end_the_stream_instead_of_getting_lost() -> None:
    left: list[Any] = []
    line: Line[int] = Line(limit=3, left=left.append)
    for number in range(4):
        line.put(number)
    with pytest.raises(Overrun):
        await anext(line)
    line.close()
    assert left == [line], "told once"


async def test_close_ends_who_is_just_reading() -> None:
    line: Line[int] = Line()
    reading = asyncio.ensure_future(rest(line))
    await asyncio.sleep(0)
    line.close()
    assert await reading == []


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    line: Line[int] = Line()
    heard: list[int] = []
    for number in range(200):
        reading = asyncio.ensure_future(anext(line))
        await asyncio.sleep(0)
        line.put(number)
        if number % 3:
            await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            heard.append(await reading)
    line.end()
    assert heard + await rest(line) == list(range(200))


async def test_the_newest_listener_of_a_key_has_it() -> None:
    left: list[str] = []
    lines: OneEach[int] = OneEach(left=left.append)
    assert lines.publish("a", 0) is False
    old = lines.subscribe("a", [1])
    new = lines.subscribe("a", [2])
    other = lines.subscribe("b")
    assert lines.publish("a", 3) is True
    assert await rest(old) == [] and left == []
    old.close()
    assert "a" in lines and left == []
    new.close()
    assert "a" not in lines and left == ["a"]
    lines.publish("b", 4)
    lines.end("b")
    assert await rest(other) == [4]
    other.close()
    assert left == ["a"]


async def test_who_is_overrun_has_left() -> None:
    left: list[str] = []
    lines: OneEach[int] = OneEach(limit=2, left=left.append)
    lines.subscribe("a")
    assert [lines.publish("a", number) for number in range(4)] == [True, True, False, False]
    assert left == ["a"]


async def test_everyone_hears_all() -> None:
    lines: Everyone[int] = Everyone(limit=5)
    first, second = lines.subscribe([0]), lines.subscribe()
    lines.publish(1)
    first.close()
    lines.publish(2)
    assert len(lines) == 1
    lines.end()
    assert (await rest(first), await rest(second)) == ([], [1, 2])


async def test_states_need_no_limit() -> None:
    lines: Everyone[int] = Everyone(key=lambda number: number, limit=5)
    line = lines.subscribe()
    for number in range(5000):
        lines.publish(number)
    lines.end()
    assert await rest(line) == list(range(5000))


async def test_registrations() -> None:
    registry: Registry[str] = Registry(2)
    assert registry.register("a") and registry.register("b")
    registry.enter("b", Line[int]())
    old, new = Line[int](), Line[int]()
    registry.enter("a", old)
    assert not registry.register("c")
    assert registry.register("a"), "again, also if it is full"
    assert await rest(old) == []
    registry.leave("a", old)
    assert "a" in registry, "that was the one before"
    registry.enter("a", new)
    registry.leave("a", new)
    assert "a" not in registry and len(registry) == 1 and registry.register("c")
    assert registry.register("d") and "c" not in registry, "who registers and never comes keeps nobody out"
