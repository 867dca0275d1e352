"""A processor's link at the controller's end: who it is, and that it may be here, is known after its `Hello`."""

from __future__ import annotations

import logging
import ssl
from typing import Protocol

import msgspec

from evertrain.mindio import framing
from evertrain.mindio.acceptedlink import AcceptedLink
from evertrain.mindio.tft import messages
from evertrain.mindio.tft.messages import AnyMessage, Hello, Refused
from evertrain.mindio.tft.requests import Event, FromLink

HELLO_PATIENCE = 10.0
"""Seconds in which a peer has to say who it is."""


class Host(Protocol):
    """What a link needs of the one that answers it."""

    tls: ssl.SSLContext | None

    def opened(self, link: Link) -> int: ...

    def refusal(self, message: AnyMessage) -> str | None: ...

    def feed(self, event: Event) -> None: ...

    def closed(self, number: int) -> None: ...


class Link(AcceptedLink):
    log = logging.getLogger(__name__)

    def __init__(self, host: Host) -> None:
        super().__init__(framing.FrameReader(messages.decoder, limit=framing.MAX_HELLO), host.tls, HELLO_PATIENCE)
        self._host = host
        self._number = 0
        self._rank: int | None = None

    @property
    def greeted(self) -> bool:
        return self._greeted

    @property
    def name(self) -> str:
        return super().name if self._rank is None else f"rank {self._rank}"

    def _opened(self) -> None:
        self._number = self._host.opened(self)

    def _lost(self) -> None:
        self._host.closed(self._number)

    def _refusal(self, reason: str, tls_wanted: bool) -> Refused:
        return Refused(reason=f"{reason}: enable_tls must be the same on both sides")

    def _take(self, message: AnyMessage) -> None:
        if not self._greeted:
            self._heard_hello()
            reason = self._host.refusal(message)
            if reason is not None:
                self.send(Refused(reason=reason))
                return self.close(reason)
            assert isinstance(message, Hello)
            self._welcome()
            self._rank = message.rank
            if not message.ip and self.address is not None:
                message = msgspec.structs.replace(message, ip=self.address[0])
        self._host.feed(FromLink(self._number, message))
