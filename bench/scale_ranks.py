"""Many simulated ranks in one process, each with a link of its own: `bench.scale` starts a few of these.

A rank answers every order at once. What is decoded here is only what the answer needs, so that the few cores of the
machine work for the controller and not for the simulation. Commands come as JSON lines on standard input; for every
kind of order a line goes out when the last of the ranks here has got it, with the time.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from typing import Any

import msgspec

from evertrain.mindio import protocol as p

_AT_ONCE = 200
"""Connections that one process opens at a time; the listener's queue is finite."""


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


_decoder = msgspec.msgpack.Decoder(tuple[int, Welcome | Refused | Stop | Join | Repair | Go | Exit | Release | Ping])


class Rank(asyncio.Protocol):
    def __init__(self, crowd: Crowd, rank: int, incarnation: int) -> None:
        self._crowd, self.rank, self._incarnation = crowd, rank, incarnation
        self._reader, self._writer = p.FrameReader(_decoder), p.FrameWriter()
        self._step = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._crowd.come(self)
        token = os.environ["EVERTRAIN_TOKEN"]
        self._say(p.Hello(version=p.VERSION, token=token, role="rank", rank=self.rank, incarnation=self._incarnation))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._crowd.gone(self)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case Welcome():
                    fresh = self._incarnation == 0 or self._step == 0
                    self._say(p.Out(step=0, clean=True, fresh=fresh, fingerprint="f", state_bytes=1))
                    self._crowd.got("Welcome", self._incarnation)
                case Stop(attempt=attempt):
                    self._crowd.got("Stop", attempt)
                    self._say(p.Out(step=self._step, clean=True, attempt=attempt, fingerprint="f", state_bytes=1))
                case Join(generation=generation, step=step):
                    self._crowd.got("Join", generation)
                    self._say(p.Joined(generation=generation, digest="d" if step == self._step else ""))
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
    def __init__(self, address: tuple[str, int], source: str, ranks: range) -> None:
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

    async def connect(self, rank: int, incarnation: int, gate: asyncio.Semaphore) -> None:
        loop = asyncio.get_running_loop()
        async with gate:
            await loop.create_connection(
                lambda: Rank(self, rank, incarnation), *self._address, local_addr=(self._source, 0)
            )

    async def run(self) -> None:
        gate = asyncio.Semaphore(_AT_ONCE)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self.tell(ready=True)
        while line := await reader.readline():
            match json.loads(line):
                case {"do": "connect"}:
                    async with asyncio.TaskGroup() as group:
                        for rank in self._ranks:
                            group.create_task(self.connect(rank, 0, gate))
                case {"do": "kill", "rank": rank, "attempt": attempt}:
                    # Like a process that is going: it does nothing any more, its link ends later.
                    link = self._links.pop(rank)
                    if link.transport is not None:
                        link.transport.pause_reading()
                    self._without_one.add(attempt)
                    self.tell(kind="killed", number=rank)
                case {"do": "spawn", "rank": rank, "incarnation": incarnation}:
                    await self.connect(rank, incarnation, gate)


def main(host: str, port: str, source: str, first: str, last: str) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    asyncio.run(Crowd((host, int(port)), source, range(int(first), int(last))).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
