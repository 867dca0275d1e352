"""A job of a demo while it trains: what its pods print, who its processes are, what it has written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.cli import incidents, manifest
from evertrain.cli.connection import Connection
from evertrain.cli.demo import processes
from evertrain.cli.demo.evidence import Pod
from evertrain.cli.demo.proof import Outcome, Step
from evertrain.cli.demo.screen import Screen
from evertrain.cli.following import Follower
from evertrain.cli.running import CommandError
from evertrain.clusterd.timeline.incident import Incident, milliseconds
from evertrain.kube.port import Object

POLL = 0.05
"""Seconds, for what only files tell."""
RANKS = range(4)
_STEP = re.compile(r"step (\d+)/(\d+)  loss (\S+)  (\d+) ranks")
_READY = re.compile(r"rank (\d+) is ready to join")
_RAISES = re.compile(r"rank \d+ raises ")
_PROCESS = re.compile(r"rank (\d+) is process (\d+)")


class Training(Follower):
    """Begins to follow the job when it is made. `lines` of its steps stay on the screen."""

    command = "demo"

    def __init__(
        self,
        kube: Connection,
        job: Object,
        document: manifest.Document,
        output: Path,
        screen: Screen,
        timeout: float,
        lines: int,
    ) -> None:
        super().__init__(kube, job, document, alone=True)
        self.output = output
        self.step = 0
        self.size = 0
        """How many ranks have done that step."""
        self.ready: set[int] = set()
        """Ranks whose new process waits for the others to let it in."""
        self.results: dict[int, dict[str, Any]] = {}
        """The last line of each rank."""
        self.processes: dict[int, list[tuple[str, int]]] = {rank: [] for rank in RANKS}
        """All that a rank has had, by pod and the process id in it."""
        self._screen, self._timeout, self._lines = screen, timeout, lines
        self._shown = 0
        self._heard = asyncio.Event()
        self._end = asyncio.create_task(self.follow())

    async def ends(self) -> bool:
        """Well?"""
        return await self._end == 0

    async def close(self) -> None:
        self._end.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._end

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Raises CommandError if it won't be."""
        try:
            async with aio.timeout(self._timeout):
                while not condition():
                    if self._end.done():
                        raise CommandError(f"the job was over before {what}: {self.state()}")
                    self._heard.clear()
                    with contextlib.suppress(TimeoutError):
                        async with aio.timeout(POLL):
                            await self._heard.wait()
        except TimeoutError:
            raise CommandError(
                f"waited {self._timeout:g} s for {what} ({self.state()}); --timeout S waits longer"
            ) from None

    async def incidents(self, count: int) -> list[Incident]:
        """Once there are so many, and all are over."""
        found: list[Incident] = []
        try:
            async with aio.timeout(self._timeout):
                while len(found) < count or not all(each.closed for each in found):
                    await asyncio.sleep(POLL)
                    found = await incidents.published(self._kube, self.name, self.namespace, self._uid)
        except TimeoutError:
            told = incidents.render(found)
            raise CommandError(f"the recovery was not over within {self._timeout:g} s:\n{told}") from None
        return found

    def pods(self) -> list[Pod]:
        found = [(pod["metadata"], pod["spec"]) for pod in self._own_pods()]
        return sorted(
            (Pod(metadata["name"], metadata["uid"], str(spec.get("nodeName") or "")) for metadata, spec in found),
            key=lambda pod: pod.name,
        )

    def process(self, rank: int) -> tuple[str, int]:
        """The newest one: its pod, and its id in there."""
        return self.processes[rank][-1]

    def process_outside(self, rank: int) -> int:
        pid = processes.find(*self.process(rank))
        if pid is None:
            raise CommandError(f"rank {rank} has no process on this machine any more")
        return pid

    def spares_ready(self, kind: str) -> int:
        """How many processes stand by in the pods of this kind, by the log of TaskD's agent."""
        files = (self.output / f"taskd-log-{kind}").glob("agent-*")
        return sum(file.read_text(errors="replace").count("a warm spare is ready") for file in files)

    def outcome(self) -> Outcome:
        return Outcome(self.results, {rank: self._steps(rank) for rank in RANKS})

    def _steps(self, rank: int) -> list[Step]:
        file = self.output / f"steps.{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return [Step(number, tuple(samples), loss) for number, samples, loss, _ in map(json.loads, lines)]

    def times(self) -> list[int]:
        """When the ranks had done their steps, in order; by the clock of the timeline."""
        lines = [line for file in self.output.glob("times.*") for line in file.read_text().splitlines()]
        return sorted(milliseconds(float(line.split()[1])) for line in lines)

    # --- what happens, as it is told

    def say(self, text: str) -> None:
        self._screen.status(text)
        self._heard.set()

    def hand_on(self, pod: str, line: str) -> None:
        if match := _STEP.match(line):
            self.step, total, self.size = int(match[1]), int(match[2]), int(match[4])
            text = f"step {self.step:>3}/{total}  loss {match[3]}  {match[4]} ranks"
            if self.step * self._lines // total > self._shown:
                self._shown = self.step * self._lines // total
                self._screen.event(text)
            self._screen.status(text)
        elif match := _PROCESS.match(line):
            self.processes[int(match[1])].append((pod, int(match[2])))
            self._screen.status(line)
        elif match := _READY.match(line):
            self.ready.add(int(match[1]))
            self._screen.event(f"{pod}: {line}")
        elif _RAISES.match(line):
            self._screen.event(f"{pod}: {line}")
        elif line.startswith('{"rank"'):
            result = json.loads(line)
            self.results[result["rank"]] = result
        elif line.startswith("taskd: "):
            self._screen.event(f"{pod}: {line.removeprefix('taskd: ')}")
        self._heard.set()
