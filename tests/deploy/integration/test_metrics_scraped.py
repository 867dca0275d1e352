"""What Prometheus reads of real processes: operator, ClusterD and noded beside an API server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE
from evertrain.noded import injected
from evertrain.noded.faults import ChipFault
from tests.operator.acjobs import ascend_job
from tests.operator.cluster import Cluster, cluster, until
from tests.ports import free_ports

Samples = dict[tuple[str, ...], float]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


@contextlib.asynccontextmanager
async def process(here: Cluster, part: str, port: int, *options: str) -> AsyncIterator[None]:
    here.client()  # writes its kubeconfig
    kubeconfig = here.folder / f"kubeconfig-{here.server.port}"
    health = ["--enable-healthz", "--healthz-host=127.0.0.1", f"-healthz-address={port}"]
    command = [sys.executable, "-m", f"evertrain.{part}", "--kubeconfig", str(kubeconfig), *health, *options]
    with (here.folder / f"{part}.log").open("wb") as log:
        running = await asyncio.create_subprocess_exec(*command, env=dict(os.environ), stdout=log, stderr=log)
    try:
        yield
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


async def scraped(port: int, name: tuple[str, ...], value: float, counted: tuple[str, ...] = ()) -> Samples:
    """All, as soon as one of them is so, and another, that is counted afterwards, is more than 0."""
    found: Samples = {}

    async def is_so() -> bool:
        nonlocal found
        with contextlib.suppress(OSError):
            found = await asyncio.to_thread(scrape, port)
        return found.get(name) == value and (not counted or found.get(counted, 0) > 0)

    await until(is_so)
    return found


async def test_prometheus_reads_all_three_parts(tmp_path: Path) -> None:
    ports = free_ports(3)
    async with cluster(tmp_path) as here:
        await here.kube.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-0"}})
        status = {"status": {"capacity": {"huawei.com/Ascend910": "4"}}}
        await here.kube.patch(NODE, "node-0", None, status, status=True)
        await here.kube.create(ASCEND_JOB, ascend_job("train"))
        fault = ChipFault(code="80E01801", chip=1, since_ms=1, level="SeparateNPU")
        await here.kube.create(CONFIG_MAP, injected.config_map("node-0", [fault]))
        async with (
            process(here, "operator", ports[0], "--leader-elect", f"--ranktable-dir={tmp_path / 'tables'}"),
            process(here, "clusterd", ports[1], "-listen", "127.0.0.1:0", "--insecure"),
            process(here, "noded", ports[2], "--node-name=node-0", "--detectors=none", "--device-info=on"),
        ):
            looked = ("evertrain_operator_reconcile_seconds_count",)  # at its end; the state is written in the middle
            operator = await scraped(ports[0], ("evertrain_operator_jobs", "Created"), 1, looked)
            assert operator["evertrain_operator_leads",] == 1
            assert operator["evertrain_api_requests_total", "GET", "200"] >= 6, "lists and watches"
            assert operator["process_resident_memory_bytes",] > 1e6

            written = ("evertrain_noded_last_publish_timestamp_seconds", "deviceinfo")
            noded = await scraped(ports[2], ("evertrain_noded_faults", "chip", "SeparateNPU"), 1, written)
            assert noded[written] > 1.7e9
            assert noded["evertrain_noded_publish_errors_total", "deviceinfo"] == 0

            clusterd = await scraped(ports[1], ("evertrain_clusterd_faults", "chip", "SeparateNPU"), 1)
            assert clusterd["evertrain_clusterd_leads",] == 1
            assert clusterd["evertrain_clusterd_open_incidents",] == 0
            assert clusterd["evertrain_clusterd_recoveries_total", "recover", "failed"] == 0
