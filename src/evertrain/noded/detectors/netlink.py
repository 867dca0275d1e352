"""The kernel's own words about network interfaces (rtnetlink). Pure but for the request's constants."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

NEW, DELETED = 16, 17
_DONE, _GET = 3, 18
_REQUEST, _DUMP = 0x1, 0x300
GROUP_LINK = 1
IFF_UP, IFF_LOOPBACK, IFF_LOWER_UP = 0x1, 0x8, 0x10000
_NAME, _CARRIER = 3, 33
_HEADER, _LINK, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BxHiII"), struct.Struct("=HH")


@dataclass(frozen=True, slots=True)
class Link:
    index: int
    name: str
    up: bool
    """Somebody wants it to be up."""
    carrier: bool
    loopback: bool = False

    @property
    def works(self) -> bool:
        return self.up and self.carrier


@dataclass(frozen=True, slots=True)
class Message:
    link: Link
    gone: bool


def request() -> bytes:
    """For all interfaces."""
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    return _HEADER.pack(_HEADER.size + len(body), _GET, _REQUEST | _DUMP, 1, 0) + body


def parse(data: bytes) -> tuple[list[Message], bool]:
    """And whether this is the end of an answer. What is cut off or isn't about links is passed over."""
    found = []
    ends = False
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size or offset + length > len(data):
            break
        if kind in (NEW, DELETED) and length >= _HEADER.size + _LINK.size:
            found.append(Message(_link(data[offset + _HEADER.size : offset + length]), kind == DELETED))
        ends = ends or kind == _DONE
        offset += (length + 3) & ~3
    return found, ends


def _link(body: bytes) -> Link:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    name, carrier = "", bool(flags & IFF_LOWER_UP)
    offset = _LINK.size
    while offset + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < _ATTRIBUTE.size or offset + length > len(body):
            break
        value = body[offset + _ATTRIBUTE.size : offset + length]
        if kind == _NAME:
            name = value.rstrip(b"\0").decode(errors="replace")
        elif kind == _CARRIER and value:
            carrier = bool(value[0])
        offset += (length + 3) & ~3
    return Link(index, name, bool(flags & IFF_UP), carrier, bool(flags & IFF_LOOPBACK))
