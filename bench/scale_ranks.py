"""Many simulated ranks in one process, each with a link of its own: `bench.scale` starts a few of these.

A rank answers every order at once. What is decoded here is only what the answer needs, so that the few cores of the
machine work for the controller and not for the simulation. Commands come as JSON lines on standard input; for every
kind of order a line goes out when the last of the ranks here has got it, with the time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from evertrain import aio
from evertrain.mindio import framing
from evertrain.mindio import protocol as p
from evertrain.mindio.timing import Timing

_AT_ONCE = 200
"""Connections that one process opens at a time; the listener's queue is finite."""


def per_node(world_size: int) -> int:
    """Eight ranks on a node, or as many as nodes of equal size allow."""
    return math.gcd(world_size, 8)


class _Order(msgspec.Struct, tag=True):
    pass


class Welcome(_Order):
    pass


class Refused(_Order):
    reason: str


class Stop(_Order):
    attempt: int


class Join(_Order):
    generation: int
    step: int


class Repair(_Order):
    generation: int
    step: int


class Go(_Order):
    generation: int
    step: int


class Exit(_Order):
    reason: str = ""


class Release(_Order):
    pass


class Ping(_Order):
    number: int


class Memo(_Order):
    pass


_decoder = msgspec.msgpack.Decoder(tuple[int, Welcome | Refused | Stop | Join | Repair | Go | Exit | Release | Ping])


class Spawn(_Order):
    rank: int
    incarnation: int


class End(_Order):
    reason: str


class Beat(_Order):
    pass


class Incident(_Order):
    pass


_agent_decoder = msgspec.msgpack.Decoder(tuple[int, Welcome | Refused | Spawn | End | Beat | Incident | Memo])


class Agent(asyncio.Protocol):
    """Starts the ranks of one node when it is told to, tells of their ends, and beats."""

    def __init__(self, crowd: Crowd, node: int, ranks: range) -> None:
        self._crowd, self.node, self.ranks = crowd, node, ranks
        self._reader, self._writer = p.FrameReader(_agent_decoder), framing.FrameWriter()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.say(
            p.Hello(
                version=p.VERSION, token=os.environ["EVERTRAIN_TOKEN"], role="agent", node=self.node,
                ranks=list(self.ranks), world_size=self._crowd.world_size, address="127.0.0.1", master_port=1,
                records=self.node <= 1,
            )
        )  # fmt: skip

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case Spawn(rank=rank, incarnation=incarnation):
                    self._crowd.spawn(rank, incarnation)
                case End(reason=reason) | Refused(reason=reason):
                    self._crowd.tell(error=f"the agent of node {self.node} was told: {reason}")

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None

    def say(self, message: p.Message) -> None:
        if self.transport is not None:
            self.transport.write(self._writer.frame(message))


class Rank(asyncio.Protocol):
    def __init__(self, crowd: Crowd, rank: int, incarnation: int) -> None:
        self._crowd, self.rank, self.incarnation = crowd, rank, incarnation
        self._reader, self._writer = p.FrameReader(_decoder), framing.FrameWriter()
        self._step = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._crowd.come(self)
        token = os.environ["EVERTRAIN_TOKEN"]
        self._say(p.Hello(version=p.VERSION, token=token, role="rank", rank=self.rank, incarnation=self.incarnation))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._crowd.gone(self)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case Welcome():
                    fresh = self.incarnation == 0 or self._step == 0
                    self._say(p.Out(step=0, clean=True, fresh=fresh, fingerprint="f", state_bytes=1))
                    self._crowd.got("Welcome", self.incarnation)
                case Stop(attempt=attempt):
                    self._crowd.got("Stop", attempt)
                    self._say(p.Out(step=self._step, clean=True, attempt=attempt, fingerprint="f", state_bytes=1))
                case Join(generation=generation, step=step):
                    self._crowd.got("Join", generation)
                    self._say(p.Joined(generation=generation, digests={p.STATE: "d"} if step == self._step else {}))
                case Repair(generation=generation, step=step):
                    self._crowd.got("Repair", generation)
                    self._step = step
                    self._say(p.Repaired(generation=generation, ok=True, step=step))
                case Go(generation=generation, step=step):
                    self._crowd.got("Go", generation)
                    self._step = step + 1
                    self._say(p.Resumed(generation=generation, step=self._step))
                case Refused(reason=reason):
                    self._crowd.tell(error=f"rank {self.rank} was refused: {reason}")

    def _say(self, message: p.Message) -> None:
        if self.transport is not None:
            self.transport.write(self._writer.frame(message))


class Crowd:
    def __init__(self, address: tuple[str, int], source: str, ranks: range, world_size: int, bound: float) -> None:
        self.world_size = world_size
        self._heartbeat = Timing.derive(bound, world_size // per_node(world_size)).heartbeat
        self._per_node = per_node(world_size)
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._agents: dict[int, Agent] = {}
        self._starting: set[asyncio.Task[asyncio.BaseProtocol]] = set()
        self._address, self._source = address, source
        self._ranks = ranks
        self._links: dict[int, Rank] = {}
        self._without_one: set[int] = set()
        """Attempts before which one of the ranks here was killed."""
        self._counts: dict[tuple[str, int], int] = {}

    def tell(self, **fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    def got(self, kind: str, number: int) -> None:
        key = kind, number
        count = self._counts[key] = self._counts.get(key, 0) + 1
        everybody = len(self._ranks)
        if kind == "Stop" and number in self._without_one:
            everybody -= 1
        if count == everybody:
            self.tell(kind=kind, number=number, at=time.monotonic(), count=count)

    def come(self, rank: Rank) -> None:
        self._links[rank.rank] = rank

    def gone(self, rank: Rank) -> None:
        if self._links.get(rank.rank) is rank:
            del self._links[rank.rank]

    def spawn(self, rank: int, incarnation: int) -> None:
        task = asyncio.create_task(self._connect(lambda: Rank(self, rank, incarnation)))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _connect(self, make: Callable[[], asyncio.Protocol]) -> asyncio.BaseProtocol:
        async with self._gate:
            _, link = await asyncio.get_running_loop().create_connection(
                make, *self._address, local_addr=(self._source, 0)
            )
        return link

    async def _connect_agents(self) -> None:
        """Their ranks follow when the controller orders them."""
        for first in range(self._ranks.start, self._ranks.stop, self._per_node):
            node, ranks = first // self._per_node, range(first, min(first + self._per_node, self._ranks.stop))
            link = await self._connect(lambda node=node, ranks=ranks: Agent(self, node, ranks))  # type: ignore[misc]
            assert isinstance(link, Agent)
            self._agents[node] = link

    async def _beat(self, agent: Agent, delay: float) -> None:
        while True:
            await asyncio.sleep(delay)
            agent.say(p.Beat(at=time.monotonic()))
            delay = self._heartbeat

    async def run(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self.tell(ready=True)
        beats = []
        while line := await reader.readline():
            match json.loads(line):
                case {"do": "connect"}:
                    await self._connect_agents()
                    for number, agent in enumerate(self._agents.values()):
                        # Nodes do not beat in time with each other.
                        delay = self._heartbeat * number / len(self._agents)
                        beats.append(asyncio.create_task(self._beat(agent, delay)))
                case {"do": "kill", "rank": rank, "attempt": attempt}:
                    # Like a process that is going: it does nothing any more, its link ends later.
                    link = self._links.pop(rank)
                    if link.transport is not None:
                        link.transport.pause_reading()
                    self._without_one.add(attempt)
                    now = time.monotonic()
                    fault = p.Fault(kind="exit", rank=rank, incarnation=link.incarnation, exit_code=-9, at=now)
                    self._agents[rank // self._per_node].say(p.Observed(fault=fault))
                    self.tell(kind="killed", number=rank, at=now)


def main(host: str, port: str, source: str, first: str, last: str, world_size: str, bound: str) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    ranks = range(int(first), int(last))
    aio.run(run((host, int(port)), source, ranks, int(world_size), float(bound)))


async def run(address: tuple[str, int], source: str, ranks: range, world_size: int, bound: float) -> None:
    await Crowd(address, source, ranks, world_size, bound).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
