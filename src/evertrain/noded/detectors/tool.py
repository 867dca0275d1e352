"""A program that is asked what it knows: those of the makers of chips ask their driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from evertrain import aio

logger = logging.getLogger(__name__)

PATIENCE = 20.0
END_PATIENCE = 2.0


class Tool:
    """One that hangs in its driver can't even be killed. Then no other is started beside it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._left: asyncio.subprocess.Process | None = None

    async def ask(self, *arguments: str) -> str | None:
        """What it prints; None if it fails or takes too long."""
        if self._left is not None and self._left.returncode is None:
            return None
        self._left = process = await asyncio.create_subprocess_exec(
            self._path,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with aio.timeout(PATIENCE):
                output, _ = await process.communicate()
        except TimeoutError:
            logger.warning("%s did not answer in %g s", self._path, PATIENCE)
            return None
        finally:
            await _end(process)
        return output.decode(errors="replace") if process.returncode == 0 else None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(END_PATIENCE):
                await process.wait()
