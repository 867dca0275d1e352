"""The end that others join: it hears them by calls and speaks to them over the stream that each keeps open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from evertrain import aio
from evertrain.taskd.codes import LEVELS, AckCode
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from evertrain.wire import service
from evertrain.wire.tasknet_pb2 import DESCRIPTOR, Ack, Message, PathDiscoveryReq, RegisterReq
from evertrain.wire.tasknet_pb2 import Position as WirePosition

log = logging.getLogger(__name__)

SERVICE = DESCRIPTOR.services_by_name["TaskNet"]
MAX_MESSAGE = 8 << 20
MAX_MEMBERS = 5000
ACK_WAIT = 3.0
"""Seconds that a member below has to confirm a message."""
LAST_ANSWERS = 3.0
"""Seconds for the answers of calls that a closing server has taken; then for its streams to end."""
MAX_WAITING = 1000
"""Messages for a member that does not read them."""
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", 3000),
    ("grpc.so_reuseport", 0),
]


def position(message: Any) -> Position:
    return Position(message.role, message.serverRank, message.processRank)


class _Member:
    """One that has registered: its stream, what is to be written to it, and who waits for its acks."""

    def __init__(self) -> None:
        self.streams = 0
        self.open = False
        self.expected = True
        """It has registered and its stream is on its way. What it says on another way may be there before."""
        self._opened = asyncio.Event()
        self.outgoing: asyncio.Queue[Message | None] = asyncio.Queue()
        self.acks: dict[str, asyncio.Future[Ack | None]] = {}
        """By message; None if the stream has broken before it was confirmed."""

    def begin(self) -> int:
        """A new stream takes over; the one before ends."""
        self.end()
        self.outgoing = asyncio.Queue()
        self.streams += 1
        self.open, self.expected = True, False
        self._opened.set()
        return self.streams

    async def is_open(self) -> bool:
        """A stream that is on its way is waited for, once."""
        if self.expected and not self.open:
            try:
                async with aio.timeout(ACK_WAIT):
                    await self._opened.wait()
            except TimeoutError:
                self.expected = False
        return self.open

    def end(self, stream: int | None = None) -> None:
        if stream is not None and stream != self.streams:
            return
        self.open = False
        self._opened.clear()
        self.outgoing.put_nowait(None)
        for ack in self.acks.values():
            if not ack.done():
                ack.set_result(None)


class Server:
    """`arrived` gets what comes from below and returns (code, reason); `discovered` gets the path of a new leaf."""

    def __init__(
        self,
        own: Position,
        arrived: Callable[[Message], Awaitable[Ack]],
        discovered: Callable[[PathDiscoveryReq], Awaitable[tuple[int, str]]],
        security: Security,
    ) -> None:
        self._own, self._arrived, self._discovered = own, arrived, discovered
        self._security = security
        self._members: dict[Position, _Member] = {}
        self._server: Any = None
        self._stopping = False
        self._calls = 0
        """That have come and are not answered."""
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    async def start(self, address: str) -> int:
        """Listen; the port, for an address with port 0. OSError if that can't be."""
        _try_to_bind(address)  # gRPC would write its own complaint to stderr
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((service.handlers(SERVICE, self, lenient=True),))
        certificates = self._security.certificates
        try:
            if certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, certificates.server())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        return int(port)

    async def close(self) -> None:
        """What has arrived is confirmed first: with its stream, a member gives its calls up and takes them for lost."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(LAST_ANSWERS):
                await self._all_answered.wait()
        for member in self._members.values():
            member.end()
        if self._server is not None:
            await self._server.stop(grace=LAST_ANSWERS)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        self._calls += 1
        self._all_answered.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._all_answered.set()

    @property
    def members(self) -> list[Position]:
        """Those with an open stream."""
        return [position for position, member in self._members.items() if member.open]

    def is_connected(self, who: Position) -> bool:
        member = self._members.get(who)
        return member is not None and member.open

    # What members call.

    async def Register(self, request: RegisterReq, context: Any) -> Ack:
        await self._admit(context)
        who = position(request.pos)
        if who.role not in LEVELS or LEVELS[who.role] >= LEVELS[self._own.role]:
            await self._fail(context, f"a {who.role[:20] or 'nobody'} can't register at a {self._own.role}")
        if not who.is_named:
            await self._fail(context, f"a {who.role} needs a number as its rank, to register")
        if who in self._members:
            self._members[who].end()
            self._members[who].expected = True
        elif len(self._members) >= MAX_MEMBERS and not self._drop_one_that_left():
            await self._fail(context, f"exceed max registry num: {MAX_MEMBERS}")
        else:
            self._members[who] = _Member()
        log.info("recv register req, role=%s, srvRank=%s, processRank=%s", *who)
        return self._ack(request.uuid)

    def _drop_one_that_left(self) -> bool:
        gone = next((who for who, member in self._members.items() if not member.open), None)
        if gone is not None:
            del self._members[gone]
        return gone is not None

    async def PathDiscovery(self, request: PathDiscoveryReq, context: Any) -> Ack:
        await self._admit(context)
        if position(request.proxyPos) not in self._members:
            await self._fail(context, "un registry error")
        code, reason = await self._discovered(request)
        if code:
            await self._fail(context, reason)
        return self._ack(request.uuid)

    async def TransferMessage(self, request: Message, context: Any) -> Ack:
        await self._admit(context)
        with self._answering():
            ack = await self._arrived(request)
        if ack.code:
            await self._fail(context, f"code {ack.code}: {_REASONS.get(ack.code, 'not delivered')}")
        return ack

    async def InitServerDownStream(self, acks: AsyncIterator[Ack], context: Any) -> AsyncIterator[Message]:
        await self._admit(context)
        metadata = dict(context.invocation_metadata() or ())
        who = Position(*(str(metadata.get(key, "")) for key in ("role", "serverrank", "processrank")))
        member = self._members.get(who)
        if member is None or self._stopping:
            await self._fail(context, "un registry error")
            return
        stream = member.begin()
        outgoing = member.outgoing
        reader = asyncio.ensure_future(self._read(acks, member, stream))
        try:
            await context.send_initial_metadata(())  # the stream is there, even before there is anything to say
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            member.end(stream)
            reader.cancel()

    async def _read(self, acks: AsyncIterator[Ack], member: _Member, stream: int) -> None:
        try:
            async for ack in acks:
                waiting = member.acks.get(ack.uuid)
                if waiting is not None and not waiting.done():
                    waiting.set_result(ack)
        except grpc.RpcError:
            pass
        finally:
            member.end(stream)

    async def _admit(self, context: Any) -> None:
        if not self._security.admits(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of the job is missing or wrong")

    async def _fail(self, context: Any, reason: str) -> None:
        await context.abort(grpc.StatusCode.UNKNOWN, reason)

    def _ack(self, uuid: str, code: int = AckCode.OK) -> Ack:
        return Ack(uuid=uuid, code=code, src=as_message(self._own))

    # What we say to them.

    async def send(self, hop: Position, message: Message) -> Ack:
        """Write to the stream of `hop`; if the message is to be confirmed, wait for that. The ack is its receiver's, or
        ours if there is none."""
        uuid, member = message.header.uuid, self._members.get(hop)
        if member is None or not await member.is_open():
            return self._ack(uuid, AckCode.NO_STREAM)
        if member.outgoing.qsize() >= MAX_WAITING:
            return self._ack(uuid, AckCode.BUFFER_BUSY)
        if not message.header.sync:
            member.outgoing.put_nowait(message)
            return self._ack(uuid)
        confirmed = asyncio.get_running_loop().create_future()
        member.acks[uuid] = confirmed
        member.outgoing.put_nowait(message)
        try:
            async with aio.timeout(ACK_WAIT):
                ack = await confirmed
            return self._ack(uuid, AckCode.SEND_LOST) if ack is None else ack
        except TimeoutError:
            return self._ack(uuid, AckCode.ACK_LOST)
        finally:
            if member.acks.get(uuid) is confirmed:
                del member.acks[uuid]


def _try_to_bind(address: str) -> None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
            probe.listen()
        except OSError as error:
            reason = error.strerror or error
            hint = ": is another manager or proxy running there?" if error.errno == errno.EADDRINUSE else ""
            raise OSError(error.errno, f"cannot listen on {address}: {reason}{hint}") from None


def as_message(who: Position) -> WirePosition:
    return WirePosition(role=who.role, serverRank=who.server, processRank=who.process)


_REASONS: dict[int, str] = {
    AckCode.NO_ROUTE: "no route",
    AckCode.BUFFER_BUSY: "dst recv buffer busy",
    AckCode.SERVER_ERROR: "client not inited",
    AckCode.ACK_LOST: "ack time out",
    AckCode.NO_STREAM: "the receiver is not connected",
    AckCode.SEND_LOST: "the receiver's stream broke",
}
