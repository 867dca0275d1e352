"""Network links: one that worked and no longer does, and one that keeps going down and up.

The kernel tells of every change (netlink), so nothing is polled. Where it may not be asked that way, /sys is read every
few seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from evertrain import aio
from evertrain.noded import codes
from evertrain.noded.detectors import netlink
from evertrain.noded.detectors.base import Tell, now_ms, number, read
from evertrain.noded.detectors.netlink import Link
from evertrain.noded.faults import AnyFault, NodeFault

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
FLAPS, FLAP_WINDOW_MS, FLAP_CALM_MS = 5, 60_000, 300_000
"""So many times down in that time is flapping, until there was none for that long."""
NETWORK = "Network"


class LinkStates:
    """What is known of the links. Pure.

    A link that never worked isn't missed (a socket without a cable), unless it was named.
    """

    def __init__(self, named: Iterable[str] = ()) -> None:
        self._named = frozenset(named)
        self._links: dict[str, Link] = {}
        self._worked: set[str] = set(self._named)
        self._since: dict[str, int] = {}
        self._downs: dict[str, deque[int]] = {}
        self.missed: set[int] = set()
        """Numbers of links that were missed when nobody knew of them here yet."""
        self.hardware: set[str] = set()
        """Names of links that belong to hardware, also when it is gone."""

    def see(self, links: Iterable[Link], now: int) -> None:
        """All links that there are."""
        there = {link.name: link for link in links}
        self.only(there, now)
        for link in there.values():
            self.change(link, now)

    def only(self, names: Iterable[str], now: int) -> None:
        """There are no others than these."""
        for name in (self._worked | set(self._links)) - set(names):
            self.gone(name, now)

    def change(self, link: Link, now: int) -> None:
        if not link.name or link.loopback:
            return
        for name, other in list(self._links.items()):  # it was renamed
            if other.index == link.index and name != link.name:
                del self._links[name]
                self._worked.discard(name)
                self._since.pop(name, None)
        self._links[link.name] = link
        if link.index in self.missed:
            self._worked.add(link.name)
        if link.works:
            self._worked.add(link.name)
            self._since.pop(link.name, None)
        elif link.name in self._worked:
            self._down(link.name, now)

    def gone(self, name: str, now: int) -> None:
        self._links.pop(name, None)
        if name in self._worked:
            self._down(name, now)

    def _down(self, name: str, now: int) -> None:
        if name not in self._since:
            self._since[name] = now
            downs = self._downs.setdefault(name, deque(maxlen=FLAPS))
            downs.append(now)

    def faults(self, now: int) -> list[NodeFault]:
        found = []
        for name, since in sorted(self._since.items()):
            link = self._links.get(name)
            why = "is not there" if link is None else "was switched off" if not link.up else "has no carrier"
            found.append(self._fault(name, codes.LINK_DOWN, since, f"{name} {why}"))
        for name, downs in sorted(self._downs.items()):
            if self._flaps(downs, now):
                note = f"{name} went down {FLAPS} times in a minute"
                found.append(self._fault(name, codes.LINK_FLAPS, downs[0], note))
        return found

    def calm_ms(self, now: int) -> int | None:
        """When a link that flaps will have been calm for long enough."""
        return min((d[-1] + FLAP_CALM_MS for d in self._downs.values() if self._flaps(d, now)), default=None)

    @staticmethod
    def _flaps(downs: deque[int], now: int) -> bool:
        full = len(downs) == FLAPS and downs[-1] - downs[0] <= FLAP_WINDOW_MS
        return full and now - downs[-1] < FLAP_CALM_MS

    def _fault(self, name: str, code: str, since: int, note: str) -> NodeFault:
        link = self._links.get(name)
        return NodeFault(code=code, device=NETWORK, id=link.index if link else 0, since_ms=since, note=note)


class Links:
    name = "links"

    def __init__(self, named: Iterable[str] = (), *, sys: Path = Path("/sys"), netlink: bool = True) -> None:
        """Without names: all that belong to hardware."""
        self._named = frozenset(named)
        self._sys = sys
        self._netlink = netlink
        self._states = LinkStates(self._named)
        self._told: list[NodeFault] | None = None

    def resume(self, faults: Iterable[AnyFault]) -> None:
        down = [fault for fault in faults if isinstance(fault, NodeFault) and fault.code == codes.LINK_DOWN]
        self._states.missed = {fault.id for fault in down if fault.id}

    async def run(self, tell: Tell) -> None:
        try:
            if not self._netlink:
                raise OSError(errno.EPERM, "not wanted")
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
                sock.bind((0, netlink.GROUP_LINK))
                await self._follow(sock, tell)
        except OSError as error:
            logger.info("links are looked at every %g s: %s", POLL_SECONDS, error)
            await self._poll(tell)

    async def _follow(self, sock: socket.socket, tell: Tell) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, netlink.request())
        seen: set[str] = set()
        """Since the last answer to our question."""
        while True:
            now = now_ms()
            calm = self._states.calm_ms(now)
            try:
                async with aio.timeout(None if calm is None else max(0.0, (calm - now) / 1000)):
                    data = await loop.sock_recv(sock, 1 << 16)
            except TimeoutError:
                data = b""
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                data = b""  # more was said than we could hear: ask again
                await loop.sock_sendall(sock, netlink.request())
            messages, complete = netlink.parse(data)
            for message in messages:
                seen.add(message.link.name)
                if not self._counts(message.link.name):
                    continue
                if message.gone:
                    self._states.gone(message.link.name, now_ms())
                else:
                    self._states.change(message.link, now_ms())
            if complete:
                self._states.only(seen, now_ms())
                seen = set()
            self._say(tell)

    async def _poll(self, tell: Tell) -> None:
        while True:
            self._states.see([link for link in self._read() if self._counts(link.name)], now_ms())
            self._say(tell)
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> list[Link]:
        found = []
        root = self._sys / "class" / "net"
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            flags = int(read(folder / "flags") or "0x0", 16)
            carrier = read(folder / "carrier") == "1"  # it can't be read of one that is off
            loopback = bool(flags & netlink.IFF_LOOPBACK)
            found.append(
                Link(number(folder / "ifindex") or 0, folder.name, bool(flags & netlink.IFF_UP), carrier, loopback)
            )
        return found

    def _counts(self, name: str) -> bool:
        if self._named:
            return name in self._named
        known = name in self._states.hardware
        if not known and (self._sys / "class" / "net" / name / "device").exists():
            self._states.hardware.add(name)
            known = True
        return known

    def _say(self, tell: Tell) -> None:
        faults = self._states.faults(now_ms())
        if faults != self._told:
            self._told = faults
            tell(faults)
