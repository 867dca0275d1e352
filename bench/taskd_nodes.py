"""Many simulated nodes in one process: `bench.taskd` starts a few of these.

Each node is a real proxy, which listens, and a real agent and real workers, which join it; every link is a TCP
connection of its own. They do what an agent and a worker do on the wire and nothing else. Commands come as JSON lines
on standard input, what has happened here goes out as JSON lines with the time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

from bench.scale import raise_descriptor_limit
from evertrain import aio
from evertrain.taskd import frames
from evertrain.taskd.codes import ACTION, AGENT, KEEP_ALIVE, MANAGER, PROXY, REGISTER, STATUS, WORKER, Code
from evertrain.taskd.frames import Body, FaultReport
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security

TO_MANAGER = Position(MANAGER, "0")
ALIVE = frames.body(KEEP_ALIVE, 0, FaultReport([], 32767).encode())
BROADCAST = "broadcast"
"""The type of a message to all workers, whose text is its number."""
_AT_ONCE = 4
"""Nodes that join at a time."""


def tell(kind: str, number: int = 0, at: float | None = None, **fields: Any) -> None:
    print(json.dumps({"kind": kind, "number": number, "at": at or time.monotonic(), **fields}), flush=True)


class Nodes:
    def __init__(self, manager: str, host: str, numbers: range, per_node: int) -> None:
        self._manager, self._host, self._numbers, self._per_node = manager, host, numbers, per_node
        self._security = Security(os.environ["EVERTRAIN_TOKEN"])
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._agents: list[Node] = []
        self._every = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._beats: list[asyncio.Task[None]] = []
        self._got: dict[str, int] = {}
        """By order to all workers: how many here have it."""
        self._copies: dict[str, dict[str, int]] = {}
        """By broadcast and rank: how many have come."""
        self._refused = 0

    async def join(self) -> None:
        await asyncio.gather(*(self._node(number) for number in self._numbers))
        tell("joined")

    async def _node(self, number: int) -> None:
        async with self._gate:
            server = str(number)
            own = Position(PROXY, server, str(int(time.time())))
            proxy = Node(own, listen=f"{self._host}:0", upstream=self._manager, security=self._security)
            await proxy.start()
            above = f"{self._host}:{proxy.port}"
            first = number * self._per_node
            workers = [Position(WORKER, server, str(rank)) for rank in range(first, first + self._per_node)]
            leaves = [Node(who, upstream=above, security=self._security) for who in (Position(AGENT, server), *workers)]
            for leaf in leaves:
                await leaf.start()
            for leaf in leaves:
                await leaf.wait_joined()
            await asyncio.gather(self._begin_agent(leaves[0]), *map(self._begin_worker, leaves[1:]))

    async def _begin_agent(self, node: Node) -> None:
        self._agents.append(node)
        await self._say(node, frames.body(REGISTER, Code.AGENT_REGISTER, "", {}))
        await self._say(node, frames.body(STATUS, Code.RESTART_TIMES, "32767", {}))
        order = frames.decode((await node.received.get()).body)
        assert order.code == Code.START_AGENT, order
        self._every = frames.alive_seconds(order) or self._every

    async def _begin_worker(self, node: Node) -> None:
        await self._say(node, frames.body(REGISTER, Code.WORKER_REGISTER))
        self._spawn(self._obey(node))

    async def _obey(self, node: Node) -> None:
        everybody = len(self._numbers) * self._per_node
        seen = frames.Seen(16)
        while True:
            message = await node.received.get()
            if message.header.mtype == BROADCAST:
                self._hear(message.body, node.own.process)
                continue
            if seen.again(message.header.uuid):
                continue
            order = frames.decode(message.body)
            uuid = (order.extension or {})["switchNicUUID"]
            count = self._got[uuid] = self._got.get(uuid, 0) + 1
            if count == everybody:
                tell("ordered", len(self._got))
            self._spawn(self._say(node, frames.body(ACTION, Code.SWITCH_NIC, "switchOK", {"switchNicUUID": uuid})))

    def _hear(self, broadcast: str, rank: str) -> None:
        copies = self._copies.setdefault(broadcast, {})
        copies[rank] = copies.get(rank, 0) + 1
        if copies[rank] == 1 and len(copies) == len(self._numbers) * self._per_node:
            tell(BROADCAST, int(broadcast))

    async def _say(self, node: Node, body: Body) -> None:
        while code := await node.send(TO_MANAGER, body.encode()):
            self._refused += 1
            if self._refused == 1:
                tell("refused", code)
            await asyncio.sleep(1)  # as agents and workers do

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _beat(self, node: Node, delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            began = time.monotonic()
            await self._say(node, ALIVE)
            await asyncio.sleep(max(0.0, began + self._every - time.monotonic()))

    async def run(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tell("ready")
        while line := await reader.readline():
            match json.loads(line):
                case "join":
                    await self.join()
                case "beat":
                    for number, agent in enumerate(self._agents):
                        self._beats.append(self._spawn(self._beat(agent, self._every * number / len(self._agents))))
                case "rest":
                    logging.disable(logging.WARNING)  # that the manager's place is empty for a moment is meant
                    for beat in self._beats:
                        beat.cancel()
                    tell("resting")
                case "count":
                    most = max(count for copies in self._copies.values() for count in copies.values())
                    tell("counted", most=most)


async def run(manager: str, host: str, first: str, last: str, per_node: str) -> None:
    await Nodes(manager, host, range(int(first), int(last)), int(per_node)).run()


if __name__ == "__main__":
    raise_descriptor_limit(0)
    aio.run(run(*sys.argv[1:]))
