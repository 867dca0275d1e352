"""Too little memory, too many processes.

Memory: the kernel tells when, within ten seconds, all tasks together have waited for memory for a second and a half
(PSI); where it doesn't do that, its averages are read, or the available memory where there are none. Process ids are
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from evertrain.noded import codes
from evertrain.noded.detectors.base import Changes, Tell, now_ms, number, read
from evertrain.noded.faults import NodeFault

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
STALL_US, WINDOW_US = 1_500_000, 10_000_000
"""Others than root may ask for windows that are multiples of two seconds."""
CALM_SECONDS = 30.0
"""Pressure is over when nothing was heard of it for that long."""
STALLED_PERCENT = STALL_US * 100 / WINDOW_US
LEAST_AVAILABLE, ENOUGH_AVAILABLE = 0.02, 0.05
MOST_TASKS, FEW_TASKS = 0.90, 0.80
NODE = "Node"


def parse_stalled(text: str) -> float | None:
    """The average of the last ten seconds in which all had to wait, in percent."""
    match = re.search(r"^full avg10=([0-9.]+)", text, re.MULTILINE)
    return float(match[1]) if match else None


def parse_meminfo(text: str) -> Mapping[str, int]:
    return {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}


def short_of_memory(stalled: float | None, meminfo: Mapping[str, int], before: bool) -> bool:
    if stalled is not None:
        return stalled >= (STALLED_PERCENT / 2 if before else STALLED_PERCENT)
    total, available = meminfo.get("MemTotal", 0), meminfo.get("MemAvailable")
    return bool(total and available is not None) and (available or 0) / total < (
        ENOUGH_AVAILABLE if before else LEAST_AVAILABLE
    )


def parse_tasks(loadavg: str) -> int | None:
    """`0.00 0.01 0.05 1/322 9876`: all tasks, threads among them."""
    match = re.search(r" \d+/(\d+) ", loadavg)
    return int(match[1]) if match else None


def short_of_pids(tasks: int | None, most: int | None, before: bool) -> bool:
    return bool(tasks and most) and (tasks or 0) / (most or 1) >= (FEW_TASKS if before else MOST_TASKS)


class Pressure:
    name = "pressure"

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        every: float = POLL_SECONDS,
        stall_us: int = STALL_US,
        calm: float = CALM_SECONDS,
    ) -> None:
        self._proc = proc
        self._every = every
        self._stall = stall_us
        self._calm = calm
        self._memory = self._pids = False

    async def run(self, tell: Tell) -> None:
        changes = self._trigger()
        with contextlib.closing(changes) if changes else contextlib.nullcontext():
            last = 0.0
            loop = asyncio.get_running_loop()
            while True:
                if changes is None:
                    stalled = parse_stalled(read(self._proc / "pressure" / "memory"))
                    meminfo = parse_meminfo(read(self._proc / "meminfo"))
                    self._memory = short_of_memory(stalled, meminfo, self._memory)
                else:
                    self._memory = bool(last) and loop.time() - last < self._calm
                self._pids = short_of_pids(parse_tasks(read(self._proc / "loadavg")), self._most_tasks(), self._pids)
                tell(self._faults())
                if changes is None:
                    await asyncio.sleep(self._every)
                elif await changes.wait(self._every):
                    last = loop.time()

    def _trigger(self) -> Changes | None:
        """The kernel's word that memory has become short; None if it doesn't give it."""
        path = self._proc / "pressure" / "memory"
        found = Changes()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"full %d %d\0" % (self._stall, WINDOW_US))
            except OSError:
                os.close(descriptor)
                raise
            found.add(descriptor)
        except OSError as error:
            logger.info("memory pressure is looked at every %g s: %s", self._every, error)
            found.close()
            return None
        return found

    def _most_tasks(self) -> int | None:
        limits = (number(self._proc / "sys" / "kernel" / name) for name in ("pid_max", "threads-max"))
        return min((limit for limit in limits if limit), default=None)

    def _faults(self) -> list[NodeFault]:
        since = now_ms()
        found = []
        if self._memory:
            note = "tasks wait for memory"
            found.append(NodeFault(code=codes.MEMORY_PRESSURE, device=NODE, since_ms=since, note=note))
        if self._pids:
            note = "process ids are running out"
            found.append(NodeFault(code=codes.PID_PRESSURE, device=NODE, since_ms=since, note=note))
        return found
