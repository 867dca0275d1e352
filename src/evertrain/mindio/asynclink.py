"""A link to a controller in an asyncio program: an agent's, or a standby's."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence

from evertrain import aio
from evertrain.mindio import framing, protocol
from evertrain.mindio.tls_stream import HandshakeError, TlsStream


class LinkError(Exception):
    """The controller could not be reached or refused this peer."""


class NotNow(LinkError):
    """Not reached or not accepted this time; another controller, or the same one later, may answer."""

    def __init__(self, reason: str, controllers: Sequence[str] = (), *, nobody: bool = False) -> None:
        super().__init__(reason)
        self.controllers = list(controllers)
        """Where the one that refused says that another one is."""
        self.nobody = nobody
        """The host lives, and nobody listens there, or one that knows nothing of the job: the controller is not just
        slow or out of reach."""


class AsyncLink(asyncio.Protocol):
    """Frames in, messages out. From `listen` on, messages go to `on_message`, the end of the link to `on_lost`."""

    def __init__(
        self,
        on_message: Callable[[protocol.Message], None],
        on_lost: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = protocol.FrameReader()
        self._writer = framing.FrameWriter()
        self._tls = TlsStream(tls, server_side=False) if tls is not None else None
        self._transport: asyncio.Transport | None = None
        self._closing = False
        self._early: list[protocol.Message] | None = []
        """What came before anybody listened: the first orders follow the welcome in the same packet."""
        self._welcomed: asyncio.Future[protocol.Welcome] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        address: tuple[str, int],
        hello: protocol.Hello,
        on_message: Callable[[protocol.Message], None],
        on_lost: Callable[[str], None],
        timeout: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ) -> tuple[AsyncLink, protocol.Welcome]:
        loop = asyncio.get_running_loop()
        link, accepted = None, False
        try:
            async with aio.timeout(timeout):
                _, link = await loop.create_connection(lambda: cls(on_message, on_lost, tls), *address)
                link.send(hello)
                welcome = await link._welcomed
            accepted = True
            return link, welcome
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout:g} s"
            raise NotNow(
                f"the controller at {address[0]}:{address[1]} can't be reached: {reason}",
                nobody=isinstance(error, ConnectionRefusedError),
            ) from None
        finally:
            if link is not None and not accepted:
                link.close()  # even if the welcome came in the moment in which it was given up

    def listen(self) -> None:
        early, self._early = self._early or [], None
        for message in early:
            self._on_message(message)

    def _receive(self, message: protocol.Message) -> None:
        if self._early is None:
            self._on_message(message)
        else:
            self._early.append(message)

    @property
    def local_host(self) -> str:
        return self._transport.get_extra_info("sockname")[0] if self._transport is not None else ""

    def send(self, message: protocol.Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._write(self._writer.frame(message))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if self._tls is not None:
            self._tls.write(data)
            data = self._tls.take()
        self._transport.write(data)

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        if self._tls is not None:
            self._tls.start()
            transport.write(self._tls.take())

    def data_received(self, data: bytes) -> None:
        try:
            if self._tls is not None:
                data = self._tls.feed(data)
                if (answer := self._tls.take()) and self._transport is not None:
                    self._transport.write(answer)
            messages = self._reader.feed(data)
        except framing.ProtocolError as error:
            self._lose(f"the controller sent what can't be read: {error}")
            return
        except HandshakeError as error:
            if self._transport is not None:
                self._transport.write(error.last_words)
            self._lose(f"the controller and this agent do not agree on TLS: {error}")
            return
        for message in messages:
            if self._welcomed.done():
                self._receive(message)
            elif isinstance(message, protocol.Welcome):
                self._welcomed.set_result(message)
            elif isinstance(message, protocol.Refused):
                reason = f"the controller refused this agent: {message.reason}"
                self._lose(reason, NotNow(reason, message.controllers, nobody=message.new) if message.retry else None)
            else:
                self._lose(f"the controller opened with {type(message).__name__}")

    def connection_lost(self, error: Exception | None) -> None:
        reason = f"the link to the controller broke: {error or 'closed'}"
        self._lose(reason, NotNow(reason))

    def _lose(self, reason: str, error: LinkError | None = None) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(error or LinkError(reason))
        elif not self._closing and not self._welcomed.cancelled():
            self._on_lost(reason)
        self.close()
