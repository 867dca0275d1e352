"""The Config service: parts of a MindIE service hear over gRPC who is in it, whenever that changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from evertrain import aio
from evertrain.acjob.job import Job as AscendJob
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.certificates import Certificates
from evertrain.clusterd.services.tokens import Tokens
from evertrain.kube import namespaces
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, Object
from tests.certificates import Authority
from tests.clusterd.client import Client, Stream
from tests.clusterd.running import Running, running
from tests.operator.acjobs import ascend_job, replica
from tests.operator.cluster import until

PATIENCE = 120.0
SERVICE = "chat"
TOKENS = Tokens([b"a secret that nobody may see"])


async def leader(clusterd: Running, app: str, number: int, namespace: str = "default") -> Object:
    """A coordinator or controller: a job with one pod, that has no address yet."""
    job = await part(clusterd, app, namespace)
    return await new_pod(clusterd, job, f"{job['metadata']['name']}-master-{number}")


async def part(clusterd: Running, app: str, namespace: str = "default") -> Object:
    """The job of one."""
    labels = {"framework": "pytorch", "jobID": SERVICE, "app": app}
    made = ascend_job(f"{SERVICE}-{app.rpartition('-')[2]}", specs={"Master": replica(chips=0)}, labels=labels)
    made["metadata"]["namespace"] = namespace
    return await clusterd.cluster.kube.create(ASCEND_JOB, made)


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


async def server(clusterd: Running, number: int, content: str, namespace: str = "default") -> None:
    metadata = {
        "name": f"rings-config-{SERVICE}-server-{number}",
        "namespace": namespace,
        "labels": {"jobID": SERVICE, "mx-consumer-cim": "true", "grt-group/deploy-server": "1"},
    }
    await clusterd.cluster.kube.create(CONFIG_MAP, {"metadata": metadata, "data": {"hccl.json": content}})


async def listen(clusterd: Running, role: str = "controller", job: str = SERVICE, **options: Any) -> Stream:
    client: Client = clusterd.client(job, **options)
    status = await client.call("Config/Register", jobId=job, role=role)
    assert status.code == 0
    return client.stream("Config/SubscribeRankTable", jobId=job, role=role)


async def servers(stream: Stream) -> list[list[str]]:
    """The addresses in the next table, by group."""
    async with aio.timeout(PATIENCE):
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


# Who may hear it.


def certified(tmp_path: Path) -> tuple[Certificates, grpc.ChannelCredentials]:
    """Of ClusterD, and of a pod."""
    authority = Authority(tmp_path)
    ours, theirs = authority.issue("server"), authority.issue("client")
    files = [Path(each).read_bytes() for each in (theirs.ca, theirs.key, theirs.cert)]
    return Certificates(Path(ours.ca), Path(ours.cert), Path(ours.key)), grpc.ssl_channel_credentials(*files)


@pytest.mark.parametrize("by", ["plain text", "tokens", "certificates", "certificates and tokens"])
async def test_a_part_hears_of_its_service_however_clusterd_is_secured(tmp_path: Path, by: str) -> None:
    """As a part calls: by the service's name, which is its MINDX_TASK_ID, with what its own job has to show."""
    ours, theirs = certified(tmp_path) if "certificates" in by else (None, None)
    tokens = TOKENS if "tokens" in by else None
    async with running(tmp_path, Security(ours, tokens, insecure=by == "plain text")) as clusterd:
        uids = {}
        for number, app in enumerate(("mindie-ms-coordinator", "mindie-ms-controller"), 1):
            pod = await leader(clusterd, app, 0)
            await address(clusterd, pod, number)
            uids[app] = pod["metadata"]["ownerReferences"][0]["uid"]
        await server(clusterd, 0, table(0))
        await until(lambda: knows(clusterd, *uids.values()), PATIENCE)
        expected = [["10.0.0.1"], ["10.0.0.2"], ["10.0.1.0"]]
        for role, uid in zip(("coordinator", "controller"), uids.values(), strict=True):
            token = TOKENS.job(uid) if tokens else ""
            assert await servers(await listen(clusterd, role, token=token, credentials=theirs)) == expected
        # Faults are asked for by that name, too.
        client = clusterd.client(SERVICE, token=token, credentials=theirs)
        assert (await client.call("Fault/Register", jobId=SERVICE, role="controller")).code == 200
        for refused in ("", TOKENS.job("of another service")) if tokens else ():
            stranger = clusterd.client(SERVICE, token=refused, credentials=theirs)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stranger.call("Config/Register", jobId=SERVICE, role="controller")
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
            stream = stranger.stream("Config/SubscribeRankTable", jobId=SERVICE, role="controller")
            assert (await stream.error())[0] == grpc.StatusCode.UNAUTHENTICATED


async def knows(clusterd: Running, *jobs: str) -> bool:
    return all(clusterd.clusterd.hub.job(uid) is not None for uid in jobs)


async def test_services_of_the_same_name_in_two_namespaces_hear_nothing_of_each_other(tmp_path: Path) -> None:
    async with running(tmp_path, Security(tokens=TOKENS)) as clusterd:
        streams = {}
        for number, namespace in enumerate(("default", "other")):
            await namespaces.make(clusterd.cluster.kube, namespace)
            for place, app in enumerate(("mindie-ms-coordinator", "mindie-ms-controller"), 1):
                pod = await leader(clusterd, app, 0, namespace)
                await address(clusterd, pod, 10 * number + place)
            uid = pod["metadata"]["ownerReferences"][0]["uid"]
            await until(lambda uid=uid: knows(clusterd, uid), PATIENCE)
            streams[namespace] = await listen(clusterd, token=TOKENS.job(uid))
            await streams[namespace].there()
        await server(clusterd, 0, table(0))
        await server(clusterd, 1, table(1), "other")
        assert await servers(streams["default"]) == [["10.0.0.1"], ["10.0.0.2"], ["10.0.1.0"]]
        assert await servers(streams["other"]) == [["10.0.0.11"], ["10.0.0.12"], ["10.0.1.1"]]
