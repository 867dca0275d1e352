"""The cluster is killed in each phase of a pod's start: nothing is left of it or runs twice, and the next one works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evertrain import aio
from evertrain.embedded import kernel
from evertrain.embedded.cluster import Cluster
from evertrain.embedded.network.rtnetlink import Rtnetlink
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client
from evertrain.kube.port import POD
from tests.embedded.doomed import HERE, PHASES, VICTIM, pod, settings
from tests.embedded.networks import needs_networks
from tests.launch.harness import ROOT
from tests.leftovers import TEST_ID

pytestmark = needs_networks
PATIENCE = 60.0
IN_THE_GATE = ("has its network", "its first cable", "its mounts", "its program")


@pytest.fixture
def machine() -> Iterator[None]:
    """A network in which nobody else does anything, so that what is left there is ours. It takes root, and for others
    the cluster touches no network but those that it makes."""
    if os.geteuid() != 0:
        yield
        return
    with open("/proc/thread-self/ns/net") as home:
        kernel.unshare(kernel.CLONE_NEWNET)
        try:
            Rtnetlink().switch("lo", True)
            yield
        finally:
            kernel.enter(home.fileno(), kernel.CLONE_NEWNET)


def network() -> list[str]:
    """Links, addresses and routes of this machine."""
    net = Path("/proc/thread-self/net")
    links = [line.split(":")[0].strip() for line in (net / "dev").read_text().splitlines()[2:]]
    return [*links, (net / "fib_trie").read_text(), (net / "route").read_text()]


def parts(folder: Path) -> list[psutil.Process]:
    """Processes of a cluster of this test, and of its pods."""
    mark, found = os.environ[TEST_ID], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            named = any(str(folder) in word for word in process.cmdline())
            if process.pid != os.getpid() and (named or process.environ().get(TEST_ID) == mark):
                found.append(process)
    return found


async def killed_at(folder: Path, phase: str) -> None:
    os.mkfifo(folder / HERE)
    process = subprocess.Popen([sys.executable, "-m", "tests.embedded.doomed", str(folder), phase], cwd=ROOT)
    try:
        reading = asyncio.create_task(asyncio.to_thread((folder / HERE).read_text))
        ended = asyncio.create_task(asyncio.to_thread(process.wait))
        await asyncio.wait([reading, ended], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert reading.done() and reading.result() == phase, "it did not get there"
        process.kill()
        assert await ended == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        if not reading.done():  # a reader waits for a writer, for ever
            os.close(os.open(folder / HERE, os.O_RDWR | os.O_NONBLOCK))


async def next_one(folder: Path) -> str:
    """Starts, comes to the end of the pod, starts another one. The phase in which the first pod ended."""
    async with Cluster(settings(folder)) as cluster:
        assert cluster.taken_over
        kube = Client.from_kubeconfig(cluster.kubeconfig)
        pods = Cache(kube, POD, "default")
        watching = asyncio.create_task(pods.run())
        try:
            await kube.create(POD, pod("next", "grep -q eth0 /proc/net/dev && grep -q eth1 /proc/net/dev"))

            def phase(name: str) -> str:
                return str(((pods.get(name, "default") or {}).get("status") or {}).get("phase"))

            for name in (VICTIM, "next"):
                over = await pods.until(lambda name=name: phase(name) in ("Succeeded", "Failed"), PATIENCE)
                assert over, f"{name}: {pods.get(name, 'default')}"
            assert phase("next") == "Succeeded", pods.get("next", "default")
            return phase(VICTIM)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await kube.close()


@pytest.mark.parametrize(
    "phase", [phase if phase in IN_THE_GATE else pytest.param(phase, marks=pytest.mark.matrix) for phase in PHASES]
)
def test_the_cluster_is_killed_while_a_pod_starts(machine: None, tmp_path: Path, phase: str) -> None:
    before = network()

    async def scenario() -> None:
        await killed_at(tmp_path, phase)
        async with aio.timeout(PATIENCE):
            while left := parts(tmp_path):
                await asyncio.sleep(0.02)
            while network() != before:
                await asyncio.sleep(0.02)
        assert not left
        ended = await next_one(tmp_path)
        record = tmp_path / "record"
        runs = record.read_text().split() if record.exists() else []
        assert len(runs) <= 1, "it was run twice"
        assert ended == "Failed" or runs, "it can't have succeeded without having run"
        async with aio.timeout(PATIENCE):
            while parts(tmp_path) or network() != before:
                await asyncio.sleep(0.02)

    aio.run(scenario())
