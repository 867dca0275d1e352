"""What a controller of 100, 1 000 and 10 000 ranks costs: real controller process, real sockets, simulated ranks.

    python -m bench.scale [--quick] [--ranks N ...] [--json FILE]

One fault after the other; for each: from the moment in which the agent reports it until the last surviving rank has its
order to stop (the decision), until every rank is out, a replacement has come and all have the order to build the new
group (the round trip), and until all have been told to go on. Growth is the exponent of a power law through the
medians. Every node of eight ranks has an agent, which beats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import resource
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.jobs import ROOT, environment
from bench.report import Row, show
from bench.scale_ranks import per_node
from evertrain import aio

BOUND = 2.0
DECISION_BUDGET = 1.0
GROWTH_BUDGET = 1.1
CPU_BUDGET = 1.0
PATIENCE = 60.0
CROWDS = 2


def nodes(size: int) -> int:
    return size // per_node(size)


@dataclass
class Figures:
    ranks: int
    registration: float = 0.0
    first_generation: float = 0.0
    decision: list[float] = field(default_factory=list)
    round_trip: list[float] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    idle_cpu: float = 0.0
    bytes_per_rank: float = 0.0


class Stuck(Exception):
    """What was waited for did not come."""


class Crowds:
    """The processes with the simulated ranks, and what they tell."""

    def __init__(self, size: int) -> None:
        edges = [nodes(size) * part // CROWDS * per_node(size) for part in range(CROWDS)] + [size]
        self._parts = [range(first, last) for first, last in zip(edges, edges[1:], strict=False)]
        self._size = size
        self._patience = PATIENCE + size / 200
        self._processes: list[asyncio.subprocess.Process] = []
        self._told: dict[tuple[str, int], list[float]] = {}
        self._news = asyncio.Condition()
        self._readers: list[asyncio.Task[None]] = []
        self._error = ""

    async def start(self, address: tuple[str, int], env: dict[str, str]) -> None:
        for number, part in enumerate(self._parts):
            # An address of their own for each: there are only so many ports.
            where = (address[0], address[1], f"127.0.1.{number + 1}", part.start, part.stop, self._size, BOUND)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.scale_ranks", *map(str, where),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT,
            )  # fmt: skip
            self._processes.append(process)
            self._readers.append(asyncio.create_task(self._read(process)))
        await self.all_have("ready", 0)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout
        while line := await process.stdout.readline():
            message = json.loads(line)
            async with self._news:
                self._error = message.get("error", self._error)
                key = message.get("kind", "ready"), message.get("number", 0)
                self._told.setdefault(key, []).append(message.get("at", 0.0))
                self._news.notify_all()

    def tell(self, rank: int | None, **command: Any) -> None:
        for part, process in zip(self._parts, self._processes, strict=True):
            if rank is None or rank in part:
                assert process.stdin
                fields = command if rank is None else {"rank": rank, **command}
                process.stdin.write(json.dumps(fields).encode() + b"\n")

    async def all_have(self, kind: str, number: int, crowds: int = CROWDS) -> float:
        """When the last rank got this order."""
        key = kind, number
        try:
            async with aio.timeout(self._patience), self._news:
                await self._news.wait_for(lambda: len(self._told.get(key, ())) >= crowds or self._error)
        except TimeoutError:
            told = [key for key, times in self._told.items() if len(times) >= crowds]
            raise Stuck(f"not every rank got its {kind} {number} within {self._patience:g} s, but {told}") from None
        if self._error:
            raise Stuck(self._error)
        return max(self._told[key])

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
            await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


@contextlib.asynccontextmanager
async def controller(size: int, env: dict[str, str]) -> AsyncIterator[tuple[psutil.Process, tuple[str, int]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evertrain.mindio.controller", f"--world-size={size}", f"--bound={BOUND}", "--no-dump",
        f"--nnodes={nodes(size)}", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout
        listening = json.loads(await process.stdout.readline())
        yield psutil.Process(process.pid), (listening["host"], listening["port"])
    finally:
        process.kill()
        _, errors = await process.communicate()
        if b"Traceback" in errors:
            print(errors.decode()[-4000:], file=sys.stderr)


async def measure(size: int, faults: int, idle: float) -> Figures:
    env = environment() | {"EVERTRAIN_TOKEN": secrets.token_hex(16)}
    figures = Figures(size)
    crowds = Crowds(size)
    async with controller(size, env) as (process, address):
        before = process.memory_info().rss
        await crowds.start(address, env)
        try:
            began = time.monotonic()
            crowds.tell(None, do="connect")
            figures.registration = await crowds.all_have("Welcome", 0) - began
            figures.first_generation = await crowds.all_have("Go", 1) - began - figures.registration
            for number in range(1, faults + 1):
                await asyncio.sleep(0.2)  # let the last answers of the ranks arrive
                rank = (number * 7919) % size
                crowds.tell(rank, do="kill", attempt=number)
                began = await crowds.all_have("killed", rank, crowds=1)
                figures.decision.append(await crowds.all_have("Stop", number) - began)
                figures.round_trip.append(await crowds.all_have("Join", number + 1) - began)
                figures.recovery.append(await crowds.all_have("Go", number + 1) - began)
            await asyncio.sleep(0.5)
            figures.bytes_per_rank = (process.memory_info().rss - before) / size
            used = sum(process.cpu_times()[:2])
            began = time.monotonic()
            await asyncio.sleep(idle)
            figures.idle_cpu = 100 * (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
        finally:
            await crowds.close()
    return figures


def growth(points: list[tuple[int, float]]) -> float:
    """The exponent of the power law through these points."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(value) for _, value in points]
    return statistics.linear_regression(xs, ys).slope


def rows(measured: list[Figures]) -> list[Row]:
    result = []
    for figures in measured:
        n = f"{figures.ranks:,} ranks: ".replace(",", " ")
        biggest = figures.ranks >= 10_000
        result += [
            Row(n + "registration", [figures.registration]),
            Row(n + "first generation", [figures.first_generation]),
            Row(n + "fault to decision at all", figures.decision, budget=DECISION_BUDGET),
            Row(n + "fault to all out and replaced", figures.round_trip),
            Row(n + "fault to all told to go on", figures.recovery),
            Row(n + "idle heartbeats", [figures.idle_cpu], "% cpu", CPU_BUDGET if biggest else None),
            Row(n + "memory of a rank", [figures.bytes_per_rank / 1000], "kB"),
        ]
    if len(measured) > 1:
        for name, values in (("decision", "decision"), ("all told to go on", "recovery")):
            points = [(figures.ranks, statistics.median(getattr(figures, values))) for figures in measured]
            result.append(Row(f"growth, fault to {name}", [growth(points)], "exponent", GROWTH_BUDGET))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer faults, under a minute")
    parser.add_argument("--ranks", type=int, nargs="*", default=[100, 1_000, 10_000], help="sizes (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    raise_descriptor_limit(max(size + nodes(size) for size in options.ranks) + 200)
    faults, idle = (3, 8.0) if options.quick else (10, 20.0)
    measured = [aio.run(measure(size, faults, idle)) for size in sorted(options.ranks)]
    return 0 if show("A controller of many ranks", rows(measured), options.json) else 1


def raise_descriptor_limit(needed: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
        except (ValueError, OSError):
            sys.exit(f"{needed} open files are needed and the limit of this machine is {hard} (ulimit -Hn)")
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
