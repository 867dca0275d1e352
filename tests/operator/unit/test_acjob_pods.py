"""What pods, service and PodGroup of a job look like: the reference's worked example, and what differs by framework."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.acjob.environment import environment
from evertrain.acjob.job import Job
from evertrain.acjob.podgroup import pod_group, resized
from evertrain.acjob.pods import Surroundings, new_pod, template_warnings
from evertrain.acjob.service import leader_service
from evertrain.kube.port import Object
from tests.operator.acjobs import ascend_job, environment_of, replica, stored

AROUND = Surroundings(leader=("10.96.0.10", "2222"), clusterd="10.96.0.20", version=0, gang=True)


def pods_of(item: Object, around: Surroundings = AROUND) -> dict[str, Object]:
    job = Job(stored(item))
    pods = [new_pod(job, kind, index, around) for kind, index in job.indices()]
    return {pod["metadata"]["name"]: pod for pod in pods}


def environments(item: Object) -> dict[str, dict[str, Any]]:
    return {name: environment_of(pod) for name, pod in pods_of(item).items()}


def recovering(**more: Any) -> Object:
    return ascend_job("default-test-pytorch", annotations={"recover-strategy": "recover,dump"}, **more)


def test_worked_example_environment() -> None:
    common = {
        "ASCEND_VISIBLE_DEVICES": "metadata.annotations['huawei.com/Ascend910']",
        "MINDX_TASK_ID": "U",
        "MINDX_SERVER_IP": "10.96.0.20",
        "MINDX_SERVER_DOMAIN": "clusterd-grpc-svc.mindx-dl.svc.cluster.local",
        "HostNetwork": "false",
        "HCCL_LOGIC_SUPERPOD_ID": "0",
        "LOCAL_WORLD_SIZE": "8",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "0,1,2,3,4,5,6,7",
        "MASTER_ADDR": "10.96.0.10",
        "MASTER_PORT": "2222",
        "PROCESS_RECOVER": "on",
        "ELASTIC_PROCESS_RECOVER_ENABLE": "1",
        "HIGH_AVAILABILITY": "dump,recover",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
    }
    assert environments(recovering()) == {
        "default-test-pytorch-master-0": {**common, "REPLICA_TYPE": "Master", "RANK": "0"},
        "default-test-pytorch-worker-0": {**common, "REPLICA_TYPE": "Worker", "RANK": "1"},
    }


def test_worked_example_pod() -> None:
    pod = pods_of(recovering())["default-test-pytorch-master-0"]
    assert pod["metadata"]["labels"] == {
        "group-name": "mindxdl.gitee.com",
        "training.kubeflow.org/operator-name": "ascendjob-controller",
        "job-name": "default-test-pytorch",
        "training.kubeflow.org/job-name": "default-test-pytorch",
        "replica-type": "master",
        "training.kubeflow.org/replica-type": "master",
        "replica-index": "0",
        "training.kubeflow.org/replica-index": "0",
        "training.kubeflow.org/job-role": "master",
        "version": "0",
    }
    assert pod["metadata"]["annotations"] == {
        "hccl/rankIndex": "0",
        "scheduling.k8s.io/group-name": "default-test-pytorch-U",
        "volcano.sh/task-spec": "master",
    }
    assert pod["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "mindxdl.gitee.com/v1",
            "kind": "AscendJob",
            "name": "default-test-pytorch",
            "uid": "U",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["spec"]["restartPolicy"] == "Never"
    worker = pods_of(recovering())["default-test-pytorch-worker-0"]["metadata"]
    assert "training.kubeflow.org/job-role" not in worker["labels"]
    assert worker["annotations"]["hccl/rankIndex"] == "1"


def test_worked_example_pod_group() -> None:
    item = stored(recovering(labels={"tor-affinity": "null"}))
    item["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"] = "{}"
    group = pod_group(Job(item))
    assert group["metadata"]["name"] == "default-test-pytorch-U"
    assert group["metadata"]["labels"] == {
        "framework": "pytorch",
        "tor-affinity": "null",
        "process-recover-enable": "on",
    }
    assert group["metadata"]["annotations"] == {"recover-strategy": "recover,dump"}
    assert group["spec"] == {
        "minMember": 2,
        "minTaskMember": {"master": 1, "worker": 1},
        "minResources": {"huawei.com/Ascend910": "16"},
    }


def test_pod_group_follows_the_scheduling_policy() -> None:
    policy = {"minAvailable": 2, "queue": "gold", "priorityClass": "high"}
    item = ascend_job(workers=3, run_policy={"schedulingPolicy": policy})
    container = item["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["resources"]["requests"] |= {"cpu": "1500m", "memory": "1Gi"}
    assert pod_group(Job(stored(item)))["spec"] == {
        "minMember": 2,
        "minTaskMember": {"master": 1, "worker": 3},
        "minResources": {"cpu": "1500m", "huawei.com/Ascend910": "16", "memory": "1073741824"},
        "queue": "gold",
        "priorityClassName": "high",
    }
    policy["minResources"] = {"cpu": "4"}
    item = ascend_job(run_policy={"schedulingPolicy": policy})
    assert pod_group(Job(stored(item)))["spec"]["minResources"] == {"cpu": "4"}


def test_pod_group_follows_a_change_of_replicas() -> None:
    before = pod_group(Job(stored(ascend_job(workers=3))))
    assert resized(Job(stored(ascend_job(workers=3))), before) == {}
    assert resized(Job(stored(ascend_job(workers=1))), before) == {
        "spec": {
            "minMember": 2,
            "minTaskMember": {"master": 1, "worker": 1},
            "minResources": {"huawei.com/Ascend910": "16"},
        }
    }


def test_service_of_the_leader() -> None:
    item = ascend_job()
    container = item["spec"]["replicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    container["ports"] = [{"name": "ttp-port", "containerPort": 8000}, {"containerPort": 53, "protocol": "UDP"}]
    service = leader_service(Job(stored(item)))
    assert service["metadata"]["name"] == "test-job-master-0"
    assert service["spec"]["ports"] == [
        {"name": "ttp-port", "port": 8000},
        {"name": "port-53", "port": 53, "protocol": "UDP"},
        {"name": "ascendjob-port", "port": 2222},
    ]
    assert service["spec"]["selector"] == service["metadata"]["labels"]
    assert service["spec"]["selector"]["replica-index"] == "0"
    assert service["spec"]["selector"]["replica-type"] == "master"


def test_mindspore_with_a_scheduler_without_chips() -> None:
    specs = {"Scheduler": replica(chips=0), "Worker": replica(2)}
    found = environments(ascend_job("ms", framework="mindspore", specs=specs))
    common = {"MS_WORKER_NUM": "16", "MS_LOCAL_WORKER": "8", "MS_SERVER_NUM": "0", "MS_SCHED_PORT": "2222"}
    assert all(environment.items() >= common.items() for environment in found.values())
    keys = ("MS_NODE_RANK", "NPU_POD", "MS_ROLE", "MS_SCHED_HOST")
    assert {name: tuple(environment[key] for key in keys) for name, environment in found.items()} == {
        "ms-scheduler-0": ("0", "false", "MS_SCHED", "status.podIP"),
        "ms-worker-0": ("0", "true", "MS_WORKER", "10.96.0.10"),
        "ms-worker-1": ("1", "true", "MS_WORKER", "10.96.0.10"),
    }
    assert "ASCEND_VISIBLE_DEVICES" not in found["ms-scheduler-0"]
    assert "HCCL_LOGIC_SUPERPOD_ID" not in found["ms-scheduler-0"]


def test_mindspore_with_workers_only_gets_nothing() -> None:
    specs = {"Worker": replica(1, chips=1)}
    assert environments(ascend_job("ms", framework="mindspore", specs=specs)) == {"ms-worker-0": {}}


def test_tensorflow() -> None:
    found = environments(ascend_job("tf", framework="tensorflow"))
    assert {key: value for key, value in found["tf-chief-0"].items() if key.startswith("CM_")} == {
        "CM_CHIEF_IP": "status.podIP",
        "CM_CHIEF_PORT": "2222",
        "CM_CHIEF_DEVICE": "0",
        "CM_WORKER_IP": "status.podIP",
        "CM_LOCAL_WORKER": "8",
        "CM_WORKER_SIZE": "16",
        "CM_RANK": "0",
    }
    assert found["tf-worker-0"]["CM_CHIEF_IP"] == "10.96.0.10"
    assert found["tf-worker-0"]["CM_RANK"] == "1"


def test_a_part_of_a_service_gets_only_its_own() -> None:
    found = environments(ascend_job("s", labels={"jobID": "mindie", "app": "mindie-ms-server"}))
    assert found["s-master-0"] == {
        "MINDX_TASK_ID": "mindie",
        "APP_TYPE": "mindie-ms-server",
        "MINDX_SERVER_IP": "10.96.0.20",
        "MINDX_SERVER_DOMAIN": "clusterd-grpc-svc.mindx-dl.svc.cluster.local",
    }


def test_a_part_of_a_service_gets_the_token_of_its_job() -> None:
    for labels in ({"jobID": "mindie", "app": "mindie-ms-server"}, {}):
        job = Job(stored(ascend_job("s", labels=labels)))
        made = environment(job, "Master", 0, ("10.96.0.10", "2222"), "10.96.0.20", token=True)
        (shown,) = [each for each in made if each["name"] == "EVERTRAIN_TOKEN"]
        assert shown["valueFrom"]["secretKeyRef"] == {"name": job.token_secret_name, "key": "token"}


def test_soft_share() -> None:
    prefix = "huawei.com/scheduler.softShareDev."
    labels = {prefix + "aicoreQuota": "50", prefix + "hbmQuota": "100", prefix + "policy": "elastic"}
    found = environments(ascend_job("s", labels=labels, chips=50))["s-worker-0"]
    assert (found["LOCAL_WORLD_SIZE"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "0")
    assert "ASCEND_VISIBLE_DEVICES" not in found


@pytest.mark.parametrize(
    ("framework", "leader", "variable", "total", "pods"),
    [
        ("pytorch", "master", "LOCAL_WORLD_SIZE", "WORLD_SIZE", 2),
        ("mindspore", "scheduler", "MS_LOCAL_WORKER", "MS_WORKER_NUM", 1),
        ("tensorflow", "chief", "CM_LOCAL_WORKER", "CM_WORKER_SIZE", 2),
    ],
)
def test_processes_of_pods_without_chips_are_those_that_somebody_has_written(
    framework: str, leader: str, variable: str, total: str, pods: int
) -> None:
    """One for each pod, as far as anybody can see, unless the job says it."""

    def sizes(text: str) -> set[tuple[object, ...]]:
        job = ascend_job("c", framework=framework, chips=0)
        if text:
            worker = job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
            worker["env"] = [{"name": variable, "value": text}]
        found = environments(job)
        return {(found[f"c-{kind}-0"][variable], found[f"c-{kind}-0"][total]) for kind in (leader, "worker")}

    assert sizes("") == {("1", str(pods))}
    assert sizes("4") == {("4", str(4 * pods))}
    for wrong in ("0", "-1", "four", "99999"):
        assert {each[1] for each in sizes(wrong)} == {str(pods)}
    if framework == "pytorch":
        job = ascend_job("c", chips=0)
        for each in job["spec"]["replicaSpecs"].values():
            own = [{"name": "LOCAL_WORLD_SIZE", "value": "2"}, {"name": "WORLD_SIZE", "value": "3"}]
            each["template"]["spec"]["containers"][0]["env"] = own
        found = environments(job)["c-worker-0"]
        assert (found["LOCAL_WORLD_SIZE"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("2", "3", "0,1")


def test_chips_that_are_cut_later_leave_the_sizes_open() -> None:
    specs = {"Master": replica(chips=0), "Worker": replica(1, chips=0)}
    for spec in specs.values():
        spec["template"]["spec"]["containers"][0]["resources"] = {"requests": {"huawei.com/npu-core": 4}}
    found = environments(ascend_job("d", specs=specs))["d-worker-0"]
    assert not {"LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK", "ASCEND_VISIBLE_DEVICES"} & set(found)
    assert (found["RANK"], found["MASTER_ADDR"]) == ("1", "10.96.0.10")


def test_without_chips_each_pod_is_a_process_and_the_users_values_stay() -> None:
    item = ascend_job("c", chips=0, workers=2)
    container = item["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "WORLD_SIZE", "value": "7"}]
    found = environments(item)
    assert (found["c-master-0"]["WORLD_SIZE"], found["c-master-0"]["RANK"]) == ("3", "0")
    assert [found[f"c-worker-{index}"]["RANK"] for index in (0, 1)] == ["1", "2"]
    assert found["c-worker-0"]["WORLD_SIZE"] == "7"
    assert found["c-worker-0"]["MASTER_ADDR"] == "10.96.0.10"


def test_mindspore_without_chips() -> None:
    found = environments(ascend_job("c", framework="mindspore", chips=0, workers=2))
    ranks = {name: (each["MS_NODE_RANK"], each["MS_WORKER_NUM"]) for name, each in found.items()}
    assert ranks == {"c-scheduler-0": ("0", "2"), "c-worker-0": ("0", "2"), "c-worker-1": ("1", "2")}


def test_more_chips_than_there_are_cost_nothing() -> None:
    specs = {"Master": replica(chips=0)}
    specs["Master"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"huawei.com/Ascend910": "16Ei"}}
    found = environments(ascend_job("j", specs=specs))["j-master-0"]
    assert "LOCAL_RANK" not in found
    assert found["MASTER_ADDR"] == "10.96.0.10"


def test_super_pods_by_block_and_by_the_scheduler() -> None:
    found = environments(ascend_job("s", workers=3, annotations={"sp-block": "16"}))
    assert [environment["HCCL_LOGIC_SUPERPOD_ID"] for environment in found.values()] == ["0", "0", "1", "1"]
    item = ascend_job("s", annotations={"sp-block": "16"}, labels={"super-pod-affinity": "soft"})
    assert environments(item)["s-worker-0"]["HCCL_LOGIC_SUPERPOD_ID"] == "metadata.annotations['super-pod-rank']"
    annotations = {"huawei.com/schedule_policy": "multilevel", "huawei.com/affinity-config": "level1=2,level2=4"}
    found = environments(ascend_job("s", workers=3, annotations=annotations))
    assert [environment["HCCL_LOGIC_SUPERPOD_ID"] for environment in found.values()] == ["0", "0", "1", "1"]


RECOVERY = {
    "recover": ("recover", "{ARF:1}", "on", "1", None),
    "retry": ("retry", "{HCCE:1,UCE:1}", "on", "1", None),
    "recover-in-place": ("recover", "{ARF:1}", "on", "1", "on"),
    "dump": ("dump", "{TTP:1}", "on", "1", None),
    "exit": ("recover", "{ARF:1}", "on", "1", None),
    "retry,recover,dump,exit": ("dump,recover,retry", "{ARF:1,HCCE:1,TTP:1,UCE:1}", "on", "1", None),
    "unknown": ("", "{}", None, None, None),
}


@pytest.mark.parametrize("strategy", RECOVERY)
def test_recovery_by_strategy(strategy: str) -> None:
    high, tft, *rest = RECOVERY[strategy]
    names = ("PROCESS_RECOVER", "ELASTIC_PROCESS_RECOVER_ENABLE", "ENABLE_RESTART_FAULT_PROCESS")
    annotations = {"recover-strategy": strategy}
    pytorch = environments(ascend_job("j", annotations=annotations))["j-worker-0"]
    assert pytorch["HIGH_AVAILABILITY"] == high
    assert pytorch["HCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert [pytorch.get(name) for name in names] == rest
    mindspore = environments(ascend_job("j", framework="mindspore", annotations=annotations))["j-worker-0"]
    assert mindspore["MS_ENABLE_TFT"] == tft
    assert (mindspore["MINDIO_FOR_MINDSPORE"], mindspore["MS_ENABLE_THM"]) == ("1", "{HCCL_WATCHDOG:0}")
    assert [mindspore.get(name) for name in names] == rest
    tensorflow = environments(ascend_job("j", framework="tensorflow", annotations=annotations))["j-worker-0"]
    assert not {"PROCESS_RECOVER", "HIGH_AVAILABILITY", "MS_ENABLE_TFT"} & set(tensorflow)


def test_elastic_training_is_for_pytorch_alone() -> None:
    annotations = {"recover-strategy": "elastic-training"}
    pytorch = environments(ascend_job("j", annotations=annotations))["j-worker-0"]
    assert (pytorch["HIGH_AVAILABILITY"], pytorch["PROCESS_RECOVER"]) == ("elastic-training", "on")
    assert "ELASTIC_PROCESS_RECOVER_ENABLE" not in pytorch
    mindspore = environments(ascend_job("j", framework="mindspore", annotations=annotations))["j-worker-0"]
    assert mindspore["MS_ENABLE_TFT"] == "{}"
    assert "PROCESS_RECOVER" not in mindspore


def test_pod_rescheduling_tells_mindspore() -> None:
    labels = {"pod-rescheduling": "on"}
    item = ascend_job("j", framework="mindspore", labels=labels)
    assert environments(item)["j-worker-0"]["MS_ENABLE_TFT"] == "{RSC:1}"
    item = ascend_job("j", framework="mindspore", labels=labels, annotations={"recover-strategy": "dump"})
    assert environments(item)["j-worker-0"]["MS_ENABLE_TFT"] == "{RSC:1,TTP:1}"
    item = ascend_job("j", framework="mindspore", labels=labels)
    container = item["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "MS_ENABLE_TFT", "value": "{TTP:1}"}]
    assert environments(item)["j-worker-0"]["MS_ENABLE_TFT"] == "{TTP:1}"


def test_hot_switch_joins_what_is_there() -> None:
    labels = {"subHealthyStrategy": "hotSwitch"}
    found = environments(ascend_job("j", labels=labels, annotations={"recover-strategy": "dump"}))["j-worker-0"]
    assert found["HIGH_AVAILABILITY"] == "dump,recover"
    item = ascend_job("j", framework="mindspore", labels=labels)
    container = item["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "MS_ENABLE_TFT", "value": "{TTP:1}"}]
    found = environments(item)["j-worker-0"]
    assert found["MS_ENABLE_TFT"] == "{ARF:1,TTP:1}"
    assert (found["PROCESS_RECOVER"], found["MINDIO_FOR_MINDSPORE"]) == ("on", "1")


def test_scheduler_name_of_the_job_and_of_templates() -> None:
    found = pods_of(ascend_job("j", schedulerName="other"))
    assert {pod["spec"]["schedulerName"] for pod in found.values()} == {"other"}
    job = Job(ascend_job("j", schedulerName="other"))
    assert [reason for reason, _ in template_warnings(job, gang=True)] == ["SettedJobSchedulerName"]
    item = ascend_job("j", specs={"Master": replica(schedulerName="mine"), "Worker": replica()})
    found = pods_of(item)
    assert found["j-master-0"]["spec"]["schedulerName"] == "mine"
    assert "schedulerName" not in found["j-worker-0"]["spec"]
    assert [reason for reason, _ in template_warnings(Job(item), gang=True)] == ["SettedPodTemplateSchedulerName"]
    alone = pods_of(ascend_job("j"), Surroundings(("a", "1"), "", 0, gang=False))
    assert "schedulerName" not in alone["j-master-0"]["spec"]
    assert set(alone["j-master-0"]["metadata"]["annotations"]) == {"hccl/rankIndex"}


@pytest.mark.parametrize(
    ("policy", "wanted"), [("Always", "Always"), ("OnFailure", "OnFailure"), ("Never", "Never"), ("ExitCode", "Never")]
)
def test_restart_policy(policy: str, wanted: str) -> None:
    item = ascend_job("j", specs={"Master": replica(restart=policy, restartPolicy="Always")})
    assert pods_of(item)["j-master-0"]["spec"]["restartPolicy"] == wanted
    assert [reason for reason, _ in template_warnings(Job(item), gang=True)] == ["SettedPodTemplateRestartPolicy"]


def test_the_users_environment_comes_first_and_ours_replaces_what_is_named_the_same() -> None:
    item = ascend_job("j")
    container = item["spec"]["replicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "WORLD_SIZE", "value": "7"}, {"name": "MINE", "value": "1"}]
    env = pods_of(item)["j-master-0"]["spec"]["containers"][0]["env"]
    assert env[0] == {"name": "MINE", "value": "1"}
    assert environment_of(pods_of(item)["j-master-0"])["WORLD_SIZE"] == "16"


def test_only_the_leader_has_a_port_by_default() -> None:
    ports = {name: pod["spec"]["containers"][0].get("ports") for name, pod in pods_of(ascend_job("j")).items()}
    assert ports == {"j-master-0": [{"name": "ascendjob-port", "containerPort": 2222}], "j-worker-0": None}


def test_only_the_container_that_trains_gets_it() -> None:
    item = ascend_job("j")
    item["spec"]["replicaSpecs"]["Master"]["template"]["spec"]["containers"].append({"name": "side", "image": "x"})
    containers = pods_of(item)["j-master-0"]["spec"]["containers"]
    assert "env" not in containers[1]
    assert containers[0]["env"]


def test_the_job_itself_is_not_changed() -> None:
    item = ascend_job("j")
    before = repr(item)
    pods_of(item)
    item["metadata"].pop("uid")
    item["metadata"].pop("resourceVersion")
    item["metadata"].pop("creationTimestamp")
    assert repr(item) == before
