"""Jobs as ClusterD reads them, and what it tells others of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from evertrain.acjob.job import Job as AscendJob
from evertrain.acjob.pods import Surroundings, new_pod
from evertrain.clusterd.jobs import summary
from evertrain.clusterd.jobs.statistics import Statistics
from evertrain.clusterd.jobs.table import Table
from evertrain.clusterd.model import Device, Job
from evertrain.kube.port import Object
from tests.operator.acjobs import ascend_job, chips_annotation, stored


def pod_of(
    job: Object, kind: str, index: int, *, phase: str = "Running", chips: int = 8, version: int = 1, **annotations: str
) -> Object:
    around = Surroundings(("10.0.0.1", "2222"), "10.0.0.2", 0, True)
    pod = new_pod(AscendJob(job), kind, index, around)
    name, rank = pod["metadata"]["name"], int(pod["metadata"]["annotations"]["hccl/rankIndex"])
    pod["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": str(version)}
    if chips:
        pod["metadata"]["annotations"] |= chips_annotation(name, f"192.168.0.{rank}", chips)
    pod["metadata"]["annotations"] |= annotations
    pod["spec"]["nodeName"] = f"node-{rank}"
    pod["status"] = {
        "phase": phase,
        "podIP": f"10.1.0.{rank}",
        "hostIP": f"192.168.0.{rank}",
        "containerStatuses": [{"name": "ascend", "containerID": f"containerd://{name}"}],
    }
    return pod


def both(job: Object, **options: Any) -> list[Object]:
    return [pod_of(job, "Master", 0, **options), pod_of(job, "Worker", 0, **options)]


def group_of(job: Object, **labels: str) -> Object:
    return {
        "metadata": {"name": "group", "namespace": "default", "labels": labels, "annotations": {"from": "group"}},
        "spec": {"minMember": 2},
        "status": {"phase": "Running"},
    }


def read(item: Object, pods: list[Object], group: Object | None = None, table: Table | None = None) -> Job:
    return (table or Table()).update(item, group, pods)[0]


def test_a_running_job_with_chips():
    item = stored(ascend_job(labels={"a": "job", "b": "job"}))
    job = read(item, both(item), group_of(item, b="group"))
    assert (job.uid, job.name, job.namespace, job.framework) == ("U", "test-job", "default", "pytorch")
    assert (job.replicas, job.per_pod, job.status, job.complete) == (2, 8, "running", True)
    assert (job.labels["a"], job.labels["b"], job.annotations["from"]) == ("job", "group", "group")
    assert (job.group, job.group_phase, job.master) == ("group", "Running", "10.0.0.1")
    assert job.created == 1767225600
    worker = job.pods[1]
    assert (worker.name, worker.uid, worker.node) == ("test-job-worker-0", "uid-test-job-worker-0", "node-1")
    assert (worker.ip, worker.host_ip) == ("10.1.0.1", "192.168.0.1")
    assert worker.devices[7] == Device("7", "192.168.1.17")
    assert (job.pod_of(8), list(job.ranks_of(1))[-1]) == (1, 15)


def test_ranks_of_a_pod_come_from_its_chips_its_wish_or_its_environment():
    item = stored(ascend_job(chips=4))
    assert read(item, both(item, chips=2)).per_pod == 2
    assert read(item, both(item, chips=0)).per_pod == 4
    none = stored(ascend_job(chips=0))
    assert read(none, both(none, chips=0)).per_pod == 1
    for kind in ("Master", "Worker"):
        container = none["spec"]["replicaSpecs"][kind]["template"]["spec"]["containers"][0]
        container["env"] = [{"name": "LOCAL_WORLD_SIZE", "value": "3"}]
    job = read(none, both(none, chips=0))
    assert (job.per_pod, job.complete, job.status, job.group) == (3, True, "running", "")


def test_status_follows_the_pods():
    item = stored(ascend_job())
    table = Table()

    def state(first: str, second: str, chips: int = 8) -> str:
        pods = [pod_of(item, "Master", 0, phase=first, chips=chips), pod_of(item, "Worker", 0, phase=second)]
        for pod in pods:
            pod["metadata"]["resourceVersion"] = ""
        return read(item, pods, group_of(item), table).status

    assert read(item, [], group_of(item), table).status == "pending"
    assert state("Pending", "Running") == "pending"
    assert state("Running", "Running") == "running"
    assert state("Succeeded", "Running") == "running"
    assert state("Pending", "Running") == "failed", "a pod of a running job is replaced"
    assert state("Running", "Running") == "running"
    assert state("Failed", "Running") == "failed"
    assert state("Succeeded", "Succeeded") == "complete"


def test_too_few_pods_are_not_a_running_job():
    item = stored(ascend_job(workers=2))
    pods = both(item)
    assert read(item, pods, group_of(item)).status == "running"
    assert read(item, pods).status == "pending", "without a PodGroup the job itself says how many it needs"
    assert not read(item, pods, group_of(item)).complete
    wanted = both(item, **{"huawei.com/schedule_minAvailable": "3"})
    assert read(item, wanted, group_of(item)).status == "pending"


def test_what_the_job_says_of_its_end_counts_when_its_pods_are_gone():
    item = stored(ascend_job())
    item["status"] = {"conditions": [{"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"}]}
    assert read(item, []).status == "complete"
    item["status"] = {"conditions": [{"type": "Restarting", "status": "True"}]}
    assert read(item, []).status == "failed", "who has only begun to look knows that it ran"


def test_backups_and_leaders_that_only_coordinate_are_apart():
    item = stored(ascend_job(framework="mindspore"))
    del item["spec"]["replicaSpecs"]["Scheduler"]["template"]["spec"]["containers"][0]["resources"]
    scheduler, worker = pod_of(item, "Scheduler", 0, chips=0), pod_of(item, "Worker", 0)
    backup = pod_of(item, "Worker", 0, podType="backup", backupSourcePodName="test-job-worker-0")
    backup["metadata"] |= {"name": "test-job-worker-0-hot-1234", "uid": "uid-backup"}
    job = read(item, [scheduler, worker, backup])
    assert [(rank, pod.name) for rank, pod in job.pods.items()] == [(0, "test-job-worker-0")]
    assert job.backups["test-job-worker-0"].uid == "uid-backup"
    assert (job.replicas, job.complete, job.status) == (1, True, "running")


def test_chips_that_nobody_can_read_are_none():
    item = stored(ascend_job())
    pods = both(item)
    pods[0]["metadata"]["annotations"]["ascend.kubectl.kubernetes.io/ascend-910-configuration"] = '{"devices": 3}'
    pods[1]["metadata"]["annotations"]["hccl/rankIndex"] = "one"
    job = read(item, pods)
    assert (list(job.pods), job.pods[0].devices, job.complete) == ([0], (), False)


def test_only_what_changed_is_news():
    item = stored(ascend_job())
    table, pods = Table(), both(item)
    job, news = table.update(item, None, pods)
    assert news
    again, news = table.update(item, None, [dict(pod) for pod in pods])
    assert again == job and not news
    assert again.pods[0] is job.pods[0], "a pod that did not change is not read again"
    pods[1] = pod_of(item, "Worker", 0, phase="Failed", version=2)
    assert table.update(item, None, pods)[0].status == "failed"
    assert table.remove("U") is not None and table.jobs == {}


# Summaries.


def test_a_summary_says_it_all():
    item = stored(ascend_job(labels={"customJobKey": "team", "team": "blue"}))
    found = summary.summarise(read(item, both(item)), 100, serials={"node-0": "SN0"})
    (config_map,) = found.config_maps()
    assert config_map["metadata"] == {
        "name": "job-summary-test-job",
        "namespace": "default",
        "labels": {"outside-job-info": "true", "ring-controller.atlas": "ascend-910"},
    }
    data = dict(config_map["data"])
    table = json.loads(data.pop("hccl.json"))
    assert data == {
        "job_name": "test-job", "framework": "pytorch", "job_id": "U", "job_status": "running", "operator": "add",
        "cm_index": "0", "total": "1", "time": "1767225600", "sid": "blue", "masterAddr": "10.0.0.1",
    }  # fmt: skip
    assert (table["status"], table["server_count"], table["total"]) == ("complete", "2", 1)
    server = table["server_list"][1]
    assert server["device"][1] == {"device_id": "1", "device_ip": "192.168.1.11", "rank_id": "9"}
    del server["device"]
    assert server == {
        "server_id": "192.168.0.1", "host_ip": "192.168.0.1", "super_pod_id": 0, "server_name": "node-1",
        "server_sn": "", "pod_name": "test-job-worker-0",
        "container_ids": {"ascend": "containerd://test-job-worker-0"},
    }  # fmt: skip
    assert table["server_list"][0]["server_sn"] == "SN0"
    signal = found.signal()
    assert (signal["jobId"], signal["operator"], signal["cmIndex"], signal["deleteTime"]) == ("U", "add", "0", "")
    assert json.loads(signal["HcclJson"])["server_count"] == "2"


def test_without_chips_there_is_no_table_yet():
    item = stored(ascend_job())
    found = summary.summarise(read(item, both(item, chips=0)), 100)
    assert [each["data"]["hccl.json"] for each in found.config_maps()] == ['{"status":"initializing"}']


def test_two_pods_of_a_node_are_told_apart():
    item = stored(ascend_job())
    pods = both(item)
    pods[1]["spec"]["nodeName"] = "node-0"
    servers = json.loads(summary.summarise(read(item, pods), 1).table)["server_list"]
    assert [server["server_id"] for server in servers] == ["uid-of-test-job-master-0", "uid-of-test-job-worker-0"]


def test_the_end_has_a_time_and_keeps_it():
    item = stored(ascend_job())
    table = Table()
    first = summary.summarise(read(item, both(item), table=table), 100)
    failed = summary.summarise(read(item, both(item, phase="Failed", version=2), table=table), 200, first)
    assert (failed.fields()["deleteTime"], failed.fields()["job_status"]) == ("200", "failed")
    assert summary.summarise(failed.job, 300, failed) is failed
    again = summary.summarise(read(item, both(item, version=3), table=table), 400, failed)
    assert "deleteTime" not in again.fields()
    gone = summary.deleted(again, 500)
    assert (gone.fields()["operator"], gone.signal()["deleteTime"]) == ("delete", "500")


def test_large_tables_are_cut_between_servers():
    item = stored(ascend_job(workers=799, chips=16))
    pods = [pod_of(item, "Master", 0, chips=16), *(pod_of(item, "Worker", each, chips=16) for each in range(799))]
    found = summary.summarise(read(item, pods), 1)
    maps = found.config_maps()
    assert [each["metadata"]["name"] for each in maps] == ["job-summary-test-job", "job-summary-test-job-1"]
    assert all(len(each["data"]["hccl.json"]) <= 800 * 1024 for each in maps)
    tables = [json.loads(each["data"]["hccl.json"]) for each in maps]
    ranks = [int(chip["rank_id"]) for table in tables for server in table["server_list"] for chip in server["device"]]
    assert ranks == list(range(12800))
    assert {(table["total"], table["server_count"]) for table in tables} == {(2, "800")}
    assert found.signal()["total"] == "2" and len(json.loads(found.signal()["HcclJson"])["server_list"]) == 800


def test_the_list_of_ranks_counts_as_well():
    item = stored(ascend_job(workers=1499, chips=16))
    pods = [pod_of(item, "Master", 0, chips=16), *(pod_of(item, "Worker", each, chips=16) for each in range(1499))]
    found = summary.summarise(replace(read(item, pods), resource="huawei.com/npu"), 1)
    tables = [each["data"]["hccl.json"] for each in found.config_maps()]
    assert all(len(each) <= 800 * 1024 for each in tables)
    ranks = [rank["rank_id"] for table in tables for rank in json.loads(table)["rank_list"]]
    assert ranks == list(range(24000))


def test_a_thousand_jobs_are_no_trouble():
    """A change costs what it changes."""
    table = Table()
    items = [stored(ascend_job(f"job-{number}", chips=5), uid=f"U{number}") for number in range(1000)]
    pods = [both(item, chips=5) for item in items]
    began = time.monotonic()
    for item, own in zip(items, pods, strict=True):
        table.update(item, None, own)
    first = time.monotonic() - began
    summary_before = summary.summarise(table.jobs["U0"], 1)
    began = time.monotonic()
    for number in range(10):
        pods[0][1]["metadata"]["resourceVersion"] = f"new-{number}"
        table.update(items[0], None, pods[0])
        summary.summarise(table.jobs["U0"], 1, summary_before)
    changed = time.monotonic() - began
    assert len(table.jobs) == 1000 and all(job.complete for job in table.jobs.values())
    assert changed < first, "one changed job must not cost as much as a thousand"


# Statistics.


def test_what_became_of_a_job_is_counted_and_survives():
    item = stored(ascend_job(labels={"custom-job-id": "mine"}))
    table, counted = Table(), Statistics()
    for now, phase in ((100, "Pending"), (200, "Running"), (300, "Failed"), (400, "Running")):
        counted.update(read(item, both(item, phase=phase, version=now), table=table), now)
    written = counted.written()
    assert written["totalJob"] == "1"
    assert json.loads(written["data"]) == [
        {"id": "U", "customID": "mine", "cardNum": 16, "podFirstRunTime": 200, "podLastRunTime": 400,
         "podLastFaultTime": 300, "podFaultTimes": 1},
    ]  # fmt: skip
    later = Statistics()
    later.load(written)
    later.update(read(item, both(item)), 500)
    assert later.written() == written, "that somebody else looks now is no news"
    later.update(read(item, both(item, phase="Succeeded")), 600)
    assert json.loads(later.written()["data"])[0]["stopTime"] == 600
    later.keep([])
    assert later.written() == {"data": "[]", "totalJob": "0"}
    later.load({"data": "nonsense"})
