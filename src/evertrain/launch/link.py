"""The agent's link to the controller, and the way to another one when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Callable

from evertrain.mindio import framing, protocol
from evertrain.mindio.asynclink import AsyncLink, LinkError, NotNow
from evertrain.mindio.timing import Timing

__all__ = ["LinkError", "Uplink"]

_RETRY = 0.1
"""Seconds between two rounds over all addresses. Nothing announces that somebody begins to listen elsewhere."""
_KEPT = 10_000
"""Messages kept while there is no controller."""


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
        on_silence: Callable[[int], None],
        timing: Timing,
        tenacious: bool,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.addresses = list(addresses)
        self.epoch = 0
        self._hello = hello
        self._on_message, self._on_linked, self._on_lost = on_message, on_linked, on_lost
        self._on_silence = on_silence
        self._timing = timing
        self._tenacious = tenacious
        self._tls = tls
        self._link: AsyncLink | None = None
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

    def beat(self, step: int = -1) -> None:
        """Say that this agent lives, and see that the controller does."""
        if self._link is None:
            return
        self._link.send(protocol.Beat(at=time.monotonic(), step=step))
        if self._may_search and time.monotonic() - self._heard > self._timing.silence:
            self._link.close()
            self._on_silence(self.epoch + 1)
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
                    self.addresses += [other for other in error.controllers if other not in self.addresses]
                    if not self._may_search:
                        raise
            if time.monotonic() + _RETRY >= deadline:
                raise LinkError(f"no controller within {patience:g} s; {reason}")
            await asyncio.sleep(_RETRY)

    async def _try(self, address: str, deadline: float) -> None:
        try:
            target = protocol.address(address)
        except framing.ProtocolError as error:
            raise NotNow(str(error)) from None
        left = max(deadline - time.monotonic(), 0.01)
        timeout = min(left, max(self._timing.bound, 2.0)) if self._may_search else left
        hello = self._hello()
        hello = protocol.replace(hello, epoch=self.epoch)
        link, welcome = await AsyncLink.open(target, hello, self._receive, self._lost, timeout, self._tls)
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
