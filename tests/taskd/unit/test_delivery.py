"""Orders to members: in their order, each once, and not to the one that comes after."""

from __future__ import annotations

import asyncio

import pytest

from evertrain.taskd import frames
from evertrain.taskd.frames import Body
from evertrain.taskd.manager import delivery
from evertrain.taskd.manager.delivery import Delivery
from evertrain.taskd.net.routing import Position

AGENT, OTHER = Position("Agent", "1"), Position("Agent", "2")


class Line:
    def __init__(self, *codes: int, stuck: Position | None = None) -> None:
        self.codes, self.stuck = list(codes), stuck
        self.sent: list[tuple[str, str, str]] = []
        self.lost: list[tuple[str, int]] = []
        self.again = asyncio.Event()
        self.arrived: list[str] = []
        self.delivery = Delivery(
            self.send,
            lambda who, body: self.lost.append((who.server, body.code)),
            lambda who, body: self.arrived.append(body.message),
        )

    async def send(self, who: Position, text: str, uuid: str) -> int:
        self.sent.append((who.server, frames.decode(text).message, uuid))
        self.again.set()
        if who == self.stuck:
            await asyncio.Event().wait()
        return self.codes.pop(0) if self.codes else 0

    async def count(self, number: int) -> None:
        while len(self.sent) < number:
            self.again.clear()
            await asyncio.wait_for(self.again.wait(), 10)

    async def empty(self) -> None:
        while self.delivery._tasks:
            await asyncio.sleep(0)


def order(text: str) -> Body:
    return frames.body("ACTION", 213, text)


async def test_orders_arrive_in_their_order_and_a_try_again_has_the_same_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "BETWEEN", 0.0)
    line = Line(6001, 5002)
    for text in ("a", "b"):
        line.delivery.put(AGENT, order(text))
    await line.empty()
    assert [text for _, text, _ in line.sent] == ["a", "a", "a", "b"]
    assert len({uuid for _, _, uuid in line.sent}) == 2
    assert line.arrived == ["a", "b"], "each is said once"
    assert not line.lost and not line.delivery._waiting


async def test_what_does_not_arrive_after_five_tries_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "BETWEEN", 0.0)
    line = Line(*[5002] * 5)
    line.delivery.put(AGENT, order("a"))
    line.delivery.put(AGENT, order("b"))
    await line.empty()
    assert [text for _, text, _ in line.sent] == ["a"] * 5 + ["b"] and line.lost == [("1", 213)]


async def test_whoever_takes_a_place_gets_none_of_the_orders_for_the_one_before() -> None:
    line = Line(*[5002] * 3)
    for text in ("a", "b", "c"):
        line.delivery.put(AGENT, order(text))
    await line.count(1)
    line.delivery.forget(AGENT)
    line.codes.clear()
    line.delivery.put(AGENT, order("for the new one"))
    await line.empty()
    assert [text for _, text, _ in line.sent] == ["a", "for the new one"]


async def test_a_burst_of_orders_arrives_as_a_whole() -> None:
    line = Line()
    for number in range(10_000):
        line.delivery.put(AGENT, order(str(number)))
    await line.empty()
    assert [int(text) for _, text, _ in line.sent] == list(range(10_000)) and not line.lost


async def test_one_that_takes_nothing_holds_up_nobody_else_and_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "MOST", 1000)
    line = Line(stuck=AGENT)
    line.delivery.put(AGENT, order("first"))
    await line.count(1)
    for number in range(3000):
        line.delivery.put(AGENT, order(str(number)))
    line.delivery.put(OTHER, order("hello"))
    await line.count(2)
    assert [who for who, _, _ in line.sent] == ["1", "2"]
    assert len(line.delivery._waiting[AGENT]) == delivery.MOST and len(line.lost) == 3000 - delivery.MOST
    await line.delivery.close()
    assert not line.delivery._tasks and not line.delivery._waiting


async def test_an_order_that_can_not_be_sent_does_not_hold_up_the_next() -> None:
    line = Line()
    line.delivery.put(AGENT, "nonsense")  # type: ignore[arg-type]
    line.delivery.put(AGENT, order("a"))
    await line.empty()
    assert [text for _, text, _ in line.sent] == ["a"]
