"""The agent's link to the controller, and the way to another one when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

from evertrain.mindio import protocol
from evertrain.mindio.timing import Timing
from evertrain.mindio.tls_stream import HandshakeError, TlsStream

_RETRY = 0.1
"""Seconds between two rounds over all addresses. Nothing announces that somebody begins to listen elsewhere."""
_KEPT = 10_000
"""Messages kept while there is no controller."""


class LinkError(Exception):
    """The controller could not be reached or refused this agent."""


class NotNow(LinkError):
    """Not reached or not accepted this time; another controller, or the same one later, may answer."""


class AgentLink(asyncio.Protocol):
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
        self._writer = protocol.FrameWriter()
        self._tls = TlsStream(tls, server_side=False) if tls is not None else None
        self._transport: asyncio.Transport | None = None
        self._closing = False
        self._early: list[protocol.Message] | None = []
        """What came before anybody listened: the first orders follow the welcome in the same packet."""
        self._welcomed: asyncio.Future[protocol.Welcome] = asyncio.get_running_loop().create_future()
        self.advice: list[str] = []
        """Where a controller that refused says that another one is."""

    @classmethod
    async def open(
        cls,
        address: tuple[str, int],
        hello: protocol.Hello,
        on_message: Callable[[protocol.Message], None],
        on_lost: Callable[[str], None],
        timeout: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ) -> tuple[AgentLink, protocol.Welcome]:
        loop = asyncio.get_running_loop()
        link = None
        try:
            async with asyncio.timeout(timeout):
                _, link = await loop.create_connection(lambda: cls(on_message, on_lost, tls), *address)
                link.send(hello)
                return link, await link._welcomed
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout:g} s"
            raise NotNow(f"the controller at {address[0]}:{address[1]} can't be reached: {reason}") from None
        finally:
            if link is not None and (not link._welcomed.done() or link._welcomed.cancelled()):
                link.close()

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
        except protocol.ProtocolError as error:
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
                self.advice = message.controllers
                kind = NotNow if message.retry else LinkError
                self._lose(f"the controller refused this agent: {message.reason}", kind)
            else:
                self._lose(f"the controller opened with {type(message).__name__}")

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(f"the link to the controller broke: {error or 'closed'}", NotNow)

    def _lose(self, reason: str, kind: type[LinkError] = LinkError) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(kind(reason))
        elif not self._closing and not self._welcomed.cancelled():
            self._on_lost(reason)
        self.close()


class Uplink:
    """The agent's way to whoever is the controller.

    With a single controller the end of the link is the end. Otherwise (`tenacious`, or a controller that has named
    others) the agent looks for a controller, beginning with the one after that which it lost, and what it has to say
    meanwhile is kept.
    """

    def __init__(
        self,
        addresses: list[str],
        hello: Callable[[], protocol.Hello],
        *,
        on_message: Callable[[protocol.Message], None],
        on_linked: Callable[[bool], None],
        on_lost: Callable[[str], None],
        timing: Timing,
        tenacious: bool,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.addresses = list(addresses)
        self.epoch = 0
        self._hello = hello
        self._on_message, self._on_linked, self._on_lost = on_message, on_linked, on_lost
        self._timing = timing
        self._tenacious = tenacious
        self._tls = tls
        self._link: AgentLink | None = None
        self.linked_before = False
        self._kept: deque[protocol.Message] = deque(maxlen=_KEPT)
        self._heard = 0.0
        self._search: asyncio.Task[None] | None = None

    @property
    def local_host(self) -> str:
        return self._link.local_host if self._link is not None else ""

    async def open(self, patience: float) -> None:
        """The first link. Raises LinkError."""
        await self._find(patience)

    def send(self, message: protocol.Message) -> None:
        if self._link is not None:
            self._link.send(message)
        elif not isinstance(message, protocol.Suspect):
            self._kept.append(message)

    def beat(self) -> None:
        """Say that this agent lives, and see that the controller does."""
        if self._link is None:
            return
        self._link.send(protocol.Beat(at=time.monotonic()))
        if self._may_search and time.monotonic() - self._heard > self._timing.silence:
            self._link.close()
            self._lost(f"the controller has been silent for {self._timing.silence:g} s")

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        if self._link is not None:
            self._link.close()
            self._link = None

    @property
    def _may_search(self) -> bool:
        return self._tenacious or len(self.addresses) > 1

    async def _find(self, patience: float) -> None:
        """Go round the addresses until one accepts."""
        deadline = time.monotonic() + patience
        reason = ""
        while True:
            for address in list(self.addresses):
                try:
                    return await self._try(address, deadline)
                except NotNow as error:
                    reason = str(error)
                    if not self._may_search:
                        raise
            if time.monotonic() + _RETRY >= deadline:
                raise LinkError(f"no controller within {patience:g} s; {reason}")
            await asyncio.sleep(_RETRY)

    async def _try(self, address: str, deadline: float) -> None:
        host, _, port = address.rpartition(":")
        left = max(deadline - time.monotonic(), 0.01)
        timeout = min(left, max(self._timing.bound, 2.0)) if self._may_search else left
        hello = self._hello()
        hello = protocol.replace(hello, epoch=self.epoch)
        link, welcome = await AgentLink.open((host, int(port)), hello, self._receive, self._lost, timeout, self._tls)
        if welcome.epoch < self.epoch:
            link.close()
            raise NotNow(f"the controller at {address} is of the past")
        self.epoch = welcome.epoch
        others = welcome.controllers or [other for other in self.addresses if other != address]
        self.addresses = [address, *(other for other in others if other != address)]
        self._link, self._heard = link, time.monotonic()
        again, self.linked_before = self.linked_before, True
        self._on_linked(again)
        while self._kept:
            link.send(self._kept.popleft())
        link.listen()

    def _receive(self, message: protocol.Message) -> None:
        self._heard = time.monotonic()
        if isinstance(message, protocol.Controllers):
            self.addresses = list(message.addresses)
            self._on_linked(False)
        elif not isinstance(message, protocol.Beat):
            self._on_message(message)

    def _lost(self, reason: str) -> None:
        self._link = None
        if not self._may_search:
            return self._on_lost(reason)
        # The one that was lost comes last.
        self.addresses = [*self.addresses[1:], *self.addresses[:1]]
        self._search = asyncio.create_task(self._search_on(reason))

    async def _search_on(self, reason: str) -> None:
        try:
            await self._find(self._timing.takeover)
        except LinkError as error:
            with contextlib.suppress(asyncio.CancelledError):
                self._on_lost(f"{reason}; {error}")
