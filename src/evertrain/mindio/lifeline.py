"""A lock that tells of its holder's death the moment it happens.

When a process dies, the kernel first tears its memory down, some 80 ms for each gigabyte, and only then closes its
sockets and tells its parent. But before all that it goes through the robust locks that the dying thread holds and wakes
whoever waits for them. So every rank's main thread takes one such lock, which lies on the board, and never gives it
back; a thread of the agent waits for it. It costs nothing while the rank lives, and no polling is as fast.

The kernel also releases the lock when the holder replaces itself by another program (exec), so a release is a reason to
look at the process, not yet its death certificate.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from evertrain.mindio import board

_SHARED, _ROBUST = 1, 1
_OWNER_DIED = 130  # EOWNERDEAD


def hold() -> bool:
    """Take the lock on this process's board, if it has one. Call in the main thread; it holds until it dies."""
    fd = os.environ.get(board.BOARD_FD)
    if fd is None:
        return False
    try:
        libc = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(64)
        lock = _Lock(int(fd))
        if (
            libc.pthread_mutexattr_init(attributes)
            or libc.pthread_mutexattr_setpshared(attributes, _SHARED)
            or libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
            or libc.pthread_mutex_init(lock.address, attributes)
            or libc.pthread_mutex_lock(lock.address)
        ):
            return False
    except (OSError, AttributeError):
        # A C library without robust locks: the agent reads /proc more often instead.
        return False
    lock.keep()
    return True


def wait(fd: int) -> bool:
    """Block until the holder of the lock on this board is gone. False if that can't be known. Call in a thread."""
    lock = _Lock(fd)
    try:
        return ctypes.CDLL(None).pthread_mutex_lock(lock.address) == _OWNER_DIED
    finally:
        lock.close()


class _Lock:
    """The lock's place on a board, in a mapping of its own."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, board.SIZE)
        self._anchor = ctypes.c_char.from_buffer(self._map, board.LOCK_OFFSET)
        self.address = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def keep(self) -> None:
        """The kernel finds the lock by its address when the thread dies, after the interpreter has cleaned up
        everything that it knows of: the mapping must not be among it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
        self._map[board.HELD_OFFSET] = 1

    def close(self) -> None:
        del self._anchor
        self._map.close()
