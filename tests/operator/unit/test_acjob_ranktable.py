"""The rank table: which version, its content byte for byte, and how it follows the pods."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.acjob.job import Job
from evertrain.acjob.pods import Surroundings, new_pod
from evertrain.acjob.ranktable import Unready, build, invalidated, next_table, next_version, table_version
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, Kind, Object
from evertrain.operator.carry import Again
from evertrain.operator.rankfile import RankFiles
from evertrain.operator.shell import Operator
from tests.kube.fake import FakeKube
from tests.operator.acjobs import ascend_job, chips_annotation, replica, stored
from tests.operator.bench import Bench


def pods_of(job: Job, chips: int = 2, hosts: tuple[str, ...] = ("10.0.0.5", "10.0.0.6"), **device: str) -> list[Object]:
    pods = []
    for number, (kind, index) in enumerate(job.indices()):
        pod = new_pod(job, kind, index, Surroundings(("10.96.0.1", "2222"), "", 0, gang=True))
        pod["metadata"]["uid"] = f"pod-{number}"
        host = hosts[number % len(hosts)]
        pod["metadata"]["annotations"] |= chips_annotation(pod["metadata"]["name"], host, chips, **device)
        pod["spec"]["nodeName"] = f"node-{host}"
        pod["status"] = {"phase": "Running", "podIP": f"172.16.0.{9 + number}"}
        pods.append(pod)
    return pods


def job_of(**fields: Any) -> Job:
    return Job(stored(ascend_job("j", chips=2, **fields)))


def test_version_1_0_byte_for_byte() -> None:
    job = job_of()
    assert next_table(job, list(reversed(pods_of(job))), '{"status":"initializing"}') == (
        '{"status":"completed","server_list":['
        '{"device":[{"device_id":"0","device_ip":"192.168.1.10","rank_id":"0"},'
        '{"device_id":"1","device_ip":"192.168.1.11","rank_id":"1"}],'
        '"server_id":"10.0.0.5","host_ip":"10.0.0.5","container_ip":"172.16.0.9"},'
        '{"device":[{"device_id":"0","device_ip":"192.168.1.10","rank_id":"2"},'
        '{"device_id":"1","device_ip":"192.168.1.11","rank_id":"3"}],'
        '"server_id":"10.0.0.6","host_ip":"10.0.0.6","container_ip":"172.16.0.10"}],'
        '"server_count":"2","version":"1.0"}'
    )


def test_pods_on_one_node_are_told_apart() -> None:
    job = job_of()
    servers = build(job, pods_of(job, hosts=("10.0.0.5",)))["server_list"]
    assert [server["server_id"] for server in servers] == ["uid-of-j-master-0", "uid-of-j-worker-0"]
    assert {server["host_ip"] for server in servers} == {"10.0.0.5"}


def test_version_1_2_by_block() -> None:
    job = job_of(workers=3, annotations={"sp-block": "4"})
    hosts = tuple(f"10.0.0.{number}" for number in range(4))
    table = build(job, pods_of(job, hosts=hosts, super_device_id="37"))
    assert table["version"] == "1.2"
    assert list(table["server_list"][0]["device"][0]) == ["device_id", "device_ip", "super_device_id", "rank_id"]
    assert table["super_pod_list"] == [
        {"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.0"}, {"server_id": "10.0.0.1"}]},
        {"super_pod_id": "1", "server_list": [{"server_id": "10.0.0.2"}, {"server_id": "10.0.0.3"}]},
    ]


def test_version_1_2_by_the_scheduler() -> None:
    job = job_of(annotations={"sp-block": "4"}, labels={"super-pod-affinity": "soft"})
    pods = pods_of(job)
    for pod, number in zip(pods, "10", strict=True):
        pod["metadata"]["annotations"]["super-pod-rank"] = number
    assert [each["server_list"][0]["server_id"] for each in build(job, pods)["super_pod_list"]] == [
        "10.0.0.6",
        "10.0.0.5",
    ]


def test_version_1_2_of_a_service() -> None:
    labels = {"jobID": "mindie", "app": "mindie-ms-server"}
    job = job_of(annotations={"sp-block": "4"}, labels=labels)
    pods = pods_of(job)
    for pod, number in zip(pods, "73", strict=True):
        pod["metadata"]["annotations"] |= {"super-pod-id": number, "mind-cluster/hardware-type": "800I-A2-64G"}
    table = build(job, pods)
    assert [each["super_pod_id"] for each in table["super_pod_list"]] == ["3", "7"]
    assert list(table["server_list"][0]) == ["device", "hardware_type", "server_id", "host_ip", "container_ip"]
    assert {server["hardware_type"] for server in table["server_list"]} == {"800I-A2-64G"}


def on_npu() -> Object:
    specs = {"Master": replica(chips=0)}
    specs["Master"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"huawei.com/npu": 1}}
    return ascend_job("j", specs=specs)


def test_version_2_0() -> None:
    job = Job(stored(on_npu()))
    [pod] = pods_of(job)
    level = {"net_layer": 0, "net_instance_id": "x", "net_type": "TOPO_FILE_DESC", "net_attr": "", "rank_addr_list": []}
    roce = {**level, "net_layer": 3, "net_type": "CLOS"}
    levels = [{"level": 0, "info": {"UB": level}}, {"level": 3, "info": {"ROCE": roce}}]
    content = {"devices": [{"device_id": "5", "levelList": levels}]}
    pod["metadata"]["annotations"] |= {"ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps(content)}
    assert build(job, [pod]) == {
        "status": "completed",
        "version": "2.0",
        "rank_list": [{"rank_id": 0, "local_id": 0, "device_id": 5, "level_list": [level, roce]}],
        "rank_count": 1,
    }


VERSIONS = [
    ({}, {}, "1.0"),
    ({"sp-block": "4"}, {}, "1.2"),
    ({"huawei.com/schedule_policy": "chip8-node8", "sp-block": "4"}, {}, "1.0"),
    ({"huawei.com/schedule_policy": "chip2-node16-sp"}, {}, "1.2"),
    ({"huawei.com/schedule_policy": "multilevel"}, {}, "1.2"),
    ({}, {"nodeSelector": {"accelerator-type": "module-a3-16-super-pod"}}, "1.2"),
]


@pytest.mark.parametrize(("annotations", "spec", "version"), VERSIONS)
def test_which_version(annotations: dict[str, str], spec: Object, version: str) -> None:
    assert table_version(Job(ascend_job("j", annotations=annotations, specs={"Master": replica(**spec)}))) == version


def test_leader_without_chips_is_not_in_the_table() -> None:
    specs = {"Scheduler": replica(chips=0), "Worker": replica(2, chips=2)}
    job = Job(stored(ascend_job("j", framework="mindspore", specs=specs)))
    pods = pods_of(job)
    del pods[0]["metadata"]["annotations"]["ascend.kubectl.kubernetes.io/ascend-910-configuration"]
    table = json.loads(next_table(job, pods, "") or "")
    assert table["server_count"] == "2"
    ranks = [[device["rank_id"] for device in server["device"]] for server in table["server_list"]]
    assert ranks == [["0", "1"], ["2", "3"]]


def test_the_table_follows_the_pods() -> None:
    job = job_of()
    pods = pods_of(job)
    table = next_table(job, pods, "")
    assert table is not None
    assert next_table(job, pods, table) is None
    assert next_table(job, pods[:1], "") is None
    stale = next_table(job, pods[:1], table)
    assert stale == table.replace("completed", "initializing")
    assert next_table(job, pods[:1], stale) is None
    assert next_table(job, pods, stale) == table
    pods[1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert next_table(job, pods, table) == stale


@pytest.mark.parametrize(
    "broken",
    [
        {"annotations": {"ascend.kubectl.kubernetes.io/ascend-910-configuration": "{"}},
        {"annotations": {"ascend.kubectl.kubernetes.io/ascend-910-configuration": "[]"}},
        {"annotations": {"ascend.kubectl.kubernetes.io/ascend-910-configuration": '{"devices":[1]}'}},
        {"annotations": {"hccl/rankIndex": "first"}},
        {"podIP": ""},
        {"device_ip": "-1"},
    ],
)
def test_what_makes_no_table(broken: Any) -> None:
    job = job_of()
    pods = pods_of(job, **({"device_ip": "-1"} if "device_ip" in broken else {}))
    pods[1]["metadata"]["annotations"] |= broken.get("annotations", {})
    pods[1]["status"]["podIP"] = broken.get("podIP", "1.2.3.4")
    with pytest.raises(Unready):
        next_table(job, pods, "")


def test_unknown_addresses_matter_between_super_pods_only() -> None:
    job = job_of(annotations={"sp-block": "4"})
    assert build(job, pods_of(job, device_ip="-1"))["version"] == "1.2"
    job = job_of(annotations={"sp-block": "2"})
    with pytest.raises(Unready):
        build(job, pods_of(job, device_ip="-1"))


def test_numbers_beside_the_table() -> None:
    assert next_version('{"status":"initializing"}', "", 100) == "0"
    assert next_version("", "", 100) == "0"
    table = '{"status":"completed","server_list":[]}'
    assert next_version(table, "0", 100) == "100"
    assert next_version(table, "100", 100) == "101"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"status":"initializing"}'])
def test_nothing_to_invalidate(text: str) -> None:
    assert invalidated(text) is None


def allocate(bench: Bench) -> None:
    for number, name in enumerate(sorted(bench.pods())):
        bench.kube.annotate(POD, name, chips_annotation(name, f"10.0.0.{number}", 8))
        bench.kube.set_status(POD, name, {"podIP": f"172.16.0.{number + 1}"})


def test_the_operator_keeps_the_config_map_current() -> None:
    async def test() -> None:
        bench = Bench()
        data = {"hccl.json": '{"status":"initializing"}'}
        config = {"metadata": {"name": "rings-config-test-job", "namespace": "default"}, "data": data}
        await bench.kube.create(CONFIG_MAP, config)
        await bench.running()
        allocate(bench)
        await bench.settle()

        def found() -> dict[str, str]:
            return bench.kube.find(CONFIG_MAP, "rings-config-test-job")["data"]

        first = json.loads(found()["hccl.json"])
        assert (first["status"], first["server_count"], found()["version"]) == ("completed", "2", "0")
        bench.kube.remove(POD, "test-job-worker-0")
        await bench.settle()
        assert json.loads(found()["hccl.json"]) == {**first, "status": "initializing"}
        allocate(bench)
        bench.later(7)
        await bench.settle()
        assert json.loads(found()["hccl.json"])["status"] == "completed"
        assert int(found()["version"]) == int(bench.now.timestamp())
        reads = [call for call in bench.kube.calls if call[1] == "ConfigMap"]
        bench.all_pods("Running")
        await bench.settle()
        assert [call for call in bench.kube.calls if call[1] == "ConfigMap"] == reads

    aio.run(test())


def rings_config(**data: str) -> Object:
    return {"metadata": {"name": "rings-config-test-job", "namespace": "default"}, "data": data}


def test_a_table_is_not_valid_when_all_pods_are_gone_or_the_job_is_another() -> None:
    """Not only once the next pods are to be seen: they would read it."""

    async def test() -> None:
        bench = Bench()
        await bench.kube.create(CONFIG_MAP, rings_config())

        def status() -> str:
            data = bench.kube.find(CONFIG_MAP, "rings-config-test-job")["data"]
            return str(json.loads(data["hccl.json"])["status"])

        async def complete() -> None:
            await bench.settle()
            bench.admit()
            await bench.settle()
            allocate(bench)
            await bench.settle()
            assert status() == "completed"

        await bench.submit()
        await complete()
        for name in list(bench.pods()):
            bench.kube.remove(POD, name)
        await bench.look()
        assert (len(bench.pods()), status()) == (2, "initializing")
        await complete()
        bench.kube.remove(ASCEND_JOB, "test-job")
        await bench.submit()
        await bench.settle()
        bench.admit()
        while not bench.pods():
            await bench.look()
        assert status() == "initializing"

    aio.run(test())


def test_the_table_waits_for_the_super_pods_that_the_scheduler_names() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.kube.create(CONFIG_MAP, rings_config())
        await bench.running(annotations={"sp-block": "8"}, labels={"super-pod-affinity": "soft"})
        allocate(bench)
        await bench.settle()
        assert "hccl.json" not in bench.kube.find(CONFIG_MAP, "rings-config-test-job")["data"]
        for number, name in enumerate(bench.pods()):
            bench.kube.annotate(POD, name, {"super-pod-rank": str(number)})
        await bench.settle()
        table = json.loads(bench.kube.find(CONFIG_MAP, "rings-config-test-job")["data"]["hccl.json"])
        assert len(table["super_pod_list"]) == 2

    aio.run(test())


def test_a_table_that_somebody_else_changes_meanwhile_is_looked_at_again() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.kube.create(CONFIG_MAP, rings_config())
        await bench.running()
        allocate(bench)

        def before(verb: str, kind: Kind, name: str) -> None:
            if verb == "patch" and kind == CONFIG_MAP:
                bench.kube.before = lambda verb, kind, name: None
                bench.kube.annotate(CONFIG_MAP, "rings-config-test-job", {"by": "somebody else"})

        bench.kube.before = before
        with pytest.raises(Again, match="modified"):
            await bench.look()

    aio.run(test())


@pytest.mark.parametrize("namespace", [None, "here"])
def test_tables_of_jobs_that_were_deleted_meanwhile_are_removed(namespace: str | None, tmp_path: Path) -> None:
    """Not those of others: the operator of one namespace doesn't know which jobs there are in another."""

    async def test() -> None:
        kube, files = FakeKube(), RankFiles(tmp_path)
        await kube.create(ASCEND_JOB, {"metadata": {"name": "alive", "namespace": "here"}, "spec": {}})
        for place in (("here", "alive"), ("here", "gone"), ("there", "job")):
            files.write(*place, "{}", "0")
        operator = Operator(kube, rank_tables=tmp_path, namespace=namespace)
        running = asyncio.ensure_future(operator.run())
        await asyncio.wait_for(operator.ready.wait(), 10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        left = {path.parent.name for path in tmp_path.glob("*/hccl.json")}
        assert left == ({"here.alive"} if namespace is None else {"here.alive", "there.job"})

    aio.run(test())


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        RankFiles(tmp_path).write("a", "b", "{}", "0")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_operator_keeps_the_file_current(tmp_path: Path) -> None:
    async def test() -> None:
        bench = Bench(rank_tables=tmp_path)
        volumes = [{"name": "ranktable", "hostPath": {"path": "/user/mindx-dl/ranktable/default.test-job"}}]
        specs = {"Master": replica(volumes=volumes), "Worker": replica()}
        await bench.running(specs=specs)
        place = tmp_path / "default.test-job"
        assert not place.exists()
        allocate(bench)
        await bench.settle()
        table = json.loads((place / "hccl.json").read_text())
        assert (table["status"], (place / "version").read_text()) == ("completed", "0")
        assert (place / "hccl.json").stat().st_mode & 0o777 == 0o644
        assert sorted(path.name for path in place.iterdir()) == ["hccl.json", "version"]
        bench.kube.remove(POD, "test-job-worker-0")
        bench.start_operator()
        await bench.settle()
        assert json.loads((place / "hccl.json").read_text())["status"] == "initializing"
        bench.kube.remove(ASCEND_JOB, "test-job")
        await bench.settle()
        assert [path.name for path in place.iterdir()] == ["version"]

    aio.run(test())
