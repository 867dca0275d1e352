"""What a demo prints: lines that stay, and on a terminal one below them that changes until the next line comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator

_CLEAR = "\r\033[K"
_EVERY = 0.2


class Screen:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._live = sys.stdout.isatty()
        self._status = ""

    def heading(self, text: str) -> None:
        self.line()
        self.line(bold(text), indent="")

    def line(self, text: str = "", *, indent: str = "   ") -> None:
        sys.stdout.write((_CLEAR if self._live else "") + f"{indent}{text}".rstrip() + "\n")
        sys.stdout.flush()
        self._draw()

    def event(self, text: str) -> None:
        """Something that happens now."""
        self.line(f"{self.seconds():6.1f} s  {text}")

    def status(self, text: str) -> None:
        """How it is at the moment; nobody who reads the output later needs it."""
        self._status = text
        self._draw()

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """In here the seconds beside the status run."""

        async def run() -> None:
            while True:
                await asyncio.sleep(_EVERY)
                self._draw()

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            self.status("")

    def _draw(self) -> None:
        if self._live:
            text = f"   {self.seconds():6.1f} s  {self._status}" if self._status else ""
            sys.stdout.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
            sys.stdout.flush()

    def seconds(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._began


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
