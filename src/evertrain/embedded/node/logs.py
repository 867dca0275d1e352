"""Reading what containers have printed, from the start, the end, or as it comes. `runtime.logs` has written it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import itertools
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

READ = 65536
_IN_MASK = 0x2 | 0x4 | 0x40 | 0x80 | 0x100  # modified, touched, moved away, moved here, created
_IN_Q_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
_IN_NONBLOCK, _IN_CLOEXEC = 0o4000, 0o2000000


def opened(folder: Path, attempt: int) -> list[BinaryIO]:
    """The log of one run of a container, oldest first, ready to be read.

    A file gets the next number when a new one is begun. The newest is opened before those with numbers are, and they
    are gone through one by one rather than listed, so nothing can be missing between them.
    """
    newest = _open(folder / f"{attempt}.log")
    highest = max((int(path.suffix[1:]) for path in folder.glob(f"{attempt}.log.*")), default=0)
    older = _opened(folder, attempt, range(highest, 0, -1))
    found = older[::-1] + _opened(folder, attempt, itertools.count(highest + 1))
    if newest is not None:
        if _identity(newest) in map(_identity, found) or not os.fstat(newest.fileno()).st_nlink:
            newest.close()  # it has got its number meanwhile, or is even dropped
        else:
            found.append(newest)
    return found


def _opened(folder: Path, attempt: int, numbers: Iterable[int]) -> list[BinaryIO]:
    """Up to the first that isn't there."""
    found = []
    for number in numbers:
        file = _open(folder / f"{attempt}.log.{number}")
        if file is None:
            break
        found.append(file)
    return found


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _identity(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino


class Filter:
    """From entries of the file to what the reader asked for."""

    def __init__(self, since: datetime | None, timestamps: bool, limit: int | None) -> None:
        # Times are compared as text: they have the same form and end in Z. Fractions may differ in length.
        self._since = since.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f").encode() if since else b""
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


def entries(given: Iterable[BinaryIO]) -> Iterator[bytes]:
    """Whole lines of the files, which are closed."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(file) for file in given]
        for file in files:
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
        current: BinaryIO | None = None
        if there := opened(folder, attempt):
            *older, current = there
            stack.push(current)
            data = current.read()
            whole = data.rfind(b"\n") + 1
            current.seek(whole)
            so_far = itertools.chain(entries(older), data[:whole].split(b"\n")[:-1])
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
                stack.close()  # a file that was dropped occupies the disk as long as somebody has it open
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
    here = None if current is None else _identity(current)
    with contextlib.suppress(OSError):
        if (folder / f"{attempt}.log").stat().st_ino == here:
            return None
    found = opened(folder, attempt)
    places = [_identity(file) for file in found]
    # One that is no longer there has been dropped, and the oldest that is left comes after it.
    wanted = places.index(here) + 1 if here in places else 0
    for file in (*found[:wanted], *found[wanted + 1 :]):
        file.close()
    return found[wanted] if wanted < len(found) else None


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
