"""Hot switching: the backup pod comes, waits unseen, and takes the place of the pod that goes; or it goes itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, Kind, Object
from evertrain.operator.carry import Again
from tests.operator.acjobs import chips_annotation
from tests.operator.bench import Bench

OLD = "test-job-worker-0"
ORDER = {"inHotSwitchFlow": "true", "needOperatorOpe": "create"}


def annotations(bench: Bench, name: str) -> dict[str, str]:
    found: dict[str, str] = bench.pods()[name]["metadata"].get("annotations") or {}
    return found


def marks(bench: Bench, name: str) -> dict[str, str]:
    """The annotations that have to do with hot switching."""
    known = ("inHotSwitchFlow", "needOperatorOpe", "backupNewPodName", "podType", "backupSourcePodName")
    return {key: value for key, value in annotations(bench, name).items() if key in known}


def backups(bench: Bench) -> list[str]:
    return [name for name in bench.pods() if "-hot-" in name]


async def switching(**fields: Any) -> tuple[Bench, str]:
    """A job of which a worker has a backup that runs."""
    bench = Bench()
    await bench.running(labels={"subHealthyStrategy": "hotSwitch"}, **fields)
    await bench.kube.patch(POD, OLD, "default", {"spec": {"nodeName": "node-1"}})
    bench.kube.annotate(POD, OLD, ORDER)
    await bench.settle()
    (backup,) = backups(bench)
    bench.phase(backup, "Running")
    await bench.settle()
    return bench, backup


async def test_a_backup_is_made_and_named_on_its_source() -> None:
    bench, backup = await switching()
    assert re.fullmatch(r"test-job-worker-0-hot-\d{4}", backup)
    assert marks(bench, OLD) == {"inHotSwitchFlow": "true", "backupNewPodName": backup}
    assert marks(bench, backup) == {
        "inHotSwitchFlow": "true",
        "podType": "backup",
        "backupSourcePodName": OLD,
    }
    old, new = bench.pods()[OLD], bench.pods()[backup]
    assert new["metadata"]["labels"] == old["metadata"]["labels"]
    assert annotations(bench, backup)["hccl/rankIndex"] == annotations(bench, OLD)["hccl/rankIndex"] == "1"
    assert new["spec"]["containers"] == old["spec"]["containers"]
    required = new["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]}
    ]
    assert "affinity" not in bench.job()["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    assert bench.state == "Running"
    assert bench.job()["status"]["replicaStatuses"] == {"Master": {"active": 1}, "Worker": {"active": 1}}


async def test_every_way_that_a_user_names_nodes_excludes_the_old_one() -> None:
    terms = [
        {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1", "node-2"]}]},
    ]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    bench = Bench()
    item = await bench.submit()
    item["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["affinity"] = affinity
    await bench.kube.patch(ASCEND_JOB, "test-job", "default", {"spec": item["spec"]})
    await bench.settle()
    bench.admit()
    await bench.settle()
    await bench.kube.patch(POD, OLD, "default", {"spec": {"nodeName": "node-1"}})
    bench.kube.annotate(POD, OLD, ORDER)
    await bench.settle()
    (backup,) = backups(bench)
    found = bench.pods()[backup]["spec"]["affinity"]["nodeAffinity"]
    kept_off = {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}
    for term in found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]:
        assert kept_off in term["matchFields"]


async def test_the_backup_takes_the_place_when_its_source_is_gone() -> None:
    bench, backup = await switching()
    bench.kube.lingering = True
    await bench.kube.delete(POD, OLD, "default")
    await bench.settle()
    assert marks(bench, backup)["podType"] == "backup", "its source is still on its way out"
    bench.kube.remove(POD, OLD)
    await bench.settle()
    assert set(bench.pods()) == {"test-job-master-0", backup}
    assert marks(bench, backup) == {"inHotSwitchFlow": "true"}
    assert bench.state == "Running"
    assert bench.job()["status"]["replicaStatuses"] == {"Master": {"active": 1}, "Worker": {"active": 1}}
    assert bench.job()["status"]["restarts"]["count"] == 1, "as any loss of a pod counts"


async def test_the_pod_that_took_over_is_a_pod_like_any_other() -> None:
    bench, backup = await switching()
    bench.kube.remove(POD, OLD)
    await bench.settle()
    bench.kube.annotate(POD, backup, ORDER)
    await bench.settle()
    (second,) = [name for name in backups(bench) if name != backup]
    assert re.fullmatch(r"test-job-worker-0-hot-\d{4}", second)
    bench.kube.remove(POD, backup)
    await bench.settle()
    assert set(bench.pods()) == {"test-job-master-0", second}
    bench.kube.remove(POD, second)
    await bench.settle()
    assert set(bench.pods()) == {"test-job-master-0", OLD}


async def test_called_off() -> None:
    bench, backup = await switching()
    bench.kube.annotate(POD, backup, {"needOperatorOpe": "delete"})
    await bench.settle()
    assert set(bench.pods()) == {"test-job-master-0", OLD}
    assert bench.kube.graces == [0]
    assert marks(bench, OLD) == {}
    assert bench.state == "Running"
    assert "restarts" not in bench.job()["status"] or bench.job()["status"]["restarts"]["count"] == 0


async def test_called_off_by_who_was_killed_before_it_could_tell_the_backup() -> None:
    bench, backup = await switching()
    gone = {"inHotSwitchFlow": None, "backupNewPodName": None, "needOperatorOpe": None}
    await bench.kube.patch(POD, OLD, "default", {"metadata": {"annotations": gone}})
    await bench.settle()
    assert set(bench.pods()) == {"test-job-master-0", OLD}


async def test_a_backup_that_somebody_deletes_is_forgotten() -> None:
    bench, backup = await switching()
    bench.kube.remove(POD, backup)
    await bench.settle()
    assert marks(bench, OLD) == {}
    assert set(bench.pods()) == {"test-job-master-0", OLD}


async def test_a_backup_that_has_ended_takes_no_place() -> None:
    bench, backup = await switching()
    bench.phase(backup, "Failed")
    await bench.settle()
    assert bench.state == "Running"
    bench.kube.remove(POD, OLD)
    await bench.settle()
    assert set(bench.pods()) == {"test-job-master-0", OLD}
    assert bench.state == "Running"


async def test_when_all_pods_start_again_so_do_those_that_are_being_switched() -> None:
    bench, backup = await switching()
    labels = {"fault-retry-times": "3"}
    await bench.kube.patch(ASCEND_JOB, "test-job", "default", {"metadata": {"labels": labels}})
    bench.phase("test-job-master-0", "Failed")
    await bench.settle()
    assert set(bench.pods()) == {"test-job-master-0", OLD}
    assert bench.versions() == {"test-job-master-0": "1", OLD: "1"}


async def test_the_backup_of_a_job_that_ends_goes() -> None:
    bench, backup = await switching()
    for name in ("test-job-master-0", OLD):
        bench.phase(name, "Succeeded")
    await bench.settle()
    assert bench.state == "Succeeded"
    assert backup not in bench.pods()


async def test_the_rank_table_has_the_new_pod_once_it_has_the_place(tmp_path: Path) -> None:
    bench, backup = await switching(chips=1)
    await bench.kube.create(CONFIG_MAP, {"metadata": {"name": "rings-config-test-job", "namespace": "default"}})

    def table() -> Object:
        found: Object = json.loads(bench.kube.find(CONFIG_MAP, "rings-config-test-job")["data"]["hccl.json"])
        return found

    for number, name in enumerate(("test-job-master-0", OLD, backup)):
        bench.kube.annotate(POD, name, chips_annotation(name, f"10.0.0.{number}", 1))
        bench.kube.set_status(POD, name, {"podIP": f"10.1.0.{number}"})
    bench.start_operator()
    await bench.settle()
    assert table()["status"] == "completed"
    assert [server["container_ip"] for server in table()["server_list"]] == ["10.1.0.0", "10.1.0.1"]
    bench.kube.lingering = True
    await bench.kube.delete(POD, OLD, "default")
    await bench.settle()
    assert table()["status"] == "initializing"
    bench.kube.remove(POD, OLD)
    await bench.settle()
    assert table()["status"] == "completed"
    assert [server["container_ip"] for server in table()["server_list"]] == ["10.1.0.0", "10.1.0.2"]


class Killed(BaseException):
    """The operator is no more."""


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("ending", ["switched", "called off"])
@pytest.mark.parametrize("request_number", range(6))
async def test_killed_at_any_request(request_number: int, ending: str, served: bool) -> None:
    """One operator dies at its n-th write, before or after it took effect; the next one brings it to the same end."""
    bench = Bench()
    await bench.running(labels={"subHealthyStrategy": "hotSwitch"})
    left = request_number

    def before(verb: str, kind: Kind, name: str) -> None:
        nonlocal left
        if verb not in ("get", "list") and kind == POD:
            left -= 1
            if left < 0 and not served:
                left = 1000
                raise Killed

    def after(verb: str, kind: Kind, name: str) -> None:
        nonlocal left
        if left < 0:
            left = 1000
            raise Killed

    async def settle() -> None:
        bench.kube.before, bench.kube.after = before, after
        try:
            await bench.settle()
        except Killed:
            bench.start_operator()
            await bench.settle()
        except Again as error:
            raise AssertionError from error
        bench.kube.before = bench.kube.after = lambda verb, kind, name: None

    bench.kube.annotate(POD, OLD, ORDER)
    await settle()
    (backup,) = backups(bench)
    assert marks(bench, OLD) == {"inHotSwitchFlow": "true", "backupNewPodName": backup}
    if ending == "switched":
        bench.phase(backup, "Running")
        await settle()
        bench.kube.remove(POD, OLD)
        await settle()
        assert set(bench.pods()) == {"test-job-master-0", backup}
        assert marks(bench, backup) == {"inHotSwitchFlow": "true"}
    else:
        bench.kube.annotate(POD, backup, {"needOperatorOpe": "delete"})
        await settle()
        assert set(bench.pods()) == {"test-job-master-0", OLD}
        assert marks(bench, OLD) == {}
    assert bench.state == "Running"
