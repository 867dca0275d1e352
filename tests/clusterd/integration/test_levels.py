"""A fault of each level on the whole cluster: noded publishes it, ClusterD passes it on, pods and nodes feel it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.embedded.cluster import Cluster, Settings
from evertrain.faultcodes import levels
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, AlreadyExists, Object
from evertrain.noded import injected
from evertrain.noded.faults import AnyFault, ChipFault, NodeFault
from evertrain.wire import clusterinfo
from tests.operator.acjobs import ascend_job, on_port

PATIENCE = 90.0
FORCE = {"fault-scheduling": "force", "pod-rescheduling": "on"}


class World:
    def __init__(self, kube: Client) -> None:
        self.kube = kube
        self.pods = Cache(kube, POD, "default")
        self.nodes = Cache(kube, NODE)
        self._ports = itertools.count(2222)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with aio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(KeyError):
                    if condition():
                        return
                await asyncio.sleep(0.05)

    async def submit(self, name: str, chips: int = 1, **labels: str) -> None:
        item = ascend_job(name, chips=chips, labels=FORCE | labels)
        del item["spec"]["replicaSpecs"]["Master"]
        item["metadata"]["labels"]["framework"] = "mindspore"  # whose jobs may have workers only
        spec = item["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
        spec["containers"][0]["command"] = ["sleep", "600"]
        await self.kube.create(ASCEND_JOB, on_port(next(self._ports), item))
        await self.until(lambda: self.phase(name) == "Running")

    def pod(self, job: str) -> Object:
        found = self.pods.get(f"{job}-worker-0", "default")
        if found is None:
            raise KeyError(job)
        return found

    def phase(self, job: str) -> str:
        pod = self.pod(job)
        return "" if pod["metadata"].get("deletionTimestamp") else str(pod["status"].get("phase"))

    def place(self, job: str) -> tuple[str, int]:
        pod = self.pod(job)
        chip = pod["metadata"]["annotations"]["huawei.com/Ascend910"].rpartition("-")[2]
        return pod["spec"]["nodeName"], int(chip)

    def uid(self, job: str) -> str:
        return str(self.pod(job)["metadata"]["uid"])

    def taints(self, node: str) -> list[str]:
        taints = (self.nodes.get(node) or {}).get("spec", {}).get("taints") or []
        return [f"{taint['key']}={taint.get('value')}" for taint in taints]

    async def inject(self, node: str, *faults: AnyFault) -> None:
        item = injected.config_map(node, faults)
        with contextlib.suppress(AlreadyExists):
            await self.kube.create(CONFIG_MAP, item)
            return
        await self.kube.patch(CONFIG_MAP, item["metadata"]["name"], injected.NAMESPACE, {"data": item["data"]})

    async def has_settled(self) -> None:
        """A fault elsewhere takes the same way as all before it, and has done what it does."""
        await self.submit("fence")
        uid, (node, chip) = self.uid("fence"), self.place("fence")
        await self.inject(node, fault(chip, levels.SEPARATE_CHIP))
        await self.until(lambda: self.uid("fence") != uid and self.phase("fence") == "Running")
        await self.inject(node)
        await self.kube.delete(ASCEND_JOB, "fence", "default")
        await self.until(lambda: self.pods.get("fence-worker-0", "default") is None)


def fault(chip: int, level: str) -> ChipFault:
    return ChipFault(chip=chip, code="80E3A201", since_ms=int(time.time() * 1000), level=level)


@contextlib.asynccontextmanager
async def world(folder: Path, nodes: int = 3) -> AsyncIterator[World]:
    async with Cluster(Settings(folder, nodes=nodes, npus=2)) as cluster:
        kube = Client.from_kubeconfig(cluster.kubeconfig)
        found = World(kube)
        tasks = [asyncio.create_task(cache.run()) for cache in (found.pods, found.nodes)]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await kube.close()


@pytest.mark.parametrize(
    "level",
    [levels.RESTART_REQUEST, levels.RESTART_BUSINESS, levels.FREE_RESTART, levels.RESTART, levels.SEPARATE_CHIP],
)
async def test_a_chip_that_is_not_well_loses_its_pod_and_gets_none_until_it_is(tmp_path: Path, level: str) -> None:
    async with world(tmp_path, nodes=2) as found:
        await found.submit("job")
        uid, (node, chip) = found.uid("job"), found.place("job")
        await found.inject(node, fault(chip, level))
        await found.until(lambda: found.uid("job") != uid and found.phase("job") == "Running")
        assert found.place("job") != (node, chip)
        for number in range(2):  # all other chips
            await found.submit(f"more-{number}")
        places = {found.place(f"more-{number}") for number in range(2)}
        assert (node, chip) not in places
        await found.inject(node)
        await found.submit("last")
        assert found.place("last") == (node, chip)


async def test_a_report_that_somebody_deletes_or_changes_is_there_again(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=1) as found:
        reports = Cache(found.kube, CONFIG_MAP, clusterinfo.NAMESPACE)
        watching = asyncio.create_task(reports.run())

        def told() -> Any:
            item = reports.get("cluster-info-device-0", clusterinfo.NAMESPACE)
            return item and "80E3A201" in item["data"]["cluster-info-device-0"] and item["metadata"]

        try:
            await found.inject("node-0", fault(0, levels.SEPARATE_CHIP))
            await found.until(told)
            uid = told()["uid"]
            await found.kube.delete(CONFIG_MAP, "cluster-info-device-0", clusterinfo.NAMESPACE)
            await found.until(lambda: told() and told()["uid"] != uid)
            empty = {"data": {"cluster-info-device-0": "{}"}}
            changed = await found.kube.patch(CONFIG_MAP, "cluster-info-device-0", clusterinfo.NAMESPACE, empty)
            version = int(changed["metadata"]["resourceVersion"])
            await found.until(lambda: told() and int(told()["resourceVersion"]) > version)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("level", [levels.NOT_HANDLE, levels.SUB_HEALTH, levels.PRE_SEPARATE_CHIP])
async def test_a_chip_that_is_good_enough_keeps_its_pod(tmp_path: Path, level: str) -> None:
    async with world(tmp_path) as found:
        await found.submit("job")
        uid, (node, chip) = found.uid("job"), found.place("job")
        await found.inject(node, fault(chip, level))
        await found.has_settled()
        assert found.uid("job") == uid
        assert found.phase("job") == "Running"


@pytest.mark.parametrize("strategy", ["forceExit", "graceExit"])
async def test_sub_health_moves_who_wants_to_be_moved(tmp_path: Path, strategy: str) -> None:
    async with world(tmp_path) as found:
        await found.submit("job", subHealthyStrategy=strategy)
        uid, (node, chip) = found.uid("job"), found.place("job")
        await found.inject(node, fault(chip, levels.SUB_HEALTH))
        await found.until(lambda: found.uid("job") != uid and found.phase("job") == "Running")
        assert found.place("job")[0] != node


async def test_a_node_that_is_not_well_loses_its_pods_and_is_taken_back(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        await found.submit("job")
        uid, (node, _) = found.uid("job"), found.place("job")
        broken = NodeFault(device="CPU", code="0000001D", since_ms=1, level=levels.SEPARATE_NODE)
        await found.inject(node, broken)
        await found.until(lambda: found.uid("job") != uid and found.phase("job") == "Running")
        assert found.place("job")[0] != node
        assert found.taints(node) == ["evertrain.dev/fault=NodeUnhealthy"]
        await found.inject(node)
        await found.until(lambda: found.taints(node) == [])


async def test_a_node_that_is_to_be_left_alone_later_keeps_its_pods(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        await found.submit("job")
        uid, (node, _) = found.uid("job"), found.place("job")
        soon = NodeFault(device="CPU", code="0000001D", since_ms=1, level=levels.PRE_SEPARATE_NODE)
        await found.inject(node, soon)
        await found.until(lambda: found.taints(node) == ["evertrain.dev/fault=PreSeparate"])
        await found.has_settled()
        assert found.uid("job") == uid
        await found.inject(node)
        await found.until(lambda: found.taints(node) == [])
