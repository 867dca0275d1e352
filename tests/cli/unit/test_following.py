"""`evertrain run` while a job is under way: what it says, which objects it takes for the job's, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest

from evertrain import aio
from evertrain.cli import following, manifest
from evertrain.cli.connection import Connection
from evertrain.cli.following import Follower
from evertrain.cli.running import CommandError
from evertrain.kube.port import ASCEND_JOB, EVENT, POD, ApiError, Object
from tests.kube.fake import FakeKube

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes: too small",
}
FILE = "apiVersion: mindxdl.gitee.com/v1\nkind: AscendJob\nmetadata: {name: job}\n"
MISSING = 'configmap "nowhere" not found'


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "STUCK", 0.1)
    monkeypatch.setattr(following, "ASK_EVERY", 0.01)
    monkeypatch.setattr(following, "SILENCE", 0.1)


class Cluster(FakeKube):
    """With what only the command line asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.reachable = True
        self.logs: dict[str, bytes] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []

    async def ask(self, method: str, path: str) -> Object:
        if not self.reachable:
            raise ConnectionError("nobody there")
        return {}

    @contextlib.asynccontextmanager
    async def follow(self, path: str, parameters: dict[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        name = path.split("/")[-2]
        self.asked.append((name, parameters))
        if (POD, "default", name) not in self.objects:
            raise ApiError(404, "NotFound", f'pods "{name}" not found')

        async def pieces() -> AsyncIterator[bytes]:
            yield self.logs.get(name, b"")

        yield pieces()

    async def job(self, name: str = "job") -> Object:
        return await self.create(ASCEND_JOB, {"metadata": {"name": name, "namespace": "default"}})

    async def pod(self, name: str, job: Object, **status: Any) -> Object:
        owner = {"kind": "AscendJob", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
        labels = {"training.kubeflow.org/job-name": job["metadata"]["name"]}
        metadata = {"name": name, "namespace": "default", "labels": labels, "ownerReferences": [owner]}
        spec = {"containers": [{"name": "side"}, {"name": "ascend"}]}
        return await self.create(POD, {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", **status}})

    async def warn(self, about: Object, kind: str, reason: str, message: str) -> None:
        self.serial += 1
        involved = {"kind": kind, "name": about["metadata"]["name"], "uid": about["metadata"]["uid"]}
        metadata = {"name": f"event-{self.serial}", "namespace": "default"}
        event = {"type": "Warning", "reason": reason, "message": message, "involvedObject": involved}
        await self.create(EVENT, event | {"metadata": metadata})

    def end(self, job: Object, condition: str, **more: str) -> None:
        conditions = [{"type": condition, "status": "True", **more}]
        self.set_status(ASCEND_JOB, job["metadata"]["name"], {"conditions": conditions})


def follower(kube: Cluster, job: Object, *, alone: bool = False) -> Follower:
    return Follower(cast(Connection, kube), job, manifest.parse(FILE, "job.yaml")[0], alone=alone)


def terminated(code: int) -> list[Object]:
    return [{"name": "ascend", "restartCount": 0, "state": {"terminated": {"exitCode": code, "reason": "Error"}}}]


def run(test: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with aio.timeout(20):
            await test(Cluster())

    aio.run(whole())


async def said(capsys: pytest.CaptureFixture[str], text: str, so_far: str = "") -> str:
    """Waits until something is on standard error; all that is there by then."""
    while text not in so_far:
        await asyncio.sleep(0.005)
        so_far += capsys.readouterr().err
    return so_far


def last(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_job_that_no_node_has_room_for_is_given_up_on_a_cluster_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(kube: Cluster) -> None:
        job = await kube.job()
        for name in ("job-master-0", "job-worker-0"):
            await kube.pod(name, job, conditions=[UNSCHEDULABLE])
        assert await follower(kube, job, alone=True).follow() == 1

    run(test)
    why = "pods job-master-0, job-worker-0: Unschedulable: 0/2 nodes: too small"
    assert last(capsys) == f"evertrain run: acjob job can't go on: {why}"


def test_a_volume_that_is_missing_is_told_and_given_up_on_a_cluster_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(kube: Cluster) -> None:
        job = await kube.job()
        waiting = [{"name": "ascend", "state": {"waiting": {"reason": "ContainerCreating"}}}]
        pod = await kube.pod("job-master-0", job, containerStatuses=waiting)
        await kube.warn(pod, "Pod", "FailedMount", MISSING)
        assert await follower(kube, job, alone=True).follow() == 1

    run(test)
    assert last(capsys) == f"evertrain run: acjob job can't go on: pod job-master-0: FailedMount: {MISSING}"


def test_a_job_without_pods_says_what_its_gang_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(kube: Cluster) -> None:
        job = await kube.job()
        gang = {"metadata": {"name": f"job-{job['metadata']['uid']}", "uid": "gang"}}
        await kube.warn(gang, "PodGroup", "Unschedulable", "the queue is full")
        kube.end(job, "Created", reason="PodGroupPending", message="waiting")
        assert await follower(kube, job, alone=True).follow() == 1

    run(test)
    assert last(capsys).endswith("can't go on: Unschedulable: the queue is full")


def test_where_others_may_make_room_it_waits_and_says_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(kube: Cluster) -> None:
        job = await kube.job()
        await kube.pod("job-master-0", job, conditions=[UNSCHEDULABLE])
        waiting = follower(kube, job)
        following_it = asyncio.create_task(waiting.follow())
        text = await said(capsys, "ends it")
        assert "none of its pods runs: pod job-master-0: Unschedulable: 0/2 nodes: too small" in text
        assert waiting.state() == "pod job-master-0: Unschedulable: 0/2 nodes: too small"
        kube.end(job, "Succeeded")
        assert await following_it == 0

    run(test)


def test_a_pod_that_waits_beside_one_that_runs_is_not_given_up() -> None:
    """It may get its turn when that one has ended."""

    async def test(kube: Cluster) -> None:
        job = await kube.job()
        await kube.pod("job-master-0", job, phase="Running")
        await kube.pod("job-worker-0", job, conditions=[UNSCHEDULABLE])
        following_it = asyncio.create_task(follower(kube, job, alone=True).follow())
        assert not (await asyncio.wait([following_it], timeout=0.4))[0]
        kube.end(job, "Succeeded")
        assert await following_it == 0

    run(test)


def test_objects_of_other_jobs_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one whose name only begins with that of ours, and of an earlier one of the same name."""

    async def test(kube: Cluster) -> None:
        earlier = await kube.job()
        remains = await kube.pod("job-master-0", earlier, phase="Failed", containerStatuses=terminated(7))
        kube.objects.pop((ASCEND_JOB, "default", "job"))
        job, other = await kube.job(), await kube.job("job-two")
        await kube.warn(remains, "Pod", "BackOff", "of an earlier time")
        await kube.warn(earlier, "AscendJob", "Odd", "of an earlier time")
        await kube.warn(await kube.pod("job-two-master-0", other), "Pod", "FailedMount", "of another job")
        following_it = asyncio.create_task(follower(kube, job).follow())
        own = await kube.pod("job-worker-0", job)
        await kube.warn(own, "Pod", "FailedMount", MISSING)
        text = await said(capsys, MISSING)
        kube.end(job, "Failed", reason="JobFailed", message="it failed")
        assert await following_it == 1
        text += capsys.readouterr().err
        assert "of another job" not in text and "of an earlier time" not in text and "exit code 7" not in text

    run(test)


def test_a_warning_that_came_before_its_pod_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(kube: Cluster) -> None:
        job = await kube.job()
        pod = await kube.pod("job-master-0", job)
        pod = kube.objects.pop((POD, "default", "job-master-0"))
        await kube.warn(pod, "Pod", "FailedMount", MISSING)
        following_it = asyncio.create_task(follower(kube, job).follow())
        await said(capsys, "created in namespace")
        kube.objects[POD, "default", "job-master-0"] = pod
        kube.set_status(POD, "job-master-0", {"phase": "Pending"})
        await said(capsys, f"pod job-master-0: FailedMount: {MISSING}")
        kube.end(job, "Succeeded")
        assert await following_it == 0

    run(test)


def test_a_cluster_that_is_gone_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(kube: Cluster) -> None:
        job = await kube.job()
        kube.reachable = False
        with pytest.raises(CommandError, match="the cluster is gone.*nobody there"):
            await follower(kube, job).follow()

    run(test)


def test_a_cluster_that_comes_back_is_followed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SILENCE", 20.0)

    async def test(kube: Cluster) -> None:
        job = await kube.job()
        following_it = asyncio.create_task(follower(kube, job).follow())
        kube.reachable = False
        await said(capsys, "doesn't answer (nobody there)")
        kube.reachable = True
        await said(capsys, "answers again")
        kube.end(job, "Succeeded")
        assert await following_it == 0

    run(test)


def test_a_job_that_is_deleted_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def before_it_was_seen(kube: Cluster) -> None:
        job = await kube.job()
        kube.remove(ASCEND_JOB, "job")
        assert await follower(kube, job).follow() == 1

    async def replaced(kube: Cluster) -> None:
        job = await kube.job()
        kube.remove(ASCEND_JOB, "job")
        kube.end(await kube.job(), "Succeeded")
        assert await follower(kube, job).follow() == 1

    for test in (before_it_was_seen, replaced):
        run(test)
        assert "acjob job was deleted before its end" in last(capsys)


def test_a_job_that_is_deleted_as_soon_as_it_has_ended_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """ttlSecondsAfterFinished: 0. Both changes may come at once."""

    async def test(kube: Cluster) -> None:
        job = await kube.job()
        following_it = asyncio.create_task(follower(kube, job).follow())
        await kube.pod("job-master-0", job)
        await said(capsys, "pod job-master-0: Pending")
        kube.end(job, "Succeeded")
        kube.remove(ASCEND_JOB, "job")
        assert await following_it == 0

    run(test)


def test_the_last_line_of_a_failure_names_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """Also if the pods are known only from the moment at which the job is over."""

    async def test(kube: Cluster) -> None:
        job = await kube.job()
        kube.logs["job-master-0"] = b"the reason\n"
        kube.end(job, "Failed", reason="JobFailed", message="it failed.")
        await kube.pod("job-master-0", job, phase="Failed", containerStatuses=terminated(3))
        assert await follower(kube, job).follow() == 1
        assert {parameters["container"] for _, parameters in kube.asked} == {"ascend"}

    run(test)
    out, err = capsys.readouterr()
    assert out == "[job-master-0] the reason\n"
    assert err.splitlines()[-2] == "    the reason"
    why = "pod job-master-0: Failed (Error, exit code 3)"
    assert err.splitlines()[-1] == f"evertrain run: acjob job Failed (JobFailed): it failed. ({why})"


def test_a_pod_that_was_cleaned_up_has_still_failed(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(kube: Cluster) -> None:
        job = await kube.job()
        kube.logs["job-master-0"] = b"the reason\n"
        await kube.pod("job-master-0", job, phase="Failed", containerStatuses=terminated(3))
        following_it = asyncio.create_task(follower(kube, job).follow())
        await said(capsys, "exit code 3")
        kube.remove(POD, "job-master-0")
        await said(capsys, "pod job-master-0: deleted")
        kube.end(job, "Failed", reason="JobFailed", message="it failed.")
        assert await following_it == 1
        assert "    the reason\n" in (text := capsys.readouterr().err)
        assert text.endswith("it failed. (pod job-master-0: Failed (Error, exit code 3))\n")

    run(test)
