"""The pods of a job: how they are made, and what they say about themselves. Pure."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from evertrain.acjob import names
from evertrain.acjob.environment import environment
from evertrain.acjob.job import Job, ascend_container
from evertrain.acjob.service import identity
from evertrain.kube.port import Object

NO_EXIT_CODE = 48879
"""Stands for the exit code of a container that has none, as of a pod that was evicted before it ran."""


@dataclass(frozen=True)
class Surroundings:
    """What a new pod must know of other objects."""

    leader: tuple[str, str]
    """Address and port of the leader's service."""
    clusterd: str
    version: int
    """How many rounds of restarts there were."""
    gang: bool


def new_pod(job: Job, kind: str, index: int, around: Surroundings) -> Object:
    template = copy.deepcopy(job.template(kind))
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    labels = {**(metadata.get("labels") or {}), **identity(job, kind, index), names.POD_VERSION: str(around.version)}
    if kind != names.WORKER:
        labels[names.JOB_ROLE] = "master"
    annotations = {**(metadata.get("annotations") or {}), names.RANK_INDEX: str(job.rank(kind, index))}
    if around.gang:
        annotations[names.GROUP_ANNOTATION] = job.pod_group_name
        annotations[names.TASK_SPEC] = kind.lower()
        if not _templates_name_scheduler(job):
            spec["schedulerName"] = job.spec.get("schedulerName") or names.VOLCANO
    policy = job.restart_policy(kind)
    spec["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    variables = environment(job, kind, index, around.leader, around.clusterd)
    name = ascend_container(template).get("name")
    for container in spec.get("containers") or ():
        if container.get("name") == name:
            container["env"] = variables
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": job.pod_name(kind, index),
            "namespace": job.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [job.owner_reference()],
        },
        "spec": spec,
    }


def _templates_name_scheduler(job: Job) -> bool:
    return any((job.template(kind).get("spec") or {}).get("schedulerName") for kind in job.types)


def template_warnings(job: Job, gang: bool) -> list[tuple[str, str]]:
    """What the user wrote into a template and won't get: (reason, message)."""
    found = []
    specs = {kind: job.template(kind).get("spec") or {} for kind in job.types}
    for kind, spec in specs.items():
        if spec.get("restartPolicy"):
            text = "Restart policy in pod template will be overwritten by restart policy in replica spec"
            found.append(("SettedPodTemplateRestartPolicy", f"{text} of {kind}"))
    if not gang:
        return found
    schedulers = {spec["schedulerName"] for spec in specs.values() if spec.get("schedulerName")}
    if schedulers - {names.VOLCANO}:
        text = "Another scheduler is specified when gang-scheduling is enabled and it will not be overwritten"
        found.append(("SettedPodTemplateSchedulerName", text))
    elif not schedulers and job.spec.get("schedulerName") not in (None, "", names.VOLCANO):
        text = "Another scheduler is specified when gang-scheduling is enabled and it will not be overwritten"
        found.append(("SettedJobSchedulerName", text))
    return found


def is_owned(item: Object, uid: str) -> bool:
    """The object was made for the job with that uid: not for a namesake, and not by somebody else."""
    owners = item["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def is_backup(pod: Object) -> bool:
    return bool((pod["metadata"].get("annotations") or {}).get(names.POD_TYPE) == names.BACKUP)


def is_going(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def version(pod: Object) -> int:
    text = (pod["metadata"].get("labels") or {}).get(names.POD_VERSION) or ""
    return int(text) if text.isdecimal() else 0


def place(job: Job, pod: Object) -> tuple[str, int] | None:
    """The replica type and index of a pod; None if its labels make no sense."""
    labels = pod["metadata"].get("labels") or {}
    kinds = {kind.lower(): kind for kind in (*names.LEADERS.values(), names.WORKER)}
    kind, index = kinds.get(labels.get(names.REPLICA_TYPE, "")), labels.get(names.REPLICA_INDEX, "")
    return (kind, int(index)) if kind is not None and index.isdecimal() else None


def exit_code(pod: Object) -> int:
    """The exit code of the container that trains."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status.get("name") == names.CONTAINER:
            terminated = (status.get("state") or {}).get("terminated")
            if terminated is not None and terminated.get("exitCode") is not None:
                return int(terminated["exitCode"])
    return NO_EXIT_CODE
