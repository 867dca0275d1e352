"""ClusterD as a part of the embedded cluster: pods find it, are let in with their job's token, and are led."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.clusterd.services.tokens import Tokens
from evertrain.embedded.cluster import CannotStart, Cluster, Settings
from evertrain.kube.client import Client as Kube
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, SECRET, SERVICE, NotFound, Object
from tests.clusterd.hub import PATIENCE
from tests.operator.acjobs import ascend_job, replica
from tests.operator.cluster import until
from tests.ports import free_port, free_ports

TRAINING = Path(__file__).parents[1] / "training.py"


@contextlib.asynccontextmanager
async def running(folder: Path, **settings: object) -> AsyncIterator[tuple[Cluster, Kube]]:
    async with Cluster(Settings(folder, **settings)) as here:  # type: ignore[arg-type]
        kube = Kube.from_kubeconfig(here.kubeconfig)
        try:
            yield here, kube
        finally:
            await kube.close()


def job(*arguments: str) -> Object:
    """Two pods; each says what it was told."""
    both = replica(1, chips=0)
    container = both["template"]["spec"]["containers"][0]
    container["command"] = [sys.executable, str(TRAINING), *arguments]
    strategy = {"recover-strategy": "retry,dump"}
    return ascend_job("train", annotations=strategy, specs={"Master": both, "Worker": both})


async def succeeded(kube: Kube, folder: Path) -> None:
    async def over() -> bool:
        conditions = ((await kube.get(ASCEND_JOB, "train", "default")).get("status") or {}).get("conditions") or []
        assert not any(each["type"] == "Failed" for each in conditions), said(folder)
        return any(each["type"] == "Succeeded" and each["status"] == "True" for each in conditions)

    try:
        await until(over, PATIENCE)
    except TimeoutError:
        raise AssertionError(said(folder)) from None


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*.log")) if path.is_file())


async def test_the_pods_of_a_job_find_it_and_are_led(tmp_path: Path):
    async with running(tmp_path) as (here, kube):
        service = await kube.get(SERVICE, "clusterd-grpc-svc", "mindx-dl")
        port = int(here.clusterd.rpartition(":")[2])
        assert [each["port"] for each in service["spec"]["ports"]] == [port] and port != 8899
        made = await kube.create(ASCEND_JOB, job())
        await succeeded(kube, tmp_path)
        uid = made["metadata"]["uid"]
        secret = await kube.get(SECRET, f"train-clusterd-token-{uid}", "default")
        assert secret["metadata"]["ownerReferences"][0]["uid"] == uid
        token = Tokens.read((tmp_path / "keys" / "clusterd-secret").read_bytes()).job(uid)
        for pod in (await kube.list(POD, "default")).items:
            assert token not in str(pod), "a token stands in a Secret, not in a pod"
        async with aio.timeout(90):  # what was kept is not kept for longer than it takes
            while (await kube.list(CONFIG_MAP, "default", labels="evertrain.dev/clusterd-recovery=true")).items:
                await asyncio.sleep(0.05)


async def test_without_tokens_if_the_user_wants_it_so(tmp_path: Path):
    async with running(tmp_path, clusterd_insecure=True) as (_, kube):
        await kube.create(ASCEND_JOB, job("--insecure"))
        await succeeded(kube, tmp_path)
        assert (await kube.list(SECRET, "default")).items == []


async def test_without_it_nobody_is_sent_there(tmp_path: Path):
    async with running(tmp_path) as (_, kube):
        await kube.get(SERVICE, "clusterd-grpc-svc", "mindx-dl")
    async with running(tmp_path, clusterd="") as (here, kube):
        assert here.clusterd == ""
        with pytest.raises(NotFound):
            await kube.get(SERVICE, "clusterd-grpc-svc", "mindx-dl")


async def test_the_port_of_another_cluster_is_named(tmp_path: Path):
    (port,) = free_ports(1)
    async with running(tmp_path / "first", clusterd=f"127.0.0.1:{port}"):
        with pytest.raises(CannotStart) as refused:
            async with running(tmp_path / "second", clusterd=f"127.0.0.1:{port}"):
                pass
    text = str(refused.value)
    assert f"port {port} of 127.0.0.1 is in use" in text and "--clusterd-addr" in text and "--no-clusterd" in text


async def test_a_port_that_nobody_asked_for_gives_way_to_another_cluster(tmp_path: Path):
    address = f"127.0.0.1:{free_port()}"
    async with running(tmp_path / "first", clusterd=address, clusterd_elsewhere=True) as (first, _):
        assert first.clusterd == address
        async with running(tmp_path / "second", clusterd=address, clusterd_elsewhere=True) as (second, kube):
            service = await kube.get(SERVICE, "clusterd-grpc-svc", "mindx-dl")
            assert service["metadata"]["annotations"]["evertrain.dev/address"] == second.clusterd != address


async def test_who_comes_while_it_is_started_again_waits(tmp_path: Path):
    """The port is the cluster's, not ClusterD's."""
    async with running(tmp_path) as (here, _):
        host, _, port = here.clusterd.rpartition(":")
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == "ClusterD"]
        assert len(tasks) == 1
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with socket.create_connection((host, int(port)), timeout=PATIENCE):
            pass
