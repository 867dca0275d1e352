"""Asks the kernel for interfaces, addresses and routes (rtnetlink). On the standard library alone.

A connection belongs to the network namespace in which it was opened, wherever its process goes.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_NEWLINK, _DELLINK, _GETLINK, _NEWADDR, _DELADDR, _NEWROUTE, _GETROUTE = 16, 17, 18, 20, 21, 24, 26
_NEWQDISC, _DELQDISC = 36, 37
_REQUEST, _ACK, _DUMP, _REPLACE, _EXCL, _CREATE = 0x1, 0x4, 0x300, 0x100, 0x200, 0x400
_ERROR, _DONE = 2, 3
_HARDWARE, _IFNAME, _MTU, _MASTER, _LINKINFO, _STATS64, _NETNS_FD = 1, 3, 4, 10, 18, 23, 28
_INFO_KIND, _INFO_DATA, _PEER = 1, 2, 1
_LOCAL, _ADDRESS = 2, 1
_DST, _OIF = 1, 4
_TC_KIND, _TC_OPTIONS, _TC_ROOT, _LATENCY64 = 1, 2, 0xFFFFFFFF, 10
_QUEUE = 100_000
"""Packets that are on their way at a time; what is more is lost."""
NO_NETEM = "this kernel has no netem (`modprobe sch_netem`, CONFIG_NET_SCH_NETEM); `evertrain node cut` does without"
_IFF_UP, _IFF_LOWER_UP = 0x1, 0x10000
MAIN, _BOOT, _LINK_SCOPE, _UNICAST = 254, 3, 253, 1
_HEADER, _LINK, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BxHiII"), struct.Struct("=HH")
_ROUTE = struct.Struct("=BBBBBBBBI")
_LARGEST = 1 << 17
MTU = 65535
"""As large as it gets, like that of the loopback interface: nothing here has to fit on a real cable."""


@dataclass(frozen=True, slots=True)
class Interface:
    index: int
    name: str
    up: bool
    carrier: bool
    received: int
    """Bytes."""
    sent: int


class Rtnetlink:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def interfaces(self) -> dict[str, Interface]:
        found = (_interface(body) for body in self._ask(_GETLINK, _DUMP, _LINK.pack(0, 0, 0, 0, 0)))
        return {each.name: each for each in found}

    def index(self, name: str) -> int:
        """Raises OSError (ENODEV) if there is none of that name."""
        answer = self._ask(_GETLINK, 0, _LINK.pack(0, 0, 0, 0, 0) + _text(_IFNAME, name))
        return _interface(next(iter(answer))).index

    def add_bridge(self, name: str, hardware: bytes) -> None:
        """Without a hardware address of its own it would have one of those plugged in, and another when that goes."""
        self._new_link(name, _text(_INFO_KIND, "bridge"), _attribute(_HARDWARE, hardware))

    def add_cable(self, name: str, other: str, other_namespace: int, hardware: bytes = b"") -> None:
        """Two ends of which packets come out that go in at the other; the `other` one in that namespace, with that
        hardware address if one is given."""
        ends = _text(_IFNAME, other) + _number(_MTU, MTU) + _number(_NETNS_FD, other_namespace)
        ends += _attribute(_HARDWARE, hardware) if hardware else b""
        peer = _attribute(_PEER, _LINK.pack(0, 0, 0, 0, 0) + ends)
        self._new_link(name, _text(_INFO_KIND, "veth") + _attribute(_INFO_DATA, peer))

    def remove(self, name: str) -> None:
        self._ask(_DELLINK, _ACK, _LINK.pack(0, 0, self.index(name), 0, 0))

    def switch(self, name: str, on: bool) -> None:
        self._ask(_NEWLINK, _ACK, _LINK.pack(0, 0, self.index(name), _IFF_UP if on else 0, _IFF_UP))

    def plug(self, name: str, bridge: str) -> None:
        """Into that bridge; out of the one that it is in, if no name is given."""
        master = self.index(bridge) if bridge else 0
        self._ask(_NEWLINK, _ACK, _LINK.pack(0, 0, self.index(name), 0, 0) + _number(_MASTER, master))

    def add_address(self, name: str, address: str, prefix: int) -> None:
        self._ask(_NEWADDR, _ACK | _CREATE | _EXCL, self._address(name, address, prefix))

    def remove_address(self, name: str, address: str, prefix: int) -> None:
        self._ask(_DELADDR, _ACK, self._address(name, address, prefix))

    def _address(self, name: str, address: str, prefix: int) -> bytes:
        packed = ipaddress.IPv4Address(address).packed
        head = struct.pack("=BBBBI", socket.AF_INET, prefix, 0, 0, self.index(name))
        return head + _attribute(_LOCAL, packed) + _attribute(_ADDRESS, packed)

    def add_route(self, network: str, name: str, table: int = MAIN) -> None:
        """Whoever is in the network is reached over that interface, without anybody between."""
        target = ipaddress.IPv4Network(network)
        head = _ROUTE.pack(socket.AF_INET, target.prefixlen, 0, 0, table, _BOOT, _LINK_SCOPE, _UNICAST, 0)
        found = _attribute(_DST, target.network_address.packed) + _number(_OIF, self.index(name))
        self._ask(_NEWROUTE, _ACK | _CREATE | _EXCL, head + found)

    def routes(self) -> list[ipaddress.IPv4Network]:
        """To where, by all tables, without the one to everywhere, which may be in two halves. Addresses of this machine
        are among them: each has a route of its own, in the table `local`."""
        asked = _ROUTE.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)
        found = []
        for body in self._ask(_GETROUTE, _DUMP, asked):
            length = _ROUTE.unpack_from(body)[1]
            if length > 1 and (target := _attributes(body, _ROUTE.size).get(_DST)):
                found.append(ipaddress.IPv4Network((target, length)))
        return found

    def worsen(self, name: str, delay: float, loss: float) -> None:
        """What goes out there is late by so many seconds, and that share of it is lost."""
        nanoseconds = round(delay * 1e9)
        # struct tc_netem_qopt, whose latency is in ticks of 64 ns and no more than four minutes.
        ticks = min(nanoseconds >> 6, 0xFFFFFFFF)
        options = struct.pack("=IIIIII", ticks, _QUEUE, round(loss * 0xFFFFFFFF), 0, 0, 0)
        options += _attribute(_LATENCY64, struct.pack("=q", nanoseconds))
        body = self._root(name) + _text(_TC_KIND, "netem") + _attribute(_TC_OPTIONS, options)
        try:
            self._ask(_NEWQDISC, _ACK | _CREATE | _REPLACE, body)
        except FileNotFoundError:
            raise OSError(errno.ENOENT, NO_NETEM) from None

    def worsen_no_more(self, name: str) -> None:
        self._ask(_DELQDISC, _ACK, self._root(name))

    def _root(self, name: str) -> bytes:
        """struct tcmsg: where packets go out."""
        return struct.pack("=BxxxiIII", socket.AF_UNSPEC, self.index(name), 0, _TC_ROOT, 0)

    def _new_link(self, name: str, info: bytes, more: bytes = b"") -> None:
        body = _LINK.pack(0, 0, 0, 0, 0) + _text(_IFNAME, name) + _number(_MTU, MTU) + more
        self._ask(_NEWLINK, _ACK | _CREATE | _EXCL, body + _attribute(_LINKINFO, info))

    def _ask(self, kind: int, flags: int, body: bytes) -> list[bytes]:
        """The bodies of the answer. Raises OSError."""
        self._number += 1
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, self._number, 0) + body)
        found: list[bytes] = []
        while True:
            for answer, number, content in _messages(self._socket.recv(_LARGEST)):
                if number != self._number:
                    continue
                if answer == _DONE:
                    return found
                if answer == _ERROR:
                    error = -int.from_bytes(content[:4], sys.byteorder, signed=True)
                    if error:
                        raise OSError(error, os.strerror(error))
                    return found
                found.append(content)
                if not flags & (_DUMP | _ACK):
                    return found


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Kind, number and body of each."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, number, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield kind, number, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _interface(body: bytes) -> Interface:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    found = _attributes(body, _LINK.size)
    name = found.get(_IFNAME, b"").rstrip(b"\0").decode(errors="replace")
    _, _, received, sent = struct.unpack_from("=QQQQ", found.get(_STATS64, bytes(32)))
    return Interface(index, name, bool(flags & _IFF_UP), bool(flags & _IFF_LOWER_UP), received, sent)


def _attributes(body: bytes, offset: int) -> dict[int, bytes]:
    found = {}
    while offset + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = body[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, value.to_bytes(4, sys.byteorder))
