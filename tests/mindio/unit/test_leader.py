"""Who may come to a controller that has a standby."""

from __future__ import annotations

import asyncio

from evertrain import aio
from evertrain.mindio import protocol
from evertrain.mindio.controller.leader import Leader
from evertrain.mindio.controller.machine import AgentLost, Machine
from evertrain.mindio.timing import Timing


def _refusal(hello: protocol.Hello) -> object:
    async def ask() -> object:
        leader = Leader(Machine(2, Timing.derive(1.0)), "t", "127.0.0.1:1", on_deposed=lambda address, epoch: None)
        return leader.refusal(hello)

    return aio.run(ask())


def test_a_new_controller_does_not_draw_the_standby_of_a_job_that_has_begun() -> None:
    # It is in the place of one that died. If the standby followed it, nobody would take over.
    hello = protocol.Hello(version=protocol.VERSION, token="t", role="standby", address="127.0.0.1:2", place="begun")
    refused = _refusal(hello)
    assert isinstance(refused, protocol.Refused) and refused.retry and refused.new


def test_the_standby_of_a_job_that_begins_is_welcome() -> None:
    hello = protocol.Hello(version=protocol.VERSION, token="t", role="standby", address="127.0.0.1:2")
    assert _refusal(hello) is None


def test_a_controller_that_was_frozen_hands_over_before_it_does_anything() -> None:
    """Others may have turned to the standby meanwhile; what it would decide now may contradict what that decided."""

    async def play() -> None:
        now = 100.0
        deposed: list[tuple[str, int]] = []
        machine = Machine(2, Timing.derive(1.0))
        leader = Leader(
            machine, "t", "127.0.0.1:1", epoch=3, on_deposed=lambda *who: deposed.append(who), clock=lambda: now
        )
        leader.prepare()
        leader._standbys["127.0.0.1:2"] = object()
        now += machine.timing.silence / 2 + 0.1
        leader._feed(AgentLost())
        assert machine.ended is None, "it has ended a job that others lead"
        await asyncio.sleep(0)
        assert deposed == [("127.0.0.1:2", 3)]
        await leader.close()

    aio.run(play())
