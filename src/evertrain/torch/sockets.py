"""Which sockets belong to a process group, and how to close them under it.

gloo offers no way to wake a thread that is blocked in one of its operations; shutting its connections down does, in
most cases, and tells the peers as well. The sockets are gloo's own, so they have to be found from outside: they are
those that appeared while the group was built, are connected, and have at one end an address on which a member of the
group listens. The last condition keeps sockets out that some other thread of the script opened at the same moment.

A socket is remembered by descriptor *and* inode. gloo closes descriptors on a thread of its own, so by the time of the
shutdown a number may be free or belong to something else; a duplicate, checked for its inode, can't be pulled away.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Socket(NamedTuple):
    fd: int
    inode: int


def opened() -> set[Socket]:
    """Every socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.add(Socket(int(name), int(target[len("socket:[") : -1])))
    return found


def listening(sockets: Iterable[Socket]) -> set[str]:
    """The TCP addresses on which these sockets wait for connections."""
    addresses = set()
    for known in sockets:
        with _duplicate(known) as sock:
            if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _is_tcp(sock):
                addresses.add(_address(sock.getsockname()))
    return addresses


def between(sockets: Iterable[Socket], listeners: set[str]) -> list[Socket]:
    """Those of the sockets that are connected TCP sockets with one end at one of the listeners' addresses."""
    chosen = []
    for known in sockets:
        with _duplicate(known) as sock, contextlib.suppress(OSError):
            # getpeername raises for a socket that is not connected; a listening one never is.
            if sock is not None and _is_tcp(sock):
                ends = {_address(sock.getsockname()), _address(sock.getpeername())}
                if ends & listeners:
                    chosen.append(known)
    return chosen


def half_close(sockets: Iterable[Socket]) -> int:
    """Shut these connections down in both directions, leaving the descriptors to their owner; returns how many."""
    closed = 0
    for known in sockets:
        with _duplicate(known) as sock, contextlib.suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


@contextlib.contextmanager
def _duplicate(known: Socket) -> Iterator[socket.socket | None]:
    """The socket under a descriptor of ours, or None if it is gone or its number has been taken by another one."""
    sock = None
    with contextlib.suppress(OSError):
        fd = os.dup(known.fd)
        if os.fstat(fd).st_ino == known.inode:
            sock = socket.socket(fileno=fd)
        else:
            os.close(fd)
    try:
        yield sock
    finally:
        if sock is not None:
            sock.close()


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _address(name: tuple) -> str:
    """Host and port, the same for an IPv4 address and for its form as an IPv6 one."""
    return f"{name[0].removeprefix('::ffff:')}|{name[1]}"
