"""Connections between processes are cut from outside, as a broken cable does it, and nobody has to help.

A socket is borrowed from the process that has it and shut down: both ends find it closed when they use it next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable
from pathlib import Path

Address = tuple[str, int]
Ends = tuple[Address, Address]
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut(some: Iterable[int], others: Iterable[int]) -> int:
    """All TCP connections between the processes `some` and `others`; how many there were."""
    far = {ends for pid in others for _, ends in _connections(pid)}
    between = [(pid, fd) for pid in some for fd, (here, there) in _connections(pid) if (there, here) in far]
    for pid, fd in between:
        with _borrowed(pid, fd) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    return len(between)


def _connections(pid: int) -> list[tuple[int, Ends]]:
    """By descriptor. The sockets themselves are asked: the process may be in another network, with other tables."""
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or connected to nobody
            if os.readlink(file).startswith("socket:"):
                with _borrowed(pid, int(file.name)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        found.append((int(file.name), (connection.getsockname(), connection.getpeername())))
    return found


def _borrowed(pid: int, fd: int) -> socket.socket:
    process = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid}")
        return socket.socket(fileno=copy)
    finally:
        os.close(process)
