"""The controller on real sockets: links, tokens, the store, and the process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.mindio import framing
from evertrain.mindio import protocol as p
from evertrain.mindio.asynclink import AsyncLink
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Server
from evertrain.mindio.timing import Timing

TOKEN = "the-secret-of-this-job"
SOURCE = Path(__file__).resolve().parents[3] / "src"


class Peer:
    """A rank or an agent as the controller sees it: a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames, self._framer = p.FrameReader(), framing.FrameWriter()
        self._read: list[p.Message] = []

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Peer:
        return cls(*await asyncio.open_connection(*address))

    @classmethod
    async def rank(cls, server: Server, rank: int, incarnation: int = 0) -> Peer:
        peer = await cls.connect(server.address)
        peer.say(p.Hello(version=p.VERSION, token=TOKEN, role="rank", rank=rank, incarnation=incarnation))
        return peer

    def say(self, *messages: p.Message) -> None:
        for message in messages:
            self._writer.write(self._framer.frame(message))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def next(self) -> p.Message | None:
        """The next message; None when the controller has closed the link."""
        async with aio.timeout(10):
            while not self._read:
                try:
                    data = await self._reader.read(65536)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self._read = self._frames.feed(data)
        return self._read.pop(0)

    async def until(self, kind: type[p.Message]) -> p.Message:
        while not isinstance(message := await self.next(), kind):
            assert message is not None, f"the link was closed before a {kind.__name__} came"
        return message

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def controller(
    world_size: int = 2, silence: float = 10.0, **options: object
) -> AsyncIterator[tuple[Server, Peer]]:
    machine = Machine(world_size, Timing.derive(0.5, silence=silence))
    server = Server(machine, TOKEN, **options)
    await server.start()
    agent = await Peer.connect(server.address)
    agent.say(p.Hello(version=p.VERSION, token=TOKEN, role="agent", world_size=world_size))
    assert await agent.next() == p.Welcome()
    try:
        yield server, agent
    finally:
        agent.close()
        await server.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with aio.timeout(30):
            await scenario()

    aio.run(bounded())


async def bring_to_running(ranks: list[Peer], generation: int = 1, step: int = 0) -> None:
    for peer in ranks:
        await peer.until(p.Join)
        peer.say(p.Joined(generation=generation, digests={"state": "same"}))
    for peer in ranks:
        await peer.until(p.Repair)
        peer.say(p.Repaired(generation=generation, ok=True, step=step))
    for peer in ranks:
        assert await peer.until(p.Go) == p.Go(generation=generation, step=step)


def test_a_job_from_start_to_end_with_a_death_in_between() -> None:
    async def scenario() -> None:
        async with controller() as (server, agent):
            assert [(await agent.until(p.Spawn)).rank for _ in range(2)] == [0, 1]
            ranks = [await Peer.rank(server, number) for number in range(2)]
            for peer in ranks:
                assert await peer.next() == p.Welcome(running=False)
                peer.say(p.Out(step=0, clean=True, fresh=True))
            await bring_to_running(ranks)
            for peer in ranks:
                peer.say(p.Resumed(generation=1, step=1))

            ranks[1].close()
            agent.say(p.Observed(fault=p.Fault(kind="exit", rank=1, exit_code=-9)))
            stop = await ranks[0].until(p.Stop)
            assert await agent.until(p.Spawn) == p.Spawn(rank=1, incarnation=1)
            ranks[1] = await Peer.rank(server, 1, 1)
            assert await ranks[1].next() == p.Welcome(running=True)
            ranks[0].say(p.Out(step=1, clean=True, attempt=stop.attempt))
            ranks[1].say(p.Out(step=0, clean=True, fresh=True))
            await bring_to_running(ranks, 2, 1)
            for peer in ranks:
                peer.say(p.Finished(step=1))
            for number, peer in enumerate(ranks):
                await peer.until(p.Release)
                peer.close()
                agent.say(p.Ended(rank=number, incarnation=number))
            record = {}
            while record.get("event") != "incident":
                record = (await agent.until(p.Incident)).record
            assert record["outcome"] == "recovered" and record["restarted"] == [1]
            assert (await agent.until(p.End)).code == 0
            assert await server.serve_until_ended() == (0, "all ranks are done")

    run(scenario)


def test_deadlines_come_back_without_any_message() -> None:
    async def scenario() -> None:
        async with controller() as (server, agent):
            ranks = [await Peer.rank(server, number) for number in range(2)]
            for peer in ranks:
                peer.say(p.Out(step=0, clean=True, fresh=True))
            await bring_to_running(ranks)
            for _ in range(2):
                await agent.until(p.Spawn)
            ranks[0].say(p.Out(step=0, clean=True, fault=p.Fault(kind="exception", rank=0, detail="x")))
            await ranks[1].until(p.Stop)  # and does not answer
            assert await agent.until(p.Spawn) == p.Spawn(rank=1, incarnation=1)

    run(scenario)


def test_who_is_refused_and_how(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with controller(hello_timeout=0.2) as (server, agent):
            good = p.Hello(version=p.VERSION, token=TOKEN, role="rank", rank=0)

            async def answer(*, data: bytes = b"", hello: p.Message | None = None) -> list[p.Message]:
                peer = await Peer.connect(server.address)
                if hello is not None:
                    peer.say(hello)
                peer.write(data)
                answers = []
                while (message := await peer.next()) is not None:
                    answers.append(message)
                peer.close()
                return answers

            def hello(**fields: object) -> p.Hello:
                values = {"version": p.VERSION, "token": TOKEN, "role": "rank", "rank": 0, **fields}
                return p.Hello(**values)

            for wrong, reason in (
                (hello(token="guessed-token"), "wrong job token"),
                (hello(version=2), "protocol version 2"),
                (hello(rank=7), "rank 7 is not in a job of 2"),
                (hello(incarnation=3), "incarnation 3 of rank 0"),
                (hello(role="agent"), "has an agent already"),
                (p.Beat(), "must be a Hello"),
            ):
                (refused,) = await answer(hello=wrong)
                assert isinstance(refused, p.Refused) and reason in refused.reason

            assert await answer(data=b"GET / HTTP/1.1\r\n\r\n") == []
            assert await answer(data=b"\xff" * 100) == []
            assert await answer() == [], "a silent link is closed"

            first = await Peer.rank(server, 0)
            assert isinstance(await first.next(), p.Welcome)
            (refused,) = await answer(hello=good)
            assert isinstance(refused, p.Refused) and "linked already" in refused.reason
            agent.say(p.Suspect(rank=0, number=5))
            assert await first.next() == p.Ping(number=5), "the job goes on unharmed"
            assert server.machine.ended is None
            first.close()

    with caplog.at_level(logging.DEBUG):
        run(scenario)
    assert TOKEN not in caplog.text and "guessed-token" not in caplog.text
    assert "it did not say who it is" in caplog.text


def test_garbage_on_the_link_of_a_rank_is_a_fault_of_that_rank() -> None:
    async def scenario() -> None:
        async with controller() as (server, agent):
            ranks = [await Peer.rank(server, number) for number in range(2)]
            for peer in ranks:
                peer.say(p.Out(step=0, clean=True, fresh=True))
            await bring_to_running(ranks)
            for _ in range(2):
                await agent.until(p.Spawn)
            ranks[0].write(b"\xff" * 64)
            assert await agent.until(p.Spawn) == p.Spawn(rank=0, incarnation=1)
            await ranks[1].until(p.Stop)

    run(scenario)


def test_the_store_of_a_generation() -> None:
    async def scenario() -> None:
        async with controller() as (server, agent):
            zero, one = [await Peer.rank(server, number) for number in range(2)]
            for peer in (zero, one):
                peer.say(p.Out(step=0, clean=True, fresh=True))
            joins = [await peer.until(p.Join) for peer in (zero, one)]
            prefix = joins[0].prefix
            zero.say(p.StoreGet(request=1, keys=[prefix + "a", prefix + "b"]))
            one.say(p.StoreSet(key=prefix + "a", value=b"A"), p.StoreAdd(request=1, key=prefix + "b", amount=2))
            assert await one.next() == p.StoreReply(request=1, values=[b"2"])
            assert await zero.next() == p.StoreReply(request=1, values=[b"A", b"2"])
            one.say(p.StoreAdd(request=2, key=prefix + "b", amount=3))
            assert await one.next() == p.StoreReply(request=2, values=[b"5"])
            one.say(p.StoreAdd(request=3, key=prefix + "a", amount=1))
            assert "not a counter" in (await one.until(p.StoreReply)).error
            one.say(p.StoreGet(request=4, keys=["g99/x"]))
            assert "not open" in (await one.until(p.StoreReply)).error

            # A wait that has become pointless ends: after the order to stop, so that its end surprises nobody.
            zero.say(p.StoreGet(request=2, keys=[prefix + "never"]))
            one.say(p.Joined(generation=1, error="no way"))
            assert isinstance(await zero.next(), p.Stop)
            reply = await zero.next()
            assert isinstance(reply, p.StoreReply) and reply.request == 2 and "abandoned" in reply.error

    run(scenario)


def test_an_agent_that_lost_its_link_before_the_controller_knows_is_asked_to_come_again() -> None:
    async def scenario() -> None:
        async with controller() as (server, _):
            hello = p.Hello(version=p.VERSION, token=TOKEN, role="agent", world_size=2)
            refused = {}
            for living in ({}, {0: 0}):
                again = await Peer.connect(server.address)
                again.say(p.replace(hello, incarnations=living))
                refused[len(living)] = await again.next()
                again.close()
            assert refused[0] == p.Refused(reason="the job has an agent already")
            assert isinstance(refused[1], p.Refused) and refused[1].retry
            assert server.machine.ended is None

    run(scenario)


def test_a_link_that_is_given_up_in_the_moment_of_its_welcome_is_closed() -> None:
    """Otherwise the controller takes it for the agent's, and refuses the next one."""

    async def scenario() -> None:
        greeted = asyncio.Event()

        class Mute(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                greeted.set()

        made: list[AsyncLink] = []

        class Spy(AsyncLink):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                made.append(self)

        server = await asyncio.get_running_loop().create_server(Mute, "127.0.0.1", 0)
        hello = p.Hello(version=p.VERSION, token=TOKEN, role="agent")
        opening = asyncio.create_task(Spy.open(server.sockets[0].getsockname(), hello, print, print))
        await greeted.wait()
        made[0]._welcomed.set_result(p.Welcome())
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled() and made[0]._transport.is_closing()
        server.close()

    run(scenario)


def test_times_that_another_host_has_measured_are_translated() -> None:
    async def scenario() -> None:
        server = Server(Machine(2, Timing.derive(0.5), nnodes=2), TOKEN)
        await server.start()
        ahead = 500_000.0
        agents = []
        for node in range(2):
            agents.append(await Peer.connect(server.address))
            at = time.monotonic() + node * ahead
            agents[node].say(p.Hello(version=p.VERSION, token=TOKEN, role="agent", world_size=2, node=node, at=at))
            await agents[node].next()
        await agents[1].until(p.Spawn)
        at = time.monotonic() + ahead - 1.0
        agents[1].say(p.Observed(fault=p.Fault(kind="exit", rank=1, exit_code=1, at=at)))
        while (record := (await agents[0].until(p.Incident)).record)["event"] != "incident":
            pass
        assert 500.0 <= record["phases_ms"]["detect"] < 300_000.0, record
        for each in agents:
            each.close()
        await server.close()

    run(scenario)


def test_the_job_ends_with_its_agent() -> None:
    async def scenario() -> None:
        async with controller() as (server, agent):
            rank = await Peer.rank(server, 0)
            await rank.next()
            agent.close()
            assert await server.serve_until_ended() == (70, "the link to the agent broke")
            assert isinstance(await rank.until(p.Exit), p.Exit)
            late = await Peer.rank(server, 1)
            assert await late.next() == p.Refused(reason="the job is over", over=True)

    run(scenario)


def test_a_silent_agent_is_given_up_and_a_beating_one_is_not() -> None:
    async def scenario() -> None:
        async with controller(silence=0.5) as (server, agent):
            for _ in range(12):
                agent.say(p.Beat())
                await asyncio.sleep(0.1)  # beats are a matter of time
            assert server.machine.ended is None
            code, reason = await server.serve_until_ended()
            assert code == 70 and "silent" in reason

    run(scenario)


def test_only_loopback_unless_allowed() -> None:
    machine = Machine(1, Timing.derive(1.0))
    for host in ("0.0.0.0", "192.0.2.1", "example.org"):
        with pytest.raises(ValueError, match="other machines"):
            Server(machine, TOKEN, host)
    Server(machine, TOKEN, "0.0.0.0", allow_remote=True)
    Server(machine, TOKEN, "::1")
    with pytest.raises(ValueError, match="token"):
        Server(machine, "")


def _controller_process(*arguments: str, token: str = TOKEN) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evertrain.mindio.controller", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"EVERTRAIN_TOKEN": token, "PYTHONPATH": str(SOURCE)},
    )


def test_the_controller_in_a_process_of_its_own() -> None:
    process = _controller_process("--world-size=1", "--bound=0.5")
    try:
        assert process.stdout is not None
        listening = json.loads(process.stdout.readline())

        async def scenario() -> None:
            agent = await Peer.connect((listening["host"], listening["port"]))
            agent.say(p.Hello(version=p.VERSION, token=TOKEN, role="agent", world_size=1))
            assert await agent.until(p.Spawn) == p.Spawn(rank=0, incarnation=0)
            agent.say(p.Ended(rank=0, incarnation=0))
            assert (await agent.until(p.End)).code == 0
            agent.close()

        run(scenario)
        rest, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert json.loads(rest) == {"event": "ended", "code": 0, "reason": "all ranks are done"}
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (("--world-size=0",), TOKEN, "at least one rank"),
        (("--world-size=1",), "", "needs a job token"),
        (("--world-size=1", "--bound=-1"), TOKEN, "detection bound"),
        (("--world-size=1", "--host=0.0.0.0"), TOKEN, "other machines"),
        (("--world-size=1", "--port=65536"), TOKEN, "can't listen on 127.0.0.1:65536"),
        (("--world-size=1", "--host=192.0.2.1", "--insecure"), TOKEN, "can't listen on 192.0.2.1:0"),
    ],
)
def test_bad_usage_of_the_controller_process(arguments: tuple[str, ...], token: str, message: str) -> None:
    process = _controller_process(*arguments, token=token)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in errors
