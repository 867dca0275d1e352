"""Every state and every reason that users are told about, each with its fields, its times and its words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from evertrain import aio
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, POD_GROUP, QUEUE, SERVICE, Kind
from tests.kube.fake import refused
from tests.operator.acjobs import ascend_job, environment_of, replica
from tests.operator.bench import Bench


def run(test: Coroutine[Any, Any, None]) -> None:
    aio.run(test)


def condition(kind: str, reason: str, message: str, at: str = "2026-01-01T10:00:00Z") -> dict[str, str]:
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastUpdateTime": at,
        "lastTransitionTime": at,
    }


def test_created_then_gate_then_running_then_succeeded() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit()
        await bench.look()
        assert bench.job()["status"]["conditions"] == [condition("Created", "JobCreated", "Job test-job is create.")]
        assert bench.job()["status"]["replicaStatuses"] == {}
        await bench.settle()
        assert bench.conditions() == [("Created", "True", "JobCreated")], "the scheduler may have had no time to look"
        bench.later(5)
        await bench.settle()
        text = (
            "volcano-scheduler is maybe not running, execute command to check the status: "
            "kubectl get pod -n volcano-system -l app=volcano-scheduler"
        )
        assert bench.last == {
            **condition("Created", "PodGroupNotInitialized", text, "2026-01-01T10:00:05Z"),
            "lastTransitionTime": "2026-01-01T10:00:00Z",
        }
        bench.later(5)
        bench.admit("Pending")
        await bench.settle()
        assert bench.last == {
            **condition("Created", "PodGroupPending", "the cluster resource is not enough", "2026-01-01T10:00:10Z"),
            "lastTransitionTime": "2026-01-01T10:00:00Z",
        }
        assert not bench.pods()
        assert "startTime" not in bench.job()["status"]
        assert bench.job()["status"]["lastReconcileTime"] == "2026-01-01T10:00:00Z"
        bench.later(5)
        bench.admit("Inqueue")
        await bench.settle()
        assert set(bench.pods()) == {"test-job-master-0", "test-job-worker-0"}
        assert bench.job()["status"]["startTime"] == "2026-01-01T10:00:15Z"
        assert bench.state == "Created"
        bench.phase("test-job-master-0", "Running")
        await bench.settle()
        assert bench.state == "Created", "running means that all pods run"
        bench.later(5)
        bench.phase("test-job-worker-0", "Running")
        await bench.settle()
        assert bench.last == condition(
            "Running", "JobRunning", "Job default/test-job is running.", "2026-01-01T10:00:20Z"
        )
        assert bench.job()["status"]["replicaStatuses"] == {"Master": {"active": 1}, "Worker": {"active": 1}}
        bench.phase("test-job-master-0", "Succeeded")
        await bench.settle()
        assert bench.state == "Running"
        bench.later(5)
        bench.phase("test-job-worker-0", "Succeeded")
        await bench.settle()
        assert bench.conditions() == [
            ("Created", "True", "PodGroupPending"),
            ("Running", "False", "JobRunning"),
            ("Succeeded", "True", "JobSucceeded"),
        ]
        assert bench.last["message"] == "Job default/test-job successfully completed."
        status = bench.job()["status"]
        assert status["completionTime"] == "2026-01-01T10:00:25Z"
        assert status["replicaStatuses"] == {"Master": {"succeeded": 1}, "Worker": {"succeeded": 1}}
        assert not bench.kube.items(POD_GROUP)
        assert len(bench.pods()) == 2

    run(test())


def test_a_group_that_nobody_looks_at_is_noticed_without_any_change() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit()
        await bench.settle()
        bench.later(4.9)
        await bench.look()
        assert await asyncio.wait_for(bench.operator._queue.get(), 5) == ("default", "test-job")

    run(test())


def test_restarting_is_to_be_seen_also_if_the_pods_that_are_left_are_enough_to_run() -> None:
    async def test(policy: dict[str, Any], annotations: dict[str, str]) -> None:
        bench = Bench()
        labels = {"fault-retry-times": "3", "pod-rescheduling": "on"}
        await bench.running(workers=3, labels=labels, run_policy=policy, annotations=annotations)
        bench.phase("test-job-worker-1", "Failed")
        await bench.look()
        assert bench.state == "Restarting"
        assert ("Normal", "jobRestarting") in bench.events()
        await bench.settle()
        assert bench.state == "Running"

    run(test({"schedulingPolicy": {"minAvailable": 2}}, {}))
    run(test({}, {"recover-strategy": "elastic-training"}))


def test_job_failed() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        bench.phase("test-job-worker-0", "Failed", exit_code=3)
        await bench.settle()
        assert bench.last == condition("Failed", "JobFailed", "Job default/test-job has failed because has pod failed.")
        assert bench.conditions()[-2:] == [("Running", "False", "JobRunning"), ("Failed", "True", "JobFailed")]
        assert bench.job()["status"]["replicaStatuses"] == {"Master": {"active": 1}, "Worker": {"failed": 1}}
        assert bench.job()["status"]["completionTime"] == "2026-01-01T10:00:00Z"
        assert ("Warning", "JobFailed") in bench.events()
        assert ("Warning", "ExitedWithCode") in bench.events()
        bench.all_pods("Running")
        await bench.settle()
        assert bench.state == "Failed"

    run(test())


def test_job_restarting_and_retries_used_up() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(labels={"fault-retry-times": "3", "fault-scheduling": "force"})
        for remaining, version in ((3, "1"), (2, "2"), (1, "3")):
            bench.later(1)
            bench.phase("test-job-worker-0", "Failed")
            await bench.look()
            assert bench.state == "Restarting"
            assert bench.last["reason"] == "jobRestarting"
            assert bench.last["message"] == (
                f"Job default/test-job is unconditional retry job and remain retry times is <{remaining}>."
            )
            await bench.settle()
            assert bench.versions() == {"test-job-master-0": version, "test-job-worker-0": version}
            bench.all_pods("Running")
            await bench.settle()
            assert bench.state == "Running"
            assert "Restarting" not in [kind for kind, _, _ in bench.conditions()]
            bench.start_operator()
        bench.phase("test-job-master-0", "Failed")
        await bench.settle()
        assert bench.last["reason"] == "JobFailed"
        assert bench.last["message"] == (
            "Job default/test-job has failed because pod failed and remain retry times is 0."
        )

    run(test())


def test_retries_are_counted_though_the_job_never_came_to_run_between() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit(labels={"fault-retry-times": "2"})
        await bench.settle()
        bench.admit()
        messages = []
        for _ in range(3):
            await bench.settle()
            bench.phase("test-job-worker-0", "Failed")
            await bench.look()
            messages.append(bench.last["message"].rpartition(" is ")[2])
        assert messages == ["<2>.", "<1>.", "0."]
        assert bench.state == "Failed"

    run(test())


@pytest.mark.parametrize(("scheduling", "grace"), [("force", 1), ("grace", None)])
def test_how_much_time_pods_have_to_end(scheduling: str, grace: int | None) -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(labels={"fault-retry-times": "3", "fault-scheduling": scheduling})
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.kube.graces == [grace, grace]

    run(test())


def test_no_retry_when_fault_scheduling_is_off() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(labels={"fault-retry-times": "3", "fault-scheduling": "off"})
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.last["message"] == "Job default/test-job has failed because has pod failed."

    run(test())


def test_pod_rescheduling_replaces_the_failed_pod_alone_unless_it_leads() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(workers=2, labels={"fault-retry-times": "3", "pod-rescheduling": "on"})
        bench.phase("test-job-worker-1", "Failed")
        await bench.settle()
        assert bench.versions() == {"test-job-master-0": "0", "test-job-worker-0": "0", "test-job-worker-1": "1"}
        assert bench.state == "Restarting"
        bench.all_pods("Running")
        await bench.settle()
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.versions() == {"test-job-master-0": "0", "test-job-worker-0": "2", "test-job-worker-1": "1"}
        bench.all_pods("Running")
        await bench.settle()
        bench.phase("test-job-master-0", "Failed")
        await bench.settle()
        assert set(bench.versions().values()) == {"3"}

    run(test())


@pytest.mark.parametrize(
    ("labels", "annotations", "group", "failed", "alone"),
    [
        ({}, {}, {}, "worker-0", False),
        ({}, {"huawei.com/recover_policy_path": "pod"}, {}, "worker-0", True),
        ({}, {"huawei.com/recover_policy_path": "pod"}, {}, "master-0", False),
        ({}, {"recover-strategy": "recover"}, {}, "worker-0", True),
        ({}, {"recover-strategy": "recover"}, {}, "master-0", True),
        ({}, {"recover-strategy": "retry,elastic-training"}, {}, "master-0", True),
        ({}, {"recover-strategy": "dump,exit"}, {}, "master-0", False),
        ({}, {"recover-strategy": "dump,exit"}, {}, "worker-0", True),
        ({}, {"recover-strategy": "recover"}, {"process-recover-enable": "pause"}, "worker-0", False),
        ({}, {"recover-strategy": "recover"}, {"process-recover-enable": "off"}, "master-0", False),
        (
            {"pod-rescheduling": "on"},
            {"recover-strategy": "recover"},
            {"process-recover-enable": "off"},
            "worker-0",
            True,
        ),
    ],
)
def test_which_pods_start_again_when_one_failed(
    labels: dict[str, str], annotations: dict[str, str], group: dict[str, str], failed: str, alone: bool
) -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(workers=2, labels={"fault-retry-times": "3", **labels}, annotations=annotations)
        for each in bench.kube.items(POD_GROUP):
            await bench.kube.patch(POD_GROUP, each["metadata"]["name"], "default", {"metadata": {"labels": group}})
        bench.phase(f"test-job-{failed}", "Failed")
        await bench.settle()
        assert bench.versions() == {
            f"test-job-{name}": "0" if alone and name != failed else "1"
            for name in ("master-0", "worker-0", "worker-1")
        }

    run(test())


@pytest.mark.parametrize("by", ["label", "platform"])
def test_pods_that_others_delete_are_left_to_them_and_their_retries_are_counted(by: str) -> None:
    async def test() -> None:
        bench = Bench()
        labels = {"fault-retry-times": "1", "pod-rescheduling": "on"}
        await bench.running(
            workers=2, labels=labels | ({"fault-scheduling": "external-force"} if by == "label" else {})
        )
        if by == "platform":
            (group,) = bench.kube.items(POD_GROUP)
            patch = {"metadata": {"annotations": {"ProcessRecoverStrategy": "recover"}}}
            await bench.kube.patch(POD_GROUP, group["metadata"]["name"], "default", patch)
        bench.phase("test-job-worker-1", "Failed")
        await bench.settle()
        assert bench.last["message"].endswith("remain retry times is <1>.")
        assert bench.versions()["test-job-worker-1"] == "0"
        assert not bench.kube.graces
        bench.kube.remove(POD, "test-job-worker-1")
        await bench.settle()
        assert bench.versions()["test-job-worker-1"] == "1"
        bench.all_pods("Running")
        await bench.settle()
        assert bench.state == "Running"
        bench.phase("test-job-worker-1", "Failed")
        await bench.settle()
        assert bench.last["message"].endswith("has failed because pod failed and remain retry times is 0.")

    run(test())


def test_a_pod_that_clusterd_has_told_to_end_is_no_failure_of_the_job() -> None:
    """It ended before it was deleted; perhaps ClusterD is restarted in between."""

    async def test(knows: bool, strategy: str) -> Bench:
        bench = Bench()
        await bench.running(annotations={"recover-strategy": strategy} if strategy else {})
        if knows:
            await bench.kube.patch(
                POD, "test-job-worker-0", "default", {"metadata": {"labels": {"fault-type": "software"}}}
            )
        ended = {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T10:00:00Z"}}
        status = {"phase": "Failed", "containerStatuses": [{"name": "ascend", "state": ended}]}
        bench.kube.set_status(POD, "test-job-worker-0", status)
        await bench.settle()
        return bench

    async def tests() -> None:
        assert (await test(knows=False, strategy="recover")).state == "Failed"
        assert (await test(knows=True, strategy="")).state == "Failed"
        bench = await test(knows=True, strategy="recover")
        assert bench.state == "Running"
        bench.kube.remove(POD, "test-job-worker-0")
        await bench.settle()
        assert bench.versions()["test-job-worker-0"] == "1"
        bench.all_pods("Running")
        await bench.settle()
        assert bench.state == "Running"
        bench = await test(knows=True, strategy="recover")
        bench.start_operator()
        bench.later(59.9)
        await bench.look()
        assert bench.state == "Running"
        assert await asyncio.wait_for(bench.operator._queue.get(), 5) == ("default", "test-job")
        bench.later(0.1)
        await bench.settle()
        assert bench.state == "Failed", "nobody came"

    run(tests())


def test_volcano_counts_where_it_is_at_work() -> None:
    async def test() -> None:
        bench = Bench()
        config = {"metadata": {"name": "vcjob-fault-npu-cm", "namespace": "volcano-system"}, "data": {}}
        await bench.kube.create(CONFIG_MAP, config)

        async def remaining(times: int) -> None:
            uid = bench.job()["metadata"]["uid"]
            entry = json.dumps({f"default/test-job-{uid}": {"UUID": uid, "Times": times}})
            patch = {"data": {"remain-retry-times": entry}}
            await bench.kube.patch(CONFIG_MAP, "vcjob-fault-npu-cm", "volcano-system", patch)

        await bench.running(labels={"fault-retry-times": "3", "fault-scheduling": "force"})
        await remaining(2)
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.last["message"].endswith("remain retry times is <2>.")
        assert bench.pods()["test-job-worker-0"]["status"]["phase"] == "Failed", "deleting is Volcano's part"
        for name in list(bench.pods()):
            bench.kube.remove(POD, name)
        await bench.settle()
        assert set(bench.versions().values()) == {"1"}
        bench.all_pods("Running")
        await bench.settle()
        assert bench.state == "Running"
        await remaining(0)
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.last["message"].endswith("has failed because pod failed and remain retry times is 0.")

    run(test())


def test_volcano_does_not_know_the_job() -> None:
    async def test() -> None:
        bench = Bench()
        config = {"metadata": {"name": "vcjob-fault-npu-cm", "namespace": "volcano-system"}, "data": {}}
        await bench.kube.create(CONFIG_MAP, config)
        await bench.running(labels={"fault-retry-times": "3"})
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.last["message"] == "Job default/test-job has failed because has pod failed."

    run(test())


def test_exit_code_policy() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(restart="ExitCode")
        bench.phase("test-job-worker-0", "Failed", exit_code=137)
        await bench.settle()
        assert bench.last == condition(
            "Restarting", "jobRestarting", "Job test-job is restarting because Worker replica(s) failed."
        )
        assert bench.versions() == {"test-job-master-0": "0", "test-job-worker-0": "1"}
        bench.all_pods("Running")
        await bench.settle()
        assert bench.state == "Running"
        bench.phase("test-job-worker-0", "Failed")
        await bench.settle()
        assert bench.state == "Restarting", "it was evicted, and never ended by itself"
        bench.all_pods("Running")
        await bench.settle()
        bench.phase("test-job-worker-0", "Failed", exit_code=1)
        await bench.settle()
        assert bench.state == "Failed"

    run(test())


def test_backoff_limit_counts_rounds_of_lost_pods_also_across_operators() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(workers=2, run_policy={"backoffLimit": 2})
        for round_ in ("1", "2"):
            for name in list(bench.pods()):
                bench.kube.remove(POD, name)
            bench.start_operator()
            await bench.settle()
            assert set(bench.versions().values()) == {round_}
            assert bench.state == "Running"
            bench.all_pods("Running")
            await bench.settle()
        bench.kube.remove(POD, "test-job-worker-0")
        await bench.settle()
        assert bench.last == condition(
            "Failed", "JobFailed", "Job test-job has failed because it has reached the specified backoff limit"
        )
        assert bench.job()["status"]["completionTime"] == "2026-01-01T10:00:00Z"
        assert len(bench.pods()) == 2

    run(test())


def test_backoff_limit_comes_from_fault_retry_times_if_it_is_not_set() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running(labels={"fault-retry-times": "1"})
        for _ in range(2):
            bench.kube.remove(POD, "test-job-worker-0")
            await bench.settle()
        assert bench.last["message"] == "Job test-job has failed because it has reached the specified backoff limit"

    run(test())


def test_pods_that_others_counted_are_believed() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        await bench.kube.patch(POD, "test-job-master-0", "default", {"metadata": {"labels": {"version": "5"}}})
        bench.kube.remove(POD, "test-job-worker-0")
        await bench.settle()
        assert bench.versions()["test-job-worker-0"] == "6"

    run(test())


def refuse(bench: Bench, kind: Kind, message: str) -> None:
    def before(verb: str, found: Kind, name: str) -> None:
        if verb == "create" and found == kind:
            raise refused(403, "Forbidden", message)

    bench.kube.before = before


REFUSALS = [
    (POD_GROUP, "SyncPodGroupFailed", "unable to create PodGroup: no quota"),
    (SERVICE, "SyncServiceFailed", "no quota"),
    (POD, "PodCreateFailed", "failed to create pods of type<Master>: no quota"),
]


@pytest.mark.parametrize(("kind", "reason", "message"), REFUSALS)
def test_what_cannot_be_created_is_said(kind: Kind, reason: str, message: str) -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit()
        refuse(bench, kind, "no quota")
        for _ in range(6):
            try:
                await bench.look()
            except Exception as error:
                assert "no quota" in str(error)
            if bench.kube.items(POD_GROUP):
                bench.admit()
        assert bench.last == condition("Created", reason, message)
        assert ("Warning", reason) in bench.events()
        assert ("Warning", f"FailedCreate{kind.kind}") in bench.events()
        bench.kube.before = lambda verb, kind, name: None
        await bench.settle()
        bench.admit()
        await bench.settle()
        bench.all_pods("Running")
        await bench.settle()
        assert bench.state == "Running"

    run(test())


def test_a_service_without_address() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit()
        await bench.settle()
        bench.admit()
        await bench.look()
        bench.kube.find(SERVICE, "test-job-master-0")["spec"]["clusterIP"] = ""
        await bench.settle()
        text = "job<default/test-job> chief service Ip<> or port<2222> is empty"
        assert (bench.last["reason"], bench.last["message"]) == ("SyncServiceFailed", text)

    run(test())


def test_a_running_job_does_not_fall_back_because_one_pod_cannot_be_created() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.running()
        refuse(bench, POD, "no quota")
        bench.kube.remove(POD, "test-job-worker-0")
        with pytest.raises(Exception, match="no quota"):
            await bench.look()
        assert bench.state == "Running"
        assert ("Warning", "FailedCreatePod") in bench.events()

    run(test())


def test_invalid_job() -> None:
    async def test() -> None:
        bench = Bench()
        specs = {"Master": replica(2)}
        await bench.submit(specs=specs)
        await bench.settle()
        text = "InvalidReplicaSpec: Master replicaSpec is not valid, the replicas must be only 1"
        assert bench.job()["status"]["conditions"] == [condition("Failed", "JobValidFailed", text)]
        assert bench.job()["status"]["replicaStatuses"] == {}
        assert bench.events() == [("Warning", "InvalidReplicaSpec")]
        assert not bench.kube.items(POD_GROUP)
        fixed = ascend_job()
        fixed["metadata"]["resourceVersion"] = bench.job()["metadata"]["resourceVersion"]
        await bench.kube.replace(ASCEND_JOB, fixed)
        await bench.settle()
        assert bench.state == "Failed"
        assert not bench.pods()

    run(test())


def test_unknown_queue() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit(run_policy={"schedulingPolicy": {"queue": "gold"}})
        await bench.settle()
        assert bench.last["message"] == (
            'InvalidQueue: check queue<gold> failed, err: queues.scheduling.volcano.sh "gold" not found, '
            "maybe it is not create"
        )

    run(test())


def test_a_queue_that_goes_away_does_not_end_a_job_that_has_begun() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.kube.create(QUEUE, {"metadata": {"name": "gold"}})
        await bench.running(run_policy={"schedulingPolicy": {"queue": "gold"}})
        bench.kube.remove(QUEUE, "gold", "")
        await bench.settle()
        assert bench.state == "Running"

    run(test())


def test_an_api_server_in_trouble_is_not_an_unknown_queue() -> None:
    async def test() -> None:
        bench = Bench()
        await bench.submit(run_policy={"schedulingPolicy": {"queue": "gold"}})

        def before(verb: str, kind: Kind, name: str) -> None:
            if verb == "get":
                raise refused(500, "InternalError", "try later")

        bench.kube.before = before
        with pytest.raises(Exception, match="try later"):
            await bench.look()
        assert bench.job()["status"] == {}

    run(test())


def test_without_gang_scheduling() -> None:
    async def test() -> None:
        bench = Bench(gang=False)
        await bench.submit(run_policy={"schedulingPolicy": {"queue": "gold"}})
        await bench.settle()
        assert not bench.kube.items(POD_GROUP)
        assert len(bench.pods()) == 2
        assert bench.conditions() == [("Created", "True", "JobCreated")]
        assert "schedulerName" not in bench.pods()["test-job-master-0"]["spec"]

    run(test())


def test_clusterd_is_found_when_it_is_there() -> None:
    async def test() -> None:
        bench = Bench()
        service = {
            "metadata": {"name": "clusterd-grpc-svc", "namespace": "mindx-dl"},
            "spec": {"clusterIP": "10.9.9.9"},
        }
        await bench.kube.create(SERVICE, service)
        await bench.running()
        assert environment_of(bench.pods()["test-job-master-0"])["MINDX_SERVER_IP"] == "10.9.9.9"
        other = Bench()
        service["spec"] = {"clusterIP": "None"}
        await other.kube.create(SERVICE, service)
        await other.running()
        domain = "clusterd-grpc-svc.mindx-dl.svc.cluster.local"
        assert environment_of(other.pods()["test-job-master-0"])["MINDX_SERVER_IP"] == domain

    run(test())
