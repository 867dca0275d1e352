"""A connection that the controller has accepted: frames in both directions, with TLS if there are certificates.

The first byte tells whether the peer wants TLS; who disagrees with us about it, or shows a certificate that we don't
take, is told so in words and refused. Nothing but a short `Hello` is read before the token was seen.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Protocol

import msgspec

from evertrain.mindio import framing
from evertrain.mindio.tft import messages
from evertrain.mindio.tft.messages import AnyMessage, Hello, Refused
from evertrain.mindio.tft.requests import Event, FromLink
from evertrain.mindio.tls_stream import HANDSHAKE, HandshakeError, TlsStream

log = logging.getLogger(__name__)

MAX_BACKLOG = 4 * framing.MAX_FRAME
"""Bytes that may wait for a peer that does not read before its link is given up."""
HELLO_PATIENCE = 10.0
"""Seconds in which a peer has to say who it is."""


class Host(Protocol):
    """What a link needs of the one that answers it."""

    tls: ssl.SSLContext | None

    def opened(self, link: Link) -> int: ...

    def refusal(self, message: AnyMessage) -> str | None: ...

    def feed(self, event: Event) -> None: ...

    def closed(self, number: int) -> None: ...


class Link(asyncio.Protocol):
    def __init__(self, host: Host) -> None:
        self._host = host
        self._reader = framing.FrameReader(messages.decoder, limit=framing.MAX_HELLO)
        self._writer = framing.FrameWriter()
        self._tls: TlsStream | None = None
        self._untouched = True
        self._refused = False
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._number = 0
        self._address = ""
        self.greeted = False
        self.name = "an unknown peer"

    def send(self, message: AnyMessage | msgspec.Raw) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        try:
            data = self._writer.frame(message)
        except framing.ProtocolError as error:
            log.error("a message to %s was not sent: %s", self.name, error)
            return
        if self._tls is not None:
            self._tls.write(data)
            data = self._tls.take()
        transport.write(data)
        if transport.get_write_buffer_size() > MAX_BACKLOG:
            log.error("%s does not read what it is sent; its link is closed", self.name)
            transport.abort()

    def close(self, why: str = "") -> None:
        if why:
            log.warning("the link of %s is closed: %s", self.name, why)
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._tls is not None and self._tls.established:
                self._tls.close()
                transport.write(self._tls.take())
            transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        if (peer := transport.get_extra_info("peername")) is not None:
            self._address, self.name = peer[0], f"an unknown peer ({peer[0]}:{peer[1]})"
        self._number = self._host.opened(self)
        self._patience = asyncio.get_running_loop().call_later(HELLO_PATIENCE, self._lose_patience)

    def _lose_patience(self) -> None:
        self.close("" if self._refused else "it did not say who it is")

    def data_received(self, data: bytes) -> None:
        if self._refused or (self._untouched and not self._agree_on_tls(data[0])):
            return
        try:
            if self._tls is not None:
                data = self._decrypt(self._tls, data)
            received = self._reader.feed(data)
        except HandshakeError as error:
            return self._refuse_tls(error)
        except framing.ProtocolError as error:
            return self.close(str(error))
        for message in received:
            if self._transport is None or self._transport.is_closing():
                return
            if self.greeted:
                self._host.feed(FromLink(self._number, message))
            else:
                self._greet(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._transport = None
        self._host.closed(self._number)

    def _agree_on_tls(self, first: int) -> bool:
        self._untouched = False
        if self._host.tls is not None and first == HANDSHAKE:
            self._tls = TlsStream(self._host.tls, server_side=True)
            return True
        if self._host.tls is None and first != HANDSHAKE:
            return True
        wanted, found = ("TLS", "plain text") if self._host.tls is not None else ("plain text", "TLS")
        self.send(Refused(reason=f"this controller speaks {wanted}: enable_tls must be the same on both sides"))
        self.close(f"it speaks {found}, and this controller {wanted}")
        return False

    def _decrypt(self, tls: TlsStream, data: bytes) -> bytes:
        said = tls.feed(data)
        if (answer := tls.take()) and self._transport is not None:
            self._transport.write(answer)
        return said

    def _refuse_tls(self, error: HandshakeError) -> None:
        """Say why and wait for the peer to hang up: if we did while its `Hello` is on the way, it would not hear it."""
        log.error("the link of %s is refused: TLS: %s", self.name, error)
        self._refused = True
        if self._transport is not None:
            self._transport.write(error.last_words)
            self._transport.write_eof()

    def _greet(self, message: AnyMessage) -> None:
        if self._patience is not None:
            self._patience.cancel()
        reason = self._host.refusal(message)
        if reason is not None:
            self.send(Refused(reason=reason))
            return self.close(reason)
        assert isinstance(message, Hello)
        self.greeted, self.name = True, f"rank {message.rank}"
        self._reader.limit = framing.MAX_FRAME
        if not message.ip:
            message = msgspec.structs.replace(message, ip=self._address)
        self._host.feed(FromLink(self._number, message))
