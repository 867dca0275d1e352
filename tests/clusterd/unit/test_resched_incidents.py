"""What the timeline tells of pod-level and job-level rescheduling: from the fault until all pods run again."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from evertrain import aio
from evertrain.clusterd.jobs.table import Table
from evertrain.clusterd.resched.shell import Rescheduler
from evertrain.clusterd.timeline.shell import Timeline
from evertrain.kube.port import ASCEND_JOB, EVENT, POD, Kind
from tests import virtual_time
from tests.clusterd.cluster_info import devices, publish
from tests.clusterd.unit.test_resched_shell import one_job
from tests.kube.fake import FakeKube

RETRIED = {"fault-scheduling": "force", "pod-rescheduling": "on", "fault-retry-times": "2"}
WORKER = "job-worker-0"


@contextlib.asynccontextmanager
async def clusterd(kube: FakeKube, **options: Any) -> AsyncIterator[Timeline]:
    """The parts of one that tell of rescheduling. It may be followed by another."""
    clock = asyncio.get_running_loop().time
    job, _ = Table().update(kube.find(ASCEND_JOB, "job"), None, [])
    timeline = Timeline(kube)
    await timeline.start()
    rescheduler = Rescheduler(
        kube,
        note=lambda uid, note: timeline.note(job, note, clock()),
        phase=timeline.phase,
        clock=clock,
        **{"leads": lambda uid: False, **options},
    )
    running = asyncio.ensure_future(rescheduler.run())
    try:
        async with aio.timeout(60):
            await rescheduler.ready.wait()
        yield timeline
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await timeline.close()


def the_incident(kube: FakeKube, timeline: Timeline) -> dict[str, Any]:
    (found,) = timeline.incidents(kube.find(ASCEND_JOB, "job")["metadata"]["uid"])
    return found.record()


async def start_again(kube: FakeKube, pod: dict[str, Any]) -> None:
    """As the operator does, and the kubelet ten seconds later."""
    made = copy.deepcopy(pod) | {"status": {"phase": "Pending"}}
    await kube.create(POD, made)
    await asyncio.sleep(10)
    kube.set_status(POD, pod["metadata"]["name"], {"phase": "Running"})
    await asyncio.sleep(1)


def test_pods_that_clusterd_replaces_also_if_another_one_goes_on() -> None:
    async def run() -> None:
        kube = await one_job(FakeKube(), RETRIED)
        worker = kube.find(POD, WORKER)
        async with clusterd(kube) as timeline:
            await publish(kube, {"n1": devices(["Ascend910-0"])})
            await asyncio.sleep(20)
            open_ = the_incident(kube, timeline)
        assert ("delete", "Pod", WORKER) in kube.calls
        assert (open_["outcome"], open_["decision"]) == ("open", "pod-rescheduling")
        assert open_["cause"].startswith(f"CardUnhealthy of pod {WORKER} on node n1")
        async with clusterd(kube) as timeline:
            await publish(kube, {})
            await asyncio.sleep(20)
            assert not the_incident(kube, timeline)["closed"], "a pod is missing"
            await start_again(kube, worker)
            closed = the_incident(kube, timeline)
        assert closed["id"] == open_["id"]
        assert (closed["outcome"], closed["ok"], closed["end"]) == ("rescheduled", True, "all pods run again")
        assert closed["phases_ms"] == {"detect": 0, "start again": 50_000}

    virtual_time.run(run())


class Late(FakeKube):
    """Watches tell later than answers that a pod goes."""

    async def delete(self, kind: Kind, name: str, namespace: str | None = None, **how: Any) -> None:
        asyncio.get_running_loop().call_later(10, lambda: asyncio.ensure_future(later(name)))
        later = functools.partial(super().delete, kind, namespace=namespace, **how)


@pytest.mark.parametrize("kubernetes", [FakeKube, Late])
def test_pods_that_are_to_go_do_not_count_as_those_that_run(kubernetes: type[FakeKube]) -> None:
    async def run() -> None:
        kube = await one_job(kubernetes(), RETRIED)
        kube.lingering = True
        worker = kube.find(POD, WORKER)
        async with clusterd(kube) as timeline:
            await publish(kube, {"n1": devices(["Ascend910-0"])})
            await asyncio.sleep(4)
            await publish(kube, {})
            await asyncio.sleep(4)
            assert not the_incident(kube, timeline)["closed"]
            await asyncio.sleep(4)
        async with clusterd(kube) as timeline:
            await asyncio.sleep(4)
            assert not the_incident(kube, timeline)["closed"]
            kube.remove(POD, WORKER)
            await start_again(kube, worker)
            assert the_incident(kube, timeline)["closed"]

    virtual_time.run(run())


def test_a_pod_that_failed_and_that_the_operator_starts_again() -> None:
    async def run() -> None:
        kube = await one_job(FakeKube(), RETRIED)
        worker = kube.find(POD, WORKER)
        async with clusterd(kube) as timeline:
            kube.set_status(POD, WORKER, {"phase": "Failed"})
            await asyncio.sleep(5)
            kube.annotate(ASCEND_JOB, "job", {"look": "again"})
            await asyncio.sleep(5)
            kube.remove(POD, WORKER)
            await start_again(kube, worker)
            told = the_incident(kube, timeline)
        assert told["cause"] == f"pod-failed of pod {WORKER} on node n1"
        assert told["reason"] == f"{told['cause']}: the operator starts it again (fault-retry-times: 2)"
        assert (told["decision"], told["outcome"], told["ok"]) == ("pod-rescheduling", "rescheduled", True)
        assert [phase["phase"] for phase in told["phases"]] == ["detect", "start again"]
        assert told["total_ms"] == 20_000
        events = {each["reason"]: each["count"] for each in kube.items(EVENT)}
        assert events == {"RecoveryStarted": 1, "RecoveryDecided": 1, "RecoverySucceeded": 1}

    virtual_time.run(run())


def test_a_job_that_has_failed_in_the_end() -> None:
    async def run() -> None:
        kube = await one_job(FakeKube(), RETRIED)
        async with clusterd(kube) as timeline:
            kube.set_status(POD, WORKER, {"phase": "Failed"})
            await asyncio.sleep(5)
            failed = {"type": "Failed", "status": "True", "message": "remain retry times is 0."}
            kube.set_status(ASCEND_JOB, "job", {"conditions": [failed]})
            await asyncio.sleep(1)
            told = the_incident(kube, timeline)
        assert (told["outcome"], told["ok"]) == ("failed", False)
        assert told["end"] == "the job has failed: remain retry times is 0."

    virtual_time.run(run())


def test_a_job_that_is_led_tells_of_itself() -> None:
    async def run() -> None:
        kube = await one_job(FakeKube(), RETRIED)
        async with clusterd(kube, leads=lambda uid: True) as timeline:
            kube.set_status(POD, WORKER, {"phase": "Failed"})
            await asyncio.sleep(5)
            assert not timeline.incidents(kube.find(ASCEND_JOB, "job")["metadata"]["uid"])

    virtual_time.run(run())
