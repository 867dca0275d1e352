"""The Config service: parts of a MindIE service hear over gRPC who is in it, whenever that changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from evertrain.acjob.job import Job as AscendJob
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, Object
from tests.clusterd.client import Client, Stream
from tests.clusterd.running import Running, running
from tests.operator.acjobs import ascend_job, replica

PATIENCE = 120.0
SERVICE = "chat"


async def leader(clusterd: Running, app: str, number: int, namespace: str = "default") -> Object:
    """A coordinator or controller: a job with one pod, that has no address yet."""
    kube, name = clusterd.cluster.kube, f"{SERVICE}-{app.rpartition('-')[2]}"
    labels = {"framework": "pytorch", "jobID": SERVICE, "app": app}
    made = ascend_job(name, specs={"Master": replica(chips=0)}, labels=labels)
    made["metadata"]["namespace"] = namespace
    job = await kube.create(ASCEND_JOB, made)
    return await new_pod(clusterd, job, f"{name}-master-{number}")


async def new_pod(clusterd: Running, job: Object, name: str) -> Object:
    source = AscendJob(job)
    metadata = {
        "name": name,
        "namespace": source.namespace,
        "labels": {"training.kubeflow.org/operator-name": "ascendjob-controller"},
        "annotations": {"hccl/rankIndex": "0"},
        "ownerReferences": [source.owner_reference()],
    }
    return await clusterd.cluster.kube.create(POD, {"metadata": metadata, "spec": source.template("Master")["spec"]})


async def address(clusterd: Running, pod: Object, number: int) -> None:
    status = {"phase": "Running", "hostIP": f"10.0.0.{number}", "podIP": f"172.16.0.{number}"}
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    await clusterd.cluster.kube.patch(POD, name, namespace, {"status": status}, status=True)


def table(number: int) -> str:
    device = {"device_id": "0", "device_ip": "192.168.1.1", "rank_id": "0"}
    server = {"device": [device], "server_id": f"10.0.1.{number}", "container_ip": f"172.16.1.{number}"}
    return json.dumps({"status": "completed", "server_list": [server], "server_count": "1", "version": "1.0"})


async def server(clusterd: Running, number: int, content: str) -> None:
    metadata = {
        "name": f"rings-config-{SERVICE}-server-{number}",
        "namespace": "default",
        "labels": {"jobID": SERVICE, "mx-consumer-cim": "true", "grt-group/deploy-server": "1"},
    }
    await clusterd.cluster.kube.create(CONFIG_MAP, {"metadata": metadata, "data": {"hccl.json": content}})


async def listen(clusterd: Running, role: str = "controller", job: str = SERVICE) -> Stream:
    client: Client = clusterd.client(job)
    status = await client.call("Config/Register", jobId=job, role=role)
    assert status.code == 0
    return client.stream("Config/SubscribeRankTable", jobId=job, role=role)


async def servers(stream: Stream) -> list[list[str]]:
    """The addresses in the next table, by group."""
    async with asyncio.timeout(PATIENCE):
        message: Any = await stream.next(PATIENCE)
    assert message.jobId == SERVICE
    found = json.loads(message.rankTable)
    assert (found["version"], found["status"]) == ("1.0", "completed")
    return [[each["server_id"] for each in group["server_list"]] for group in found["server_group_list"]]


async def test_a_service_comes_together_and_changes(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        kube = clusterd.cluster.kube
        stream = await listen(clusterd)
        coordinator = await leader(clusterd, "mindie-ms-coordinator", 0)
        controller = await leader(clusterd, "mindie-ms-controller", 0)
        await server(clusterd, 0, '{"status":"initializing"}')
        await server(clusterd, 1, table(1))
        await server(clusterd, 2, "this is no table")
        await address(clusterd, controller, 2)
        await address(clusterd, coordinator, 1)
        assert await servers(stream) == [["10.0.0.1"], ["10.0.0.2"], ["10.0.1.1"]]

        # The other server is ready; who comes later hears all of it at once.
        await kube.patch(CONFIG_MAP, f"rings-config-{SERVICE}-server-0", "default", {"data": {"hccl.json": table(0)}})
        both = [["10.0.0.1"], ["10.0.0.2"], ["10.0.1.0"], ["10.0.1.1"]]
        assert await servers(stream) == both
        assert await servers(await listen(clusterd, "coordinator")) == both

        # A controller is replaced: nothing is told until the new one has its address.
        uid, name = controller["metadata"]["uid"], controller["metadata"]["name"]
        await kube.delete(POD, name, "default", uid=uid, grace=0)
        job = await kube.get(ASCEND_JOB, f"{SERVICE}-controller", "default")
        await address(clusterd, await new_pod(clusterd, job, f"{SERVICE}-controller-master-1"), 9)
        assert await servers(stream) == [["10.0.0.1"], ["10.0.0.9"], ["10.0.1.0"], ["10.0.1.1"]]

        # A server goes.
        await kube.delete(CONFIG_MAP, f"rings-config-{SERVICE}-server-0", "default")
        assert await servers(stream) == [["10.0.0.1"], ["10.0.0.9"], ["10.0.1.1"]]


async def test_nobody_hears_of_another_service(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        other = await listen(clusterd, job="translate")
        for number, app in enumerate(("mindie-ms-coordinator", "mindie-ms-controller"), 1):
            await address(clusterd, await leader(clusterd, app, 0), number)
        stream = await listen(clusterd)
        await server(clusterd, 0, table(0))
        assert len(await servers(stream)) == 3
        reading = asyncio.ensure_future(other.next(PATIENCE))
        await server(clusterd, 1, table(1))
        assert len(await servers(stream)) == 4
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
