"""A processor's link to a controller: one socket and one thread that reads and writes.

Others only queue what is to be sent, so that none of them ever waits for the network, and so that a TLS connection is
used by one thread only.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from evertrain.mindio import framing
from evertrain.mindio.tft import messages
from evertrain.mindio.tft.messages import Hello, Message, Refused, Welcome

_CHUNK = 65536
WELCOME = 10.0
"""Seconds in which a controller must say whether it takes this processor."""
_UNACKNOWLEDGED = 10_000
"""Milliseconds after which a link on which nothing is acknowledged is broken."""
_MAX_WAITING = 64 * 1024 * 1024
"""Bytes that may wait for a controller that does not read; then the link counts as broken."""


class NotWelcome(Exception):
    """The controller answered, but does not take this processor."""

    def __init__(self, reason: str, passive: bool = False) -> None:
        super().__init__(reason)
        self.passive = passive


def connect(
    address: tuple[str, int], hello: Hello, context: ssl.SSLContext | None, timeout: float
) -> tuple[Link, Welcome]:
    """Open a link and be welcomed; a standby may let us wait for that. `Link.start` sets it going.

    Raises OSError, NotWelcome or ProtocolError.
    """
    sock = socket.create_connection(address, timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A machine that is gone does not say so: heartbeats that nobody acknowledges do.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=address[0] if context.check_hostname else None)
        deadline = time.monotonic() + WELCOME
        writer, reader = framing.FrameWriter(), framing.FrameReader(messages.decoder)
        sock.sendall(writer.frame(hello))
        pending: list[Any] = []
        while not pending:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            data = sock.recv(_CHUNK)
            if not data:
                raise ConnectionError("the controller closed the link without a word")
            pending = reader.feed(data)
        first, *rest = pending
        if isinstance(first, Refused):
            raise NotWelcome(first.reason, first.passive)
        if not isinstance(first, Welcome):
            raise framing.ProtocolError(f"expected a welcome, got {type(first).__name__}")
        sock.setblocking(False)
        return Link(sock, writer, reader, rest), first
    except BaseException:
        sock.close()
        raise


class Link:
    def __init__(
        self, sock: socket.socket, writer: framing.FrameWriter, reader: framing.FrameReader, pending: list[Any]
    ) -> None:
        self._socket = sock
        self._writer = writer
        self._reader = reader
        self._pending = pending
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._waiting = 0
        self._closing = False
        self._flush_until: float | None = None
        self.lost = False
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._thread: threading.Thread | None = None
        self.sent_at = 0.0
        self.heard_at = time.monotonic()

    def start(self, on_message: Callable[[Any], None], on_lost: Callable[[Link], None]) -> None:
        """`on_message` is called in the link's thread and must not block. `on_lost` is called once, at its end, unless
        the link was closed by us."""
        self._on_message, self._on_lost = on_message, on_lost
        self._thread = threading.Thread(target=self._run, name="tft-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Queue a message. False if the link is gone."""
        with self._lock:
            if self.lost or self._closing:
                return False
            frame = self._writer.frame(message)
            self._outbox.append(frame)
            self._waiting += len(frame)
            self.sent_at = time.monotonic()
        self._wake()
        return True

    def close(self, flush: float = 0.0) -> None:
        """End the link, after what is queued has gone out or `flush` seconds have passed."""
        with self._lock:
            self._closing = True
            self._flush_until = time.monotonic() + flush
        self._wake()
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(flush + 5.0)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it is over
            self._waker.send(b"x")

    # The link's thread.

    def _run(self) -> None:
        try:
            for message in self._pending:
                self._on_message(message)
            self._loop()
        except (OSError, framing.ProtocolError):
            pass
        finally:
            with self._lock:
                self.lost = True
                by_us = self._closing
            self._end()
            if not by_us:
                self._on_lost(self)

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakee, selectors.EVENT_READ)
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                    timeout: float | None = 0.0
                else:
                    timeout = None
                if (left := self._time_left()) is not None:
                    if left <= 0:
                        return
                    timeout = left if timeout is None else timeout
                selector.select(timeout)
                with contextlib.suppress(BlockingIOError):
                    self._wakee.setblocking(False)
                    self._wakee.recv(_CHUNK)
                self._read()
                blocked = self._write()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
                selector.modify(self._socket, events)

    def _time_left(self) -> float | None:
        with self._lock:
            if not self._closing or self._flush_until is None:
                return None
            return self._flush_until - time.monotonic() if self._outbox else 0.0

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not data:
                raise ConnectionError("the controller closed the link")
            self.heard_at = time.monotonic()
            for message in self._reader.feed(data):
                self._on_message(message)

    def _write(self) -> bool:
        """Send what is queued. True if the socket takes no more now."""
        while True:
            with self._lock:
                if not self._outbox:
                    return False
                if self._waiting > _MAX_WAITING:
                    raise ConnectionError("the controller does not read")
                frame = self._outbox[0]
            try:
                sent = self._socket.send(frame)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            with self._lock:
                self._waiting -= sent
                if sent == len(frame):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = frame[sent:]

    def _end(self) -> None:
        for end in (self._socket, self._waker, self._wakee):
            with contextlib.suppress(OSError):
                end.close()
