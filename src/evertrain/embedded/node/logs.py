"""Reading what containers have printed, from the start, the end, or as it comes. `runtime.logs` has written it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import datetime
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

READ = 65536
_IN_MODIFY, _IN_MOVED_FROM, _IN_CREATE = 0x2, 0x40, 0x100
_IN_NONBLOCK, _IN_CLOEXEC = 0o4000, 0o2000000


def files(folder: Path, attempt: int) -> list[Path]:
    """The log of one run of a container, oldest first."""
    current = folder / f"{attempt}.log"
    rotated = sorted(folder.glob(f"{attempt}.log.*"), key=lambda path: -int(path.suffix[1:]))
    return [*rotated, *([current] if current.exists() else [])]


class Filter:
    """From entries of the file to what the reader asked for."""

    def __init__(self, since: datetime.datetime | None, timestamps: bool, limit: int | None) -> None:
        # Times are compared as text: they have the same form and end in Z. Fractions may differ in length.
        self._since = since.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f").encode() if since else b""
        self._timestamps = timestamps
        self._left = limit
        self._open = False

    @property
    def full(self) -> bool:
        return self._left is not None and self._left <= 0

    def __call__(self, entry: bytes) -> bytes:
        time, _, rest = entry.partition(b" ")
        _, _, rest = rest.partition(b" ")
        tag, _, text = rest.partition(b" ")
        if self._since and time < self._since:
            return b""
        goes_on, self._open = self._open, tag == b"P"
        found = text if tag == b"P" else text + b"\n"
        if self._timestamps and not goes_on:
            found = time + b" " + found
        if self._left is not None:
            found = found[: max(0, self._left)]
            self._left -= len(found)
        return found


def entries(paths: list[Path]) -> Iterator[bytes]:
    """Whole lines of the files."""
    for path in paths:
        with path.open("rb") as file:
            yield from (line.rstrip(b"\n") for line in file if line.endswith(b"\n"))


def last(given: Iterable[bytes], count: int | None) -> Iterable[bytes]:
    """The entries of the last so many lines."""
    if count is None:
        return given
    kept: collections.deque[list[bytes]] = collections.deque(maxlen=max(count, 0))
    line: list[bytes] = []
    for entry in given:
        line.append(entry)
        if entry.split(b" ", 3)[2:3] != [b"P"]:
            kept.append(line)
            line = []
    if line:
        kept.append(line)
    return [entry for pieces in kept for entry in pieces]


async def follow(
    folder: Path, attempt: int, tail: int | None, chosen: Filter, ended: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """What is there, then what comes, until the container has ended and all is read. `ended` is looked at whenever
    the directory changes; whoever makes it true sees to that (see `wake`)."""
    with _Watch(folder) as watch, contextlib.ExitStack() as stack:
        over = ended()
        paths = files(folder, attempt)
        current = stack.enter_context(paths[-1].open("rb")) if paths else None
        if current is not None:
            data = current.read()
            whole = data.rfind(b"\n") + 1
            current.seek(whole)
            so_far = itertools.chain(entries(paths[:-1]), data[:whole].split(b"\n")[:-1])
            for piece in pieces(last(so_far, tail), chosen):
                yield piece
        rest = b""
        while not chosen.full:
            while current is not None and (data := current.read(READ)):
                *lines, rest = (rest + data).split(b"\n")
                for piece in pieces(lines, chosen):
                    yield piece
                await asyncio.sleep(0)
            path = folder / f"{attempt}.log"
            if path.exists() and (current is None or path.stat().st_ino != os.fstat(current.fileno()).st_ino):
                current, rest = stack.enter_context(path.open("rb")), b""
                continue
            if over:
                return
            await watch.changed()
            over = ended()


def pieces(given: Iterable[bytes], chosen: Filter) -> Iterator[bytes]:
    """In pieces of a size that is good for sending."""
    waiting, size = [], 0
    for entry in given:
        if chosen.full:
            break
        if found := chosen(entry):
            waiting.append(found)
            size += len(found)
        if size >= READ:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def wake(folder: Path) -> None:
    """Lets followers look again."""
    try:
        (folder / ".wake").touch()
    except OSError:
        return


class _Watch:
    """Changes in a directory, by inotify."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self._descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"inotify: {os.strerror(number)}")
        mask = _IN_MODIFY | _IN_MOVED_FROM | _IN_CREATE | 0x4  # the last: attributes, as by touch
        if libc.inotify_add_watch(self._descriptor, os.fsencode(folder), mask) < 0:
            number = ctypes.get_errno()
            os.close(self._descriptor)
            raise OSError(number, f"{folder}: {os.strerror(number)}")

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    async def changed(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._descriptor)
        os.read(self._descriptor, READ)
