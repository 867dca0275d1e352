"""The example of MindIO's callbacks, led by the hand: it trains up to the step that a file allows.

Pace(folder).to(5)           in the test
Pace(folder).hold_joining()  processes that take the place of others are not ready until `let_join`
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain import aio

if TYPE_CHECKING:
    from tests.taskd.jobs import TwoPods

FILE, JOINING = "pace", "joining-waits"
LIMIT = "PACED_COLLECTIVES_TIMEOUT"
"""How many seconds ranks wait for each other in a collective, if it is not as long as in the example."""
RANKS = range(4)


class Pace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.allow(0)

    def allow(self, step: int) -> None:
        file = self._folder / FILE
        written = file.with_suffix(".new")
        written.write_text(str(step))
        written.rename(file)

    def hold_joining(self) -> None:
        (self._folder / JOINING).touch()

    def joining(self, rank: int) -> bool:
        """Is the process there that is to take this rank?"""
        return (self._folder / f"{JOINING}.{rank}").exists()

    def let_join(self) -> None:
        (self._folder / JOINING).unlink()

    def step(self, rank: int) -> int:
        file = self._folder / f"steps.{rank}"
        return len(file.read_text().splitlines()) if file.exists() else 0

    async def to(self, step: int, limit: float = 300) -> None:
        """Let the training go on, and wait until all ranks have done this step."""
        self.allow(step)
        async with aio.timeout(limit):
            while any(self.step(rank) < step for rank in RANKS):
                await asyncio.sleep(0.02)


def paced(pods: TwoPods) -> Pace:
    pods.script = Path(__file__)
    return Pace(pods.work)


def main() -> None:
    # In the place of this folder, whose modules are nothing for a training.
    sys.path[0] = str(Path(__file__).parents[2] / "examples" / "resumable")
    import train  # type: ignore[import-not-found]

    inject, register = train.Job.inject, train.register

    def paced(job: train.Job) -> None:
        while job.step >= int((job.directory / FILE).read_text()):
            time.sleep(0.02)
        inject(job)

    def joining(job: train.Job) -> None:
        register(job)
        while job.reborn and (job.directory / JOINING).exists():
            (job.directory / f"{JOINING}.{job.rank}").touch()
            time.sleep(0.02)

    train.Job.inject, train.register = paced, joining
    if limit := os.environ.get(LIMIT):
        train.Collectives = functools.partial(train.Collectives, timeout=float(limit))
    train.main()


if __name__ == "__main__":
    main()
