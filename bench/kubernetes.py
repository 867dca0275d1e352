"""Many jobs at once on a real API server without kubelets: how long the operator takes, what it asks for and needs.

    make bench-kubernetes [ARGS=--quick]

A real etcd, API server, controller manager and scheduler (`python -m tests.kubernetes_cluster --nodes 0`), nodes that
are only objects, and an operator in a process of its own. Time is from the first job that is given to it until the last
pod is there, and until the last one has a node; what the operator asks for is counted by the API server itself.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.jobs import ROOT
from bench.report import Row, show
from evertrain import aio
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client
from evertrain.kube.port import ASCEND_JOB, NODE, POD, Object

PODS = 8
CHIPS = 8
CLIENTS = 8
PATIENCE = 900.0


@dataclass
class Figures:
    submitted: float = 0.0
    created: list[float] = field(default_factory=list)
    placed: list[float] = field(default_factory=list)
    memory: float = 0.0
    idle_memory: float = 0.0
    cpu: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)


def job(number: int) -> Object:
    def replica(count: int) -> Object:
        chip = {"requests": {"huawei.com/Ascend910": 1}, "limits": {"huawei.com/Ascend910": 1}}
        container = {"name": "ascend", "image": "none", "command": ["true"], "resources": chip}
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


def node(number: int) -> Object:
    capacity = {"cpu": "64", "memory": "512Gi", "pods": "200", "huawei.com/Ascend910": str(CHIPS)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "as this benchmark says"}
    status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"fake-{number}"}, "status": status}


async def measure(options: argparse.Namespace) -> Figures:
    place = Path(os.environ["KUBECONFIG"])
    subprocess.run(["kubectl", "apply", "-k", ROOT / "deploy" / "crds"], check=True, stdout=subprocess.DEVNULL)
    crd = "crd/ascendjobs.mindxdl.gitee.com"
    subprocess.run(["kubectl", "wait", "--for=condition=Established", crd], check=True, stdout=subprocess.DEVNULL)
    operator = subprocess.Popen(
        [sys.executable, "-m", "evertrain.operator", "--enableGangScheduling=false",
         "--kubeconfig", str(place.with_name("kubeconfig-operator"))],
        stdin=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    kube = Client.from_kubeconfig(place)
    try:
        figures = Figures()
        async with aio.timeout(PATIENCE):
            await asyncio.gather(*(kube.create(NODE, node(number)) for number in range(options.jobs * PODS // CHIPS)))
            await _run_jobs(kube, options.jobs, psutil.Process(operator.pid), figures)
        figures.requests = requests(place.with_name("requests.log"))
        return figures
    finally:
        await kube.close()
        operator.terminate()
        operator.wait()


async def _run_jobs(kube: Client, jobs: int, operator: psutil.Process, figures: Figures) -> None:
    pods = Cache(kube, POD)
    began = time.monotonic()

    def changed(before: Object | None, after: Object | None) -> None:
        now = time.monotonic() - began
        if before is None:
            figures.created.append(now)
        if after is not None and after["spec"].get("nodeName") and not (before or {"spec": {}})["spec"].get("nodeName"):
            figures.placed.append(now)

    pods.listen(changed)
    watching = asyncio.create_task(pods.run())
    try:
        figures.idle_memory = operator.memory_info().rss / 2**20
        numbers = iter(range(jobs))

        async def submit() -> None:
            for number in numbers:
                await kube.create(ASCEND_JOB, job(number))

        await asyncio.gather(*(submit() for _ in range(CLIENTS)))
        figures.submitted = time.monotonic() - began
        for what, seen in (("created", figures.created), ("placed", figures.placed)):
            if not await pods.until(lambda seen=seen: len(seen) >= jobs * PODS, PATIENCE):  # type: ignore[misc]
                raise TimeoutError(f"only {len(seen)} of {jobs * PODS} pods were {what}")
        figures.cpu = sum(operator.cpu_times()[:2])
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{operator.pid}/status").read_text())
        figures.memory = int(peak[1]) / 1024 if peak else 0.0
    finally:
        watching.cancel()


def requests(log: Path) -> dict[str, int]:
    """By what was asked."""
    seen: collections.Counter[str] = collections.Counter()
    for line in log.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        about = event.get("objectRef") or {}
        kind = "/".join(filter(None, [about.get("resource"), about.get("subresource")]))
        seen[f"{event['verb']} {kind}"] += 1
    return dict(seen.most_common())


def rows(figures: Figures, jobs: int) -> list[Row]:
    total = sum(figures.requests.values())
    most = ", ".join(f"{count} {what}" for what, count in list(figures.requests.items())[:6])
    return [
        Row("all jobs submitted", [figures.submitted]),
        Row(f"{jobs} jobs, {jobs * PODS} pods, until all are created", [max(figures.created)]),
        Row("until all have a node", [max(figures.placed)], notes="by the default scheduler"),
        Row("requests of the operator for each job", [total / jobs], unit="req", notes=most),
        Row("processor time of the operator", [figures.cpu], notes=f"{figures.cpu / jobs * 1000:.1f} ms a job"),
        Row("memory of the operator before the jobs", [figures.idle_memory], unit="MiB"),
        Row("memory of the operator at most", [figures.memory], unit="MiB"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kubernetes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 jobs")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.jobs = 20
    if "EVERTRAIN_KUBERNETES_CONTROL" not in os.environ:
        print("This needs a cluster of its own: make bench-kubernetes", file=sys.stderr)
        return 1
    figures = aio.run(measure(options))
    return 0 if show("Many jobs on a real API server", rows(figures, options.jobs), options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
