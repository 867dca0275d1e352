"""Rescheduling on a real API server, with the operator, the scheduler, and nodes whose pods are processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.acjob import crd
from evertrain.clusterd.jobs.table import Table
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import ReplacePods
from evertrain.clusterd.resched.decide import Settings
from evertrain.clusterd.resched.shell import Rescheduler
from evertrain.embedded.controllers.nodes import NodeLifecycle
from evertrain.kube.cache import Cache
from evertrain.kube.port import (
    ASCEND_JOB,
    CONFIG_MAP,
    CUSTOM_RESOURCE_DEFINITION,
    NODE,
    POD,
    POD_GROUP,
    NotFound,
    Object,
)
from evertrain.operator.shell import Operator
from tests.clusterd.cluster_info import devices, node, publish
from tests.embedded.nodes import SmallCluster, small_cluster
from tests.operator.acjobs import ascend_job, on_port

PATIENCE = 120.0
SLEEP = "exec sleep 600"


@dataclass
class World:
    cluster: SmallCluster
    jobs: Cache
    nodes: Cache
    groups: Cache
    rescheduler: Rescheduler
    options: dict[str, Any]
    tasks: list[asyncio.Task[None]]
    ports: Iterator[int] = field(default_factory=lambda: itertools.count(2222))

    @property
    def kube(self) -> Any:
        return self.cluster.kube

    def pods(self, name: str = "job") -> dict[str, Object]:
        return {
            pod["metadata"]["name"].removeprefix(f"{name}-"): pod
            for pod in self.cluster.machine.pods
            if pod["metadata"]["labels"].get("job-name") == name
        }

    def uid(self, pod: str) -> str:
        return str(self.pods()[pod]["metadata"]["uid"])

    def place(self, pod: str, name: str = "job") -> tuple[str, str]:
        item = self.pods(name)[pod]
        return item["spec"]["nodeName"], item["metadata"]["annotations"].get("huawei.com/Ascend910", "")

    def state(self, name: str = "job") -> str:
        job = self.jobs.get(name, "default") or {}
        conditions = (job.get("status") or {}).get("conditions") or [{"type": ""}]
        return str(conditions[-1]["type"])

    async def until(self, condition: Callable[[], Any], patience: float = PATIENCE) -> None:
        """It may depend on anything that a watch tells us of."""
        async with aio.timeout(patience):
            while True:
                with contextlib.suppress(KeyError):
                    if condition():
                        return
                await asyncio.sleep(0.02)

    def runs(self, name: str = "job", count: int = 2) -> bool:
        """All of it, and none on the way out."""
        pods = self.pods(name).values()
        return (
            self.state(name) == "Running"
            and len(pods) == count
            and all(each["status"].get("phase") == "Running" for each in pods)
            and not any(each["metadata"].get("deletionTimestamp") for each in pods)
        )

    async def submit(
        self,
        script: str = SLEEP,
        *,
        name: str = "job",
        chips: int = 1,
        workers: int = 1,
        seconds: int = 30,
        **fields: Any,
    ) -> Object:
        item = ascend_job(name, chips=chips, workers=workers, **fields)
        for spec in item["spec"]["replicaSpecs"].values():
            spec["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", script]
            spec["template"]["spec"]["terminationGracePeriodSeconds"] = seconds
        made: Object = await self.kube.create(ASCEND_JOB, on_port(next(self.ports), item))
        return made

    def group_phase(self, name: str) -> str:
        groups = [each for each in self.groups if each["metadata"]["name"].startswith(f"{name}-")]
        return str((groups[0].get("status") or {}).get("phase")) if groups else ""

    def taints(self, name: str) -> list[tuple[str, str]]:
        found = (self.nodes.get(name) or {}).get("spec", {}).get("taints") or []
        return [(taint["key"], taint.get("value", "")) for taint in found]

    async def records(self) -> list[dict[str, str]]:
        """Of all jobs, newest first."""
        try:
            item = await self.kube.get(CONFIG_MAP, "job-reschedule-reason", "mindx-dl")
        except NotFound:
            return []
        entries = json.loads(item["data"]["recent-reschedule-records"]).values()
        return [task for entry in entries for record in entry["RescheduleRecords"] for task in record["ReasonOfTask"]]

    def model(self, name: str = "job") -> Job:
        item = self.jobs.get(name, "default")
        assert item is not None
        return Table().update(item, None, list(self.pods(name).values()))[0]

    def start(self, **options: Any) -> None:
        self.rescheduler = Rescheduler(self.kube, **(self.options | options))
        self.tasks.append(asyncio.create_task(self.rescheduler.run()))

    async def kill(self) -> None:
        task = self.tasks.pop()
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def world(
    folder: Path, nodes: int = 3, npus: int = 2, *, node_grace: float | None = None, **options: Any
) -> AsyncIterator[World]:
    async with small_cluster(folder, nodes, npus=npus, **({"lease_seconds": 0.5} if node_grace else {})) as cluster:
        await cluster.kube.create(CUSTOM_RESOURCE_DEFINITION, crd.definition())
        options = {"chips": True, **options}
        caches = Cache(cluster.kube, ASCEND_JOB), Cache(cluster.kube, NODE), Cache(cluster.kube, POD_GROUP)
        found = World(cluster, *caches, Rescheduler(cluster.kube, **options), options, [])
        parts = [Operator(cluster.kube, rank_tables=folder / "tables").run, *(cache.run for cache in caches)]
        if node_grace:
            parts.append(NodeLifecycle(cluster.kube, grace_seconds=node_grace).run)
        background = [asyncio.create_task(part()) for part in parts]
        found.tasks.append(asyncio.create_task(found.rescheduler.run()))
        try:
            await found.until(lambda: len(list(caches[1])) == nodes)
            yield found
        finally:
            for task in (*background, *found.tasks):
                task.cancel()
            results = await asyncio.gather(*background, *found.tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


FORCE = {"fault-scheduling": "force"}
POD_LEVEL = FORCE | {"pod-rescheduling": "on"}


async def test_a_chip_with_a_fault_is_left_alone_and_its_pod_comes_up_elsewhere(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=2) as found:
        await found.submit(labels=POD_LEVEL)
        await found.until(found.runs)
        survivor, lost = found.uid("master-0"), found.uid("worker-0")
        name, chip = found.place("worker-0")
        await publish(found.kube, {name: devices([chip])})
        await found.until(lambda: found.runs() and found.uid("worker-0") != lost)
        assert found.uid("master-0") == survivor
        assert found.place("worker-0") != (name, chip)
        assert found.taints(name) == [], "its other chip is well"
        (task,) = await found.records()
        assert task == {
            "RescheduleReason": "CardUnhealthy",
            "PodName": "job-worker-0",
            "NodeName": name,
            "NodeRankIndex": "1",
        }
        # Nobody gets the chip until it is well; then it is as good as any.
        await found.submit(name="other")
        await found.until(lambda: found.group_phase("other") == "Pending")
        await publish(found.kube, {})
        await found.until(lambda: found.runs("other"))
        assert (name, chip) in {found.place("master-0", "other"), found.place("worker-0", "other")}


async def test_a_node_with_a_fault_gets_no_pods_until_it_is_well(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=3) as found:
        await found.submit(labels=FORCE, chips=2)
        await found.until(found.runs)
        before = {found.uid("master-0"), found.uid("worker-0")}
        name, _ = found.place("worker-0")
        theirs = {"key": "theirs", "value": "", "effect": "PreferNoSchedule"}
        await found.kube.patch(NODE, name, None, {"spec": {"taints": [theirs]}})
        await publish(found.kube, nodes={name: node("UnHealthy", "SeparateFault")})
        await found.until(lambda: found.runs() and not before & {found.uid("master-0"), found.uid("worker-0")})
        assert name not in {found.place("master-0")[0], found.place("worker-0")[0]}
        assert found.taints(name) == [("theirs", ""), ("evertrain.dev/fault", "NodeUnhealthy")]
        assert {task["RescheduleReason"] for task in await found.records()} == {"NodeUnhealthy"}
        # Another one takes over, finds the taint, and lifts it when the fault is over.
        await found.kill()
        found.start()
        await found.rescheduler.ready.wait()
        await publish(found.kube, nodes={name: node()})
        await found.until(lambda: found.taints(name) == [("theirs", "")])
        await found.submit(name="other", labels=FORCE, workers=0, specs=one_pod(2))
        await found.until(lambda: found.runs("other", 1))
        assert found.place("master-0", "other")[0] == name


def one_pod(chips: int) -> Object:
    return {"Master": ascend_job(chips=chips)["spec"]["replicaSpecs"]["Master"]}


async def test_where_the_scheduler_knows_no_chips_one_with_a_fault_closes_its_node(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=2, chips=False) as found:
        await publish(
            found.kube,
            {"node-0": devices(["Ascend910-1"]), "node-1": devices(faults=[("Ascend910-1", "SubHealthFault")])},
        )
        await found.until(lambda: found.taints("node-0") == [("evertrain.dev/fault", "CardUnhealthy")])
        await found.until(lambda: found.taints("node-1") == [("evertrain.dev/fault", "SubHealthy")])
        await publish(found.kube, {})
        await found.until(lambda: not found.taints("node-0") and not found.taints("node-1"))


async def test_who_has_a_chip_that_is_to_be_left_alone_later_keeps_it(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=1) as found:
        await found.submit(labels=FORCE, specs=one_pod(1))
        await found.until(lambda: found.runs(count=1))
        uid, (name, chip) = found.uid("master-0"), found.place("master-0")
        await publish(
            found.kube, {name: devices(faults=[(chip, "PreSeparateNPU")])}, {name: node("Healthy", "PreSeparateFault")}
        )
        await found.until(lambda: found.taints(name) == [("evertrain.dev/fault", "PreSeparate")])
        assert found.uid("master-0") == uid
        assert found.runs(count=1)


@pytest.mark.parametrize("scheduling", ["grace", "force"])
async def test_how_pods_are_asked_to_go(tmp_path: Path, scheduling: str) -> None:
    """In good order they take the time that they need; forced they don't get it."""
    script = f"trap 'sleep 5; echo $HOSTNAME >> {tmp_path}/goodbyes; exit 0' TERM; while :; do sleep 0.1; done"
    async with world(tmp_path, nodes=2) as found:
        await found.submit(script, labels={"fault-scheduling": scheduling})
        await found.until(found.runs)
        before = found.uid("master-0")
        name, chip = found.place("worker-0")
        await publish(found.kube, {name: devices([chip])})
        await found.until(lambda: found.runs() and found.uid("master-0") != before)
        written = tmp_path / "goodbyes"
        assert (
            sorted(written.read_text().split()) == ["job-master-0", "job-worker-0"]
            if scheduling == "grace"
            else not written.exists()
        )


async def test_who_does_not_go_in_time_is_forced_to(tmp_path: Path) -> None:
    script = "trap '' TERM; while :; do sleep 0.1; done"
    async with world(tmp_path, nodes=2, settings=Settings(grace_over_time=1.0)) as found:
        await found.submit(script, labels={"fault-scheduling": "grace"}, seconds=3000)
        await found.until(found.runs)
        before = found.uid("master-0")
        name, chip = found.place("worker-0")
        await publish(found.kube, {name: devices([chip])})
        await found.until(lambda: found.runs() and found.uid("master-0") != before)


async def test_the_pods_of_a_node_that_is_gone_come_up_elsewhere(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=3, node_grace=3.0) as found:
        await found.submit(labels=POD_LEVEL, chips=2)
        await found.until(found.runs)
        lost, (name, _) = found.uid("worker-0"), found.place("worker-0")
        await found.cluster.drop_dead(name)
        await found.until(lambda: found.runs() and found.uid("worker-0") != lost)
        assert found.place("worker-0")[0] != name
        assert ("evertrain.dev/fault", "NodeUnhealthy") not in found.taints(name), "Kubernetes says so itself"
        assert {task["RescheduleReason"] for task in await found.records()} == {"NodeUnhealthy"}


async def test_pods_that_fail_are_retried_as_often_as_they_may(tmp_path: Path) -> None:
    """By the operator, which counts them; written down with the rest."""
    runs = tmp_path / "runs"
    runs.mkdir()
    fails = f"mktemp -p {runs}; n=$(ls {runs} | wc -l); while [ ! -e {tmp_path}/fail-$n ]; do sleep 0.05; done; exit 3"
    async with world(tmp_path, nodes=2) as found:
        script = f'if [ "$RANK" = 1 ]; then {fails}; fi; {SLEEP}'
        await found.submit(script, labels=POD_LEVEL | {"fault-retry-times": "1"})
        await found.until(found.runs)
        survivor, failed = found.uid("master-0"), found.uid("worker-0")
        (tmp_path / "fail-1").touch()
        await found.until(lambda: found.runs() and found.uid("worker-0") != failed)
        assert found.uid("master-0") == survivor
        restarts = (found.jobs.get("job", "default") or {})["status"]["restarts"]
        assert restarts["retries"] == 1
        assert {task["RescheduleReason"] for task in await found.records()} == {"pod-failed"}
        (tmp_path / "fail-2").touch()
        await found.until(lambda: found.state() == "Failed")
        message = (found.jobs.get("job", "default") or {})["status"]["conditions"][-1]["message"]
        assert message.endswith("remain retry times is 0.")


async def test_a_job_whose_pods_are_replaced_goes_on(tmp_path: Path) -> None:
    """Pods that are asked to go end with an error, as programs do then: that is no failure of the job."""
    async with world(tmp_path, nodes=3) as found:
        states: set[str] = set()
        found.jobs.listen(lambda before, after: states.add(found.state()))
        await found.submit(labels=FORCE)
        await found.until(found.runs)
        states.clear()
        for round_ in range(2):
            before, (name, chip) = found.uid("worker-0"), found.place("worker-0")
            await publish(found.kube, {name: devices([chip])})
            await found.until(lambda before=before: found.runs() and found.uid("worker-0") != before)
            restarts = (found.jobs.get("job", "default") or {})["status"]["restarts"]
            assert (restarts["count"], restarts["retries"]) == (round_ + 1, 0)
        assert states <= {"Running"}


async def test_a_job_that_leads_itself_says_which_pods_to_replace(tmp_path: Path) -> None:
    leads = True
    async with world(tmp_path, nodes=2, leads=lambda job: leads) as found:
        await found.submit(labels=FORCE, annotations={"recover-strategy": "recover"})
        await found.until(found.runs)
        first, second = found.uid("master-0"), found.uid("worker-0")
        name, chip = found.place("worker-0")
        await publish(found.kube, {name: devices([chip])})
        await found.until(lambda: found.rescheduler._watched.health)
        await found.rescheduler.replace(found.model(), ReplacePods((first,), "its process died"))
        await found.until(lambda: found.runs() and found.uid("master-0") != first)
        assert found.uid("worker-0") == second, "nobody has asked for it"
        job = found.model()
        order = ReplacePods(tuple(pod.uid for pod in job.pods.values()), "all again", whole_job=True)
        await found.rescheduler.replace(job, order)
        await found.until(lambda: found.runs() and found.uid("worker-0") != second)
        newest = {found.uid("master-0"), found.uid("worker-0")}
        await found.rescheduler.replace(job, order)
        assert {task["RescheduleReason"] for task in await found.records()} == {"its process died", "all again"}
        assert {found.uid("master-0"), found.uid("worker-0")} == newest
        assert found.runs()


async def test_a_job_that_should_lead_itself_and_does_not_is_helped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertrain.clusterd.resched.shell.LEAD_PATIENCE", 1.0)
    async with world(tmp_path, nodes=2, leads=lambda job: False) as found:
        await found.submit(labels=FORCE, annotations={"recover-strategy": "recover"})
        await found.until(found.runs)
        first, second = found.uid("master-0"), found.uid("worker-0")
        name, chip = found.place("worker-0")
        await publish(found.kube, {name: devices([chip])})
        await found.until(lambda: found.runs() and found.uid("worker-0") != second)
        assert found.uid("master-0") == first


async def test_a_hot_switch(tmp_path: Path) -> None:
    """As ClusterD leads it, patch by patch; the job never stops."""
    async with world(tmp_path, nodes=3) as found:
        states: set[str] = set()
        found.jobs.listen(lambda before, after: states.add(found.state()))
        labels = FORCE | {"subHealthyStrategy": "hotSwitch"}
        await found.submit(labels=labels, chips=2)
        await found.until(found.runs)
        states.clear()
        survivor, old = found.uid("master-0"), found.uid("worker-0")
        name, chips = found.place("worker-0")
        await publish(found.kube, {name: devices(faults=[(chips.split(",")[0], "SubHealthFault")])})

        async def mark(pod: str, annotations: dict[str, str | None], labels: dict[str, str] | None = None) -> None:
            patch = {"metadata": {"annotations": annotations, "labels": labels or {}}}
            await found.kube.patch(POD, pod, "default", patch)

        await mark("job-worker-0", {"inHotSwitchFlow": "true", "needOperatorOpe": "create"})

        def backup() -> str:
            return next(each for each in found.pods() if "-hot-" in each)

        def runs() -> bool:
            return backup() in found.pods() and found.pods()[backup()]["status"].get("phase") == "Running"

        await found.until(lambda: len(found.pods()) == 3 and runs())
        new = found.pods()[backup()]["metadata"]
        assert new["annotations"]["podType"] == "backup"
        assert found.place(backup())[0] not in {name, found.place("master-0")[0]}
        marks = found.pods()["worker-0"]["metadata"]["annotations"]
        await found.until(lambda: "needOperatorOpe" not in found.pods()["worker-0"]["metadata"]["annotations"])
        assert found.uid("worker-0") == old, "the old pod goes only when ClusterD says so"
        marks = found.pods()["worker-0"]["metadata"]["annotations"]
        assert marks["backupNewPodName"] == new["name"]
        await mark("job-worker-0", {"needVolcanoOpe": "delete"}, {"fault-type": "SubHealth"})
        await found.until(
            lambda: len(found.pods()) == 2 and "podType" not in found.pods()[backup()]["metadata"]["annotations"]
        )
        assert found.pods()[backup()]["metadata"]["uid"] == new["uid"]
        assert found.uid("master-0") == survivor
        await mark(new["name"], {"inHotSwitchFlow": None})
        await found.until(found.runs)
        assert states <= {"Running"}


async def test_a_hot_switch_that_is_called_off(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=3) as found:
        await found.submit(labels=FORCE | {"subHealthyStrategy": "hotSwitch"}, chips=2)
        await found.until(found.runs)
        old = found.uid("worker-0")
        order = {"inHotSwitchFlow": "true", "needOperatorOpe": "create"}
        await found.kube.patch(POD, "job-worker-0", "default", {"metadata": {"annotations": order}})
        await found.until(lambda: len(found.pods()) == 3)
        (backup,) = (each for each in found.pods() if "-hot-" in each)
        back = {"inHotSwitchFlow": None, "backupNewPodName": None, "needOperatorOpe": None}
        await found.kube.patch(POD, "job-worker-0", "default", {"metadata": {"annotations": back}})
        with contextlib.suppress(NotFound):
            order = {"needOperatorOpe": "delete"}
            await found.kube.patch(POD, f"job-{backup}", "default", {"metadata": {"annotations": order}})
        await found.until(lambda: len(found.pods()) == 2 and found.runs())
        assert found.uid("worker-0") == old


async def test_a_pod_that_finds_no_place_takes_the_others_with_it(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=2, settings=Settings(job_patience=2.0)) as found:
        await found.submit(labels=POD_LEVEL, chips=2)
        await found.until(found.runs)
        survivor, lost = found.uid("master-0"), found.uid("worker-0")
        name, chips = found.place("worker-0")
        await publish(found.kube, {name: devices(chips.split(","))})
        await found.until(lambda: found.uid("worker-0") != lost and found.uid("master-0") != survivor)
        await publish(found.kube, {})
        await found.until(found.runs)


async def test_who_is_outside_of_the_cluster_is_told_and_deletes(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=2) as found:
        await found.submit(labels={"fault-scheduling": "external-force", "pod-rescheduling": "on"})
        await found.until(found.runs)
        lost, (name, chip) = found.uid("worker-0"), found.place("worker-0")
        await publish(found.kube, {name: devices([chip])})

        def told() -> bool:
            annotations = found.pods()["worker-0"]["metadata"]["annotations"]
            return bool(annotations.get("huawei.com/pod-status") == "Unhealthy-CardUnhealthy")

        await found.until(told)
        assert found.uid("worker-0") == lost
        await found.kube.delete(POD, "job-worker-0", "default", grace=1)
        await found.until(lambda: found.runs() and found.uid("worker-0") != lost)
        assert found.place("worker-0") != (name, chip)


@pytest.mark.parametrize("known", ["by its configuration", "by an option"])
async def test_where_the_ascend_plugin_runs_it_does_the_work(tmp_path: Path, known: str) -> None:
    conf = "actions: enqueue\ntiers:\n- plugins:\n  - name: volcano-npu-v7.3.0_linux-aarch64\n"
    options = {"plugin": True} if known == "by an option" else {}
    async with world(tmp_path, nodes=2, **options) as found:
        metadata = {"name": "volcano-scheduler-configmap", "namespace": "volcano-system"}
        if not options:
            item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
            await found.kube.create(CONFIG_MAP, item | {"data": {"volcano-scheduler.conf": conf}})
        await found.until(lambda: not found.rescheduler.acts)
        await found.submit(labels=FORCE)
        await found.until(found.runs)
        lost, (name, chip) = found.uid("worker-0"), found.place("worker-0")
        await publish(found.kube, {name: devices([chip])}, {name: node("UnHealthy")})
        await found.until(lambda: found.rescheduler._watched.health)
        job = found.model()
        await found.rescheduler.replace(job, ReplacePods((lost,), "x", whole_job=True))
        await found.rescheduler._look_at_job(job.uid)
        await found.rescheduler._look_at_node(name)
        assert found.uid("worker-0") == lost
        assert found.taints(name) == []
        assert await found.records() == []
        if not options:
            plain = {"data": {"volcano-scheduler.conf": conf.replace("volcano-npu", "gang")}}
            await found.kube.patch(CONFIG_MAP, metadata["name"], metadata["namespace"], plain)
            await found.until(lambda: found.runs() and found.uid("worker-0") != lost)
            assert found.taints(name) == [("evertrain.dev/fault", "NodeUnhealthy")]


async def test_launchers_are_told_to_leave_in_good_order_and_that_it_is_over(tmp_path: Path) -> None:
    async with world(tmp_path, nodes=3) as found:
        start = json.dumps({"RankList": [], "UpdateTime": 0, "RetryTime": 0, "FaultFlushing": False, "GracefulExit": 0})
        metadata = {"name": "reset-config-job", "namespace": "default", "labels": {"reset": "true"}}
        item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"reset.json": start}}
        await found.kube.create(CONFIG_MAP, item)
        configs = Cache(found.kube, CONFIG_MAP, "default")
        seen: list[int] = []

        def look(before: Object | None, after: Object | None) -> None:
            value = json.loads((after or {})["data"]["reset.json"])["GracefulExit"]
            if not seen or seen[-1] != value:
                seen.append(value)

        configs.listen(look)
        found.tasks.insert(0, asyncio.create_task(configs.run()))
        await found.submit(labels=FORCE | {"subHealthyStrategy": "graceExit"}, chips=2)
        await found.until(found.runs)
        before, (name, chips) = found.uid("worker-0"), found.place("worker-0")
        await publish(found.kube, {name: devices(faults=[(chips.split(",")[0], "SubHealthFault")])})
        await found.until(lambda: found.runs() and found.uid("worker-0") != before)
        await found.until(lambda: seen == [0, 1, 0])
        assert name not in {found.place("master-0")[0], found.place("worker-0")[0]}


async def test_killed_while_it_deletes_a_job_the_next_one_goes_on(tmp_path: Path) -> None:
    """It dies after the first pod is on its way: nobody is left to wait for pods that never come."""

    class Dying:
        def __init__(self, kube: Any) -> None:
            self._kube = kube
            self.deleted = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._kube, name)

        async def delete(self, *arguments: Any, **more: Any) -> None:
            self.deleted += 1
            if self.deleted > 1:
                await asyncio.Event().wait()
            await self._kube.delete(*arguments, **more)

    async with world(tmp_path, nodes=3) as found:
        await found.submit(labels=FORCE, workers=2)
        await found.until(lambda: found.runs(count=3))
        before = {pod["metadata"]["uid"] for pod in found.pods().values()}
        await found.kill()
        dying = Dying(found.kube)
        found.rescheduler = Rescheduler(dying, chips=True)  # type: ignore[arg-type]
        found.tasks.append(asyncio.create_task(found.rescheduler.run()))
        name, chip = found.place("worker-0")
        await publish(found.kube, {name: devices([chip])})
        await found.until(lambda: dying.deleted >= 2)
        await found.kill()
        found.start()
        await found.until(
            lambda: found.runs(count=3) and not before & {pod["metadata"]["uid"] for pod in found.pods().values()}
        )
