"""What becomes of a job and its pods: the end, the clean-up, deadlines, changes of size, names that are taken."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine
from typing import Any

import pytest

from evertrain import aio
from evertrain.kube.port import ASCEND_JOB, EVENT, POD, POD_GROUP, SERVICE, Kind
from evertrain.operator.carry import Again
from tests.operator.acjobs import ascend_job, replica
from tests.operator.bench import Bench


def run(test: Coroutine[Any, Any, None]) -> None:
    aio.run(test)


def ended(policy: str | None, **pods: str) -> tuple[set[str], set[str]]:
    """The pods and services that are left of a job whose pods were in these phases when it failed."""
    left: list[set[str]] = []

    async def test() -> None:
        bench = Bench()
        await bench.running(workers=len(pods), run_policy={} if policy is None else {"cleanPodPolicy": policy})
        for index, phase in enumerate(pods.values()):
            bench.phase(f"test-job-worker-{index}", phase)
        bench.phase("test-job-master-0", "Failed")
        await bench.settle()
        assert bench.state == "Failed"
        services = {service["metadata"]["name"] for service in bench.kube.items(SERVICE)}
        left.extend([{name.removeprefix("test-job-") for name in bench.pods()}, services])

    run(test())
    return left[0], left[1]


@pytest.mark.parametrize("policy", [None, "None"])
def test_pods_stay_by_default_except_those_that_wait(policy: str | None) -> None:
    pods, services = ended(policy, a="Running", b="Succeeded", c="Pending")
    assert pods == {"master-0", "worker-0", "worker-1"}
    assert services == {"test-job-master-0"}


def test_clean_running() -> None:
    assert ended("Running", a="Running", b="Succeeded", c="Pending")[0] == {"master-0", "worker-1"}


def test_clean_all() -> None:
    assert ended("All", a="Running", b="Succeeded", c="Pending") == (set(), set())


def test_time_to_live_after_the_end() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(run_policy={"ttlSecondsAfterFinished": 60})
        bench.all_pods("Succeeded")
        await bench.settle()
        bench.later(59)
        await bench.settle()
        assert bench.state == "Succeeded"
        bench.later(1)
        await bench.settle()
        assert not bench.kube.items(ASCEND_JOB)
        assert not bench.pods()

    run(test())


def test_the_end_of_its_time_wakes_the_operator() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(run_policy={"ttlSecondsAfterFinished": 60})
        bench.all_pods("Succeeded")
        await bench.settle()
        bench.start_operator()
        bench.later(59.9)
        await bench.look()
        assert await asyncio.wait_for(bench.operator._queue.get(), 5) == ("default", "test-job")

    run(test())


def test_what_belongs_to_others_is_not_cleaned_up() -> None:
    """A pod and a service with the names and labels of ours, made for an earlier job by the same name."""

    async def test() -> None:
        bench = Bench()
        await bench.running(run_policy={"cleanPodPolicy": "All"})
        for kind in (POD, SERVICE):
            item = bench.kube.find(kind, "test-job-master-0")
            item["metadata"]["ownerReferences"][0]["uid"] = "of another"
        bench.phase("test-job-worker-0", "Failed")
        bench.start_operator()
        await bench.settle()
        assert bench.state == "Failed"
        assert set(bench.pods()) == {"test-job-master-0"}
        assert len(bench.kube.items(SERVICE)) == 1

    run(test())


@pytest.mark.parametrize("invalid", [True, False])
def test_time_to_live_also_of_jobs_that_never_ran(invalid: bool) -> None:
    async def test() -> None:
        bench = Bench()
        specs = {"Master": replica(2 if invalid else 1)}
        await bench.submit(specs=specs, run_policy={"ttlSecondsAfterFinished": 0, "backoffLimit": 1})
        if invalid:
            await bench.settle()
        else:
            await bench.settle()
            bench.admit()
            await bench.settle()
            for _ in range(2):
                bench.kube.remove(POD, "test-job-master-0")
                await bench.settle()
        assert not bench.kube.items(ASCEND_JOB)

    run(test())


def test_active_deadline_stops_the_job() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(run_policy={"activeDeadlineSeconds": 100})
        bench.later(99)
        await bench.settle()
        assert bench.state == "Running"
        bench.later(1)
        await bench.settle()
        assert bench.last["reason"] == "JobFailed"
        assert bench.last["message"] == "Job test-job has failed because it was active longer than specified deadline"
        assert not bench.pods()

    run(test())


@pytest.mark.parametrize("seconds", [2**63 - 1, 10**12])
def test_a_deadline_after_the_end_of_time(seconds: int) -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(run_policy={"activeDeadlineSeconds": seconds, "ttlSecondsAfterFinished": 2**31 - 1})
        assert bench.state == "Running"
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.state == "Failed"
        assert set(bench.pods()) == {"test-job-master-0", "test-job-worker-0"}

    run(test())


def test_a_deadline_wakes_the_operator() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(run_policy={"activeDeadlineSeconds": 100})
        bench.start_operator()
        bench.later(99.9)
        await bench.look()
        queue = bench.operator._queue
        assert await asyncio.wait_for(queue.get(), 5) == ("default", "test-job")

    run(test())


def test_success_policy_empty_does_not_wait_for_pods_that_never_got_a_node() -> None:
    async def test(policy: str, state: str) -> None:
        bench = Bench()
        await bench.running(workers=2, successPolicy=policy)
        bench.phase("test-job-master-0", "Succeeded")
        bench.phase("test-job-worker-0", "Running")
        bench.phase("test-job-worker-1", "Pending")
        await bench.settle()
        assert bench.state == "Running", "somebody still works"
        bench.phase("test-job-worker-0", "Succeeded")
        await bench.settle()
        assert bench.state == state

    run(test("", "Succeeded"))
    run(test("AllWorkers", "Running"))


def test_a_pod_that_is_done_before_the_others_have_begun_does_not_end_the_job() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit()
        await bench.settle()
        bench.admit()
        await bench.settle()
        bench.phase("test-job-master-0", "Succeeded")
        await bench.settle()
        assert bench.state == "Created"
        assert len(bench.pods()) == 2
        bench.phase("test-job-worker-0", "Succeeded")
        await bench.settle()
        assert bench.state == "Succeeded"

    run(test())


def test_elastic_training_may_end_smaller() -> None:
    async def test() -> None:
        bench = Bench()
        strategy = {"recover-strategy": "elastic-training"}
        await bench.running(workers=2, successPolicy="AllWorkers", annotations=strategy)
        bench.kube.remove(POD, "test-job-worker-1")
        await bench.settle()
        assert bench.state == "Running"
        for name in ("test-job-master-0", "test-job-worker-0"):
            bench.phase(name, "Succeeded")
        await bench.settle()
        assert bench.state == "Succeeded"
        assert set(bench.pods()) == {"test-job-master-0", "test-job-worker-0"}

    run(test())


async def resize(bench: Bench, workers: int) -> None:
    patch = {"spec": {"replicaSpecs": {"Worker": {"replicas": workers}}}}
    await bench.kube.patch(ASCEND_JOB, "test-job", "default", patch)
    await bench.settle()


def test_fewer_and_more_replicas() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(workers=3)
        await resize(bench, 1)
        assert bench.versions() == {"test-job-master-0": "0", "test-job-worker-0": "0"}
        [group] = bench.kube.items(POD_GROUP)
        assert (group["spec"]["minMember"], group["spec"]["minTaskMember"]) == (2, {"master": 1, "worker": 1})
        await resize(bench, 3)
        assert bench.versions() == {
            "test-job-master-0": "0",
            "test-job-worker-0": "0",
            "test-job-worker-1": "0",
            "test-job-worker-2": "0",
        }
        assert bench.state == "Running"
        assert bench.kube.items(POD_GROUP)[0]["spec"]["minMember"] == 4
        bench.kube.remove(POD, "test-job-worker-2")
        await bench.settle()
        assert bench.versions()["test-job-worker-2"] == "1"

    run(test())


def test_thirty_pods_deleted_at_once_are_created_at_once() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(workers=40)
        for index in range(30):
            bench.kube.remove(POD, f"test-job-worker-{index}")
        await bench.look()
        assert len(bench.pods()) == 41
        assert sum(1 for version in bench.versions().values() if version == "1") == 30
        created = [event for event in bench.kube.items(EVENT) if event["reason"] == "SuccessfulCreatePod"]
        assert len([event for event in created if event["message"].startswith("Created pod: ")]) == 31
        assert [event["message"] for event in created if "more" in event["message"]] == ["and 11 more"]

    run(test())


def test_pods_that_are_going_hold_their_names_and_count_as_one_round() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(workers=2)
        bench.kube.lingering = True
        for name in list(bench.pods()):
            await bench.kube.delete(POD, name, "default")
        await bench.settle()
        assert set(bench.versions().values()) == {"0"}
        for name in ("test-job-worker-0", "test-job-worker-1", "test-job-master-0"):
            bench.kube.remove(POD, name)
            await bench.settle()
        assert set(bench.versions().values()) == {"1"}
        assert bench.job()["status"]["restarts"]["count"] == 1

    run(test())


def test_pods_and_service_of_an_earlier_job_are_waited_for() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        del bench.kube.objects[ASCEND_JOB, "default", "test-job"]  # its pods are not collected yet
        await bench.submit()
        await bench.settle()
        bench.admit()
        old = bench.kube.find(SERVICE, "test-job-master-0")["metadata"]["uid"]
        with pytest.raises(Again, match="earlier job"):
            await bench.look()
        bench.kube.remove(SERVICE, "test-job-master-0")
        await bench.look()
        assert bench.kube.find(SERVICE, "test-job-master-0")["metadata"]["uid"] != old
        with pytest.raises(Again, match="earlier job"):
            await bench.look()
        assert bench.state == "Created"
        for name in list(bench.pods()):
            bench.kube.remove(POD, name)
        await bench.settle()
        uid = bench.job()["metadata"]["uid"]
        assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in bench.pods().values()} == {uid}

    run(test())


@pytest.mark.parametrize(
    ("kind", "reason"), [(POD, "PodCreateFailed"), (SERVICE, "SyncServiceFailed")], ids=["pod", "service"]
)
def test_a_stranger_has_the_name(kind: Kind, reason: str) -> None:
    async def test() -> None:
        bench = Bench()
        stranger = {"metadata": {"name": "test-job-master-0", "namespace": "default"}, "spec": {}}
        await bench.kube.create(kind, stranger)
        await bench.submit()
        await bench.settle()
        bench.admit()
        for _ in range(4):
            try:
                await bench.look()
            except Again as error:
                assert "already exists" in str(error)
        assert bench.last["reason"] == reason
        assert bench.last["message"].endswith(f'{kind.plural} "test-job-master-0" already exists')
        bench.kube.remove(kind, "test-job-master-0")
        await bench.settle()
        assert len(bench.pods()) == 2

    run(test())


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        (POD, "training.kubeflow.org/job-name"),
        (POD, "training.kubeflow.org/replica-index"),
        (SERVICE, "training.kubeflow.org/operator-name"),
    ],
)
def test_what_lost_its_label_is_missed_aloud(kind: Kind, label: str) -> None:
    """The operator doesn't find it any more, and it can't be made again."""

    async def test() -> None:
        bench = Bench()
        await bench.submit()
        await bench.settle()
        bench.admit()
        while not bench.kube.items(kind):
            await bench.look()
        await bench.kube.patch(kind, "test-job-master-0", "default", {"metadata": {"labels": {label: None}}})
        with pytest.raises(Again):
            for _ in range(3):
                await bench.look()
        assert bench.last["message"].endswith(
            f'{kind.plural} "test-job-master-0" already exists, but its label {label} was changed'
        )
        await bench.kube.delete(kind, "test-job-master-0", "default")
        await bench.settle()
        assert len(bench.pods()) == 2

    run(test())


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        await bench.kube.patch(
            ASCEND_JOB, "test-job", "default", {"metadata": {"deletionTimestamp": "2026-01-01T10:00:00Z"}}
        )
        bench.kube.remove(POD, "test-job-worker-0")
        await bench.settle()
        assert set(bench.pods()) == {"test-job-master-0"}

    run(test())


def test_an_old_view_of_the_job_is_not_acted_upon() -> None:
    """The watch of jobs may lag behind that of pods: a job that has just ended must not get its pods back."""

    async def test() -> None:
        bench = Bench()
        await bench.running(run_policy={"cleanPodPolicy": "All"})
        bench.all_pods("Succeeded")
        observer = bench.operator.observer
        for cache in observer.caches:
            await cache.refresh()
        key = ("default", "test-job")
        await bench.operator.look(key)  # writes that it has succeeded
        await bench.operator.look(key)  # deletes the pods
        await observer.pods.refresh()
        assert not bench.pods()
        await bench.operator.look(key)
        assert not bench.pods()
        assert bench.state == "Succeeded"

    run(test())


def test_a_pod_that_took_the_place_of_a_failed_one_meanwhile_is_not_deleted() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(labels={"fault-retry-times": "3", "pod-rescheduling": "on"})
        bench.phase("test-job-worker-0", "Failed")
        for cache in bench.operator.observer.caches:
            await cache.refresh()
        old = bench.kube.find(POD, "test-job-worker-0")
        bench.kube.remove(POD, "test-job-worker-0")
        new = await bench.kube.create(POD, {**old, "status": {"phase": "Pending"}})
        await bench.operator.look(("default", "test-job"))
        assert bench.kube.find(POD, "test-job-worker-0")["metadata"]["uid"] == new["metadata"]["uid"]

    run(test())


def test_backup_pods_of_a_hot_switch_are_not_counted() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        backup = copy.deepcopy(bench.kube.find(POD, "test-job-worker-0"))
        source = {"podType": "backup", "backupSourcePodName": "test-job-worker-0"}
        backup["metadata"] |= {"name": "backup", "annotations": source}
        flow = {"inHotSwitchFlow": "true", "backupNewPodName": "backup"}
        bench.kube.annotate(POD, "test-job-worker-0", flow)
        await bench.kube.create(POD, {**backup, "status": {"phase": "Failed"}})
        await bench.settle()
        assert bench.state == "Running"
        assert bench.job()["status"]["replicaStatuses"] == {"Master": {"active": 1}, "Worker": {"active": 1}}
        assert "backup" in bench.pods()

    run(test())


def test_status_that_somebody_else_changed_meanwhile_is_not_overwritten() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit()
        for cache in bench.operator.observer.caches:
            await cache.refresh()
        await bench.kube.patch(ASCEND_JOB, "test-job", "default", {"metadata": {"labels": {"more": "1"}}})
        with pytest.raises(Again, match="changed meanwhile"):
            await bench.operator.look(("default", "test-job"))
        assert bench.job()["status"] == {}
        assert not bench.kube.items(POD_GROUP)
        await bench.settle()
        assert bench.state == "Created"

    run(test())


def test_events_are_said_once() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        before = bench.events()
        assert len(before) == len(set(before)) + 1  # two pods were created
        for reason in ("JobCreated", "JobRunning", "SuccessfulCreatePod"):
            assert ("Normal", reason) in before
        await bench.settle()
        bench.start_operator()
        await bench.settle()
        assert bench.events() == before

    run(test())


def test_events_tell_jobs_of_the_same_name_apart() -> None:
    async def test() -> None:
        bench = Bench()
        uids = []
        for _ in range(2):
            await bench.submit(specs={"Master": replica(2)})
            await bench.settle()
            uids.append(bench.job()["metadata"]["uid"])
            bench.kube.remove(ASCEND_JOB, "test-job")
        events = bench.kube.items(EVENT)
        assert [event["involvedObject"]["uid"] for event in events] == uids
        assert [event["count"] for event in events] == [1, 1]

    run(test())


def test_deleting_the_job_by_somebody_takes_everything_along_and_nothing_comes_back() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        bench.kube.remove(ASCEND_JOB, "test-job")
        await bench.settle()
        assert not bench.pods()
        assert not bench.kube.items(POD_GROUP)

    run(test())


def test_job_without_workers() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(workers=0)
        assert bench.state == "Running"
        bench.all_pods("Succeeded")
        await bench.settle()
        assert bench.job()["status"]["replicaStatuses"] == {"Master": {"succeeded": 1}, "Worker": {}}

    run(test())


def test_mindspore_workers_need_no_service() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(framework="mindspore", specs={"Worker": replica(1, chips=1)})
        assert not bench.kube.items(SERVICE)
        assert bench.state == "Running"

    run(test())


def test_min_available_decides_what_running_means() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit(ascend_job(workers=3, run_policy={"schedulingPolicy": {"minAvailable": 2}}))
        await bench.settle()
        bench.admit()
        await bench.settle()
        bench.phase("test-job-master-0", "Running")
        await bench.settle()
        assert bench.state == "Created"
        bench.phase("test-job-worker-0", "Running")
        await bench.settle()
        assert bench.state == "Running"

    run(test())
