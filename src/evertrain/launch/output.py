"""What the ranks print: whole lines with the rank in front, to the console, to files, or both.

Every rank writes into pipes; the launcher's loop reads them and hands complete lines to a writer thread. The thread is
needed because the console may be slow or stopped, and the loop must see faults all the while; a terminal's
descriptor is shared with other programs, so it can't be made non-blocking. When the writer falls behind, the pipes
are no longer read and the ranks wait in their own writes, exactly as they would with a pipe to a slow reader.

A spare's pipes exist before it has a rank; it gets its `Route` when it is promoted, and until then its output is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import socket
import string
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass

from evertrain.launch.config import STDERR, STDOUT, LaunchConfig

_CHUNK = 65536
_LONGEST_LINE = 65536
"""A line longer than this is passed on in pieces."""
_BEHIND = 1 << 20
"""A writer with so many bytes in its queue is behind."""
_LEFT = 2 * _BEHIND
"""More than a pipe holds, as long as nobody but the administrator may make it bigger."""
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""Progress bars end their lines with a bare carriage return; one at the very end of what has arrived may be half of a
CRLF, so it waits."""


class Writer:
    """A thread that writes to descriptors in order. Starts with the first write."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._broken: set[int] = set()
        self.on_caught_up: Callable[[], None] = lambda: None

    @property
    def is_behind(self) -> bool:
        return self._pending > _BEHIND

    def write(self, fd: int, data: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        with self._lock:
            self._pending += len(data)
        self._queue.put((fd, data))

    def close(self, timeout: float) -> None:
        """Write what is queued. Gives up after the timeout: nobody may be reading the console any more."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            fd, data = item
            if fd not in self._broken:
                try:
                    write_all(fd, data)
                except OSError:
                    # The reader of the console has gone, or the disk is full. Training goes on.
                    self._broken.add(fd)
            with self._lock:
                was_behind = self.is_behind
                self._pending -= len(data)
                caught_up = was_behind and not self.is_behind
            if caught_up:
                self.on_caught_up()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@dataclass(slots=True)
class Route:
    """Where one stream of one rank goes."""

    prefix: bytes
    console: int | None
    file: int | None
    filtered: int | None = None
    needles: tuple[bytes, ...] = ()


class Stream:
    """The launcher's end of one pipe."""

    def __init__(self, outputs: Outputs, fd: int, writer: Writer) -> None:
        self._outputs = outputs
        self._fd = fd
        self._writer = writer
        self._route: Route | None = None
        self._partial = b""
        self._reading = False
        self.last_line = ""
        self.ended = asyncio.Event()
        os.set_blocking(fd, False)
        self.resume()

    def assign(self, route: Route) -> None:
        """From now on, and for all that was kept so far, the output goes there."""
        self._route = route
        self._pass_on()
        self.resume()

    def resume(self) -> None:
        if self._reading or self.ended.is_set() or self._must_wait():
            return
        self._reading = True
        self._outputs.loop.add_reader(self._fd, self._read)

    def _must_wait(self) -> bool:
        if self._route is None:
            return len(self._partial) >= _BEHIND
        return self._writer.is_behind or self._outputs.files.is_behind

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._outputs.loop.remove_reader(self._fd)

    def _read(self) -> bool:
        """Take what is there; True if there may be more."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end()
            return False
        self._partial += data
        self._pass_on()
        if self._must_wait():
            self._pause()
        return True

    def _pass_on(self, rest_too: bool = False) -> None:
        route = self._route
        if route is None or not self._partial:
            return
        taken, lines = 0, []
        for match in _LINE_END.finditer(self._partial):
            lines.append(self._partial[taken : match.end()])
            taken = match.end()
        rest = self._partial[taken:]
        while len(rest) > _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE] + b"\n")
            taken += _LONGEST_LINE
            rest = rest[_LONGEST_LINE:]
        if rest_too and rest:
            lines.append(rest + b"\n")
            taken = len(self._partial)
        if route.file is not None and taken:
            self._outputs.files.write(route.file, self._partial[:taken])
        self._partial = self._partial[taken:]
        if not lines:
            return
        last = next((text for line in reversed(lines) if (text := line.strip())), b"")
        self.last_line = last.decode(errors="replace") or self.last_line
        if route.console is not None:
            self._writer.write(route.console, b"".join([route.prefix + line for line in lines]))
        if route.filtered is not None:
            kept = [route.prefix + line for line in lines if any(needle in line for needle in route.needles)]
            if kept:
                self._outputs.files.write(route.filtered, b"".join(kept))

    def _end(self) -> None:
        if self.ended.is_set():
            return
        self._pause()
        self._pass_on(rest_too=True)
        os.close(self._fd)
        self.ended.set()

    def drain(self) -> None:
        """Take what is in the pipe now instead of when the loop comes to it."""
        for _ in range(_LEFT // _CHUNK):
            if self.ended.is_set() or not self._reading or not self._read():
                break

    def last_words(self) -> str:
        """The last line with anything in it, for a message about a process that failed."""
        if self._route is not None:
            return self.last_line
        lines = [line for line in self._partial.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def finish(self) -> None:
        """The process has ended: take what is left in the pipe and close, even if somebody else holds its other end,
        and writes faster than we can read."""
        for _ in range(_LEFT // _CHUNK):
            if self.ended.is_set() or not self._read():
                break
        self._end()


class Outputs:
    """All streams of a job and the files they go to."""

    def __init__(
        self, config: LaunchConfig, loop: asyncio.AbstractEventLoop, console: tuple[int, int] = (1, 2)
    ) -> None:
        self.loop = loop
        self._config = config
        self._console = console
        self._streams: set[Stream] = set()
        self._open: dict[str, int] = {}
        self._attempt = 0
        self._run_dir: str | None = None
        self._writers = {STDOUT: Writer("evertrain-stdout"), STDERR: Writer("evertrain-stderr")}
        self.files = Writer("evertrain-files")
        for writer in (*self._writers.values(), self.files):
            writer.on_caught_up = self._wake
        self._template = config.line_prefix
        if self._template is None:
            self._template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")

    def _wake(self) -> None:
        """Called by a writer's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self.loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        for stream in self._streams:
            stream.resume()

    def say(self, text: str) -> None:
        """A line of the launcher itself, on stderr, in order with the ranks' lines."""
        self._writers[STDERR].write(self._console[1], f"evertrain: {text}\n".encode())

    def open(self, fd: int, which: int) -> Stream:
        stream = Stream(self, fd, self._writers[which])
        self._streams.add(stream)
        return stream

    def begin_attempt(self, number: int) -> None:
        """The whole job is restarted: new log files, as with torchrun."""
        self._attempt = number

    def route(self, rank: int, which: int) -> Route:
        config = self._config
        name = "stdout" if which == STDOUT else "stderr"
        local = rank - config.first_rank
        to_file = (config.redirects[local] | config.tee[local]) & which
        to_console = local in config.shown_ranks and (not to_file or config.tee[local] & which)
        needles = config.stdout_filters if which == STDOUT else config.stderr_filters
        names = {"rank": rank, "local_rank": local, "role_name": config.role, "hostname": socket.gethostname()}
        prefix = string.Template(self._template or "").safe_substitute(names)
        return Route(
            prefix=prefix.encode(),
            console=self._console[which - 1] if to_console else None,
            file=self._file(f"{local}/{name}.log") if to_file else None,
            filtered=self._file(f"filtered_{name}.log") if needles and to_console else None,
            needles=tuple(needle.encode() for needle in needles),
        )

    def error_file(self, rank: int) -> str | None:
        """Where torch's `@record` writes a worker's exception; only if the user asked for log files."""
        if self._config.log_dir in (None, os.devnull):
            return None
        return self._path(f"{rank - self._config.first_rank}/error.json")

    def _path(self, name: str) -> str:
        if self._run_dir is None:
            base = self._config.log_dir or tempfile.mkdtemp(prefix="evertrain_")
            os.makedirs(base, exist_ok=True)
            self._run_dir = tempfile.mkdtemp(prefix=f"{self._config.run_id}_", dir=base)
            self.say(f"log files are in {self._run_dir}")
        path = os.path.join(self._run_dir, f"attempt_{self._attempt}", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def _file(self, name: str) -> int:
        path = os.devnull if self._config.log_dir == os.devnull else self._path(name)
        if path not in self._open:
            # A replacement goes on in the file of the process that it replaces.
            self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._open[path]

    def forget(self, stream: Stream) -> None:
        stream.finish()
        self._streams.discard(stream)

    async def close(self, timeout: float = 5.0) -> None:
        for stream in list(self._streams):
            self.forget(stream)
        for writer in (*self._writers.values(), self.files):
            await asyncio.to_thread(writer.close, timeout)
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
