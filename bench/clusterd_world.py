"""A cluster on paper for `bench.clusterd`: an embedded API server that holds jobs, pods and nodes which nobody runs.

    python -m bench.clusterd_world FOLDER JOBS

Pods that are deleted are gone at once, and come again in their places. Says on its standard output how to reach it and
which jobs there are. For each line on its standard input it says how many requests of each kind it has answered since
the last, and the longest time between two renewals of ClusterD's Lease. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.acjob import crd
from evertrain.acjob.job import Job
from evertrain.acjob.podgroup import pod_group
from evertrain.acjob.pods import Surroundings, new_pod
from evertrain.embedded import volcano
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.api.server import ApiServer
from evertrain.embedded.certificates import credentials, write_kubeconfig
from evertrain.embedded.schema import Registry, Resource
from evertrain.embedded.store import Store
from evertrain.kube import namespaces
from evertrain.kube.cache import Cache
from evertrain.kube.port import (
    ASCEND_JOB,
    CONFIG_MAP,
    CUSTOM_RESOURCE_DEFINITION,
    NODE,
    POD,
    POD_GROUP,
    Conflict,
    NotFound,
    Object,
)
from evertrain.wire.faultinfo import (
    DEVICE_INFO,
    DEVICE_NAMESPACE,
    DEVICE_PREFIX,
    LABELS,
    ChipFault,
    DeviceInfo,
    encode_device,
)

PODS, CHIPS, NODE_CHIPS = 5, 2, 8
"""Of a job, of a pod, and of a node."""
RANKS = PODS * CHIPS
PREFIXES = (
    "clusterd-recovery-", "clusterd-recoveries-", "recovery-timeline-", "reset-config-", "cluster-info-",
    "job-summary-", DEVICE_PREFIX,
)  # fmt: skip
"""Of ConfigMaps that are counted by themselves."""
STRATEGIES = "retry,recover-in-place,recover,dump,exit"


class Counting(Api):
    """Remembers what it was asked for."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.counts: collections.Counter[str] = collections.Counter()
        self._led = 0.0
        self._unled = 0.0

    def get(self, resource: Resource, namespace: str, name: str) -> Any:
        self._count("get", resource, name)
        return super().get(resource, namespace, name)

    def create(self, resource: Resource, namespace: str, item: Any, *rest: Any) -> Any:
        self._count("create", resource, str(item["metadata"].get("name")))
        return super().create(resource, namespace, item, *rest)

    def update(self, resource: Resource, namespace: str, name: str, *rest: Any, **options: Any) -> Any:
        self._count("update", resource, name)
        if resource.plural == "leases":
            self._renewed()
        return super().update(resource, namespace, name, *rest, **options)

    def patch(self, resource: Resource, namespace: str, name: str, *rest: Any, **options: Any) -> Any:
        self._count("patch", resource, name)
        return super().patch(resource, namespace, name, *rest, **options)

    def delete(self, resource: Resource, namespace: str, name: str, *rest: Any, **options: Any) -> Any:
        self._count("delete", resource, name)
        return super().delete(resource, namespace, name, *rest, **options)

    def _renewed(self) -> None:
        now = time.monotonic()
        self._unled = max(self._unled, now - self._led if self._led else 0.0)
        self._led = now

    def told(self) -> Object:
        """Since the last time."""
        if self._led:
            self._renewed()
        found = {"counts": dict(self.counts), "unled": self._unled}
        self.counts.clear()
        self._unled = 0.0
        return found

    def _count(self, verb: str, resource: Resource, name: str) -> None:
        what = resource.plural
        if resource.plural == "configmaps":
            what = next((prefix.rstrip("-") for prefix in PREFIXES if name.startswith(prefix)), what)
        self.counts[f"{verb} {what}"] += 1


def node_of(job: int, pod: int) -> tuple[str, int]:
    """Where a pod is, and the first of its chips there."""
    number = job * PODS + pod
    each = NODE_CHIPS // CHIPS
    return f"node-{number // each}", number % each * CHIPS


def job(number: int) -> Object:
    chips = {"huawei.com/Ascend910": CHIPS}
    container = {"name": "ascend", "image": "none", "resources": {"requests": chips, "limits": chips}}

    def replica(count: int) -> Object:
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}

    return {
        "apiVersion": ASCEND_JOB.api_version,
        "kind": ASCEND_JOB.kind,
        "metadata": {
            "name": f"job-{number}",
            "namespace": "default",
            "labels": {"framework": "pytorch"},
            "annotations": {"recover-strategy": STRATEGIES},
        },
        "spec": {
            "runPolicy": {"schedulingPolicy": {"minAvailable": PODS, "queue": "default"}},
            "replicaSpecs": {"Master": replica(1), "Worker": replica(PODS - 1)},
        },
    }


def devices(faults: tuple[ChipFault, ...] = ()) -> Object:
    """The data of a node's device-info."""
    names = [f"Ascend910-{chip}" for chip in range(NODE_CHIPS)]
    bad = {fault.chip for fault in faults}
    info = DeviceInfo(
        available=tuple(name for name in names if name not in bad),
        unhealthy=tuple(name for name in names if name in bad),
        faults=faults,
        update_time=int(time.time()),
    )
    return {DEVICE_INFO: encode_device(info)}


async def make_node(kube: LocalKube, name: str, number: int) -> None:
    address = f"10.0.{number // 250}.{number % 250 + 1}"
    await kube.create(NODE, {"metadata": {"name": name}})
    status = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "addresses": [{"type": "InternalIP", "address": address}],
    }
    await kube.patch(NODE, name, None, {"status": status}, status=True)
    metadata = {"name": DEVICE_PREFIX + name, "namespace": DEVICE_NAMESPACE, "labels": LABELS}
    await kube.create(CONFIG_MAP, {"metadata": metadata, "data": devices()})


async def make_job(kube: LocalKube, number: int) -> Job:
    item = await kube.create(ASCEND_JOB, job(number))
    made = Job(item)
    await kube.create(POD_GROUP, pod_group(made))
    await kube.patch(POD_GROUP, made.pod_group_name, "default", {"status": {"phase": "Running"}}, status=True)
    reset = {"RankList": [], "UpdateTime": 0, "RetryTime": 0, "FaultFlushing": False, "GracefulExit": 0}
    metadata = {"name": f"reset-config-{made.name}", "namespace": "default", "labels": {"reset": "true"}}
    data = {"reset.json": json.dumps({**reset, "RestartFaultProcess": False}), "checkCode": ""}
    await kube.create(CONFIG_MAP, {"metadata": metadata, "data": data})
    for index in range(PODS):
        await make_pod(kube, made, number, index)
    return made


async def make_pod(kube: LocalKube, job: Job, number: int, index: int) -> None:
    around = Surroundings(("10.96.0.1", "2222"), "10.96.0.2", 0, True)
    pod = new_pod(job, "Worker" if index else "Master", max(0, index - 1), around)
    name, (node, first) = pod["metadata"]["name"], node_of(number, index)
    chips = range(first, first + CHIPS)
    found = [{"device_id": str(chip), "device_ip": f"192.168.0.{chip}"} for chip in chips]
    configuration = {"pod_name": name, "server_id": node, "host_ip": "10.0.0.1", "devices": found}
    pod["metadata"]["annotations"] |= {
        "ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps(configuration),
        "huawei.com/AscendReal": ",".join(f"Ascend910-{chip}" for chip in chips),
    }
    pod["spec"]["nodeName"] = node
    await kube.create(POD, pod)
    status = {"phase": "Running", "podIP": f"172.16.{number // 250}.{number % 250}", "hostIP": "10.0.0.1"}
    await kube.patch(POD, name, "default", {"status": status}, status=True)


class Replacing:
    """The nodes, which end pods that are to go, and the operator, which makes others."""

    def __init__(self, kube: LocalKube, jobs: dict[str, tuple[int, Job]]) -> None:
        self._kube, self._jobs = kube, jobs
        self._cache = Cache(kube, POD, "default")
        self._work: asyncio.Queue[tuple[Object, bool]] = asyncio.Queue()
        self._cache.listen(self._seen)

    def _seen(self, before: Object | None, after: Object | None) -> None:
        if after is None and before is not None:
            self._work.put_nowait((before, True))
        elif after is not None and after["metadata"].get("deletionTimestamp"):
            self._work.put_nowait((after, False))

    async def run(self) -> None:
        watching = asyncio.create_task(self._cache.run())
        try:
            while True:
                pod, gone = await self._work.get()
                metadata = pod["metadata"]
                if gone:
                    number, job = self._jobs[metadata["ownerReferences"][0]["uid"]]
                    await make_pod(self._kube, job, number, int(metadata["annotations"]["hccl/rankIndex"]))
                else:
                    with contextlib.suppress(NotFound, Conflict):
                        await self._kube.delete(POD, metadata["name"], "default", uid=metadata["uid"], grace=0)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def serve(folder: Path, jobs: int) -> None:
    store = Store(folder / "objects.db")
    api = Counting(store, Registry.builtin())
    bootstrap(api)
    who = credentials(folder / "keys")
    server = ApiServer(api, who)
    await server.start()
    try:
        kube = LocalKube(api)
        for definition in [crd.definition(), *volcano.definitions()]:
            await kube.create(CUSTOM_RESOURCE_DEFINITION, definition)
        await namespaces.make(kube, "mindx-dl")
        for number in range(-(-jobs * PODS * CHIPS // NODE_CHIPS)):
            await make_node(kube, f"node-{number}", number)
        made = [await make_job(kube, number) for number in range(jobs)]
        replacing = asyncio.create_task(
            Replacing(kube, {job.uid: (number, job) for number, job in enumerate(made)}).run()
        )
        kubeconfig = folder / "kubeconfig"
        write_kubeconfig(kubeconfig, server.url, who)
        print(json.dumps({"kubeconfig": str(kubeconfig), "jobs": [job.uid for job in made]}), flush=True)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.readline():
            print(json.dumps(api.told()), flush=True)
        replacing.cancel()
        await asyncio.gather(replacing, return_exceptions=True)
    finally:
        await server.stop()
        store.close()


if __name__ == "__main__":
    aio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
