"""Reading what containers have printed, from the start, the end, or as it comes. `runtime.logs` has written it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import datetime
import itertools
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

READ = 65536
_IN_MASK = 0x2 | 0x4 | 0x40 | 0x80 | 0x100  # modified, touched, moved away, moved here, created
_IN_Q_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
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
    watcher: Watcher, folder: Path, attempt: int, tail: int | None, chosen: Filter, ended: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """What is there, then what comes, until the container has ended and all is read. `ended` is looked at whenever
    the directory changes; whoever makes it true sees to that (see `wake`)."""
    with watcher.watch(folder) as changed, contextlib.ExitStack() as stack:
        over = ended()
        paths = files(folder, attempt)
        current: BinaryIO | None = stack.enter_context(paths[-1].open("rb")) if paths else None
        if current is not None:
            data = current.read()
            whole = data.rfind(b"\n") + 1
            current.seek(whole)
            so_far = itertools.chain(entries(paths[:-1]), data[:whole].split(b"\n")[:-1])
            for piece in pieces(last(so_far, tail), chosen):
                yield piece
        rest = b""
        while not chosen.full:
            newer = _newer(folder, attempt, current)
            while current is not None and (data := current.read(READ)):
                *lines, rest = (rest + data).split(b"\n")
                for piece in pieces(lines, chosen):
                    yield piece
                await asyncio.sleep(0)
            if newer is not None:
                current, rest = stack.enter_context(newer), b""
                continue
            if over:
                return
            await changed.wait()
            changed.clear()
            over = ended()


def _newer(folder: Path, attempt: int, current: BinaryIO | None) -> BinaryIO | None:
    """The file after the current one, if the log was rotated. Looked for before the current one is read to its end:
    what was written to that before the change is in it then."""
    here = None if current is None else os.fstat(current.fileno()).st_ino
    oldest: Path | None = None
    found = False
    for path in files(folder, attempt):
        try:
            number = path.stat().st_ino
        except OSError:
            continue
        if found:
            return path.open("rb")
        found = number == here
        oldest = oldest or path
    # The current one is the newest, or it has been dropped.
    return None if found or oldest is None else oldest.open("rb")


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


class Watcher:
    """Changes in directories, by one inotify instance for all: a user may have few of those."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = -1
        self._watched: dict[int, tuple[Path, set[asyncio.Event]]] = {}

    @contextlib.contextmanager
    def watch(self, folder: Path) -> Iterator[asyncio.Event]:
        """An event that is set at every change in the directory."""
        if self._descriptor < 0:
            self._descriptor = self._check(self._libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC), "inotify")
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        number = self._check(self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_MASK), str(folder))
        event = asyncio.Event()
        _, events = self._watched.setdefault(number, (folder, set()))
        events.add(event)
        try:
            yield event
        finally:
            events.discard(event)
            if not events and self._watched.get(number, (None, None))[1] is events:
                del self._watched[number]
                self._libc.inotify_rm_watch(self._descriptor, number)
            if not self._watched:
                self._close()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, READ)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            number, mask, _, length = struct.unpack_from("iIII", data, offset)
            offset += struct.calcsize("iIII") + length
            # When the kernel could not keep up, anything may have changed.
            changed = list(self._watched) if mask & _IN_Q_OVERFLOW else [number]
            for each in changed:
                for event in self._watched.get(each, (None, set()))[1]:
                    event.set()
            if mask & _IN_IGNORED:
                self._watched.pop(number, None)  # the directory is gone

    def _close(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def _check(result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return result
