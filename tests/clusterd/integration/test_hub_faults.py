"""Faults that nodes publish: jobs are led around them, schedulers and statistics are told."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from evertrain.clusterd.faulting import MEMORY, MEMORY_KEY, _packed
from evertrain.clusterd.faults import state
from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.observe import SYSTEM
from evertrain.clusterd.publish import config_map
from evertrain.kube import namespaces
from evertrain.kube.cache import Cache
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NAMESPACE, NODE, POD
from evertrain.wire.faultinfo import ChipFault, DeviceInfo, encode_device
from tests.clusterd.hub import PATIENCE, Client, eventually, find, hub_of, make_job
from tests.operator.cluster import Cluster, background, cluster

CODE, LEVEL = "80C98009", "SeparateNPU"


async def publish(here: Cluster, node: str, *faults: ChipFault, super_pod: int = -2) -> None:
    """As noded does."""
    chips = tuple(f"Ascend910-{number}" for number in range(2))
    faulty = tuple(fault.chip for fault in faults)
    info = DeviceInfo(
        available=tuple(chip for chip in chips if chip not in faulty),
        unhealthy=faulty,
        faults=faults,
        update_time=int(time.time()),
        super_pod=super_pod,
    )
    name, data = f"mindx-dl-deviceinfo-{node}", {"DeviceInfoCfg": encode_device(info)}
    if await find(here.kube, name, "kube-system"):
        await here.kube.patch(CONFIG_MAP, name, "kube-system", {"data": data})
        return
    metadata = {"name": name, "namespace": "kube-system", "labels": {"mx-consumer-cim": "true"}}
    await here.kube.create(CONFIG_MAP, {"metadata": metadata, "data": data})


async def test_a_chip_that_fails_is_told_to_the_job_and_to_schedulers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "evertrain.clusterd.faulting")
    async with cluster(tmp_path) as here:
        await here.kube.create(NAMESPACE, {"metadata": {"name": "cluster-system"}})
        job = await make_job(here, **{"fault-scheduling": "grace"})
        uid = job["metadata"]["uid"]
        for node in ("node-0", "node-1"):
            await publish(here, node, super_pod=5)
        async with hub_of(here) as running, Client(uid, running.port) as client:
            await client.begin()
            assert running.hub.super_pod("node-1") == 5
            await publish(here, "node-1", ChipFault("Ascend910-1", CODE, LEVEL, int(time.time() * 1000)), super_pod=5)
            before = await client.hears("preExitProcess")
            assert ([each.rankId for each in before.faultRanks], list(before.nodeRankIds)) == (["3"], ["1"])
            await client.hears("stopTrain")
            assert running.hub.faults()[uid].health == "UnHealthy"
            await client.reports_stop()
            await client.hears("globalFault")
            told = await eventually(
                here.kube, "cluster-info-device-0", lambda item: item and CODE in str(item["data"]), "mindx-dl"
            )
            assert told is not None and told["metadata"]["labels"]["mx-consumer-volcano"] == "true"
            node = json.loads(told["data"]["cluster-info-device-0"])["mindx-dl-deviceinfo-node-1"]
            assert node["DeviceList"]["huawei.com/Ascend910-Unhealthy"] == "Ascend910-1"
            info = await eventually(
                here.kube, "fault-job-info", lambda item: item and uid in (item.get("data") or {}), "cluster-system"
            )
            assert info is not None and json.loads(info["data"][uid])["5"]["FaultNodes"] == {"node-1": {}}
            statistics = await eventually(here.kube, "statistic-fault-info", bool, "cluster-system")
            assert statistics is not None and json.loads(statistics["data"]["FaultNum"]) == {"publicFaultNum": 0}
            counted = await eventually(here.kube, "current-job-statistic", bool, "mindx-dl")
            assert counted is not None and counted["data"]["totalJob"] == "1"
            # Well again.
            await publish(here, "node-1", super_pod=5)
            await eventually(here.kube, "cluster-info-device-0", lambda item: CODE not in str(item["data"]), "mindx-dl")
            for end in ("begun", "ended"):
                assert f"job {uid}: fault {CODE} ({LEVEL}) of NPU 1 of node-1 has {end}" in caplog.messages


async def test_a_fault_that_was_there_before_is_known_after_a_restart(tmp_path: Path):
    async with cluster(tmp_path) as here:
        uid = (await make_job(here, **{"fault-scheduling": "grace"}))["metadata"]["uid"]
        await publish(here, "node-1", ChipFault("Ascend910-0", CODE, LEVEL, int(time.time() * 1000)))
        async with hub_of(here) as first, Client(uid, first.port) as client:
            await client.begin()
            await client.hears("preExitProcess")
            await client.hears("stopTrain")
        async with hub_of(here) as second, Client(uid, second.port) as client:
            await client.begin()
            for kind in ("preExitProcess", "stopTrain"):
                signal = await client.hears(kind)
                assert [each.rankId for each in signal.faultRanks] == ["2"]
            await client.reports_stop()
            await client.hears("globalFault")
            assert client.signals.empty(), "it is not taken for another fault"


async def test_where_pods_were_that_have_no_place_is_known_after_a_restart(tmp_path: Path):
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        await publish(here, "node-1", ChipFault("Ascend910-0", "80E18402", LEVEL, int(time.time() * 1000)))
        async with hub_of(here) as first:
            job = first.hub.jobs[uid]
        lost = job.pods[1]
        await here.kube.delete(POD, lost.name, "default", grace=0)
        kept, left = FaultCentre(), {0: job.pods[0]}
        for each in (job, replace(job, uid="gone")):
            kept.job(each.uid, each)
            kept.job(each.uid, replace(each, complete=False, pods=left))
        memory = config_map(SYSTEM, MEMORY, {MEMORY_KEY: _packed(kept.dump())})
        await namespaces.make(here.kube, SYSTEM)
        await here.kube.create(CONFIG_MAP, memory)
        async with hub_of(here) as second:
            assert [(each.pod_uid, each.code) for each in second.hub.faults()[uid].ranks] == [(lost.uid, "80E18402")]
            assert set(state.decode(second.centre.dump()).tables) == {uid}, "the other job is no more"


async def test_a_node_that_goes_takes_its_ranks_along(tmp_path: Path):
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with hub_of(here) as running:
            changes = running.hub.fault_changes([uid])
            await here.kube.delete(NODE, "node-1")
            faults = await anext(changes)
            assert faults.health == "UnHealthy" and {fault.rank for fault in faults.ranks} == {2, 3}
            await here.kube.delete(ASCEND_JOB, "train", "default")
            while (faults := await anext(changes)).ranks:
                pass
            assert running.hub.faults() == {}
            changes.close()


async def test_a_label_whose_fault_has_ended_while_nobody_was_here_goes(tmp_path: Path):
    async with cluster(tmp_path) as here:
        pods = Cache(here.kube, POD)

        def label(name: str) -> str | None:
            labels: dict[str, str] = (pods.get(name, "default") or {})["metadata"].get("labels") or {}
            return labels.get("fault-type")

        for name in ("related", "switched"):
            await make_job(here, name)
        marks = {
            "related-master-0": {"labels": {"fault-type": "Separate"}},
            "related-worker-0": {"labels": {"fault-type": "SubHealth"}},
            "switched-worker-0": {"labels": {"fault-type": "SubHealth"}, "annotations": {"needVolcanoOpe": "delete"}},
        }
        for name, metadata in marks.items():
            await here.kube.patch(POD, name, "default", {"metadata": metadata})
        async with background(pods.run), hub_of(here):
            await pods.synced.wait()
            assert await pods.until(lambda: label("related-worker-0") is None, PATIENCE)
            assert label("related-master-0") == "Separate", "it stays with the pod"
            assert label("switched-worker-0") == "SubHealth", "a scheduler has to see it"
