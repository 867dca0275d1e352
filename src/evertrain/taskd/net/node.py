"""A member of the tree: sends, passes on and receives. Runs in an asyncio loop; `background` offers one."""

from __future__ import annotations

import asyncio
import logging
import uuid as uuids
from collections.abc import Callable

from evertrain import aio
from evertrain.taskd.codes import AckCode
from evertrain.taskd.net.client import Client
from evertrain.taskd.net.routing import Down, Here, Position, Refusal, Routes, Up, checked
from evertrain.taskd.net.security import Security
from evertrain.taskd.net.server import Server, as_message, position
from evertrain.wire.tasknet_pb2 import Ack, Message, MessageHeader, PathDiscoveryReq

log = logging.getLogger(__name__)

_BUSY = 0.5
"""Seconds that a message waits for room in the buffer of its receiver."""
_BUFFERS = {"Mgr": 40_000, "Proxy": 32, "Agent": 8, "Worker": 8}
"""The manager's has room for an answer of every worker of a large job."""


class Node:
    def __init__(
        self,
        own: Position,
        *,
        listen: str = "",
        upstream: str = "",
        security: Security | None = None,
        announced: Callable[[Position, Position], None] = lambda who, over: None,
    ) -> None:
        """`listen` and `upstream` are addresses with a port; `announced` hears who can be reached, and over whom."""
        self.own = own
        self.received: asyncio.Queue[Message] = asyncio.Queue(_BUFFERS[own.role])
        self.port = 0
        self._listen = listen
        self._announced = announced
        security = security or Security()
        self.server = Server(own, self._from_below, self._discovered, security) if listen else None
        self._routes = Routes(own, self.server.is_connected if self.server is not None else lambda hop: False)
        self.client = Client(own, upstream, self._from_above, self._paths, security) if upstream else None

    async def start(self) -> None:
        if self.server is not None:
            self.port = await self.server.start(self._listen)
        if self.client is not None:
            self.client.start()
        log.info("init network success, role=%s, srvRank=%s, processRank=%s", *self.own)

    async def wait_joined(self, timeout: float | None = None) -> bool:
        """Until the parent has taken us in. False if that takes longer."""
        assert self.client is not None
        try:
            async with aio.timeout(timeout):
                await self.client.joined.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        if self.server is not None:
            await self.server.close()

    async def send(self, dst: Position, body: str, *, mtype: str = "default", uuid: str = "", sync: bool = True) -> int:
        """0 when it has arrived at `dst`; for several destinations: when it is on its way to them."""
        header = MessageHeader(uuid=uuid or str(uuids.uuid4()), mtype=mtype, sync=sync, src=as_message(self.own))
        header.dst.CopyFrom(as_message(dst))
        return int((await self._route(Message(header=header, body=body))).code)

    async def _from_below(self, message: Message) -> Ack:
        return await self._route(message)

    async def _from_above(self, message: Message) -> Ack:
        return await self._route(message, from_above=True)

    def _paths(self) -> list[list[Position]]:
        if self.server is None:
            return [[self.own]]
        return [[member, self.own] for member in self.server.members]

    async def _discovered(self, request: PathDiscoveryReq) -> tuple[int, str]:
        path = [position(each) for each in request.path]
        over = position(request.proxyPos)
        refusal = self._routes.learn(path, over)
        if refusal is not None:
            log.warning("%s: a path of %.100s: %s", self.own, over, refusal.reason)
            return refusal.code, refusal.reason
        for who in path:
            self._announced(who, over)
        if self.client is None:
            return AckCode.OK, ""
        own = as_message(self.own)
        return await self.client.announce(PathDiscoveryReq(uuid=request.uuid, proxyPos=own, path=[*request.path, own]))

    async def _route(self, message: Message, from_above: bool = False) -> Ack:
        if not message.HasField("header"):
            return self._ack(message, AckCode.NIL_HEADER)
        header = message.header
        if not (header.HasField("src") and header.HasField("dst")):
            return self._ack(message, AckCode.NIL_POSITION)
        dst = checked(position(header.dst))
        if isinstance(dst, Refusal):
            return self._refuse(message, dst)
        header.dst.CopyFrom(as_message(dst))
        way = self._routes.way(dst, from_above)
        match way:
            case Here():
                return await self._deliver(message)
            case Up():
                if self.client is None:
                    return self._refuse(message, Refusal(AckCode.NO_ROUTE, f"no route to {dst}"))
                return await self.client.send(message)
            case Down():
                return await self._send_down(message, way)
            case Refusal():
                return self._refuse(message, way)

    async def _deliver(self, message: Message) -> Ack:
        try:
            if self.received.full():
                async with aio.timeout(_BUSY):
                    await self.received.put(message)
            else:
                self.received.put_nowait(message)
        except TimeoutError:
            return self._refuse(message, Refusal(AckCode.BUFFER_BUSY, f"{self.own} has too much to read"))
        return self._ack(message, AckCode.OK)

    async def _send_down(self, message: Message, way: Down) -> Ack:
        assert self.server is not None
        if not way.broadcast:
            return await self.server.send(way.hops[0], message)
        message.header.sync = False
        codes = [(await self.server.send(hop, message)).code for hop in way.hops]
        return self._ack(message, max(codes))

    def _refuse(self, message: Message, refusal: Refusal) -> Ack:
        log.warning("%s: message %.64s: %s", self.own, message.header.uuid, refusal.reason)
        return self._ack(message, refusal.code)

    def _ack(self, message: Message, code: int) -> Ack:
        return Ack(uuid=message.header.uuid, code=code, src=as_message(self.own))
