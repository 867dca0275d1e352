"""The rescheduler against an API that does not let it see everything, and with nobody who wakes it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from evertrain.clusterd.resched import watched
from evertrain.clusterd.resched.shell import LEAD_PATIENCE, Rescheduler
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, NODE, POD, Kind, Listing
from tests import virtual_time
from tests.clusterd.cluster_info import devices, publish
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
            async with asyncio.timeout(60):
                await rescheduler.ready.wait()
                assert rescheduler.acts
                assert "volcano-system/volcano-scheduler-configmap" in caplog.text
                kube.forbidden = False
                while rescheduler.acts:
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_a_leader_that_is_lost_later_than_the_fault() -> None:
    """With the node of the fault, say, and its silence is noticed only when nothing happens any more."""

    async def run() -> None:
        kube = await one_job()
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


async def one_job() -> FakeKube:
    """That leads its recovery itself, of a master on n0 and a worker on n1."""
    kube = FakeKube()
    labels = {"fault-scheduling": "force", "process-recover-enable": "on"}
    job = await kube.create(ASCEND_JOB, ascend_job("job", labels=labels, annotations={"recover-strategy": "recover"}))
    owner = {"kind": "AscendJob", "controller": True, "uid": job["metadata"]["uid"]}
    for rank, role in enumerate(("master", "worker")):
        node = {"metadata": {"name": f"n{rank}"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await kube.create(NODE, node)
        metadata = {
            "name": f"job-{role}-0",
            "namespace": "default",
            "labels": {"training.kubeflow.org/operator-name": "ascendjob-controller",
                       "training.kubeflow.org/replica-type": role},
            "annotations": {"hccl/rankIndex": str(rank), "huawei.com/Ascend910": "Ascend910-0"},
            "ownerReferences": [owner],
        }  # fmt: skip
        pod = {"metadata": metadata, "spec": {"nodeName": f"n{rank}"}, "status": {"phase": "Running"}}
        await kube.create(POD, pod)
    return kube
