"""What a container prints, line by line with time and stream, in files of limited size.

The format is that of Kubernetes' container runtimes: `2026-01-02T03:04:05.123456789Z stdout F the line`, with P
instead of F for a piece of a line that goes on. The directory is held open, so that files can be rotated also after
the process has moved to another root.
"""

from __future__ import annotations

import contextlib
import os
import time

PIECE = 16384
MAX_BYTES = 10 * 1024 * 1024
MAX_FILES = 5


class LogWriter:
    def __init__(self, folder: str, name: str, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._name = name
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file = self._open(name)
        self._size = os.fstat(self._file).st_size
        self._rotated = 0
        self._partial: dict[str, bytes] = {}
        self._torn = False
        """The file ends within a line."""
        self._lost = 0

    def feed(self, stream: str, data: bytes) -> None:
        data = self._partial.pop(stream, b"") + data
        *lines, rest = data.split(b"\n")
        written = []
        for line in lines:
            while len(line) > PIECE:
                written.append(self._entry(stream, b"P", line[:PIECE]))
                line = line[PIECE:]
            written.append(self._entry(stream, b"F", line))
        while len(rest) >= PIECE:
            written.append(self._entry(stream, b"P", rest[:PIECE]))
            rest = rest[PIECE:]
        if rest:
            self._partial[stream] = rest
        self._write(b"".join(written))

    def close(self) -> None:
        for stream, rest in self._partial.items():
            self._write(self._entry(stream, b"F", rest))
        self._partial.clear()
        os.close(self._file)
        os.close(self._folder)

    def _entry(self, stream: str, tag: bytes, line: bytes) -> bytes:
        now = time.time_ns()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000_000))
        return f"{seconds}.{now % 1_000_000_000:09d}Z {stream} ".encode() + tag + b" " + line + b"\n"

    def _open(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def _write(self, data: bytes) -> None:
        """A full disk must not stop the container: what can't be written is lost, and later the log says so."""
        if not data:
            return
        if self._size and self._size + len(data) > self._max_bytes:
            with contextlib.suppress(OSError):
                self._rotate()
        before = b"\n" if self._torn else b""
        if lost := self._lost:
            note = f"evertrain: {lost} bytes of the log could not be written"
            before += self._entry("stderr", b"F", note.encode())
        view = memoryview(before + data)
        try:
            while view:
                written = os.write(self._file, view)
                self._size += written
                self._torn = view[written - 1] != 10
                view = view[written:]
            self._lost -= lost
        except OSError:
            self._lost += min(len(view), len(data))

    def _rotate(self) -> None:
        """The new file first: if it can't be, everything stays as it is. Numbers grow and are never used again, so that
        readers know what follows what."""
        new = self._open(f".{self._name}")
        self._rotated += 1
        self._rename(self._name, f"{self._name}.{self._rotated}")
        self._rename(f".{self._name}", self._name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._name}.{self._rotated - self._max_files + 1}", dir_fd=self._folder)
        os.close(self._file)
        self._file, self._size, self._torn = new, 0, False

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._folder, dst_dir_fd=self._folder)
