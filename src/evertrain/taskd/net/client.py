"""The end that joins a parent: registers, announces its path, keeps the stream open, comes back after a break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from evertrain import aio
from evertrain.taskd.codes import PROXY, AckCode
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from evertrain.taskd.net.server import MAX_MESSAGE, SERVICE, as_message
from evertrain.wire import service
from evertrain.wire.tasknet_pb2 import Ack, Message, PathDiscoveryReq, RegisterReq

log = logging.getLogger(__name__)

CALL_LIMIT = 10.0
_FROM_BELOW = 1.25
"""How many times as long the members of a proxy wait: its call ends with theirs, and would never be a late one."""
JOIN_LIMIT = 30.0
"""Seconds for a call by which a member joins: all nodes of a large job come at once, and who gives up comes again."""
LAST_ANSWERS = 3.0
"""Seconds for the answers to our calls, when the parent has ended the stream in good order."""
_OPENING = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_HOLDS = 5.0
"""Seconds after which a join counts as one: two that have the same place would send each other away without a pause."""
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of one's own, and anew after a break
    ("grpc.keepalive_time_ms", 330_000),  # who says nothing notices no cut; originals bear a ping in 5 minutes
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # a newer gRPC's name for it
    ("grpc.http2.max_pings_without_data", 0),
]


class Client:
    """`received` gets what comes down and returns what confirms it."""

    def __init__(
        self,
        own: Position,
        address: str,
        received: Callable[[Message], Awaitable[Ack]],
        paths: Callable[[], list[list[Position]]],
        security: Security,
    ) -> None:
        """`paths`: what the parent has to know about whom it reaches over us, each from the leaf to us."""
        self._own, self._address, self._received, self._paths = own, address, received, paths
        self._security = security
        self.joined = asyncio.Event()
        self._since: float | None = None
        """When the last attempt to join has succeeded; None if it has not."""
        self._stub: Any = None
        self._task: asyncio.Task[None] | None = None
        self._handling: set[asyncio.Task[None]] = set()
        self._broken = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._keep_joined())

    async def close(self) -> None:
        for task in (self._task, *self._handling):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in (self._task, *self._handling) if t is not None), return_exceptions=True)

    async def _keep_joined(self) -> None:
        pause, told = _FIRST_PAUSE, ""
        while True:
            self._since = None
            try:
                await self._stay_joined()
                level, reason = logging.INFO, f"the parent at {self._address} ended the stream"
            except (grpc.RpcError, OSError) as error:
                level, reason = logging.WARNING, f"{self._address}: {_reason(error)}"
            except Exception as error:  # whatever it is, the next attempt may succeed
                level, reason = logging.ERROR, f"{type(error).__name__}: {error}"
            finally:
                self.joined.clear()
            if self._since is not None and asyncio.get_running_loop().time() - self._since >= _HOLDS:
                pause, told = _FIRST_PAUSE, ""
            if reason != told:
                told = reason
                log.log(level, "rebuild net, role=%s, srvRank=%s: %s", *self._own[:2], reason)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # so that not all come back at once
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _stay_joined(self) -> None:
        self._broken.clear()
        async with await self._channel() as channel:
            stub = service.stub(channel, SERVICE)
            metadata = self._security.metadata()
            call = {"metadata": metadata, "timeout": JOIN_LIMIT}
            ack = await stub.Register(RegisterReq(uuid=_uuid(), pos=as_message(self._own)), **call)
            if ack.code:
                raise OSError(f"the parent refused the place: code {ack.code}")
            own = as_message(self._own)
            for path in self._paths():
                await stub.PathDiscovery(
                    PathDiscoveryReq(uuid=_uuid(), proxyPos=own, path=[as_message(each) for each in path]), **call
                )
            where = (("role", self._own.role), ("serverrank", self._own.server), ("processrank", self._own.process))
            stream = stub.InitServerDownStream(metadata=(*metadata, *where))
            # Ours answers at once; an original parent says nothing before its first message.
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(_OPENING):
                    await stream.initial_metadata()
            self._stub = stub
            self._since = asyncio.get_running_loop().time()
            self.joined.set()
            log.info("path join success, role=%s, srvRank=%s, processRank=%s", *self._own)
            try:
                await self._receive(stream)
            finally:
                self._stub = None
                stream.cancel()
            # It may be read before the answer to a call of ours, though the parent has given that first.
            self.joined.clear()
            await channel.close(LAST_ANSWERS)

    async def _channel(self) -> Any:
        certificates = self._security.certificates
        if certificates is None:
            return grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        async with aio.timeout(CALL_LIMIT):
            name = await certificates.name_at(self._address)
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(self._address, certificates.client(), options=options)

    async def _receive(self, stream: Any) -> None:
        lock = asyncio.Lock()
        broken = asyncio.ensure_future(self._broken.wait())
        reading: asyncio.Future[Any] = broken
        try:
            while True:
                reading = asyncio.ensure_future(stream.read())
                done, _ = await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
                if reading not in done:
                    raise OSError("a call to the parent was not answered")
                message = reading.result()
                if message is grpc.aio.EOF:
                    return
                if message is None:
                    log.warning("%s: what came from the parent is no message", self._own)
                    continue
                task = asyncio.ensure_future(self._handle(stream, lock, message))
                self._handling.add(task)
                task.add_done_callback(self._handling.discard)
        finally:
            broken.cancel()
            reading.cancel()
            await asyncio.wait({broken, reading})  # read to its end: nobody else would hear how it ended
            if not reading.cancelled():
                reading.exception()

    async def _handle(self, stream: Any, lock: asyncio.Lock, message: Message) -> None:
        """Beside the next ones: a member below that is slow to confirm holds nobody else up."""
        try:
            ack = await self._received(message)
        except Exception as error:
            log.error("%s: message %s: %s: %s", self._own, message.header.uuid, type(error).__name__, str(error))
            ack = self._nack(message, AckCode.NET_ERROR)
        if message.header.sync:
            try:
                async with lock:
                    await stream.write(ack)
            except (grpc.RpcError, asyncio.InvalidStateError):
                log.info("the ack of %s could not be sent: the stream broke", message.header.uuid)

    async def send(self, message: Message) -> Ack:
        """Up. An ack with a code that is not 0 says why it did not arrive."""
        stub = self._stub
        if stub is None:
            return self._nack(message, AckCode.SERVER_ERROR)
        limit = CALL_LIMIT * (1.0 if self._own.role == PROXY else _FROM_BELOW)
        try:
            ack: Ack = await stub.TransferMessage(message, metadata=self._security.metadata(), timeout=limit)
            return ack
        except grpc.aio.AioRpcError as error:
            log.debug("%s: message %s: %s", self._own, message.header.uuid, _reason(error))
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                if stub is self._stub:
                    self._broken.set()
                return self._nack(message, AckCode.SEND_LOST)
            return self._nack(message, AckCode.NET_ERROR)
        except asyncio.CancelledError:
            _unless_cancelled()
            return self._nack(message, AckCode.SEND_LOST)

    async def announce(self, request: PathDiscoveryReq) -> tuple[int, str]:
        """Pass the path of a leaf on. A parent that is just coming is waited for."""
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(CALL_LIMIT / 2):
                await self.joined.wait()
        stub = self._stub
        if stub is None:
            return AckCode.CLIENT_ERROR, f"client not inited, role={self._own.role}"
        try:
            await stub.PathDiscovery(request, metadata=self._security.metadata(), timeout=JOIN_LIMIT - CALL_LIMIT)
        except grpc.aio.AioRpcError as error:
            return AckCode.CLIENT_ERROR, _reason(error)
        except asyncio.CancelledError:
            _unless_cancelled()
            return AckCode.CLIENT_ERROR, "the way up broke"
        return AckCode.OK, ""

    def _nack(self, message: Message, code: AckCode) -> Ack:
        return Ack(uuid=message.header.uuid, code=code, src=as_message(self._own))


def _unless_cancelled() -> None:
    """A call also ends like this when its channel is closed, because another one has found it broken."""
    if aio.is_cancelled():
        raise asyncio.CancelledError


def _uuid() -> str:
    return str(uuid.uuid4())


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error) or type(error).__name__
