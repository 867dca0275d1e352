"""A ClusterD of many jobs under many faults: that none is lost, how fast it decides, and what it needs for it.

    python -m bench.clusterd [--quick] [--jobs N] [--steady N] [--rate N] [--seconds S] [--nodes N] [--json FILE]

A real ClusterD that leads by its Lease, a real API server that holds the jobs, their PodGroups and pods as objects, and
this process with a client for each job, all of them processes of their own that talk gRPC and HTTPS. Then faults at a
steady rate: of ten, four are memory errors that the training reports (the step is run again), three are processes that
ended (they start again in place), one are processes of two pods (both pods are replaced, by an operator and nodes on
paper), two are chips' faults in their nodes' ConfigMaps, which the nodes take back once the training has stopped. Each
has to end in a finished recovery: for the client, in the timeline, and in what ClusterD keeps in the cluster. The Lease
has to be renewed all the time. The faults come twice: first so many a second as a small machine can do (--steady),
which is where the time to decide has a budget; then far more than that (--rate), where none may be lost, however long
it takes.

How long it takes to decide is measured by the client, from just before it sends its report until it has the strategy:
the client's own answers to the signals between them, and all writes to the API server that ClusterD waits for, are part
of it. Labels, annotations and reset files follow when there is time; how long that takes after the last recovery is
printed, how many recoveries a second were reached, and what ClusterD asked of the API server for one. How busy each of
the processes was is printed as well: on a small machine the busiest of them is what limits the rate.

Then another ClusterD stands by, the one that leads is killed, and the other has to serve within 5 seconds; a few times.
At last the ConfigMaps of many nodes go through the fault centre in one pass, and then one that changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.clusterd_jobs import CHIP, PODS, REPORT, Crowd, Fault, Job, Pods
from bench.clusterd_merge import Merged, merge
from bench.clusterd_world import CHIPS, RANKS, devices, node_of
from bench.clusterd_world import PODS as PODS_OF_JOB
from bench.jobs import ROOT, Stuck, environment
from bench.report import Row, percentile, show
from bench.scale import raise_descriptor_limit
from evertrain import aio
from evertrain.clusterd.__main__ import LEASE_SECONDS
from evertrain.clusterd.keep import SELECTOR, TEXT, decode
from evertrain.clusterd.model import MEMORY, OTHER
from evertrain.clusterd.recover.names import INIT
from evertrain.clusterd.recover.state import decode as decode_state
from evertrain.clusterd.timeline.store import Store
from evertrain.kube.client import Client
from evertrain.kube.port import CONFIG_MAP
from evertrain.wire.faultinfo import DEVICE_NAMESPACE, DEVICE_PREFIX, ChipFault

PATIENCE = 300.0
SETTLE_SECONDS = 300.0
CHIP_CODE, CHIP_LEVEL = "80C98000", "RestartBusiness"
DECISION_BUDGET = 1.0
TAKEOVER_BUDGET = 5.0
TAKEOVERS = 3
QUIET, QUIET_SECONDS = 0.05, 3.0
"""Who has used less than this share of a core for so long has nothing left to do."""
SUMMARIES = "outside-job-info=true"


@dataclass
class Process:
    """One of those that take part, and what it used while there were faults."""

    name: str
    process: psutil.Process
    before: float = 0.0
    used: float = 0.0

    def begin(self) -> None:
        self.before = sum(self.process.cpu_times()[:2])

    def end(self) -> None:
        self.used = sum(self.process.cpu_times()[:2]) - self.before


@dataclass
class Storm:
    """Faults at a steady rate, and what came of them."""

    rate: int
    seconds: int
    budget: float | None
    """Of the time from a report to its strategy."""
    faults: list[Fault] = field(default_factory=list)
    unfinished: int = 0
    late: int = 0
    """Faults that had to wait until their job was through with the one before."""
    kept: list[str] = field(default_factory=list)
    """Recoveries that the cluster says are not over."""
    used: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    lasted: float = 0.0
    """Seconds from the first fault to the end of the last recovery, for its client."""
    settled: float = 0.0
    """From then on, until nothing was left to be written."""
    unled: float = 0.0
    """The longest time without a renewal of the Lease."""

    @property
    def sent(self) -> int:
        return self.rate * self.seconds


@dataclass
class Figures:
    storms: list[Storm]
    registered: float = 0.0
    surplus: list[str] = field(default_factory=list)
    incidents: int = 0
    """Recoveries in the timeline that ended well."""
    others: list[str] = field(default_factory=list)
    """Those that did not, or are not over."""
    memory: dict[str, float] = field(default_factory=dict)
    takeovers: list[float] = field(default_factory=list)
    """Seconds from the end of who led until the other one serves."""
    merged: Merged | None = None


class Nodes:
    """Publish faults of their chips, and take them back."""

    def __init__(self, kube: Client) -> None:
        self._kube = kube
        self._faults: dict[str, dict[str, ChipFault]] = {}
        self._writing: dict[str, asyncio.Lock] = {}

    async def set(self, node: str, chip: int, faulty: bool) -> None:
        name = f"Ascend910-{chip}"
        found = self._faults.setdefault(node, {})
        if faulty:
            found[name] = ChipFault(name, CHIP_CODE, CHIP_LEVEL, int(time.time() * 1000))
        else:
            found.pop(name, None)
        async with self._writing.setdefault(node, asyncio.Lock()):
            patch = {"data": devices(tuple(found.values()))}
            await self._kube.patch(CONFIG_MAP, DEVICE_PREFIX + node, DEVICE_NAMESPACE, patch)


@contextlib.asynccontextmanager
async def world(folder: Path, jobs: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[str]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.clusterd_world", str(folder), str(jobs),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=ROOT, limit=1 << 24,
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        async with aio.timeout(PATIENCE):
            line = await process.stdout.readline()
        if not line:
            raise Stuck("the API server has ended, see above")
        told = json.loads(line)
        yield process, told["kubeconfig"], told["jobs"]
    finally:
        process.stdin.close()
        await process.wait()


async def requests(process: asyncio.subprocess.Process) -> tuple[dict[str, int], float]:
    """Since the last time; and the longest time in which nobody led."""
    assert process.stdin and process.stdout
    process.stdin.write(b"\n")
    found = json.loads(await process.stdout.readline())
    return found["counts"], found["unled"]


@contextlib.asynccontextmanager
async def clusterd(folder: Path, kubeconfig: str) -> AsyncIterator[asyncio.subprocess.Process]:
    folder.mkdir()
    log = folder / "clusterd.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "evertrain.clusterd", "--kubeconfig", kubeconfig, "--listen", "127.0.0.1:0",
            "--insecure", "--leader-elect", "--timeline", str(folder / "timeline.db"), "--logLevel", "2",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, env=environment(), cwd=ROOT,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        text = log.read_text()
        if text:
            print(f"ClusterD said ({len(text.splitlines())} lines):\n{text[:2000]}", file=sys.stderr)


async def serves(process: asyncio.subprocess.Process) -> str:
    """Waits for it; where it serves."""
    assert process.stdout
    async with aio.timeout(PATIENCE):
        line = (await process.stdout.readline()).decode()
    found = re.search(r"serves on (\S+)", line)
    if not found:
        raise Stuck("ClusterD does not serve, see below")
    return found[1]


async def quiet(*processes: psutil.Process) -> None:
    async with aio.timeout(PATIENCE):
        while True:
            parts = [Process("", process) for process in processes]
            for part in parts:
                part.begin()
            await asyncio.sleep(QUIET_SECONDS)
            for part in parts:
                part.end()
            if all(part.used < QUIET * QUIET_SECONDS for part in parts):
                return


async def take_over(
    folder: Path, kubeconfig: str, leader: asyncio.subprocess.Process, server: psutil.Process, figures: Figures
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(TAKEOVERS):
            other = await stack.enter_async_context(clusterd(folder / f"standby-{number}", kubeconfig))
            await quiet(psutil.Process(other.pid), psutil.Process(leader.pid), server)
            figures.memory["standby"] = psutil.Process(other.pid).memory_info().rss / 2**20
            leader.kill()
            began = time.monotonic()
            await serves(other)
            figures.takeovers.append(time.monotonic() - began)
            leader = other


async def measure(options: argparse.Namespace, folder: Path) -> Figures:
    figures = Figures(
        [Storm(options.steady, options.seconds, DECISION_BUDGET), Storm(options.rate, options.seconds, None)]
    )
    async with world(folder, options.jobs) as (server, kubeconfig, uids):
        kube = Client.from_kubeconfig(kubeconfig)
        try:
            async with clusterd(folder / "first", kubeconfig) as brain:
                address = await serves(brain)
                parts = [
                    Process("ClusterD", psutil.Process(brain.pid)),
                    Process("API server", psutil.Process(server.pid)),
                    Process("clients", psutil.Process()),
                ]
                figures.memory["idle"] = parts[0].process.memory_info().rss / 2**20
                crowd = Crowd(address, uids)
                try:
                    began = time.monotonic()
                    async with aio.timeout(PATIENCE):
                        await crowd.join()
                    figures.registered = time.monotonic() - began
                    figures.memory["registered"] = parts[0].process.memory_info().rss / 2**20
                    await _settled_down(kube, options.jobs)
                    async with watched(kube) as pods:
                        for storm in figures.storms:
                            await _blow(storm, crowd, pods, kube, server, parts)
                            figures.memory["after"] = parts[0].process.memory_info().rss / 2**20
                    figures.memory["most"] = _most(brain.pid)
                    figures.surplus = crowd.surplus
                finally:
                    await crowd.close()
                await take_over(folder, kubeconfig, brain, parts[1].process, figures)
        finally:
            await kube.close()
    _read_timeline(folder / "first" / "timeline.db", figures)
    return figures


@contextlib.asynccontextmanager
async def watched(kube: Client) -> AsyncIterator[Pods]:
    pods = Pods(kube)
    watching = asyncio.create_task(pods.cache.run())
    try:
        async with aio.timeout(PATIENCE):
            await pods.cache.synced.wait()
        yield pods
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _settled_down(kube: Client, jobs: int) -> None:
    """Until ClusterD has written what it writes of each job when it sees it first, at its own pace."""
    async with aio.timeout(PATIENCE):
        while len((await kube.list(CONFIG_MAP, "default", labels=SUMMARIES)).items) < jobs:
            await asyncio.sleep(1)


def _most(pid: int) -> float:
    """The most memory that a process ever had, in MiB."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak[1]) / 1024 if peak else 0.0


async def _blow(
    storm: Storm,
    crowd: Crowd,
    pods: Pods,
    kube: Client,
    server: asyncio.subprocess.Process,
    parts: list[Process],
) -> None:
    nodes = Nodes(kube)
    await requests(server)
    for part in parts:
        part.begin()
    began = time.monotonic()
    running: set[asyncio.Task[None]] = set()
    waiting = [asyncio.Lock() for _ in crowd.jobs]
    for number in range(storm.sent):
        await asyncio.sleep(max(0.0, began + number / storm.rate - time.monotonic()))
        job = crowd.jobs[number % len(crowd.jobs)]
        task = asyncio.create_task(_one(job, number, nodes, pods, waiting[job.number], storm))
        running.add(task)
        task.add_done_callback(running.discard)
    if running:
        _, left = await asyncio.wait(running, timeout=PATIENCE)
        storm.unfinished = len(left)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    storm.lasted = time.monotonic() - began
    for part in parts:
        part.end()
        storm.used[part.name] = part.used
    ended = time.monotonic()
    storm.kept = await _settled(kube)
    storm.settled = time.monotonic() - ended
    storm.requests, storm.unled = await requests(server)
    storm.requests.pop(f"patch {DEVICE_PREFIX.rstrip('-')}", None)  # those are our own


async def _one(job: Job, number: int, nodes: Nodes, pods: Pods, turn: asyncio.Lock, storm: Storm) -> None:
    """One fault, up to the end of its recovery."""
    storm.late += turn.locked()
    async with turn:
        rank = number * 3 % RANKS
        if number % 5 == 4:
            node, first = node_of(job.number, rank // CHIPS)
            fault = job.expect(CHIP)
            storm.faults.append(fault)
            await nodes.set(node, first + rank % CHIPS, True)
            await job.stopped.wait()
            await nodes.set(node, first + rank % CHIPS, False)
        else:
            gone = [number // 10 % (PODS_OF_JOB - 1) + 1, (number // 10 + 1) % (PODS_OF_JOB - 1) + 1]
            fault = job.expect(PODS if number % 10 == 8 else REPORT)
            storm.faults.append(fault)
            if fault.kind == PODS:  # not the first, where the client would be
                fault.replaced = pods.replaced(job.uid, *gone)
                await job.report({pod * CHIPS: OTHER for pod in gone})
            else:
                await job.report({rank: MEMORY if number % 2 else OTHER})
        await fault.done.wait()


async def _settled(kube: Client) -> list[str]:
    """What ClusterD keeps of recoveries that are not over, though it had some time."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = []
        for item in (await kube.list(CONFIG_MAP, labels=SELECTOR)).items:
            for text in (item.get("data") or {}).values():
                record = decode({"data": {TEXT: text}})
                state = decode_state(record.state).state
                if state != INIT or record.effects:
                    found.append(f"{record.job} in state {state}")
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def _read_timeline(path: Path, figures: Figures) -> None:
    store = Store(path, read_only=True)
    try:
        incidents = store.incidents()
    finally:
        store.close()
    good = [each for each in incidents if each.closed and each.ok and each.outcome == "recovered"]
    figures.incidents = len(good)
    figures.others = [f"{each.name}: {each.outcome or 'open'} {each.end}" for each in incidents if each not in good]


def rows(figures: Figures, options: argparse.Namespace) -> list[Row]:
    many, sent = f"{options.jobs} jobs × {RANKS} ranks", sum(storm.sent for storm in figures.storms)
    wrong = [*figures.surplus, *figures.others]
    result = [Row(f"{many} register", [figures.registered])]
    for storm in figures.storms:
        result += _of_storm(storm)
    result.append(
        Row(
            f"{sent} faults: not recovered in the timeline", [float(sent - figures.incidents)], "", 0.0, "max",
            failure=f"{len(wrong)} things that should not be: {'; '.join(wrong[:5])}" if wrong else "",
        )
    )  # fmt: skip
    for when, words in _WHEN.items():
        if when in figures.memory:
            result.append(Row(f"memory of ClusterD, {words}", [figures.memory[when]], "MiB"))
    notes = f"{LEASE_SECONDS:g} s of it for the Lease to run out"
    result.append(Row("leader killed -> the other serves", figures.takeovers, "s", TAKEOVER_BUDGET, "max", notes=notes))
    if figures.merged is not None:
        many = f"{options.nodes} nodes"
        result += [
            Row(f"{many}' ConfigMaps merged in one pass", [figures.merged.all], notes=f"{figures.merged.pages} pages"),
            Row(f"one of {many} changes", figures.merged.one),
        ]
    return result


def _of_storm(storm: Storm) -> list[Row]:
    sent, when = storm.sent, f"at {storm.rate} faults a second: "
    finished = [fault for fault in storm.faults if fault.done.is_set()]
    lost = max(sent - len(finished), storm.unfinished) + len(storm.kept)
    replaced = [fault.decided - fault.sent for fault in finished if fault.kind == PODS]
    whole = [fault.finished - fault.sent for fault in finished if fault.kind == PODS]
    reported = [fault.decided - fault.sent for fault in finished if fault.kind == REPORT]
    chips = [fault.stopped - fault.sent for fault in finished if fault.kind == CHIP]
    ended = [fault.decided - fault.sent for fault in finished if fault.kind == CHIP]
    result = [
        Row(
            f"{when}lost of {sent}", [float(lost)], "", 0.0, "max",
            failure=f"{len(storm.kept)} that are not over: {'; '.join(storm.kept[:5])}" if storm.kept else "",
        ),
        Row(f"{when}report -> strategy", reported, "s", storm.budget, "p99", notes=_p99(reported)),
        Row(f"{when}report of two pods -> strategy", replaced, notes=_p99(replaced)),
        Row(f"{when}report of two pods -> both are replaced", whole, notes=_p99(whole)),
        Row(f"{when}chip's fault published -> stop", chips, notes=_p99(chips)),
        Row(f"{when}chip's fault published, mended -> strategy", ended, notes=_p99(ended)),
        Row(f"{when}longest time between renewals of the Lease", [storm.unled], "s", LEASE_SECONDS, "max"),
        Row(f"{when}faults that waited for their job", [float(storm.late)], ""),
        Row(
            f"{when}all faults and recoveries", [storm.lasted],
            notes=f"{len(finished) / storm.lasted:.1f} recoveries a second; "
            f"the last ended {max(0.0, storm.lasted - storm.seconds):.1f} s after the last fault",
        ),
        Row(f"{when}then, until nothing was left to be written", [storm.settled]),
    ]  # fmt: skip
    busiest = max(storm.used, key=lambda name: storm.used[name], default="")
    for name, used in storm.used.items():
        notes = f"{100 * used / storm.lasted:.0f} % of a core, {1000 * used / sent:.1f} ms a recovery"
        notes += "; the busiest, and so the bottleneck" if name == busiest else ""
        result.append(Row(f"{when}processor time of {name}", [used], notes=notes))
    detail = ", ".join(
        f"{count / sent:.1f} {what}" for what, count in sorted(storm.requests.items(), key=lambda each: -each[1])
        if count >= 0.05 * sent
    )  # fmt: skip
    asked = sum(storm.requests.values())
    result.append(Row(f"{when}requests of ClusterD for a recovery", [asked / sent], "", notes=detail))
    return result


_WHEN = {"idle": "no client", "registered": "all jobs registered", "after": "after the faults", "most": "at most",
         "standby": "that stands by"}  # fmt: skip


def _p99(values: list[float]) -> str:
    return f"p99 {percentile(values, 0.99):.3f}" if values else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.clusterd", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="50 jobs, 5 and 20 faults a second for 10 s each, 1000 nodes"
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--steady", type=int, default=10, help="faults a second to be kept up with (default 10)")
    parser.add_argument(
        "--rate", type=int, default=100, help="faults a second, none of which may be lost (default 100)"
    )
    parser.add_argument("--seconds", type=int, default=60, help="of faults, at each of the rates (default 60)")
    parser.add_argument("--nodes", type=int, default=10_000, help="whose ConfigMaps are merged (default 10 000)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.jobs, options.steady, options.rate, options.seconds, options.nodes = 50, 5, 20, 10, 1000
    raise_descriptor_limit(4 * options.jobs + 1000)
    with tempfile.TemporaryDirectory(prefix="evertrain-bench-") as folder:
        figures = aio.run(measure(options, Path(folder)))
    figures.merged = merge(options.nodes)
    return 0 if show("A ClusterD of many jobs", rows(figures, options), options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
