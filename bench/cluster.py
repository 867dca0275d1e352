"""Many jobs at once on an embedded cluster: how long they take, what the cluster needs for them.

    python -m bench.cluster [--quick] [--jobs N] [--nodes N] [--sleep S] [--json FILE]

A real `evertrain up` in a process of its own, once with networks of the pods' own and once without. First pods start
one after the other, then the jobs are given to it over HTTPS, eight at a time, and watched to their end. Every job has
four pods with one NPU each which sleep, so with the default sizes half of the jobs wait for chips of the others;
and a port that no other job has. Memory is that of the cluster's process, without its pods. After the jobs, the API
server is asked by eight clients at once for as many requests as it can answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from bench.jobs import ROOT, environment
from bench.report import Row, show
from evertrain import aio
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, Object

PODS = 4
PATIENCE = 900.0
CLIENTS = 8
NETWORKS = {"--own-network": "own", "--shared-network": "shared"}
FIRST_PORT = 10_000


@dataclass
class Figures:
    starts: list[float] = field(default_factory=list)
    submitted: float = 0.0
    finished: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    idle_memory: float = 0.0
    memory: float = 0.0
    cpu: float = 0.0
    requests: dict[str, float] = field(default_factory=dict)


def job(number: int, sleep: float) -> Object:
    def replica(count: int) -> Object:
        container = {
            "name": "ascend",
            "image": "none",
            "command": ["sleep", f"{sleep:g}"],
            "ports": [{"name": "ascendjob-port", "containerPort": FIRST_PORT + number}],
            "resources": {"requests": {"huawei.com/Ascend910": 1}, "limits": {"huawei.com/Ascend910": 1}},
        }
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}

    return {
        "apiVersion": ASCEND_JOB.api_version,
        "kind": ASCEND_JOB.kind,
        "metadata": {"name": f"job-{number}", "namespace": "default", "labels": {"framework": "pytorch"}},
        "spec": {
            "runPolicy": {"schedulingPolicy": {"minAvailable": PODS, "queue": "default"}},
            "replicaSpecs": {"Master": replica(1), "Worker": replica(PODS - 1)},
        },
    }


async def measure(options: argparse.Namespace, folder: Path, network: str) -> Figures:
    command = [sys.executable, "-m", "evertrain.cli", "up", network, "--nodes", str(options.nodes)]
    process = subprocess.Popen(
        [*command, "--data-dir", str(folder), "--clusterd-addr", "127.0.0.1:0"],
        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        kubeconfig = next(match[1] for line in process.stdout if (match := re.search(r"KUBECONFIG=(\S+)", line)))
        kube = Client.from_kubeconfig(kubeconfig)
        try:
            async with aio.timeout(PATIENCE):
                figures = Figures()
                await _start_pods(kube, options.pods, figures)
                await _run_jobs(kube, options, psutil.Process(process.pid), figures)
                await _ask(kube, options.seconds, figures)
            return figures
        finally:
            await kube.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()


async def _start_pods(kube: Client, count: int, figures: Figures) -> None:
    """Each from its creation until its program runs, or has ended. The first one on a node starts more than itself."""
    pods = Cache(kube, POD)
    watching = asyncio.create_task(pods.run())
    try:
        await pods.synced.wait()
        for number in range(-1, count):
            metadata = {"name": f"start-{number + 1}", "namespace": "default"}
            container = {"name": "main", "image": "none", "command": ["sleep", "600"]}
            spec = {"nodeName": "node-0", "terminationGracePeriodSeconds": 0, "containers": [container]}
            began = time.monotonic()
            await kube.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

            def runs(name: str = metadata["name"]) -> bool:
                return ((pods.get(name, "default") or {}).get("status") or {}).get("phase") == "Running"

            if not await pods.until(runs, PATIENCE):
                raise TimeoutError(f"{metadata['name']} does not run")
            if number >= 0:
                figures.starts.append(time.monotonic() - began)
            await kube.delete(POD, metadata["name"], "default", grace=0)
        await pods.until(lambda: not len(pods), PATIENCE)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _run_jobs(kube: Client, options: argparse.Namespace, process: psutil.Process, figures: Figures) -> None:
    figures.idle_memory = process.memory_info().rss / 2**20
    jobs = Cache(kube, ASCEND_JOB)
    began = time.monotonic()

    def changed(before: Object | None, after: Object | None) -> None:
        for item, was in ((after, before),):
            if item is None or _outcome(item) == _outcome(was or {}):
                continue
            if _outcome(item):
                figures.finished.append(time.monotonic() - began)
            if _outcome(item) == "Failed":
                figures.failed.append(item["metadata"]["name"])

    jobs.listen(changed)
    watching = asyncio.create_task(jobs.run())
    try:
        numbers = iter(range(options.jobs))

        async def submit() -> None:
            for number in numbers:
                await kube.create(ASCEND_JOB, job(number, options.sleep))

        cpu = sum(process.cpu_times()[:2])
        await asyncio.gather(*(submit() for _ in range(CLIENTS)))
        figures.submitted = time.monotonic() - began
        if not await jobs.until(lambda: len(figures.finished) >= options.jobs, PATIENCE):
            raise TimeoutError(f"only {len(figures.finished)} of {options.jobs} jobs have ended")
        figures.cpu = sum(process.cpu_times()[:2]) - cpu
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        figures.memory = int(peak[1]) / 1024 if peak else 0.0
    finally:
        watching.cancel()


def _outcome(item: Object) -> str:
    conditions: list[Any] = (item.get("status") or {}).get("conditions") or []
    ends = [each["type"] for each in conditions if each["type"] in ("Succeeded", "Failed") and each["status"] == "True"]
    return str(ends[-1]) if ends else ""


async def _ask(kube: Client, seconds: float, figures: Figures) -> None:
    """As many requests as come back in that time, one kind after the other."""
    name = (await kube.list(POD, "default")).items[0]["metadata"]["name"]
    numbers = iter(range(10**9))

    async def create() -> None:
        number = next(numbers)
        metadata = {"name": f"bench-{number}", "namespace": "default"}
        await kube.create(
            CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}}
        )

    async def get() -> None:
        await kube.get(POD, name, "default")

    async def patch() -> None:
        await kube.patch(POD, name, "default", {"metadata": {"annotations": {"bench": str(next(numbers))}}})

    for what, request in (("get a pod", get), ("patch a pod", patch), ("create a config map", create)):
        count, began = 0, time.monotonic()

        async def client(request: Any = request, began: float = began) -> int:
            done = 0
            while time.monotonic() - began < seconds:
                await request()
                done += 1
            return done

        count = sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))
        figures.requests[what] = count / (time.monotonic() - began)


def rows(figures: Figures, options: argparse.Namespace, network: str) -> list[Row]:
    pods = options.jobs * PODS
    failure = f"{len(figures.failed)} jobs failed: {', '.join(figures.failed[:5])}" if figures.failed else ""
    waves = -(-pods // (options.nodes * 8))
    found = [
        Row("a pod from its creation until it runs", figures.starts),
        Row("all jobs submitted", [figures.submitted]),
        Row("a job from the first submission to its end", figures.finished),
        Row(
            f"{options.jobs} jobs, {pods} pods, {options.nodes} nodes",
            [max(figures.finished)],
            failure=failure,
            notes=f"of which {waves * options.sleep:g} s of sleep",
        ),
        Row("processor time of the cluster", [figures.cpu], notes=f"{figures.cpu / pods * 1000:.1f} ms a pod"),
        Row("memory of the cluster before the jobs", [figures.idle_memory], unit="MiB"),
        Row("memory of the cluster at most", [figures.memory], unit="MiB"),
        *(Row(f"{CLIENTS} clients {what}", [rate], unit="req/s") for what, rate in figures.requests.items()),
    ]
    return [replace(row, name=f"{network} network: {row.name}") for row in found]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 jobs on 5 nodes")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--pods", type=int, default=20, help="that start one after the other (default 20)")
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds that every pod sleeps (default 1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of requests of each kind (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.jobs, options.nodes, options.pods, options.seconds = 20, 5, 5, 1.0
    found: list[Row] = []
    for network, name in NETWORKS.items():
        with tempfile.TemporaryDirectory(prefix="evertrain-bench-") as folder:
            found += rows(aio.run(measure(options, Path(folder), network)), options, name)
    return 0 if show("Many jobs at once", found, options.json) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
