"""Ends of a connection without the connection, so that a million frames take seconds."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from typing import Any


class Sink(asyncio.Transport):
    """A transport whose peer reads everything and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._closing = False

    def setsockopt(self, *_: object) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self, "peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        assert isinstance(data, bytes)

    def write_eof(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close


class Script:
    """A socket from which a given series of pieces can be read, and then nothing more."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def recv(self, size: int) -> bytes:
        return next(self._pieces, b"")

    def sendall(self, data: bytes) -> None:
        pass

    def settimeout(self, seconds: float | None) -> None:
        pass

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        pass


class Growth:
    """Memory of this process beyond what it had when all that is loaded once was loaded."""

    def __init__(self, total: int) -> None:
        self._begin = max(total // 5, 1000)
        self._base: int | None = None

    def look(self, done: int) -> None:
        if self._base is None and done >= self._begin:
            self._base = self._now()

    def megabytes(self) -> float:
        assert self._base is not None, "the run was too short to say anything"
        return (self._now() - self._base) / 2**20

    @staticmethod
    def _now() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
