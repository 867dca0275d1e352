"""Pods that stand by: made last, unseen, given the place of the next worker that goes, gone when in the way."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.clusterd.jobs import table
from evertrain.kube.port import ASCEND_JOB, POD, Object
from tests.operator.bench import Bench

OLD, STANDBY = "test-job-worker-0", "test-job-standby-0"
RECOVERS = {"recover-strategy": "recover", "standby-pods": "1"}


async def standing_by(annotations: dict[str, str] | None = None, **fields: Any) -> Bench:
    """A job that runs, with a pod that stands by and runs, too."""
    bench = Bench()
    await bench.running(annotations=RECOVERS | (annotations or {}), **fields)
    bench.phase(STANDBY, "Running")
    await bench.settle()
    return bench


def labels(pod: Object) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"]["labels"]
    return found


def annotations(pod: Object) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"]["annotations"]
    return found


def rank(pod: Object) -> str:
    return annotations(pod).get("hccl/rankIndex", "")


async def test_it_comes_when_the_job_runs_and_has_no_place_in_it() -> None:
    bench = Bench()
    await bench.submit(annotations=RECOVERS)
    await bench.settle()
    bench.admit()
    await bench.settle()
    bench.phase(OLD, "Running")
    await bench.settle()
    assert STANDBY not in bench.pods(), "those that train come first"
    bench.all_pods("Running")
    await bench.settle()
    bench.phase(STANDBY, "Running")
    await bench.settle()
    pod, worker = bench.pods()[STANDBY], bench.pods()[OLD]
    assert annotations(pod)["podType"] == "standby" and rank(pod) == ""
    assert "training.kubeflow.org/replica-index" not in labels(pod)
    (container,) = pod["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["RANK"] not in {rank(each) for each in bench.pods().values()}
    (volume,) = pod["spec"]["volumes"]
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == "metadata.annotations['hccl/rankIndex']"
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert values["TASKD_PLACE_FILE"] == f"{mount['mountPath']}/{item['path']}"
    assert "place" not in str(worker["spec"]), "others are as they are without it"
    assert bench.job()["status"]["replicaStatuses"]["Worker"] == {"active": 1}
    pods = [(each, table.read_pod(each)) for each in bench.pods().values()]
    seen = table.read_job(bench.job(), None, pods)
    assert {each.name for each in seen.pods.values()} == {"test-job-master-0", OLD} and not seen.backups


async def test_it_takes_the_place_of_a_worker_that_is_on_its_way_out_and_another_one_comes() -> None:
    bench = await standing_by()
    uid, old = bench.pods()[STANDBY]["metadata"]["uid"], bench.pods()[OLD]
    bench.kube.lingering = True
    await bench.kube.delete(POD, OLD, "default")
    await bench.settle()
    assert OLD in bench.pods(), "it is not gone yet"
    heir = bench.pods()[STANDBY]
    assert heir["metadata"]["uid"] == uid and "podType" not in annotations(heir)
    assert rank(heir) == rank(old) == "1"
    index = "training.kubeflow.org/replica-index"
    assert labels(heir)[index] == labels(heir)["replica-index"] == labels(old)[index]
    assert sorted(bench.pods()) == ["test-job-master-0", "test-job-standby-0", "test-job-standby-1", OLD]
    bench.kube.remove(POD, OLD)
    await bench.settle()
    assert sorted(bench.pods()) == ["test-job-master-0", "test-job-standby-0", "test-job-standby-1"]
    assert bench.state == "Running"


async def test_the_next_one_has_a_free_name_and_takes_the_place_in_its_turn() -> None:
    bench = await standing_by()
    for number in range(3):
        bench.phase(f"test-job-standby-{number % 2}", "Running")
        await bench.settle()
        (held,) = [name for name, pod in bench.pods().items() if rank(pod) == "1"]
        await bench.kube.delete(POD, held, "default")
        await bench.settle()
        assert rank(bench.pods()[f"test-job-standby-{number % 2}"]) == "1"


async def test_one_that_does_not_run_yet_is_of_no_use() -> None:
    bench = Bench()
    await bench.running(annotations=RECOVERS)
    uid = bench.pods()[OLD]["metadata"]["uid"]
    await bench.kube.delete(POD, OLD, "default")
    await bench.settle()
    assert bench.pods()[OLD]["metadata"]["uid"] != uid, "replaced as always"
    assert annotations(bench.pods()[STANDBY])["podType"] == "standby"


async def test_it_makes_room_for_a_pod_of_the_job_that_finds_no_node() -> None:
    bench = Bench()
    await bench.running(annotations=RECOVERS)
    await bench.kube.delete(POD, OLD, "default")
    await bench.settle()
    unplaced = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "reason": "Unschedulable"}]}
    bench.kube.set_status(POD, OLD, unplaced)
    await bench.settle()
    assert sorted(bench.pods()) == ["test-job-master-0", OLD]
    bench.phase(OLD, "Running")
    await bench.settle()
    assert STANDBY in bench.pods(), "when there is room it comes again"


async def test_it_goes_when_the_first_pod_does() -> None:
    bench = await standing_by()
    await bench.kube.delete(POD, "test-job-master-0", "default")
    await bench.settle()
    assert STANDBY not in bench.pods()


async def test_it_goes_when_all_start_again_or_fewer_are_wanted_or_the_job_has_ended() -> None:
    bench = await standing_by(labels={"fault-scheduling": "grace", "fault-retry-times": "2"})
    uid = bench.pods()[STANDBY]["metadata"]["uid"]
    bench.phase("test-job-master-0", "Failed", 1)
    await bench.settle()
    assert all(pod["metadata"]["uid"] != uid for pod in bench.pods().values())
    bench.admit()
    bench.all_pods("Running")
    await bench.settle()
    assert STANDBY in bench.pods()
    bench.kube.annotate(ASCEND_JOB, "test-job", {"standby-pods": "0"})
    await bench.settle()
    assert STANDBY not in bench.pods()
    bench = await standing_by()
    for name in ("test-job-master-0", OLD):
        bench.phase(name, "Succeeded")
    await bench.settle()
    assert bench.state == "Succeeded" and STANDBY not in bench.pods()


async def test_one_that_has_ended_is_not_tried_again_and_again() -> None:
    bench = await standing_by()
    bench.phase(STANDBY, "Failed", 1)
    await bench.settle()
    assert bench.state == "Running"
    assert [name for name in bench.pods() if "standby" in name] == [STANDBY]
    await bench.kube.delete(POD, OLD, "default")
    await bench.settle()
    assert rank(bench.pods()[OLD]) == "1" and rank(bench.pods()[STANDBY]) == ""


async def test_the_place_of_a_hot_switch_is_that_of_its_backup() -> None:
    bench = await standing_by(labels={"subHealthyStrategy": "hotSwitch"})
    bench.kube.annotate(POD, OLD, {"inHotSwitchFlow": "true", "needOperatorOpe": "create"})
    await bench.settle()
    (backup,) = [name for name in bench.pods() if "-hot-" in name]
    bench.phase(backup, "Running")
    bench.kube.lingering = True
    await bench.kube.delete(POD, OLD, "default")
    await bench.settle()
    assert rank(bench.pods()[STANDBY]) == ""
    bench.kube.remove(POD, OLD)
    await bench.settle()
    assert rank(bench.pods()[STANDBY]) == "" and "podType" not in annotations(bench.pods()[backup])


@pytest.mark.parametrize(
    "change", [{"recover-strategy": "dump"}, {"standby-pods": "0"}, {"standby-pods": "many"}, {"sp-block": "16"}]
)
async def test_there_is_none_where_it_is_not_asked_for_or_of_no_use(change: dict[str, str]) -> None:
    bench = Bench()
    await bench.running(annotations=RECOVERS | change)
    assert STANDBY not in bench.pods()
