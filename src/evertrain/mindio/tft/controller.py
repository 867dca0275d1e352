"""The controller's shell: a TCP server in a thread of the hosting process, around the pure machine.

All that happens is fed to the machine in one thread, and what it returns is sent in the same moment. Callbacks of the
platform may block; they run one after the other in a thread of their own, and their end is an event like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import os
import queue
import secrets
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from evertrain import aio
from evertrain.mindio import framing, tls
from evertrain.mindio.tft.accepted import Link
from evertrain.mindio.tft.machine import Machine
from evertrain.mindio.tft.messages import AnyMessage, Hello
from evertrain.mindio.tft.requests import (
    Action,
    CallPlatform,
    Close,
    Event,
    LinkLost,
    PlatformDone,
    Send,
    Signal,
    Tick,
)
from evertrain.mindio.tft.settings import Settings
from evertrain.mindio.tls_dates import DateWatch

log = logging.getLogger(__name__)

START_PATIENCE = 10.0
FAREWELL = 1.0
"""Seconds in which the last messages have to be out."""

Platform = Callable[..., object]
"""Called with the name of a report and its arguments."""


class Controller:
    """`start`, then `destroy`. `notify` and the properties may be used from any thread."""

    def __init__(
        self,
        settings: Settings,
        host: str,
        port: int = 0,
        *,
        context: ssl.SSLContext | None = None,
        certificates: tls.TlsInfo | None = None,
        token: str = "",
        platform: Platform | None = None,
    ) -> None:
        instance = settings.instance or secrets.token_hex(8)
        self.machine = Machine(dataclasses.replace(settings, instance=instance, platform=platform is not None))
        self.tls = context
        self._certificates = certificates
        self._host, self._port, self._token = host, port, token
        self._platform = platform
        self._links: dict[int, Link] = {}
        self._numbers = 0
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: asyncio.Server | None = None
        self._stop: asyncio.Event | None = None
        self._calls: queue.SimpleQueue[CallPlatform | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tft-controller", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.address: tuple[str, int] = (host, port)

    # From any thread.

    def start(self) -> None:
        """Listen. Raises what hindered it."""
        if self._platform is not None:
            threading.Thread(target=self._call_platform, name="tft-platform", daemon=True).start()
        self._thread.start()
        if not self._started.wait(START_PATIENCE):
            raise TimeoutError(f"the controller did not start within {START_PATIENCE:g} s")
        if self._failure is not None:
            raise self._failure

    def notify(self, signal: Signal) -> bool:
        """Pass on what the platform wants. False if nobody listens any more."""
        if self.machine.ended is not None:
            return False
        return self._post(self.feed, signal)

    @property
    def linked(self) -> int:
        """How many processors are connected."""
        return self.machine.linked

    def destroy(self) -> None:
        """Tell all processors that nobody leads them any more, and end."""
        stop = self._stop
        if stop is not None and self._post(stop.set) and self._thread is not threading.current_thread():
            self._thread.join(START_PATIENCE)

    def _post(self, function: Callable[..., object], *args: object) -> bool:
        loop = self._loop
        if loop is None:
            return False
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(function, *args)
            return True
        return False

    # The controller's thread.

    def _run(self) -> None:
        try:
            aio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                log.exception("the controller failed")
        finally:
            self._loop = None
            self._calls.put(None)
            self._started.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._listener = await loop.create_server(lambda: Link(self), self._host, self._port, backlog=4096)
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.address = (host, port)
        self._loop = loop
        self.feed(Tick())
        lookout = tls.Lookout.from_environment(os.environ)
        dates = DateWatch(self._certificates, lookout, log.warning) if self._certificates is not None else None
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            if dates is not None:
                dates.close()
            await self._farewell()

    async def _farewell(self) -> None:
        self._carry_out(self.machine.leave())
        if self._tick is not None:
            self._tick.cancel()
        if self._listener is not None:
            self._listener.close()
        self._drained = asyncio.Event()
        for link in list(self._links.values()):
            link.close()
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(FAREWELL):
                while self._links:
                    self._drained.clear()
                    await self._drained.wait()

    _drained: asyncio.Event | None = None

    def feed(self, event: Event) -> None:
        now = time.monotonic()
        self._carry_out(self.machine.handle(event, now))
        deadline = self.machine.deadline
        if deadline is None or (self._tick is not None and self._tick_at <= deadline):
            return  # a tick that comes too early does no harm, and most deadlines only ever move on
        if self._tick is not None:
            self._tick.cancel()
        self._tick_at = deadline
        self._tick = asyncio.get_running_loop().call_later(max(deadline - now, 0.0), self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self.feed(Tick())

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(links, message):
                    order: Any = framing.prepare(message) if len(links) > 1 else message
                    for number in links:
                        if (link := self._links.get(number)) is not None:
                            link.send(order)
                case Close(number, why):
                    if (link := self._links.get(number)) is not None:
                        link.close(why)
                case CallPlatform():
                    self._calls.put(action)

    # Called by the links.

    def opened(self, link: Link) -> int:
        self._numbers += 1
        self._links[self._numbers] = link
        return self._numbers

    def closed(self, number: int) -> None:
        link = self._links.pop(number, None)
        if self._drained is not None:
            self._drained.set()
        elif link is not None and link.greeted:
            self.feed(LinkLost(number))

    def refusal(self, message: AnyMessage) -> str | None:
        if not isinstance(message, Hello):
            return "the first message must be a Hello"
        if self._token and not hmac.compare_digest(message.token.encode(), self._token.encode()):
            return "wrong job token"
        return None

    # The platform's thread.

    def _call_platform(self) -> None:
        assert self._platform is not None
        while (call := self._calls.get()) is not None:
            try:
                self._platform(call.name, *call.args)
                ok = True
            except Exception:
                log.exception("the platform's callback %s failed", call.name)
                ok = False
            self._post(self.feed, PlatformDone(call.call, ok))
