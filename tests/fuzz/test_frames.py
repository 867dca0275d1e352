"""Whatever arrives at a controller or at a processor: neither dies nor grows, and nobody else notices.

20 000 frames each as part of the tests, always the same; a million each by `make fuzz`, always new ones. A failure
names the seed; give it back by EVERTRAIN_FUZZ_SEED to see the same frames again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Iterator

import pytest

from evertrain import aio
from evertrain.mindio import framing
from evertrain.mindio import protocol as p
from evertrain.mindio.board import Board
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Link, Server
from evertrain.mindio.processor import LinkLost, Processor
from evertrain.mindio.timing import Timing
from tests.fuzz.frames import Fuzzer
from tests.fuzz.targets import Growth, Script, Sink

FRAMES = int(os.environ.get("EVERTRAIN_FUZZ_FRAMES", "20000"))
SEED = int(os.environ.get("EVERTRAIN_FUZZ_SEED") or (secrets.randbelow(2**32) if FRAMES > 20_000 else 1))
TOKEN = "the-secret-of-this-job"
TIMING = Timing.derive(0.5, silence=1e5, takeover=1e5)
"""The agent here does not beat."""
MAX_GROWTH = 24.0
"""Megabytes: a heap that is used at random is never quite the same again. A leak of one frame in ten would be more."""

pytestmark = pytest.mark.timeout(120 + FRAMES // 500)


@pytest.fixture(autouse=True)
def _quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A million refusals are as many lines; what must not happen is an exception, and that is looked for itself."""
    with capsys.disabled():
        print(f"\n  {FRAMES} frames, EVERTRAIN_FUZZ_SEED={SEED} ", end="", flush=True)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _server(**options: object) -> Server:
    return Server(Machine(4, TIMING, max_restarts=1_000), TOKEN, **options)


def _drive(server: Server, link: Link, fuzzer: Fuzzer, serial: int) -> int:
    """Feed one connection until it is closed or has had enough; returns how many pieces it took."""
    count = 0
    for count, piece in enumerate(fuzzer.stream(serial + 2), 1):
        for chunk in fuzzer.chunks(piece):
            if not link._transport or link._transport.is_closing():
                return count
            link.data_received(chunk)
        if server.machine.ended is not None:
            break
    return count


async def _real_ranks(server: Server) -> list[Processor]:
    ranks = [Processor(server.address, TOKEN, rank=rank) for rank in range(2)]
    for rank in ranks:
        await asyncio.to_thread(rank.connect)
    return ranks


def test_strangers_at_the_controller() -> None:
    """Nobody knows the token. Two real ranks are linked all the time and can use the store."""

    async def scenario() -> None:
        server = _server()
        await server.start()
        opened = await asyncio.get_running_loop().create_connection(asyncio.Protocol, *server.address)
        writer = framing.FrameWriter()
        opened[0].write(writer.frame(p.Hello(version=p.VERSION, token=TOKEN, role="agent", world_size=4)))
        while not server._agents:
            await asyncio.sleep(0)
        ranks = await _real_ranks(server)
        fuzzer, growth, done, asked = Fuzzer(SEED, p.AnyMessage), Growth(FRAMES), 0, 0
        state = server.machine.state
        try:
            while done < FRAMES:
                link = Link(server)
                link.connection_made(Sink())
                done += _drive(server, link, fuzzer, 0)
                link.connection_lost(None)
                growth.look(done)
                if done // 500 > asked:
                    asked += 1
                    rank = ranks[asked % 2]
                    assert await asyncio.to_thread(rank.store_add, "prelude/asked", 1) == asked, f"seed {SEED}"
            assert growth.megabytes() < MAX_GROWTH, f"seed {SEED}"
            assert server.machine.state is state and len(server.links) == 3, f"seed {SEED}"
            assert all(not rank.lost and rank._inbox.empty() for rank in ranks), f"seed {SEED}"
        finally:
            for rank in ranks:
                rank.close()
            opened[0].close()
            await server.close()

    aio.run(scenario())


def _known(fuzzer: Fuzzer, server: Server) -> p.Hello:
    """A peer with the token: most are what the controller expects at this moment."""
    pick = fuzzer.random
    role = pick.choice(("rank", "rank", "rank", "agent", "control"))
    if pick.random() < 0.1:
        hello = fuzzer.of(p.Hello)
        return p.Hello(version=p.VERSION, token=TOKEN, role=role, rank=hello.rank, ranks=hello.ranks, node=hello.node)
    rank = pick.randrange(4)
    incarnation = server.machine._roster[rank].incarnation
    ranks = list(range(4)) if role == "agent" else []
    return p.Hello(version=p.VERSION, token=TOKEN, role=role, rank=rank, incarnation=incarnation, ranks=ranks)


def test_members_of_a_job_that_say_anything() -> None:
    """They have the token, so what they say is acted on: their job may end, the controller must not break."""

    async def scenario() -> None:
        fuzzer, growth, done, jobs = Fuzzer(SEED, p.AnyMessage), Growth(FRAMES), 0, 0
        while done < FRAMES:
            server = _server()
            server._over = asyncio.get_running_loop().create_future()
            jobs += 1
            links: list[Link] = []
            while done < FRAMES and server.machine.ended is None and len(links) < 400:
                link = Link(server)
                links.append(link)
                link.connection_made(Sink())
                link.data_received(framing.encode(1, _known(fuzzer, server)))
                # Some stay while others come.
                for each in fuzzer.random.sample(links, min(len(links), 3)):
                    done += _drive(server, each, fuzzer, done)
                    if each._transport is not None and each._transport.is_closing():
                        each.connection_lost(None)
                        links.remove(each)
                await asyncio.sleep(0)
                growth.look(done)
            for link in links:
                if link._transport is not None:
                    link.connection_lost(None)
            await server.close(0.0)
        assert growth.megabytes() < MAX_GROWTH, f"seed {SEED}"
        assert jobs > 1, "no job came to an end: the fuzzer is too tame"

    aio.run(scenario())


def test_a_controller_that_says_anything() -> None:
    """At a processor: the link ends at the first piece that can't be read, and the training thread gets to know."""
    fuzzer, growth, done, stops = Fuzzer(SEED, p.AnyMessage), Growth(FRAMES), 0, 0

    def on_stop() -> None:
        nonlocal stops
        stops += 1

    def counted(pieces: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal done
        for piece in pieces:
            done += 1
            yield piece

    threads = threading.active_count()
    board = Board()
    try:
        while done < FRAMES:
            script = Script(chunk for piece in counted(fuzzer.stream(1)) for chunk in fuzzer.chunks(piece))
            processor = Processor(("127.0.0.1", 1), TOKEN, rank=0, board=board, on_stop=on_stop)
            processor._socket = script  # type: ignore[assignment]
            answers = [processor._waiting.setdefault(number, type(processor._inbox)()) for number in (1, 2, 3)]  # type: ignore[arg-type]
            processor._read(script, p.FrameReader())  # type: ignore[arg-type]
            assert processor.lost and all(not answer.empty() for answer in answers), f"seed {SEED}"
            try:
                while True:
                    assert isinstance(processor.receive(0), p.Message)
            except LinkLost:
                pass
            growth.look(done)
    finally:
        board.close()
    assert stops > 0 and threading.active_count() == threads
    assert growth.megabytes() < MAX_GROWTH, f"seed {SEED}"
