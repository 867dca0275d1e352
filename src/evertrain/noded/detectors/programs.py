"""Detectors of others: every executable file in a directory is run and says what it sees (see `lines`).

One that stays is listened to; one that ends with 0 is a check, run again after a while; one that fails is started
again, each time later, and after a few times a fault of its own says so. A file that others than its owner may change
is not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
from collections.abc import Mapping
from pathlib import Path

from evertrain import aio
from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, now_ms
from evertrain.noded.detectors.lines import LONGEST, Lines
from evertrain.noded.faults import AnyFault, Malformed, NodeFault

logger = logging.getLogger(__name__)

SCAN_SECONDS = 5.0
AGAIN_SECONDS = 30.0
FIRST_DELAY, MAX_DELAY = 1.0, 60.0
FAILURES = 3
"""In a row, before that is a fault."""
END_PATIENCE = 2.0
SETTLE_SECONDS = 5.0
"""What the programs see is known when each of them has said something, has ended, or has had this time."""
COMPLAINTS = 5
"""Lines of a run that are complained about one by one."""


class Programs:
    name = "programs"

    def __init__(
        self,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        scan: float = SCAN_SECONDS,
        again: float = AGAIN_SECONDS,
        first_delay: float = FIRST_DELAY,
    ) -> None:
        self._folder = folder
        self._environment = dict(environment or {})
        self._scan, self._again, self._first_delay = scan, again, first_delay
        self._running: dict[str, asyncio.Task[None]] = {}
        self._faults: dict[str, list[AnyFault]] = {}
        self._refused: dict[str, str] = {}
        self._awaited: set[str] = set()
        """Those that were there at the start and have not said anything yet."""

    async def run(self, tell: Tell) -> None:
        self._awaited = set(self._find())
        settled = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._settle, tell)
        self._say(tell)
        try:
            while True:
                for name in self._find():
                    if name not in self._running:
                        self._running[name] = asyncio.create_task(self._keep(name, tell))
                await asyncio.sleep(self._scan)
                for name in set(self._running) - set(self._find()):
                    await _end([self._running.pop(name)])
                    self._awaited.discard(name)
                    if self._faults.pop(name, None):
                        self._say(tell)
        finally:
            settled.cancel()
            await _end(list(self._running.values()))

    def _find(self) -> list[str]:
        """Names of programs that may be run."""
        found = []
        try:
            entries = sorted(os.scandir(self._folder), key=lambda entry: entry.name)
        except OSError:
            return []
        for entry in entries:
            try:
                about = entry.stat()
            except OSError:
                continue
            if entry.name.startswith(".") or not stat.S_ISREG(about.st_mode) or not about.st_mode & 0o111:
                continue
            reason = ""
            if about.st_uid not in (0, os.geteuid()):
                reason = "belongs to somebody else"
            elif about.st_mode & 0o022:
                reason = "can be changed by others than its owner"
            if reason and self._refused.get(entry.name) != reason:
                logger.warning("%s is not run: it %s", entry.path, reason)
            self._refused[entry.name] = reason
            if not reason:
                found.append(entry.name)
        return found

    async def _keep(self, name: str, tell: Tell) -> None:
        """One program through its runs."""
        lines = Lines()
        failures = 0
        while True:
            try:
                code = await self._once(name, lines, failures, tell)
            except OSError as error:
                logger.warning("%s can't be run: %s", name, error)
                code = 127
            failures = 0 if code == 0 else failures + 1
            lines.ended(code == 0)
            self._note(name, lines, failures, tell)
            delay = self._again if code == 0 else min(MAX_DELAY, self._first_delay * 2 ** min(16, failures - 1))
            if code:
                logger.warning("%s ended with code %d; it is started again in %g s", name, code, delay)
            await asyncio.sleep(delay)

    async def _once(self, name: str, lines: Lines, failures: int, tell: Tell) -> int:
        process = await asyncio.create_subprocess_exec(
            str(self._folder / name),
            stdin=asyncio.subprocess.PIPE,  # stays open for as long as we live: its end tells the program to end
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self._environment},
            start_new_session=True,
            limit=2 * LONGEST,
        )
        assert process.stdout and process.stderr
        complaining = asyncio.create_task(self._complain(name, process.stderr))
        complaints = 0
        try:
            while (line := await _line(process.stdout)) is not None:
                if not line.strip():
                    continue
                try:
                    lines.take(line, now_ms())
                except Malformed as error:
                    complaints += 1
                    if complaints <= COMPLAINTS:
                        logger.warning("%s: %s: %r", name, error, line[:100])
                else:
                    failures = 0
                    self._note(name, lines, failures, tell)
            return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            if process.stdin:
                process.stdin.close()
            if process.returncode is None:
                await _ended(process)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started and left behind
            complaining.cancel()
            await asyncio.gather(complaining, return_exceptions=True)

    async def _complain(self, name: str, stream: asyncio.StreamReader) -> None:
        while (line := await _line(stream)) is not None:
            logger.info("%s: %s", name, line[:500].decode(errors="replace"))

    def _note(self, name: str, lines: Lines, failures: int, tell: Tell) -> None:
        found = lines.faults(now_ms())
        if failures >= FAILURES:
            number = sorted(self._running).index(name) if name in self._running else 0
            note = f"detector {name} fails again and again"
            found.append(NodeFault(code=codes.PROGRAM_FAILS, device="Node", id=number, since_ms=now_ms(), note=note))
        first = name in self._awaited
        self._awaited.discard(name)
        if first or found != self._faults.get(name, []):
            self._faults[name] = found
            self._say(tell)

    def _settle(self, tell: Tell) -> None:
        if self._awaited:
            self._awaited.clear()
            self._say(tell)

    def _say(self, tell: Tell) -> None:
        if not self._awaited:
            tell([fault for faults in self._faults.values() for fault in faults])


async def _line(stream: asyncio.StreamReader) -> bytes | None:
    """The next one without its end; of one that is far too long the beginning. None at the end."""
    try:
        line = await stream.readuntil(b"\n")
        return line[:-1]
    except asyncio.IncompleteReadError as error:
        return error.partial or None
    except asyncio.LimitOverrunError as error:
        start = await stream.readexactly(error.consumed)
        while True:
            try:
                await stream.readuntil(b"\n")
                return start
            except asyncio.IncompleteReadError:
                return start
            except asyncio.LimitOverrunError as more:
                await stream.readexactly(more.consumed)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """The end of one that was asked to end."""
    try:
        async with aio.timeout(END_PATIENCE):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
