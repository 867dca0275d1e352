"""Seeing a process die or stop, as early as the kernel shows it.

A pidfd becomes readable when the process can be reaped, and that is only after the kernel has torn its memory down:
80 ms for each gigabyte. The mark that it is exiting, and its exit code, stand in /proc/PID/stat from the first
moment, so that file is read every two milliseconds, for 6 us a process. The same reading shows a process that was
stopped (state T). One that a debugger has stopped (state t) is somebody's business and no fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from evertrain.launch import procfs
from evertrain.launch.processes import Process


class Watcher:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        poll: float,
        *,
        on_dying: Callable[[Process, int], None],
        on_stopped: Callable[[Process], None],
        on_ended: Callable[[Process, int], None],
    ) -> None:
        """`on_dying` has the exit code of a process that failed, at the first moment; `on_ended` follows for every
        process when it has been reaped."""
        self._loop = loop
        self._poll = poll
        self._on_dying = on_dying
        self._on_stopped = on_stopped
        self._on_ended = on_ended
        self._watched: dict[int, Process] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, process: Process) -> None:
        self._watched[process.pid] = process
        self._loop.add_reader(process.pidfd, self._reap, process)
        if self._timer is None:
            self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for process in self._watched.values():
            self._loop.remove_reader(process.pidfd)
        self._watched.clear()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._poll, self._tick) if self._watched else None
        for process in list(self._watched.values()):
            if not process.reported and not process.doomed:
                self._look(process)

    def _look(self, process: Process) -> None:
        seen = procfs.glance(process.stat_fd)
        if seen is None:
            return
        state, is_exiting = seen
        if is_exiting:
            stat = procfs.read_stat(process.stat_fd)
            # Code 0 is either the truth, then there is no hurry, or not set yet, then the next look has it.
            if stat is not None and stat.exit_code != 0:
                process.reported = True
                self._on_dying(process, stat.exit_code)
        elif state == b"T":
            process.reported = True
            self._on_stopped(process)

    def _reap(self, process: Process) -> None:
        self._loop.remove_reader(process.pidfd)
        del self._watched[process.pid]
        code = process.reap()
        if not process.reported and not process.doomed and code != 0:
            process.reported = True
            self._on_dying(process, code)
        self._on_ended(process, code)
