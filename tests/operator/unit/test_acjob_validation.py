"""The eighteen checks: each refuses what it is for, with the original's words, and lets the rest pass."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.acjob.validation import queue_of, validate
from evertrain.kube.port import Object
from tests.operator.acjobs import ascend_job, replica


def with_container(job: Object, kind: str, **changes: Any) -> Object:
    container = job["spec"]["replicaSpecs"][kind]["template"]["spec"]["containers"][0]
    container.update(changes)
    return job


def without_containers() -> Object:
    job = ascend_job()
    job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"] = []
    return job


def null_replica() -> Object:
    job = ascend_job()
    job["spec"]["replicaSpecs"]["Worker"] = None
    return job


def without_specs() -> Object:
    job = ascend_job()
    del job["spec"]["replicaSpecs"]
    return job


REFUSED = {
    "1": (
        ascend_job(labels={"mind-cluster/scaling-rule": "rule"}),
        "InvalidScalingConfig: job test-job has no group name, please set label of "
        "mind-cluster/group-name=<the group of job>",
    ),
    "2": (
        ascend_job(labels={"mind-cluster/scaling-rule": "rule", "mind-cluster/group-name": "g"}),
        "InvalidScalingConfig: job test-job has no jobID, please set label of jobID=<the jobID of job>",
    ),
    "3": (
        ascend_job(labels={"scaleout-type": "infiniband"}),
        "InvalidScaleOutConfig: the value of label scaleout-type is invalid, which should be ROCE or UBOE",
    ),
    "4": (without_specs(), "InvalidSpecs: replicaSpecs is not set, please modify your job"),
    "5": (
        ascend_job(successPolicy="Most"),
        'InvalidSuccessPolicy: job success policy is invalid, it must be one of <"", AllWorkers>',
    ),
    "7": (
        ascend_job(framework=None),
        "InvalidFramework: framework label is not set, please set label framework as one of "
        "<pytorch,mindspore,tensorflow>",
    ),
    "8": (
        ascend_job(framework="caffe"),
        "InvalidFramework: framework label<caffe> is not in map[mindspore:{} pytorch:{} tensorflow:{}]",
    ),
    "9": (
        ascend_job(specs={"Chief": replica(), "Worker": replica()}),
        "InvalidReplicaType: replicaType is Chief but must be one of [Master Worker]",
    ),
    "9, wrong case": (
        ascend_job(specs={"master": replica()}),
        "InvalidReplicaType: replicaType is master but must be one of [Master Worker]",
    ),
    "10": (null_replica(), "InvalidReplicaSpec: Worker replicaSpec is not set, please modify your job"),
    "11": (
        ascend_job(workers=-1),
        "InvalidReplicaSpec: Worker replicaSpec is not valid: replicas can not be negative num, but got -1",
    ),
    "12": (
        ascend_job(workers=20001),
        "InvalidReplicaSpec: Worker replicaSpec is not valid: replicas can not be larger than 20000, but got 20001",
    ),
    "13": (without_containers(), "InvalidReplicaSpec: Worker replicaSpec is not valid: containers is undefined"),
    "14": (
        ascend_job(specs={"Master": replica(2), "Worker": replica()}),
        "InvalidReplicaSpec: Master replicaSpec is not valid, the replicas must be only 1",
    ),
    "15": (
        with_container(ascend_job(), "Worker", image=""),
        "InvalidContainer: Worker replicaSpec is not valid: Image is undefined in the container of ascend",
    ),
    "16": (
        with_container(ascend_job(), "Worker", name="main"),
        "InvalidContainer: Worker replicaSpec is not valid: There is no container named ascend",
    ),
    "17": (
        ascend_job(specs={"Worker": replica()}),
        "InvalidReplicaType: replicaType is not valid: there need 1 leader replicaType, Master for pytorch, "
        "Chief of tensorflow",
    ),
    "18": (
        ascend_job(framework="mindspore", specs={"Worker": replica(2, chips=1)}),
        "InvalidReplicaSpec: replicaSpec is not valid: when scheduler not found, the req num must be 1",
    ),
}


@pytest.mark.parametrize("check", REFUSED)
def test_refused(check: str) -> None:
    job, message = REFUSED[check]
    assert str(validate(job)) == message


def test_queue_is_checked_by_whoever_can_look() -> None:
    job = ascend_job(run_policy={"schedulingPolicy": {"queue": "gold"}})
    assert queue_of(job) == "gold"
    error = 'queues.scheduling.volcano.sh "gold" not found'
    assert str(validate(job, queue_error=error)) == (
        f"InvalidQueue: check queue<gold> failed, err: {error}, maybe it is not create"
    )
    assert validate(job) is None


@pytest.mark.parametrize(("policy", "queue"), [(None, None), ({}, "default"), ({"queue": "q"}, "q")])
def test_which_queue(policy: Object | None, queue: str | None) -> None:
    run_policy = {} if policy is None else {"schedulingPolicy": policy}
    assert queue_of(ascend_job(run_policy=run_policy)) == queue


@pytest.mark.parametrize(
    "job",
    [
        ascend_job(),
        ascend_job(workers=0),
        ascend_job(workers=20000),
        ascend_job(framework="mindspore"),
        ascend_job(framework="tensorflow"),
        ascend_job(framework="mindspore", specs={"Worker": replica(1, chips=1)}),
        ascend_job(specs={"Master": replica(None)}),
        ascend_job(labels={"scaleout-type": " roce "}),
        ascend_job(labels={"scaleout-type": "  "}),
        ascend_job(successPolicy="AllWorkers"),
        ascend_job(successPolicy=""),
        ascend_job(labels={"mind-cluster/scaling-rule": "r", "mind-cluster/group-name": "g", "jobID": "1"}),
    ],
)
def test_accepted(job: Object) -> None:
    assert validate(job) is None


def test_the_first_failure_counts() -> None:
    job = ascend_job(framework="caffe", workers=-1, successPolicy="Most", labels={"scaleout-type": "x"})
    assert str(validate(job)).startswith("InvalidScaleOutConfig")
