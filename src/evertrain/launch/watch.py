"""Seeing a process die or stop, as early as the kernel shows it.

A pidfd becomes readable when the process can be reaped, and that is only after the kernel has torn its memory down:
80 ms for each gigabyte. Two things are earlier. A lock that the process holds is released at once (`lifeline`), and the
mark that it is exiting, with its exit code, stands in /proc/PID/stat from the first moment. So the release of the lock
wakes the watcher and the file tells the cause. A stop is announced to the parent by SIGCHLD, and the same file shows it
as state T; a process that a debugger has stopped (state t) is somebody's business and no fault.

A process that holds no such lock (another C library, a script that is about to begin) is looked at periodically; often
only while it trains, because reading the file of four processes every 2 ms takes 5 % of a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable

from evertrain.launch import procfs
from evertrain.launch.processes import Process
from evertrain.mindio import board, lifeline

_IDLE_POLL = 0.02
"""Seconds between two looks at processes that have nothing to lose yet."""
_SECOND_LOOK = 0.002
_LOOKS = 5


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
        self._tethered: set[int] = set()
        """Processes whose lock a thread waits for."""
        self._timer: asyncio.TimerHandle | None = None
        loop.add_signal_handler(signal.SIGCHLD, self._look_at_all)

    def add(self, process: Process) -> None:
        self._watched[process.pid] = process
        self._loop.add_reader(process.pidfd, self._reap, process)
        self._begin()

    def _begin(self) -> None:
        if self._timer is None:
            self._tick()

    def close(self) -> None:
        self._loop.remove_signal_handler(signal.SIGCHLD)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for process in self._watched.values():
            self._loop.remove_reader(process.pidfd)
        self._watched.clear()

    def _tick(self) -> None:
        """Look at those that need it. Once all hold their locks there is nothing to do until somebody joins."""
        delays = []
        for process in list(self._watched.values()):
            if process.reported or process.doomed or process.pid in self._tethered:
                continue
            if process.board.is_held:
                self._tether(process)
                continue
            self._look(process)
            delays.append(_IDLE_POLL if process.board.activity == board.BOOT else self._poll)
        self._timer = self._loop.call_later(min(delays), self._tick) if delays else None

    def _tether(self, process: Process) -> None:
        """Have a thread wait for the lock of this process. It ends with the process."""
        self._tethered.add(process.pid)
        # A descriptor of its own: the board's may be closed before the thread has been scheduled.
        fd = os.dup(process.board.fd)

        def wait() -> None:
            lifeline_works = lifeline.wait(fd)
            os.close(fd)
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody wants to know any more
                self._loop.call_soon_threadsafe(self._on_release, process, _LOOKS if lifeline_works else 0)

        threading.Thread(target=wait, name=f"evertrain-lifeline-{process.pid}", daemon=True).start()

    def _on_release(self, process: Process, looks: int) -> None:
        if process.pid not in self._watched or process.reported or process.doomed:
            return
        self._look(process)
        if process.reported:
            return
        if looks:
            self._loop.call_later(_SECOND_LOOK, self._on_release, process, looks - 1)
        else:
            # It has become another program: alive, and without the lock.
            self._tethered.discard(process.pid)
            process.board.drop()
            self._begin()

    def _look_at_all(self) -> None:
        for process in list(self._watched.values()):
            self.look(process)

    def look(self, process: Process) -> None:
        """See now whether this process is dying or stopped, unless that is known."""
        if not process.reported and not process.doomed and process.code is None:
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
        self._tethered.discard(process.pid)
        code = process.reap()
        if not process.reported and not process.doomed and code != 0:
            process.reported = True
            self._on_dying(process, code)
        self._on_ended(process, code)
