"""Connections between processes are cut from outside, as a broken cable does it, and nobody has to help.

A socket is borrowed from the process that has it and shut down: both ends find it closed when they use it next.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterable

import psutil

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


def _connections(pid: int) -> list[tuple[int, tuple[tuple[str, int], tuple[str, int]]]]:
    found = psutil.Process(pid).net_connections("tcp")
    return [
        (each.fd, (tuple(each.laddr), tuple(each.raddr))) for each in found if each.status == psutil.CONN_ESTABLISHED
    ]


def _borrowed(pid: int, fd: int) -> socket.socket:
    process = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid}")
        return socket.socket(fileno=copy)
    finally:
        os.close(process)
