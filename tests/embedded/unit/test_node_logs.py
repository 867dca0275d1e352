"""Log files of containers: rotated, read while they are written, and on a full disk."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.embedded.node import logs
from evertrain.embedded.node.runtime.logs import LogWriter


def lines(folder: Path, attempt: int = 0) -> list[str]:
    chosen = logs.Filter(None, False, None)
    return b"".join(logs.pieces(logs.entries(logs.opened(folder, attempt)), chosen)).decode().splitlines()


class Disk:
    """Takes so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 30
        write = os.write

        def limited(descriptor: int, data: bytes) -> int:
            if self.left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(descriptor, data[: self.left])
            self.left -= written
            return written

        monkeypatch.setattr(os, "write", limited)


def test_a_full_disk_costs_lines_and_the_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    writer = LogWriter(str(tmp_path), "0.log")
    writer.feed("stdout", b"one\n")
    disk.left = 50
    writer.feed("stdout", b"two, of which the disk takes a part\n")
    writer.feed("stdout", b"three, of which it takes nothing\n")
    disk.left = 1 << 30
    writer.feed("stdout", b"four\n")
    writer.close()
    found = lines(tmp_path)
    assert found[0] == "one"
    assert "two, of which the disk takes a part".startswith(found[1])
    assert found[2].startswith("evertrain: ") and found[2].endswith(" bytes of the log could not be written")
    assert found[3:] == ["four"]


def test_a_rotation_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(str(tmp_path), "0.log", max_bytes=100, max_files=3)
    opened = os.open
    full = [True]

    def limited(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if full[0] and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", limited)
    for number in range(5):
        writer.feed("stdout", b"line %d\n" % number)
    full[0] = False
    for number in range(5, 8):
        writer.feed("stdout", b"line %d\n" % number)
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.log", "0.log.1", "0.log.2"]
    found = lines(tmp_path)
    assert found == [f"line {number}" for number in range(8)][-len(found) :]
    assert len(found) >= 6


def test_a_log_that_is_rotated_while_it_is_read_has_each_line_once(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), "0.log", max_bytes=300, max_files=6)
    stop = threading.Event()

    def write() -> None:
        for number in itertools.count():
            writer.feed("stdout", b"%d\n" % number)
            if stop.is_set():
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(500):
            numbers = [int(line) for line in lines(tmp_path)]
            assert not numbers or numbers == list(range(numbers[0], numbers[-1] + 1))
    finally:
        stop.set()
        thread.join()
        writer.close()


def test_a_follower_sees_every_line_and_keeps_no_old_file(tmp_path: Path) -> None:
    held = []

    def open_files() -> int:
        links = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
        return sum(link.startswith(f"{tmp_path}/") for link in links)

    async def main() -> list[int]:
        writer = LogWriter(str(tmp_path), "0.log", max_bytes=300, max_files=3)
        before = open_files()
        over = False
        chosen = logs.Filter(None, False, None)
        following = logs.follow(logs.Watcher(), tmp_path, 0, None, chosen, lambda: over)
        found: list[int] = []
        number = 0
        writer.feed("stdout", b"0\n")
        async for piece in following:
            found += [int(line) for line in piece.split()]
            held.append(open_files() - before)
            if number < 100:
                number += 1
                writer.feed("stdout", b"%d\n" % number)
            else:
                over = True
                logs.wake(tmp_path)
        writer.close()
        return found

    assert aio.run(asyncio.wait_for(main(), 20)) == list(range(101))
    assert max(held) <= 2
