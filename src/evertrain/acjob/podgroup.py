"""The PodGroup of a job, by which the scheduler places all of its pods or none. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from evertrain.acjob import names
from evertrain.acjob.conditions import POD_GROUP_NOT_INITIALIZED, POD_GROUP_PENDING
from evertrain.acjob.job import Job, requests
from evertrain.kube import quantity
from evertrain.kube.port import POD_GROUP, Object


@dataclass(frozen=True)
class Closed:
    """No pod is created as long as the scheduler has not let the group in."""

    reason: str
    message: str


_NOT_RUNNING = (
    "volcano-scheduler is maybe not running, execute command to check the status: "
    "kubectl get pod -n volcano-system -l app=volcano-scheduler"
)
NO_GROUPS = Closed(
    POD_GROUP_NOT_INITIALIZED,
    f"{_NOT_RUNNING}. This cluster has no PodGroups: install Volcano, or run the operator with "
    "-enableGangScheduling=false",
)


def pod_group(job: Job) -> Object:
    labels, annotations = dict(job.labels), dict(job.annotations)
    if names.RECOVER_STRATEGY in annotations and labels:
        labels[names.PROCESS_RECOVER_ENABLE] = "on"
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return {
        "apiVersion": POD_GROUP.api_version,
        "kind": POD_GROUP.kind,
        "metadata": {
            "name": job.pod_group_name,
            "namespace": job.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [job.owner_reference()],
        },
        "spec": spec(job),
    }


def spec(job: Job) -> Object:
    policy = job.scheduling_policy
    wanted: Object = {
        "minMember": job.min_available,
        "minTaskMember": {kind.lower(): job.replicas(kind) for kind in job.types},
        "minResources": policy.get("minResources") or _resources(job),
    }
    if policy.get("queue"):
        wanted["queue"] = policy["queue"]
    if policy.get("priorityClass"):
        wanted["priorityClassName"] = policy["priorityClass"]
    return wanted


def _resources(job: Job) -> dict[str, str]:
    """What the first minMember pods ask for, leader first."""
    pods = [job.template(kind) for kind, _ in job.indices()][: max(0, job.min_available)]
    containers = [container for pod in pods for container in (pod.get("spec") or {}).get("containers") or []]
    return quantity.total([requests(container) for container in containers])


def resized(job: Job, current: Object) -> Object:
    """The patch that a change of replicas makes necessary; empty if none."""
    wanted, found = spec(job), current.get("spec") or {}
    patch: Object = {}
    if found.get("minMember") != wanted["minMember"]:
        patch["minMember"] = wanted["minMember"]
    tasks, had = wanted["minTaskMember"], found.get("minTaskMember") or {}
    if tasks != had:
        patch["minTaskMember"] = {**dict.fromkeys(had), **tasks}
    if patch:
        gone = dict.fromkeys(found.get("minResources") or {})
        patch["minResources"] = {**gone, **wanted["minResources"]}
    return {"spec": patch} if patch else {}


def gate(current: Object) -> Closed | None:
    phase = (current.get("status") or {}).get("phase") or ""
    if not phase:
        return Closed(POD_GROUP_NOT_INITIALIZED, _NOT_RUNNING)
    if phase == "Pending":
        return Closed(POD_GROUP_PENDING, "the cluster resource is not enough")
    return None
