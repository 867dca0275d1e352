"""A controller whose lines a test speaks: a real socket, framed messages, and no mind of its own."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

from evertrain.mindio import framing, protocol
from evertrain.mindio.tft import messages
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.processor import Processor, Settings

_T = TypeVar("_T")
PATIENCE = 120.0


class ScriptedController:
    """Takes one processor after another. `sn` counts by itself in `order`."""

    def __init__(
        self, registered: messages.Registered | None = None, address: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._server = socket.create_server((address, port))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self.registered = registered or messages.Registered(result=0)
        self.greeting: messages.Message = messages.Welcome(instance="one")
        self.received: queue.Queue[Any] = queue.Queue()
        self.registrations: queue.Queue[messages.Register] = queue.Queue()
        self.mute = False
        """Registrations are not answered."""
        self.hellos: list[messages.Hello] = []
        self._sn = 0
        self._link: socket.socket | None = None
        self._writer = framing.FrameWriter()
        self._sending = threading.Lock()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._server.accept()
                self._writer = framing.FrameWriter()
                self._link = link
                self._threads.append(threading.Thread(target=self._read, args=(link,), daemon=True))
                self._threads[-1].start()

    def _read(self, link: socket.socket) -> None:
        reader = protocol.FrameReader(messages.decoder)
        with contextlib.suppress(OSError):
            while data := link.recv(65536):
                for message in reader.feed(data):
                    self._take(link, message)

    def _take(self, link: socket.socket, message: Any) -> None:
        if isinstance(message, messages.Hello):
            self.hellos.append(message)
            self.send(self.greeting)
            if isinstance(self.greeting, messages.Refused):
                link.close()
        elif isinstance(message, messages.Register):
            if not self.mute:
                self.send(self.registered)
            self.registrations.put(message)
        else:
            self.received.put(message)

    def send(self, message: messages.Message) -> None:
        assert self._link is not None
        with self._sending:
            self._link.sendall(self._writer.frame(message))

    def order(self, kind: type, **fields: Any) -> int:
        self._sn += 1
        self.send(kind(sn=self._sn, **fields))
        return self._sn

    def next(self, kind: type[_T]) -> _T:
        """The next message of this kind; others are let go."""
        while True:
            message = self.received.get(timeout=PATIENCE)
            if isinstance(message, kind):
                return message

    def ask(self, kind: type, **fields: Any) -> messages.Reply:
        sn = self.order(kind, **fields)
        reply = self.next(messages.Reply)
        assert reply.sn == sn
        return reply

    def silent(self, seconds: float = 0.1) -> bool:
        """No reply came meanwhile."""
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(self.received.get(timeout=seconds), messages.Reply):
                    return False
        return True

    def drop_link(self) -> None:
        link = self._link  # the next one may be there before this one is closed
        assert link is not None
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        if self._link is not None:
            self.drop_link()
        for thread in self._threads:
            thread.join(PATIENCE)


@contextlib.contextmanager
def controller(**options: Any) -> Iterator[ScriptedController]:
    scripted = ScriptedController(**options)
    try:
        yield scripted
    finally:
        scripted.close()


@contextlib.contextmanager
def processor(at: ScriptedController, callbacks: Callbacks | None = None, **options: Any) -> Iterator[Processor]:
    hooks = {name: options.pop(name) for name in ("on_exit", "on_standby") if name in options}
    settings = Settings(**{"rank": 1, "world_size": 4, **options})
    made = Processor(settings, callbacks or Callbacks(), **hooks)
    try:
        made.start(*at.address)
        yield made
    finally:
        made.destroy()
