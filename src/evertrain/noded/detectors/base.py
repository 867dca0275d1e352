"""What a detector is, and what several need: files that may be missing, and files that tell when they change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from evertrain import aio
from evertrain.noded.faults import AnyFault

T = TypeVar("T")

Tell = Callable[[Iterable[AnyFault]], None]
"""Called with all faults that a detector sees now."""


class Detector(Protocol):
    @property
    def name(self) -> str: ...

    async def run(self, tell: Tell) -> None:
        """Until it is cancelled, or until it finds that there is nothing to look at."""
        ...


@runtime_checkable
class Resumes(Protocol):
    """A detector that judges by what was before, and so has to know what was found before it started."""

    def resume(self, faults: Iterable[AnyFault]) -> None: ...


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def read(path: Path) -> str:
    """Empty if it can't be read: hardware comes and goes."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    text = read(path)
    return int(text) if text.isascii() and text.isdecimal() else None


def aside(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """What a call makes that may hang for good, as one to a disk or a driver may. Nobody can end such a thread; nobody
    waits for it, not even the end of the process."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def finish(method: Callable[[Any], None], value: object) -> None:
        if not answer.done():
            method(value)

    def run() -> None:
        try:
            end: tuple[Callable[[Any], None], object] = answer.set_result, work()
        except BaseException as error:
            end = answer.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, *end)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


class Changes:
    """Files of /proc and /sys that tell by POLLPRI that they have changed.

    asyncio knows only readable and writable, and such files are always readable: so they are in a poll set of their
    own, which is readable when one of them has changed.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._files: list[int] = []
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def add(self, descriptor: int) -> None:
        """Takes the descriptor over. PermissionError if the file can't tell."""
        self._files.append(descriptor)
        self._epoll.register(descriptor, select.EPOLLPRI | select.EPOLLERR)

    def _ready(self) -> None:
        self._epoll.poll(0)
        for descriptor in self._files:  # sysfs tells again only after it has been read
            with contextlib.suppress(OSError):
                os.pread(descriptor, 4096, 0)
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """Until one has changed, but not longer than that."""
        try:
            async with aio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        for descriptor in self._files:
            os.close(descriptor)


@contextlib.contextmanager
def changes(*paths: Path) -> Iterator[Changes]:
    """Of these files, as far as they can tell."""
    found = Changes()
    try:
        for path in paths:
            with contextlib.suppress(OSError):
                found.add(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        yield found
    finally:
        found.close()
