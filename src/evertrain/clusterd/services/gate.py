"""The listening port, with a limit of connections: of all, and of each address they come from.

gRPC has no such limit, and does not tell when a connection comes or goes. So the port is ours: what is within the
limits is passed on, byte by byte and both ways, to gRPC's own socket, an abstract one of this process; the rest is
reset at once, as the original does. TLS is spoken behind the gate, nothing is looked into here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from typing import Any

from evertrain.clusterd.services.limits import Connections, Limits

log = logging.getLogger(__name__)

_TELL = 60.0
"""Seconds between lines in the log about the same."""
_FLUSH = 10.0
"""Seconds in which the last bytes have to be read."""


class Gate:
    def __init__(self, limits: Limits) -> None:
        self.inside = f"evertrain-clusterd-{secrets.token_hex(16)}"
        """The name of the abstract socket that gRPC listens on."""
        self._connections = Connections(limits)
        self._open: set[_Outer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._told = float("-inf")

    async def listen(self, *places: str | socket.socket) -> int:
        """The port of the first, for an address with port 0. OSError if that can't be.

        A socket that somebody has bound is listened on as well; it stays open when we close.
        """
        for place in places:
            await self._listen(place)
        return int(self._servers[0].sockets[0].getsockname()[1])

    async def _listen(self, place: str | socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(place, socket.socket):
            self._servers.append(await loop.create_server(lambda: _Outer(self), sock=place.dup(), backlog=1024))
            return
        host, colon, port = place.rpartition(":")
        if not (colon and port.isascii() and port.isdigit() and int(port) < 65536):
            raise OSError(f"cannot listen on {place}: it has to be HOST:PORT")
        try:
            server = await loop.create_server(lambda: _Outer(self), host.strip("[]"), int(port), backlog=1024)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {place}: {error.strerror or error}") from None
        self._servers.append(server)

    def shut(self) -> None:
        """Nobody new."""
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        self.shut()
        for each in list(self._open):
            each.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What connections ask.

    def enter(self, connection: _Outer) -> bool:
        refusal = self._connections.enter(connection.source)
        if refusal:
            now = asyncio.get_running_loop().time()
            if now - self._told >= _TELL:
                self._told = now
                log.warning("a connection from %s is refused: %s", connection.source, refusal)
            return False
        self._open.add(connection)
        task = asyncio.ensure_future(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _connect(self, outer: _Outer) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: _Inner(outer), f"\0{self.inside}")
        except OSError as error:
            log.error("gRPC does not take a connection: %s", error)
            outer.abort()

    def leave(self, connection: _Outer) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self._connections.leave(connection.source)


class _Side(asyncio.Protocol):
    """One end of a connection that is passed on. Its transport is not read while the other one's buffer is full."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.other: _Side | None = None
        self.early = b""
        """What has come before there was another side. It can't be kept from coming: some Pythons (3.10, 3.11.2) read a
        transport nevertheless that is paused when it is made."""

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
            return
        self.early += data
        self.transport.pause_reading()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """HTTP/2 knows no half of a connection: with one side the other is over, too."""
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.close()  # after what is still to be written
            asyncio.get_running_loop().call_later(_FLUSH, self.other.transport.abort)

    def abort(self) -> None:
        self.transport.abort()


class _Outer(_Side):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate
        self.source = ""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if peer else "unknown"
        if not self._gate.enter(self):
            at_once = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._gate.leave(self)


class _Inner(_Side):
    def __init__(self, outer: _Outer) -> None:
        super().__init__()
        self.other = outer

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        outer = self.other
        assert outer is not None
        if outer.transport.is_closing():
            transport.abort()
            return
        outer.other = self
        transport.write(outer.early)
        outer.early = b""
        outer.transport.resume_reading()
