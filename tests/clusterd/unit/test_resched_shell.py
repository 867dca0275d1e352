"""The rescheduler against an API that does not let it see everything, and with nobody who wakes it."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from evertrain import aio
from evertrain.clusterd.actor import Actor
from evertrain.clusterd.effects import Carrier
from evertrain.clusterd.keep import Keeper
from evertrain.clusterd.model import UNHEALTHY, Job, JobFaults, Pod, RankFault
from evertrain.clusterd.recover.events import FaultsSeen, JobSeen, Note, ProcessFault, StopComplete
from evertrain.clusterd.recover.machine import Recovery
from evertrain.clusterd.recover.names import SCALED
from evertrain.clusterd.recover.timing import SUBSCRIBER
from evertrain.clusterd.resched import reasons, watched
from evertrain.clusterd.resched.shell import LEAD_PATIENCE, READY_WORD, READY_WORDS, Rescheduler
from evertrain.kube.events import timestamp
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, Kind, Listing, Object
from tests import virtual_time
from tests.clusterd.cluster_info import devices, publish
from tests.clusterd.recover_world import World
from tests.kube.fake import FakeKube, refused
from tests.operator.acjobs import ascend_job


class Guarded(FakeKube):
    """Nobody may read Volcano's configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden = True

    async def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        if self.forbidden and namespace == "volcano-system":
            raise refused(403, "Forbidden", "configmaps is forbidden")
        return await super().list(kind, namespace, labels=labels, fields=fields)


def test_without_a_look_at_volcano(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watched, "SCHEDULER_AGAIN", 0.01)
    caplog.set_level(logging.WARNING)

    async def run() -> None:
        kube = Guarded()
        metadata = {"name": "volcano-scheduler-configmap", "namespace": "volcano-system"}
        text = "plugins:\n- name: volcano-npu_v7"
        await kube.create(CONFIG_MAP, {"metadata": metadata, "data": {"volcano-scheduler.conf": text}})
        rescheduler = Rescheduler(kube)
        running = asyncio.ensure_future(rescheduler.run())
        try:
            async with aio.timeout(60):
                await rescheduler.ready.wait()
                assert rescheduler.acts
                assert "volcano-system/volcano-scheduler-configmap" in caplog.text
                kube.forbidden = False
                while rescheduler.acts:
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    aio.run(run())


def test_a_leader_that_is_lost_later_than_the_fault() -> None:
    """With the node of the fault, say, and its silence is noticed only when nothing happens any more."""

    async def run() -> None:
        kube = await led_job()
        loop = asyncio.get_running_loop()
        lost = float("inf")
        rescheduler = Rescheduler(kube, leads=lambda job: loop.time() < lost, clock=loop.time)
        running = asyncio.ensure_future(rescheduler.run())
        try:
            await rescheduler.ready.wait()
            await publish(kube, {"n1": devices(["Ascend910-0"])})
            await asyncio.sleep(10 * LEAD_PATIENCE)
            assert len(kube.items(POD)) == 2, "its recovery leads"
            lost = loop.time()
            await asyncio.sleep(2 * LEAD_PATIENCE + 1)
            assert [call for call in kube.calls if call[0] == "delete"] == [("delete", "Pod", "job-worker-0")]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    virtual_time.run(run())


def test_a_recovery_does_not_wait_for_ever_for_what_the_rescheduler_may_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Closed(FakeKube):
        async def list(self, kind: Kind, namespace: str | None = None, **chosen: str) -> Listing:
            if chosen.get("fields") == f"metadata.name={reasons.NAME}" and closed:
                raise refused(403, "Forbidden", "configmaps is forbidden")
            return await super().list(kind, namespace, **chosen)

    async def run() -> None:
        nonlocal closed
        kube, world = Closed(), World("recover")
        rescheduler = Rescheduler(kube)
        machine = Recovery(world.job.uid, make_uuid=lambda: "uuid")
        notes: list[str] = []

        class Notes:
            def note(self, job: Job, note: Note, now: float) -> None:
                notes.append(note.text)

        carrier = Carrier(kube, rescheduler, Notes())
        actor = Actor(world.job, machine, Keeper(kube, world.job), carrier.carry)
        tasks = [asyncio.ensure_future(each) for each in (rescheduler.run(), actor.run())]
        actor.put(JobSeen(world.job))
        line = await actor.signals()
        await actor.tell(ProcessFault({3: "1"}))
        await actor.tell(StopComplete(0))
        async with aio.timeout(2 * READY_WORDS * READY_WORD):
            while (await anext(line)).type != "globalFault":
                pass
        missing = f"ConfigMaps in {reasons.NAMESPACE} (metadata.name={reasons.NAME})"
        assert caplog.text.count(f"we wait for {missing}") == READY_WORDS
        await asyncio.sleep(1)
        assert any(text.endswith(f"the rescheduler has waited 30 s for {missing}") for text in notes), notes
        closed = False
        await asyncio.sleep(100)
        assert rescheduler.ready.is_set() and not actor._undone, "the pods go as soon as they can"
        line.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    closed = True
    virtual_time.run(run())


def test_a_job_that_trains_smaller_and_loses_the_node_of_its_manager_gets_new_pods() -> None:
    """As long as its recovery waits for its pods to grow again, nobody else replaces any."""

    async def run() -> None:
        kube = await led_job()
        job = kube.find(ASCEND_JOB, "job")["metadata"]
        pods = {
            rank: Pod(rank, kube.find(POD, name)["metadata"]["uid"], name, f"n{rank}", phase="Running")
            for rank, name in enumerate(("job-master-0", "job-worker-0"))
        }
        wishes = {name: job[name] for name in ("labels", "annotations")}
        seen = Job(job["uid"], "job", "default", replicas=2, pods=pods, **wishes)

        class Notes:
            def note(self, job: Job, note: Note, now: float) -> None:
                pass

        loop = asyncio.get_running_loop()
        rescheduler = Rescheduler(kube, leads=lambda uid: actor.leads, clock=loop.time)
        state = json.dumps({"state": SCALED, "pods": {1: "another"}, "origin": {0: pods[0].uid, 1: "another"}}).encode()
        machine = Recovery.load(state, seen.uid, make_uuid=lambda: "uuid")
        carrier = Carrier(kube, rescheduler, Notes())
        actor = Actor(seen, machine, Keeper(kube, seen), carrier.carry, clock=loop.time)
        tasks = [asyncio.ensure_future(each) for each in (rescheduler.run(), actor.run())]
        try:
            line = await actor.signals()
            actor.put(JobSeen(replace(seen, pods={0: pods[0], 1: replace(pods[1], phase="Pending")})))
            await rescheduler.ready.wait()
            kube.set_status(NODE, "n0", {"conditions": [{"type": "Ready", "status": "Unknown"}]}, "")
            lost = RankFault(0, 0, pods[0].uid, "n0")
            actor.put(FaultsSeen(JobFaults(seen.uid, UNHEALTHY, (lost,))))
            await asyncio.sleep(10 * LEAD_PATIENCE)
            assert len(kube.items(POD)) == 2, "somebody listens: it can say what has happened"
            line.close()
            await asyncio.sleep(SUBSCRIBER + 5)
            assert kube.items(POD) == []
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    virtual_time.run(run())


class Clocked(FakeKube):
    """Has a clock of its own."""

    @property
    def now(self) -> float:
        return 1_800_000_000 + asyncio.get_running_loop().time()

    async def create(self, kind: Kind, item: Object) -> Object:
        made = await super().create(kind, item)
        metadata = made["metadata"]
        stamp = {"metadata": {"creationTimestamp": timestamp(self.now)}}
        return await super().patch(kind, metadata["name"], metadata.get("namespace"), stamp)

    async def delete(self, kind: Kind, name: str, namespace: str | None = None, **options: Any) -> Any:
        if kind == POD:
            grace = options.get("grace")
            metadata = self.find(POD, name)["metadata"]
            metadata["deletionGracePeriodSeconds"] = 30 if grace is None else grace
            metadata["deletionTimestamp"] = timestamp(self.now + metadata["deletionGracePeriodSeconds"])
        return await super().delete(kind, name, namespace, **options)


CLOCKS = [-100.0, 0.0, 100.0]
"""Seconds by which ClusterD's is fast."""


@pytest.mark.parametrize("fast", CLOCKS)
def test_pods_have_their_time_to_end_whatever_the_clock_of_the_api_server_says(fast: float) -> None:
    async def run() -> None:
        kube = await one_job(Clocked(), {"fault-scheduling": "force"})
        kube.lingering = True
        rescheduler = Rescheduler(kube, clock=lambda: kube.now + fast)
        running = asyncio.ensure_future(rescheduler.run())
        try:
            await rescheduler.ready.wait()
            await publish(kube, {"n1": devices(["Ascend910-0"])})
            await asyncio.sleep(15.5)
            assert kube.graces == [1, 1]
            await asyncio.sleep(1)
            assert kube.graces == [1, 1, 0, 0]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    virtual_time.run(run())


@pytest.mark.parametrize("predecessor", [False, True])
@pytest.mark.parametrize("fast", CLOCKS)
def test_a_pod_without_a_place_has_its_time_whatever_the_clock_of_the_api_server_says(
    fast: float, predecessor: bool
) -> None:
    """`predecessor`: another ClusterD, on a machine with the right time, had begun it."""

    async def run() -> None:
        kube = await one_job(Clocked(), {"fault-scheduling": "force", "pod-rescheduling": "on"})
        rescheduler = Rescheduler(kube, clock=lambda: kube.now + (0 if predecessor else fast))
        running = asyncio.ensure_future(rescheduler.run())
        try:
            await rescheduler.ready.wait()
            await publish(kube, {"n1": devices(["Ascend910-0"])})
            await asyncio.sleep(0.5)
            assert [item["metadata"]["name"] for item in kube.items(POD)] == ["job-master-0"]
            if predecessor:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                rescheduler = Rescheduler(kube, clock=lambda: kube.now + fast)
                running = asyncio.ensure_future(rescheduler.run())
                await rescheduler.ready.wait()
            await kube.create(POD, one_pod(kube.items(ASCEND_JOB)[0], 1, "worker", version="1"))
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            kube.set_status(POD, "job-worker-0", {"phase": "Pending", "conditions": [condition]})
            await asyncio.sleep(11.5)
            assert len(kube.items(POD)) == 2, "it may find one yet"
            await asyncio.sleep(1)
            assert [item["metadata"]["name"] for item in kube.items(POD)] == ["job-worker-0"]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    virtual_time.run(run())


K = TypeVar("K", bound=FakeKube)


async def led_job() -> FakeKube:
    """Its recovery leads."""
    labels = {"fault-scheduling": "force", "process-recover-enable": "on"}
    return await one_job(FakeKube(), labels, {"recover-strategy": "recover"})


async def one_job(kube: K, labels: dict[str, str], annotations: dict[str, str] | None = None) -> K:
    """Of a master on n0 and a worker on n1."""
    job = await kube.create(ASCEND_JOB, ascend_job("job", labels=labels, annotations=annotations or {}))
    for rank, role in enumerate(("master", "worker")):
        node = {"metadata": {"name": f"n{rank}"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await kube.create(NODE, node)
        await kube.create(POD, one_pod(job, rank, role) | {"spec": {"nodeName": f"n{rank}"}})
        kube.set_status(POD, f"job-{role}-0", {"phase": "Running"})
    return kube


def one_pod(job: Object, rank: int, role: str, version: str = "0") -> Object:
    metadata = {
        "name": f"job-{role}-0",
        "namespace": "default",
        "labels": {"training.kubeflow.org/operator-name": "ascendjob-controller",
                   "training.kubeflow.org/replica-type": role,
                   "version": version},
        "annotations": {"hccl/rankIndex": str(rank), "huawei.com/Ascend910": "Ascend910-0"},
        "ownerReferences": [{"kind": "AscendJob", "controller": True, "uid": job["metadata"]["uid"]}],
    }  # fmt: skip
    return {"metadata": metadata}
