"""Two controllers and the links of an agent and a rank: what is known after a take-over, and who is followed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from evertrain import aio
from evertrain.launch.link import Uplink
from evertrain.mindio import protocol as p
from evertrain.mindio.controller.host import ControllerHost
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.processor import Processor, Refused
from evertrain.mindio.timing import Timing

TOKEN = "the-secret-of-this-job"
TIMING = Timing.derive(0.5)


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with aio.timeout(15):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen") from None


@asynccontextmanager
async def host(peer: str = "", port: int = 0) -> AsyncIterator[ControllerHost]:
    made = ControllerHost(lambda: Machine(1, TIMING), TOKEN, "127.0.0.1", port, leads=not peer, peer=peer)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def agent(address: str) -> AsyncIterator[Uplink]:
    lost: list[str] = []

    def hello() -> p.Hello:
        living = {0: 0} if link.linked_before else {}
        return p.Hello(version=p.VERSION, token=TOKEN, role="agent", world_size=1, ranks=[0], incarnations=living)

    link = Uplink(
        [address], hello, on_message=lambda message: None, on_linked=lambda again: None, on_lost=lost.append,
        on_silence=lambda epoch: None, timing=TIMING, tenacious=True,
    )  # fmt: skip
    await link.open(10)
    try:
        yield link
        assert not lost
    finally:
        await link.close()


@asynccontextmanager
async def training_rank(address: str) -> AsyncIterator[Processor]:
    rank = Processor([p.address(address)], TOKEN, rank=0, patience=10.0)
    try:
        await asyncio.to_thread(rank.connect)
        rank.send(p.Out(step=0, clean=True, fresh=True))
        for expected, answer in (
            (p.Join, p.Joined(generation=1, digests={p.STATE: "same"})),
            (p.Repair, p.Repaired(generation=1, ok=True, step=0)),
            (p.Go, p.Resumed(generation=1, step=1)),
        ):
            while not isinstance(await asyncio.to_thread(rank.receive, 10), expected):
                pass
            if expected is p.Go:
                rank.entered(1, 0)
            rank.send(answer)
        yield rank
    finally:
        rank.close()


@asynccontextmanager
async def both() -> AsyncIterator[tuple[ControllerHost, ControllerHost, Uplink, Processor]]:
    """A controller in charge, its standby, and those who are linked to the first one and know of the other."""
    async with (
        host() as first,
        host(first.address) as second,
        agent(first.address) as link,
        training_rank(first.address) as rank,
    ):
        await until(lambda: len(rank._addresses) == 2 and len(link.addresses) == 2, "the news of the standby")
        yield first, second, link, rank


def test_what_ranks_agreed_on_before_training_outlives_the_controller() -> None:
    async def scenario() -> None:
        async with both() as (first, second, link, rank):
            await asyncio.to_thread(rank.store_set, "prelude/run", b"id-7")
            await until(lambda: getattr(second.answering, "notes", None), "the note")
            await first.close()
            await until(lambda: second.leads and rank.epoch == link.epoch == 1, "the take-over")
            assert await asyncio.to_thread(rank.store_get, ["prelude/run"], 10) == [b"id-7"]
            assert rank._inbox.qsize() == 1 and isinstance(rank.receive(), p.Continue), "nobody was told to stop"

    aio.run(scenario())


def test_a_new_controller_in_the_place_of_the_old_one_stands_by() -> None:
    async def scenario() -> None:
        async with both() as (first, second, link, rank):
            port = p.address(first.address)[1]
            await first.close()
            await until(lambda: second.leads and rank.epoch == link.epoch == 1, "the take-over")
            async with host(port=port) as third:
                assert third.leads
                await until(lambda: not third.leads and second.answering.standbys, "its stepping down")

    aio.run(scenario())


def test_a_controller_of_the_past_is_not_followed() -> None:
    async def scenario() -> None:
        async with host() as past:
            rank = Processor(p.address(past.address), TOKEN, rank=0)
            rank.epoch = 1
            async with agent(past.address):
                with pytest.raises(Refused, match="of the past"):
                    await asyncio.to_thread(rank.connect)

    aio.run(scenario())
