"""TLS between bytes and bytes, and on a blocking socket with a reader and writers in different threads.

Neither asyncio's TLS nor a wrapped socket does for links. The first says nothing when a handshake fails, and who is
refused must be told on both sides. The second must not be read and written by two threads at once, because OpenSSL
keeps one state for both directions; but a processor's reader thread is always inside a read. Here OpenSSL sees memory
only, under a lock, and the socket belongs to whoever waits for it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

from evertrain.mindio.tls import reason

HANDSHAKE = 0x16
"""First byte of a TLS connection. A frame of ours begins with the high byte of its length, which is zero."""


class HandshakeError(Exception):
    """The peers do not agree on TLS; the text says why. `last_words` should still be sent: they tell the peer."""

    def __init__(self, why: str, last_words: bytes = b"") -> None:
        super().__init__(why)
        self.last_words = last_words


class TlsRefused(ConnectionError):
    """A connection came to nothing because the peers do not agree on TLS; trying again won't help."""


class TlsStream:
    """One side of a connection without the connection: `feed` what arrives, `write`, and send what `take` gives."""

    def __init__(self, context: ssl.SSLContext, server_side: bool) -> None:
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server_side)
        self._early: list[bytes] = []
        """Written before the handshake was done."""
        self.established = False
        self.closed = False
        """The peer has said that nothing more will come."""

    def start(self) -> None:
        """A client has the first word."""
        self._shake_hands()

    def take(self) -> bytes:
        """What has to be sent now."""
        return self._leaving.read()

    def feed(self, data: bytes) -> bytes:
        """What the peer said, in clear. Empty data is the end of the connection."""
        if data:
            self._arrived.write(data)
        else:
            self._arrived.write_eof()
        if not self.established:
            self._shake_hands()
        said = bytearray()
        if self.established:
            try:
                while chunk := self._tls.read(1 << 18):
                    said += chunk
                self.closed = True
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                self.closed = True
            except ssl.SSLError as error:
                raise HandshakeError(reason(error), self._leaving.read()) from None
        return bytes(said)

    def write(self, data: bytes) -> None:
        """Say something; while the handshake lasts it is kept back."""
        if self.established:
            self._tls.write(data)
        else:
            self._early.append(data)

    def close(self) -> None:
        """The words of parting: without them the peer can't tell an end from a cut."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise HandshakeError(reason(error), self._leaving.read()) from None
        self.established = True
        for data in self._early:
            self._tls.write(data)
        self._early.clear()


class TlsSocket:
    """A connected socket with TLS on it: one thread may read while others write.

    Takes the place of the plain socket in its owner; the handshake is done here and bounded by the socket's timeout.
    """

    def __init__(self, link: socket.socket, context: ssl.SSLContext, server_side: bool = False) -> None:
        self._link = link
        self._stream = TlsStream(context, server_side)
        self._tls_lock = threading.Lock()
        """Around OpenSSL, and never while something waits: the reader must go on when writers can't."""
        self._send_lock = threading.Lock()
        """Keeps the records in the order in which they were made."""
        self._read = bytearray()
        timeout = link.gettimeout()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            if not server_side:
                self._stream.start()
                self._flush()
            while not self._stream.established:
                if deadline is not None:
                    link.settimeout(max(deadline - time.monotonic(), 0.001))
                self._take(self._link.recv(1 << 16))
            link.settimeout(timeout)
        except HandshakeError as error:
            with contextlib.suppress(OSError):
                link.sendall(error.last_words)
            raise TlsRefused(f"TLS: {error}") from None

    def _take(self, data: bytes) -> None:
        with self._tls_lock:
            self._read += self._stream.feed(data)
        # If somebody else is sending, an answer to the peer's TLS leaves with the next record.
        if self._send_lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._send_lock.release()

    def _flush(self) -> None:
        with self._tls_lock:
            leaving = self._stream.take()
        if leaving:
            self._link.sendall(leaving)

    def recv(self, size: int) -> bytes:
        """Some bytes; none at the end. Raises OSError when the peer refused us after the handshake."""
        while not self._read and not self._stream.closed:
            data = self._link.recv(max(size, 1 << 14))
            try:
                self._take(data)
            except HandshakeError as error:
                raise TlsRefused(f"TLS: {error}") from None
            if not data:
                break
        taken = bytes(self._read[:size])
        del self._read[:size]
        return taken

    @property
    def buffered(self) -> bool:
        """There is something to read without waiting for the socket."""
        return bool(self._read)

    def sendall(self, data: bytes) -> None:
        with self._send_lock:
            with self._tls_lock:
                self._stream.write(data)
            self._flush()

    def settimeout(self, timeout: float | None) -> None:
        self._link.settimeout(timeout)

    def gettimeout(self) -> float | None:
        return self._link.gettimeout()

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self._link.setsockopt(level, name, value)

    def fileno(self) -> int:
        return self._link.fileno()

    def shutdown(self, how: int) -> None:
        self._link.shutdown(how)

    def close(self) -> None:
        self._link.close()
