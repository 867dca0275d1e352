"""msrun's processes, by the four callbacks that it hands over; and a wait that ends when one of them does."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

from evertrain.taskd.agent import pids as ids
from evertrain.taskd.native import crash

log = logging.getLogger(__name__)

KILL, START_ALL, START_LIST, MONITOR = "KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST", "MONITOR"
CALLBACKS = (KILL, START_ALL, START_LIST, MONITOR)
ALL = [-1]
NOT_STARTED, VANISHED = 200, 300
"""Of a process that has ended msrun says that it has vanished, whatever its exit code, unless that is 0."""
RESTART_TYPE = "RESTART_FAULT_PROCESS_TYPE"
"""Tells a process whether all are new, or only itself."""
POD, WORKER = "pod", "worker"
GONE = 30.0
"""Seconds that killed processes have to be gone."""
SCHEDULER = 10.0
"""Seconds that the scheduler has to end after the processes of its node."""


class StartFailed(RuntimeError):
    """msrun says that it could not start its processes."""


class Process:
    """What msrun says about one."""

    def __init__(self, local_rank: int, entry: dict[str, Any]) -> None:
        self.local_rank = local_rank
        self.pid: int | None = entry["pid"]
        self.status: int | None = entry["status"]
        self.rank: int = entry["global_rank"]

    @property
    def runs(self) -> bool:
        return self.status is None and self.pid is not None

    @property
    def failed(self) -> bool:
        return self.status not in (None, NOT_STARTED, 0)


def processes(answer: Any) -> list[Process] | None:
    """From the answer of MONITOR; None if it can't be understood. A rank that was not started has no process id."""
    if not isinstance(answer, dict):
        return None
    found = []
    for key, entry in answer.items():
        local_rank = _number(key)
        if local_rank is None or not (isinstance(entry, dict) and {"pid", "status", "global_rank"} <= entry.keys()):
            return None
        kinds_right = (
            isinstance(entry["pid"], int | None)
            and isinstance(entry["status"], int | None)
            and isinstance(entry["global_rank"], int)
        )
        if not kinds_right:
            return None
        found.append(Process(local_rank, entry))
    return found


def _number(key: Any) -> int | None:
    try:
        return int(key)
    except (TypeError, ValueError):
        return None


class Msrun:
    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._watched: dict[int, int] = {}
        """Process ids by their descriptors."""
        self._crashes = crash.Directory()
        self._since: dict[int | None, int] = {}
        """When a local rank was started, None for all others; nanoseconds."""
        self._understood = True
        self.processes: list[Process] = []
        """As of the last `look`."""

    def register(self, operator: str, function: Callable[..., Any]) -> None:
        self._functions[operator] = function

    def require_all(self) -> None:
        missing = [name for name in CALLBACKS if name not in self._functions]
        if missing:
            raise RuntimeError(f"mindspore hasn't fully registered all callbacks: {', '.join(missing)} missing")

    def close(self) -> None:
        self._watch(())
        self._selector.close()
        self._crashes.close()
        os.close(self._wakeup)

    # Waiting.

    def wake(self) -> None:
        """End the wait, from any thread; not after `close`."""
        os.eventfd_write(self._wakeup, 1)

    def wait(self, seconds: float | None) -> bool:
        """Until a process has ended or the time is over; True if somebody called `wake`."""
        ready = [key.fd for key, _ in self._selector.select(seconds)]
        for descriptor in self._watched.keys() & ready:  # it would be ready for ever, and msrun may not say what it was
            self._forget(descriptor)
        if self._wakeup not in ready:
            return False
        os.eventfd_read(self._wakeup)
        return True

    def look(self) -> bool:
        """Ask how the processes are. False if the answer can't be understood."""
        found, why = None, "msrun's answer about its processes can't be understood"
        try:
            found = processes(self._functions[MONITOR](ALL))
        except Exception as error:  # another's function; the next answer may be better
            why = f"msrun can't say how its processes are: {error!r}"
        if found is None:
            if self._understood:
                log.warning("%s", why)
            self._understood = False
            return False
        self._understood = True
        self.processes = found
        self._watch([each.pid for each in found if each.pid is not None and each.runs])
        return True

    @property
    def running(self) -> list[Process]:
        return [each for each in self.processes if each.runs]

    @property
    def succeeded(self) -> bool:
        return bool(self.processes) and all(each.status == 0 for each in self.processes)

    def cause(self, process: Process) -> crash.Cause:
        """Why it has failed; to be asked once."""
        since = self._since.get(process.local_rank, self._since.get(None, 0))
        status = None if process.status == VANISHED else process.status
        return self._crashes.cause(process.pid or 0, status, since)

    def _watch(self, pids: Collection[int]) -> None:
        for descriptor, pid in list(self._watched.items()):
            if pid not in pids:
                self._forget(descriptor)
        for pid in set(pids) - set(self._watched.values()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                descriptor = os.pidfd_open(pid)
                self._watched[descriptor] = pid
                self._selector.register(descriptor, selectors.EVENT_READ)

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._watched[descriptor]

    # Orders. All return when they are carried out.

    def start_all(self) -> None:
        os.environ[RESTART_TYPE] = POD
        self._since = {None: time.time_ns()}
        self._start(START_ALL)

    def start(self, local_ranks: list[int]) -> None:
        os.environ[RESTART_TYPE] = WORKER
        self._since |= dict.fromkeys(local_ranks, time.time_ns())
        self._start(START_LIST, local_ranks)

    def _start(self, operator: str, *arguments: Any) -> None:
        os.environ.update(self._crashes.environment())  # which the processes inherit
        try:
            answer = self._functions[operator](*arguments)
        except Exception as error:
            raise StartFailed(f"msrun could not start its processes: {error!r}") from error
        if answer not in (None, 0, True):
            raise StartFailed(f"msrun could not start its processes: it answers {answer!r}")

    def kill_all(self) -> None:
        self.look()
        self._kill(ALL, self._pids(self.running))

    def kill(self, chosen: Collection[Process]) -> None:
        pids = self._pids(chosen)
        if pids:
            self._kill(pids, pids)

    def _pids(self, chosen: Collection[Process]) -> list[int]:
        return [each.pid for each in chosen if each.pid is not None]

    def _kill(self, whom: list[int], pids: list[int]) -> None:
        """By msrun, which knows what belongs to a process; what is left then, by ourselves."""
        patience = GONE
        try:
            answer = self._functions[KILL](whom)
        except Exception as error:
            answer = error
        if answer not in (None, 0, True):
            log.warning("msrun could not kill %s: it answers %r", pids, answer)
            patience = 0.0
        if ids.wait_gone(pids, patience):
            return
        for descriptor, pid in self._watched.items():
            if pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not ids.wait_gone(pids, GONE):
            log.warning("processes that were killed are still there after %g s", GONE)

    def wait_for_scheduler(self) -> None:
        """What else msrun has started: processes of other nodes may still need it to end well."""
        if not ids.wait_gone(ids.children(), SCHEDULER):
            log.info("msrun's scheduler still runs after %g s; it is left", SCHEDULER)
