"""The processor: a training process's end of the link to the controller.

One socket and one reader thread. The thread answers pings on the board, resolves store requests, calls `on_stop` the
moment a `Stop` arrives, and queues every instruction for the training thread, which takes them one by one with
`receive` while it is out of user code. There is no heartbeat thread: the agent reads the board, and the link breaks
with the process.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import ssl
import threading
from collections.abc import Callable

from evertrain.mindio import protocol
from evertrain.mindio.board import Board
from evertrain.mindio.tls_stream import TlsRefused, TlsSocket


class LinkLost(Exception):
    """The link to the controller is gone."""


class Refused(Exception):
    """The controller does not want this process; the text says why."""


class StoreCancelled(Exception):
    """A wait on the store was given up: its generation is over."""


class Processor:
    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        *,
        rank: int,
        incarnation: int = 0,
        pid: int = 0,
        board: Board | None = None,
        on_stop: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._hello = protocol.Hello(
            version=protocol.VERSION, token=token, role="rank", rank=rank, incarnation=incarnation, pid=pid
        )
        self._board = board
        self.on_stop = on_stop
        self._inbox: queue.SimpleQueue[protocol.Message | None] = queue.SimpleQueue()
        self._writer = protocol.FrameWriter()
        self._write_lock = threading.Lock()
        self._requests = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[protocol.StoreReply]] = {}
        self._waiting_lock = threading.Lock()
        self._closed = False
        self._socket: socket.socket | TlsSocket | None = None
        self.newest_stop = -1
        """Attempt of the newest `Stop` that has arrived; instructions queued before it are void."""
        self.newest_pause = 0
        """Number of the newest `Pause` that has arrived."""
        self.lost = False

    def connect(self, timeout: float = 10.0) -> protocol.Welcome:
        """Open the link. Raises `Refused` with the controller's reason, or OSError."""
        link = self._open(timeout)
        self._socket = link
        reader = protocol.FrameReader()
        self.send(self._hello)
        pending: list[protocol.Message] = []
        while not pending:
            try:
                data = link.recv(65536)
            except TlsRefused as error:
                raise Refused(str(error)) from None
            if not data:
                raise Refused("the controller closed the link without a word")
            pending = reader.feed(data)
        first, *rest = pending
        if isinstance(first, protocol.Refused):
            link.close()
            raise Refused(first.reason)
        if not isinstance(first, protocol.Welcome):
            link.close()
            raise Refused(f"expected a welcome, got {type(first).__name__}")
        link.settimeout(None)
        for message in rest:
            self._dispatch(message)
        threading.Thread(target=self._read, args=(link, reader), name="evertrain-link", daemon=True).start()
        return first

    def _open(self, timeout: float) -> socket.socket | TlsSocket:
        link = socket.create_connection(self._address, timeout=timeout)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return link
        try:
            return TlsSocket(link, self._tls)
        except TlsRefused as error:
            link.close()
            raise Refused(str(error)) from None

    def send(self, message: protocol.Message) -> None:
        """Send, or do nothing when the link is lost: the loss itself is what the training thread gets to see."""
        if self._socket is None or self.lost:
            return
        with self._write_lock:
            try:
                self._socket.sendall(self._writer.frame(message))
            except OSError:
                self.lost = True

    def receive(self, timeout: float | None = None) -> protocol.Message:
        """The next instruction. Raises `LinkLost`, or queue.Empty after the timeout."""
        message = self._inbox.get(timeout=timeout)
        if message is None:
            self._inbox.put(None)
            raise LinkLost("the link to the controller is gone")
        return message

    def close(self) -> None:
        self._closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    # The store: what torch's process groups use to find each other.

    def store_set(self, key: str, value: bytes) -> None:
        self.send(protocol.StoreSet(key=key, value=value))

    def store_get(self, keys: list[str], timeout: float | None = None) -> list[bytes]:
        return self._ask(lambda number: protocol.StoreGet(request=number, keys=keys), timeout).values

    def store_add(self, key: str, amount: int) -> int:
        reply = self._ask(lambda number: protocol.StoreAdd(request=number, key=key, amount=amount), None)
        return int(reply.values[0])

    def _ask(self, request: Callable[[int], protocol.Message], timeout: float | None) -> protocol.StoreReply:
        number = next(self._requests)
        answer: queue.SimpleQueue[protocol.StoreReply] = queue.SimpleQueue()
        with self._waiting_lock:
            self._waiting[number] = answer
        try:
            if self.lost:
                raise StoreCancelled("the link to the controller is gone")
            self.send(request(number))
            reply = answer.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer from the store within {timeout:g} s") from None
        finally:
            with self._waiting_lock:
                self._waiting.pop(number, None)
        if reply.error:
            raise StoreCancelled(reply.error)
        return reply

    # The reader thread.

    def _read(self, link: socket.socket | TlsSocket, reader: protocol.FrameReader) -> None:
        try:
            while data := link.recv(1 << 20):
                for message in reader.feed(data):
                    self._dispatch(message)
        except (OSError, protocol.ProtocolError):
            pass
        finally:
            self.lost = True
            with self._waiting_lock:
                for number, answer in self._waiting.items():
                    answer.put(protocol.StoreReply(request=number, error="the link to the controller is gone"))
            self._inbox.put(None)
            link.close()

    def _dispatch(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Ping):
            if self._board is not None:
                self._board.pong(message.number)
        elif isinstance(message, protocol.Pause):
            self.newest_pause = max(self.newest_pause, message.number)
        elif isinstance(message, protocol.StoreReply):
            with self._waiting_lock:
                answer = self._waiting.get(message.request)
            if answer is not None:
                answer.put(message)
        else:
            if isinstance(message, protocol.Stop):
                self.newest_stop = max(self.newest_stop, message.attempt)
            if isinstance(message, protocol.Stop | protocol.Exit):
                # Before the message can be taken: who takes it may rely on the interruption having been made.
                self.on_stop()
            self._inbox.put(message)

