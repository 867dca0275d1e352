"""A connection that a controller has accepted: frames in both directions, with TLS if there are certificates.

The first byte tells whether the peer wants TLS; who disagrees with us about it, or shows a certificate that we don't
take, is told so in words and refused. Nothing but a short greeting is read before somebody has taken it.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import socket
import ssl
from typing import Any

import msgspec

from evertrain.mindio import framing
from evertrain.mindio.tls_stream import HANDSHAKE, HandshakeError, TlsStream

MAX_BACKLOG = 4 * framing.MAX_FRAME
"""Bytes that may wait for a peer that does not read before its link is given up."""

# Shared by all links, which are read one after the other: a fresh one for every few bytes costs more than reading them.
_buffer = memoryview(bytearray(1 << 18))


class AcceptedLink(asyncio.BufferedProtocol, abc.ABC):
    """A subclass says what messages mean (`_take`), how to refuse a peer, and what else happens at both ends of the
    link's life."""

    log = logging.getLogger(__name__)

    def __init__(self, reader: framing.FrameReader, tls: ssl.SSLContext | None, hello_timeout: float) -> None:
        """`reader` has the limit for greetings; `hello_timeout`: seconds in which the peer has to say who it is."""
        self._reader = reader
        self._writer = framing.FrameWriter()
        self._context, self._hello_timeout = tls, hello_timeout
        self._tls: TlsStream | None = None
        self._untouched = True
        """Nothing has arrived yet."""
        self._refused = False
        self._greeted = False
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None
        self.address: tuple[str, int] | None = None
        """Of the peer."""

    # For the subclass.

    def _opened(self) -> None:  # noqa: B027
        """The peer has connected."""

    @abc.abstractmethod
    def _take(self, message: Any) -> None: ...

    def _lost(self) -> None:  # noqa: B027
        """The connection is gone."""

    @abc.abstractmethod
    def _refusal(self, reason: str, tls_wanted: bool) -> msgspec.Struct:
        """What tells the peer that it should speak TLS, or should not."""

    @property
    def name(self) -> str:
        return "an unknown peer" + (f" ({self.address[0]}:{self.address[1]})" if self.address else "")

    def _heard_hello(self) -> None:
        """The peer has said who it is, whether it is believed or not."""
        if self._patience is not None:
            self._patience.cancel()

    def _welcome(self) -> None:
        """It is believed; now it may say more."""
        self._greeted = True
        self._reader.limit = framing.MAX_FRAME

    # Both ways.

    def send(self, message: msgspec.Struct | msgspec.Raw) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        try:
            data = self._writer.frame(message)
        except framing.ProtocolError as error:
            self.log.error("a message to %s was not sent: %s", self.name, error)
            return
        if self._tls is not None:
            self._tls.write(data)
            data = self._tls.take()
        transport.write(data)
        if transport.get_write_buffer_size() > MAX_BACKLOG:
            self.log.error("%s does not read what it is sent; its link is closed", self.name)
            transport.abort()

    def close(self, why: str = "") -> None:
        if why:
            level = logging.WARNING if self._greeted else logging.ERROR
            self.log.log(level, "the link of %s is closed: %s", self.name, why)
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._tls is not None and self._tls.established:
                self._tls.close()
                transport.write(self._tls.take())
            transport.close()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        if peer := transport.get_extra_info("peername"):
            self.address = peer[0], peer[1]
        self._opened()
        self._patience = asyncio.get_running_loop().call_later(self._hello_timeout, self._lose_patience)

    def _lose_patience(self) -> None:
        self.close("" if self._refused else "it did not say who it is")

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(_buffer[:nbytes]))

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
            self._take(message)

    def _agree_on_tls(self, first: int) -> bool:
        self._untouched = False
        if self._context is not None and first == HANDSHAKE:
            self._tls = TlsStream(self._context, server_side=True)
            return True
        if self._context is None and first != HANDSHAKE:
            return True
        wanted, found = ("TLS", "plain text") if self._context is not None else ("plain text", "TLS")
        self.send(self._refusal(f"this controller speaks {wanted}", self._context is not None))
        self.close(f"it speaks {found}, and this controller {wanted}")
        return False

    def _decrypt(self, tls: TlsStream, data: bytes) -> bytes:
        said = tls.feed(data)
        if (answer := tls.take()) and self._transport is not None:
            self._transport.write(answer)
        return said

    def _refuse_tls(self, error: HandshakeError) -> None:
        """Say why and wait for the peer to hang up: if we did while its `Hello` is on the way, it would not hear it."""
        assert self._transport is not None
        self._transport.write(error.last_words)
        if self._greeted:
            return self.close(f"TLS: {error}")  # a link in use: nothing that comes on it can be read any more
        self.log.error("the link of %s is refused: TLS: %s", self.name, error)
        self._refused = True
        self._transport.write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._transport = None
        self._lost()
