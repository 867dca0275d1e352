"""Connections between processes are cut from outside, as a broken cable does it, and nobody has to help.

A socket is borrowed from the process that has it and shut down: both ends find it closed when they use it next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

Address = tuple[str, int]
Ends = tuple[Address, Address]
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut(some: Iterable[int], others: Iterable[int]) -> int:
    """All TCP connections between the processes `some` and `others`; how many there were."""
    with contextlib.ExitStack() as stack:
        near, far = (list(_connections(pids, stack)) for pids in (some, others))
        reached = {ends for _, ends in far}
        return sum(_shut_down(connection) for connection, (here, there) in near if (there, here) in reached)


def _shut_down(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # it is broken already
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _connections(pids: Iterable[int], stack: contextlib.ExitStack) -> Iterator[tuple[socket.socket, Ends]]:
    """Those of processes. The sockets themselves are asked: a process may be in another network, with other tables."""
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile, or connected to nobody
                if os.readlink(file).startswith("socket:"):
                    connection = stack.enter_context(_borrowed(pid, int(file.name)))
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        yield connection, (connection.getsockname(), connection.getpeername())


def _borrowed(pid: int, fd: int) -> socket.socket:
    process = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid}")
        return socket.socket(fileno=copy)
    finally:
        os.close(process)
