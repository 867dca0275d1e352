"""The processor: a training process's end of the link to the controller.

One socket and one reader thread. The thread answers pings on the board, resolves store requests, calls `on_stop` the
moment a `Stop` arrives, and queues every instruction for the training thread, which takes them one by one with
`receive` while it is out of user code. There is no heartbeat thread: the agent reads the board, and the link breaks
with the process.

A job with a standby has several controllers. When the link breaks, the reader thread looks for another one and says
there where this rank is; the training thread does not notice unless it waits for an instruction, and then it goes on
waiting. Only when nobody is found within `patience` the link is lost. What was said in the store before training is
said again to the new one, for the old one may have been the only one to know it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from evertrain.mindio import framing, protocol
from evertrain.mindio.board import Board
from evertrain.mindio.tls_stream import TlsRefused, TlsSocket

_ATTEMPT = 2.0
"""Seconds that one controller may take to accept a rank before the next one is tried."""
_RETRY = 0.1
"""Seconds between two rounds over all of them: nothing announces that somebody begins to listen elsewhere."""
_LOOK = 0.5
"""Seconds between two looks at what the agent says about the controller; a frozen one keeps its links."""
_GONE = "the link to the controller is gone"


class LinkLost(Exception):
    """The link to the controller is gone."""


class Refused(Exception):
    """The controller does not want this process; the text says why."""

    def __init__(self, reason: str, *, retry: bool = False, over: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry
        """Another controller, or this one later, may accept."""
        self.over = over
        """The job has ended."""


class StoreCancelled(Exception):
    """A wait on the store was given up: its generation is over."""


class _StoreGone(StoreCancelled):
    """The controller that kept the store is gone."""

    def __init__(self) -> None:
        super().__init__(_GONE)


_Opened = tuple[protocol.Welcome, list[protocol.Message], socket.socket | TlsSocket, protocol.FrameReader]


class Processor:
    def __init__(
        self,
        address: tuple[str, int] | Sequence[tuple[str, int]],
        token: str,
        *,
        rank: int,
        incarnation: int = 0,
        pid: int = 0,
        board: Board | None = None,
        on_stop: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
        patience: float = 0.0,
    ) -> None:
        """`address` may be several; `patience` is how long to look for another controller when the link breaks."""
        several = not isinstance(address[0], str)
        self._addresses: list[tuple[str, int]] = [*address] if several else [address]  # type: ignore[list-item]
        self._patience = patience
        self._tls = tls
        self._hello = protocol.Hello(
            version=protocol.VERSION, token=token, role="rank", rank=rank, incarnation=incarnation, pid=pid
        )
        self._board = board
        self.on_stop = on_stop
        self._inbox: queue.SimpleQueue[protocol.Message | None] = queue.SimpleQueue()
        self._writer = framing.FrameWriter()
        self._write_lock = threading.Lock()
        self._requests = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[protocol.StoreReply]] = {}
        self._waiting_lock = threading.Lock()
        self._said: dict[str, bytes] = {}
        """What this rank has set in the store before training."""
        self._closed = self._ended = False
        self._socket: socket.socket | TlsSocket | None = None
        self._place, self._generation, self._step = "starting", 0, -1
        self._out: protocol.Out | None = None
        self._newest_pause = 0
        self._welcomed = False
        self.epoch = 0
        """Number of the newest controller; an older one has no say any more."""
        self.newest_stop = -1
        """Attempt of the newest `Stop` that has arrived; instructions queued before it are void."""
        self.on_pause: Callable[[protocol.Pause | protocol.PauseAt], None] = lambda message: None
        self.lost = False

    def connect(self, timeout: float = 10.0) -> protocol.Welcome:
        """Open the link. Raises `Refused` with the controller's reason, or OSError."""
        if len(self._addresses) > 1 or self._patience:
            welcome, rest, link, reader = self._find(timeout)
        else:
            welcome, rest, link, reader = self._greet(self._addresses[0], timeout, self._hello)
        link.settimeout(None)
        for message in rest:
            self._dispatch(message)
        threading.Thread(target=self._read, args=(link, reader), name="evertrain-link", daemon=True).start()
        return welcome

    @property
    def starting(self) -> bool:
        """The training thread has not come to the training yet."""
        return self._place == "starting"

    def entered(self, generation: int, step: int) -> None:
        """The training thread goes on training; a new controller has to be told so."""
        with self._write_lock:
            self._place, self._generation, self._step, self._out = "inside", generation, step, None
            self._said.clear()

    def _greet(self, address: tuple[str, int], timeout: float, hello: protocol.Hello) -> _Opened:
        """One attempt at one controller."""
        link = self._open(address, timeout)
        try:
            reader = protocol.FrameReader()
            with self._write_lock:
                # From here on, what the training thread says comes after the Hello, on the same link.
                if self._welcomed:
                    hello = self._hello_again()
                self._writer = framing.FrameWriter()
                self._socket, self.lost = link, False
                link.sendall(self._writer.frame(hello))
            return self._await_welcome(link, reader)
        except BaseException:
            with self._write_lock:
                self._socket = None
            self._cancel_requests()
            link.close()
            raise

    def _await_welcome(self, link: socket.socket | TlsSocket, reader: protocol.FrameReader) -> _Opened:
        pending: list[protocol.Message] = []
        while not pending:
            try:
                data = link.recv(65536)
            except TlsRefused as error:
                raise Refused(str(error)) from None
            if not data:
                raise Refused("the controller closed the link without a word", retry=True)
            pending = reader.feed(data)
        first, *rest = pending
        if isinstance(first, protocol.Refused):
            self._learn(first.controllers)
            raise Refused(first.reason, retry=first.retry, over=first.over)
        if not isinstance(first, protocol.Welcome):
            raise Refused(f"expected a welcome, got {type(first).__name__}")
        if first.epoch < self.epoch:
            raise Refused("that controller is of the past", retry=True)
        self.epoch = first.epoch
        self._welcomed = True
        self._learn(first.controllers)
        return first, rest, link, reader

    def _hello_again(self) -> protocol.Hello:
        return protocol.replace(
            self._hello,
            place=self._place,
            generation=self._generation,
            step=self._step,
            attempt=self.newest_stop,
            out=self._out,
            pause=self._newest_pause,
            epoch=self.epoch,
        )

    def _learn(self, controllers: Sequence[str]) -> None:
        for text in controllers:
            if (address := protocol.address(text)) not in self._addresses:
                self._addresses.append(address)

    def _find(self, patience: float) -> _Opened:
        """Go round the addresses until one accepts this rank."""
        deadline = time.monotonic() + patience
        attempt = max(min(_ATTEMPT, patience), 0.01)
        while True:
            error: Exception = OSError("there is no address to try")
            for address in list(self._addresses):
                if self._closed:
                    raise OSError("closed")
                try:
                    return self._greet(address, attempt, self._hello)
                except Refused as refusal:
                    if not refusal.retry:
                        raise
                    error = refusal
                except (OSError, framing.ProtocolError) as failure:
                    error = failure
            if time.monotonic() + _RETRY >= deadline:
                raise error
            time.sleep(_RETRY)

    def _open(self, address: tuple[str, int], timeout: float) -> socket.socket | TlsSocket:
        link = socket.create_connection(address, timeout=timeout)
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
        with self._write_lock:
            if isinstance(message, protocol.Out):
                self._place, self._out, self._step = "out", message, message.step
            elif isinstance(message, protocol.Finished):
                self._place, self._step = "finished", message.step
            if self._socket is None or self.lost:
                return
            try:
                self._socket.sendall(self._writer.frame(message))
            except OSError:
                self.lost = True
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # the reader has to notice, whatever was wrong

    def receive(self, timeout: float | None = None) -> protocol.Message:
        """The next instruction. Raises `LinkLost`, or queue.Empty after the timeout."""
        message = self._inbox.get(timeout=timeout)
        if message is None:
            self._inbox.put(None)
            raise LinkLost(_GONE)
        if isinstance(message, protocol.Release):
            with self._write_lock:
                self._place = "leaving"
        elif isinstance(message, protocol.Join):
            with self._write_lock:
                self._generation = message.generation
        return message

    def close(self) -> None:
        self._closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    # The store: what torch's process groups use to find each other.

    def store_set(self, key: str, value: bytes) -> None:
        if self._outlives_controllers(key):
            self._said[key] = value
        self.send(protocol.StoreSet(key=key, value=value))

    def store_get(self, keys: list[str], timeout: float | None = None) -> list[bytes]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(end - time.monotonic(), 0.0)
            try:
                return self._ask(lambda number: protocol.StoreGet(request=number, keys=keys), left).values
            except _StoreGone:
                if self._ended or not all(map(self._outlives_controllers, keys)):
                    raise
                time.sleep(_RETRY)

    def _outlives_controllers(self, key: str) -> bool:
        """Is this a key of what ranks say to each other before training, and may there be another controller?

        Nobody calls them out of that, unlike out of a generation.
        """
        return self._patience > 0 and self.starting and key.startswith(protocol.PRELUDE)

    def store_add(self, key: str, amount: int) -> int:
        reply = self._ask(lambda number: protocol.StoreAdd(request=number, key=key, amount=amount), None)
        return int(reply.values[0])

    def _ask(self, request: Callable[[int], protocol.Message], timeout: float | None) -> protocol.StoreReply:
        number = next(self._requests)
        answer: queue.SimpleQueue[protocol.StoreReply] = queue.SimpleQueue()
        with self._waiting_lock:
            self._waiting[number] = answer
        try:
            if self.lost or self._socket is None:
                raise _StoreGone
            self.send(request(number))
            reply = answer.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer from the store within {timeout:g} s") from None
        finally:
            with self._waiting_lock:
                self._waiting.pop(number, None)
        if reply.error:
            raise _StoreGone if reply.error == _GONE else StoreCancelled(reply.error)
        return reply

    # The reader thread.

    def _read(self, link: socket.socket | TlsSocket, reader: protocol.FrameReader) -> None:
        try:
            while True:
                self._pump(link, reader)
                if not self._patience or self._closed or len(self._addresses) < 2:
                    return
                with self._write_lock:
                    self._socket = None
                link.close()
                self._cancel_requests()
                # The one that was lost comes last.
                self._addresses = [*self._addresses[1:], self._addresses[0]]
                _, rest, link, reader = self._find(self._patience)
                for key, value in list(self._said.items()):
                    self.send(protocol.StoreSet(key=key, value=value))
                for message in rest:
                    self._dispatch(message)
        except (OSError, Refused):
            pass
        finally:
            self.lost = self._ended = True
            self._cancel_requests()
            self._inbox.put(None)
            link.close()

    def _pump(self, link: socket.socket | TlsSocket, reader: protocol.FrameReader) -> None:
        """Read until the link breaks, or until the agent says that its controller is one of the past."""
        # Not for reading: a socket has one timeout for both ways, and a big message may take longer than a look.
        link.settimeout(self._patience or None)
        while True:
            try:
                if self._patience and self._board is not None and not _readable(link, _LOOK):
                    if self._board.epoch > self.epoch and len(self._addresses) > 1:
                        link.shutdown(socket.SHUT_RDWR)  # whoever is sending must let go
                        return
                    continue
                data = link.recv(1 << 20)
                if not data:
                    return
                for message in reader.feed(data):
                    self._dispatch(message)
            except TimeoutError:
                continue
            except (OSError, framing.ProtocolError):
                return

    def _cancel_requests(self) -> None:
        with self._waiting_lock:
            for number, answer in self._waiting.items():
                answer.put(protocol.StoreReply(request=number, error=_GONE))

    def _dispatch(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Ping):
            if self._board is not None:
                self._board.pong(message.number)
        elif isinstance(message, protocol.Pause):
            self._newest_pause = max(self._newest_pause, message.number)
            self.on_pause(message)
        elif isinstance(message, protocol.Controllers):
            self._addresses = list(dict.fromkeys(map(protocol.address, message.addresses))) or self._addresses
        elif isinstance(message, protocol.StoreReply):
            with self._waiting_lock:
                answer = self._waiting.get(message.request)
            if answer is not None:
                answer.put(message)
        else:
            if isinstance(message, protocol.Stop):
                self.newest_stop = max(self.newest_stop, message.attempt)
            if isinstance(message, protocol.PauseAt):
                self.on_pause(message)
            if isinstance(message, protocol.Stop | protocol.Exit):
                # Before the message can be taken: who takes it may rely on the interruption having been made.
                self.on_stop()
            self._inbox.put(message)


def _readable(link: socket.socket | TlsSocket, seconds: float) -> bool:
    if isinstance(link, TlsSocket) and link.buffered:
        return True
    poll = select.poll()
    try:
        poll.register(link.fileno(), select.POLLIN)
    except ValueError:
        raise OSError("the link was closed") from None
    return bool(poll.poll(seconds * 1000))
