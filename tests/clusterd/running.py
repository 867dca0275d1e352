"""ClusterD on an embedded API server, and jobs whose operator, scheduler and nodes are played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.acjob.job import Job as AscendJob
from evertrain.acjob.podgroup import pod_group
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.shell import ClusterD
from evertrain.clusterd.timeline.incident import Incident
from evertrain.kube.cache import Cache
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, POD_GROUP, Conflict, NotFound, Object
from evertrain.wire.faultinfo import ChipFault, DeviceInfo, encode_device
from tests.clusterd.client import Client, Signals
from tests.operator.acjobs import ascend_job, replica
from tests.operator.cluster import Cluster, background, cluster, until

PATIENCE = 120.0
STATUS = "ProcessRecoverStatus"
OPEN = Security(insecure=True)


@dataclass
class Running:
    cluster: Cluster
    clusterd: ClusterD
    address: str
    folder: Path
    stack: contextlib.AsyncExitStack
    """Ends what belongs to a test, the last first."""

    async def knows(self, job: str) -> bool:
        """With all its pods."""
        found = self.clusterd.hub.job(job)
        return found is not None and found.complete and found.status == "running"

    def incidents(self, job: str) -> list[Incident]:
        return self.clusterd.timeline.incidents(job)

    def client(self, job: str, **options: Any) -> Client:
        made = Client(self.address, job, **options)
        self.stack.push_async_callback(made.close)
        return made

    async def train(self, name: str = "bert", **options: Any) -> Training:
        made = Training(self, name, **options)
        await made.create()
        groups = Cache(self.cluster.kube, POD_GROUP)
        groups.listen(made.group_changed)
        await self.stack.enter_async_context(background(made.hands, groups.run))
        await asyncio.wait_for(groups.synced.wait(), PATIENCE)
        await until(made.is_known, PATIENCE)
        return made

    async def node(self, name: str, super_pod: int = 0, chips: int = 2) -> None:
        with contextlib.suppress(NotFound):
            await self.cluster.kube.get(NODE, name)
            return
        ready = {"type": "Ready", "status": "True"}
        made = await self.cluster.kube.create(NODE, {"metadata": {"name": name}})
        made["status"] = {"conditions": [ready], "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}
        await self.cluster.kube.replace_status(NODE, made)
        await self.devices(name, super_pod=super_pod, chips=chips)

    async def devices(self, node: str, *faults: ChipFault, super_pod: int = 0, chips: int = 2) -> None:
        """What a node publishes about its chips."""
        names = tuple(f"Ascend910-{chip}" for chip in range(chips))
        faulty = {fault.chip for fault in faults}
        info = DeviceInfo(
            available=tuple(name for name in names if name not in faulty),
            unhealthy=tuple(name for name in names if name in faulty),
            faults=faults,
            super_pod=super_pod,
            update_time=int(time.time()),
        )
        item: Object = {
            "metadata": {
                "name": f"mindx-dl-deviceinfo-{node}",
                "namespace": "kube-system",
                "labels": {"mx-consumer-cim": "true"},
            },
            "data": {"DeviceInfoCfg": encode_device(info)},
        }
        try:
            await self.cluster.kube.patch(CONFIG_MAP, item["metadata"]["name"], "kube-system", {"data": item["data"]})
        except NotFound:
            await self.cluster.kube.create(CONFIG_MAP, item)


class Training:
    """A job of some pods with some chips each; pod N is on node-N. Pods that are deleted go when `let_go`, and come
    again elsewhere when there are `spares`."""

    def __init__(
        self,
        running: Running,
        name: str,
        *,
        pods: int = 2,
        chips: int = 2,
        strategies: str = "retry,recover,dump,exit",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        group_annotations: Mapping[str, str] | None = None,
    ) -> None:
        self.running, self.name, self.pods, self.chips = running, name, pods, chips
        self.kube = running.cluster.kube
        self.strategies = strategies
        self.let_go = True
        self.spares = 1000
        self._labels = {"framework": "pytorch", **(labels or {})}
        self._annotations = {**({"recover-strategy": strategies} if strategies else {}), **(annotations or {})}
        self._group_annotations = dict(group_annotations or {})
        self._serial = itertools.count()
        self.item: Object = {}
        self.group = ""
        self._said: list[str] = []
        """Results that nobody has asked for yet."""

    @property
    def uid(self) -> str:
        return str(self.item["metadata"]["uid"])

    async def create(self) -> None:
        specs = {"Master": replica(chips=self.chips), "Worker": replica(self.pods - 1, chips=self.chips)}
        made = ascend_job(self.name, specs=specs, labels=self._labels, annotations=self._annotations)
        self.item = await self.kube.create(ASCEND_JOB, made)
        group = pod_group(AscendJob(self.item))
        group["metadata"]["annotations"] |= self._group_annotations
        self.group = str(group["metadata"]["name"])
        await self.kube.create(POD_GROUP, group)
        await self.kube.patch(POD_GROUP, self.group, "default", {"status": {"phase": "Running"}}, status=True)
        empty = {"RankList": [], "UpdateTime": 0, "RetryTime": 0, "FaultFlushing": False, "GracefulExit": 0}
        metadata = {"name": f"reset-config-{self.name}", "namespace": "default", "labels": {"reset": "true"}}
        data = {"reset.json": json.dumps({**empty, "RestartFaultProcess": False}), "checkCode": ""}
        await self.kube.create(CONFIG_MAP, {"metadata": metadata, "data": data})
        for rank in range(self.pods):
            await self.pod(rank, f"{self.name}-node-{rank}")

    async def is_known(self) -> bool:
        return await self.running.knows(self.uid)

    async def pod(self, rank: int, node: str, suffix: str = "", **annotations: str) -> Object:
        await self.running.node(node, chips=self.chips)
        kind, index = ("master", 0) if rank == 0 else ("worker", rank - 1)
        name = f"{self.name}-{kind}-{index}{suffix}"
        devices = [{"device_id": str(chip), "device_ip": f"10.1.{rank}.{chip}"} for chip in range(self.chips)]
        real = ",".join(f"Ascend910-{chip}" for chip in range(self.chips))
        configuration = {"pod_name": name, "server_id": node, "host_ip": "10.0.0.1", "devices": devices}
        template = AscendJob(self.item).template("Master")
        item: Object = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "labels": {
                    **self._labels,
                    "training.kubeflow.org/operator-name": "ascendjob-controller",
                    "training.kubeflow.org/job-name": self.name,
                    "training.kubeflow.org/replica-type": kind,
                    "training.kubeflow.org/replica-index": str(index),
                    "job-name": self.name,
                },
                "annotations": {
                    "hccl/rankIndex": str(rank),
                    "scheduling.k8s.io/group-name": self.group,
                    "ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps(configuration),
                    "huawei.com/AscendReal": real,
                    **annotations,
                },
                "ownerReferences": [AscendJob(self.item).owner_reference()],
            },
            "spec": {**template["spec"], "nodeName": node, "restartPolicy": "Never"},
        }
        await self.kube.create(POD, item)
        status = {"phase": "Running", "podIP": f"10.2.0.{rank}", "hostIP": "10.0.0.1"}
        return await self.kube.patch(POD, name, "default", {"status": status}, status=True)

    async def present(self) -> list[Object]:
        listed = (await self.kube.list(POD, "default", labels=f"job-name={self.name}")).items
        return [pod for pod in listed if pod["metadata"]["annotations"].get("podType") != "backup"]

    async def uids(self) -> dict[int, str]:
        found = await self.present()
        return {int(pod["metadata"]["annotations"]["hccl/rankIndex"]): pod["metadata"]["uid"] for pod in found}

    async def hands(self) -> None:
        """Of nodes, that end pods which are to go; and of operator and scheduler, that make others."""
        while True:
            pods = await self.present()
            for pod in pods if self.let_go else ():
                if pod["metadata"].get("deletionTimestamp"):
                    await self.end(pod)
            ranks = {int(pod["metadata"]["annotations"]["hccl/rankIndex"]) for pod in pods}
            for rank in sorted(set(range(self.pods)) - ranks):
                if self.spares > 0:
                    self.spares -= 1
                    await self.pod(rank, f"{self.name}-spare-{next(self._serial)}")
            await asyncio.sleep(0.02)

    async def end(self, pod: Object) -> None:
        with contextlib.suppress(NotFound, Conflict):
            await self.kube.delete(POD, pod["metadata"]["name"], "default", uid=pod["metadata"]["uid"], grace=0)

    async def replaced(self, before: Mapping[int, str], *ranks: int) -> None:
        """Until these pods are others than before, and only these."""

        async def done() -> bool:
            now = await self.uids()
            return len(now) == self.pods and all(now[rank] != before[rank] for rank in ranks)

        await until(done, PATIENCE)
        now = await self.uids()
        assert {rank for rank in now if now[rank] != before[rank]} == set(ranks)

    async def join(self) -> tuple[Client, Signals]:
        client = self.running.client(self.uid)
        return client, await client.join()

    # What ClusterD writes.

    async def group_now(self) -> Object:
        return await self.kube.get(POD_GROUP, self.group, "default")

    async def annotate_group(self, **annotations: str | None) -> None:
        await self.kube.patch(POD_GROUP, self.group, "default", {"metadata": {"annotations": annotations}})

    def group_changed(self, before: Object | None, after: Object | None) -> None:
        if after is not None and after["metadata"]["name"] == self.group:
            status = after["metadata"].get("annotations", {}).get(STATUS)
            if status is not None and self._said[-1:] != [status]:
                self._said.append(status)

    async def reported(self, status: str) -> None:
        """Until the platform has read this about the recovery: it watches, for the next result may follow at once."""

        async def done() -> bool:
            if status in self._said:
                del self._said[: self._said.index(status) + 1]
                return True
            return (await self.group_now())["metadata"].get("annotations", {}).get(STATUS) == status

        await until(done, PATIENCE)

    async def reset(self) -> dict[str, Any]:
        found = await self.kube.get(CONFIG_MAP, f"reset-config-{self.name}", "default")
        decoded: dict[str, Any] = json.loads(found["data"]["reset.json"])
        return decoded

    async def reset_is(self, **values: object) -> None:
        async def done() -> bool:
            now = await self.reset()
            ranks = [rank["RankId"] for rank in now.pop("RankList")]
            return all({**now, "ranks": ranks}[key] == value for key, value in values.items())

        try:
            await until(done, PATIENCE)
        except TimeoutError:
            raise AssertionError(f"reset.json is {await self.reset()}, not {values}") from None

    async def ended(self, outcome: bool | None = None) -> Any:
        """Until the recovery is over; what is in the timeline about it."""

        async def done() -> bool:
            found = self.running.incidents(self.uid)
            return bool(found) and found[-1].closed

        try:
            await until(done, PATIENCE)
        except TimeoutError:
            raise AssertionError(f"{self.running.incidents(self.uid)}") from None
        incident = self.running.incidents(self.uid)[-1]
        assert sum(duration for _, duration in incident.durations) == incident.total_ms
        assert outcome is None or incident.ok == outcome, incident
        return incident


@contextlib.asynccontextmanager
async def running(folder: Path, security: Security = OPEN) -> AsyncIterator[Running]:
    async with cluster(folder) as server, leading(server, folder, security) as found:
        yield found


@contextlib.asynccontextmanager
async def leading(server: Cluster, folder: Path, security: Security = OPEN) -> AsyncIterator[Running]:
    """On a cluster that others may have led before."""
    kube = server.client()
    clusterd = ClusterD(kube, ["127.0.0.1:0"], security, timeline=folder / "timeline.db")
    try:
        async with background(clusterd.run), contextlib.AsyncExitStack() as stack:
            async with aio.timeout(PATIENCE):
                await clusterd.ready.wait()
            yield Running(server, clusterd, f"127.0.0.1:{clusterd.port}", folder, stack)
    finally:
        await kube.close()
