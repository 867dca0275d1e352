"""The pods of a job: how they are made, and what they say about themselves. Pure."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from evertrain.acjob import names
from evertrain.acjob.environment import environment
from evertrain.acjob.job import Job, ascend_container
from evertrain.acjob.service import identity
from evertrain.kube.port import Object
from evertrain.kube.times import parse_time

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
    token: bool = False
    """The job has a Secret with a token for ClusterD."""
    tls: bool = False
    """And certificates are in it."""


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
    variables = environment(job, kind, index, around.leader, around.clusterd, token=around.token)
    name = ascend_container(template).get("name")
    for container in spec.get("containers") or ():
        if container.get("name") == name:
            container["env"] = variables
            if around.tls:
                _mount_certificates(job, spec, container)
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


def backup_pod(job: Job, kind: str, index: int, source: Object, around: Surroundings) -> Object:
    """A pod like `source`, to take its place when it goes. It is to run on another node: this one is not well."""
    pod = new_pod(job, kind, index, around)
    metadata = pod["metadata"]
    metadata["name"] = backup_name(job, kind, index, source)
    metadata["annotations"] |= {
        names.IN_HOT_SWITCH: "true",
        names.POD_TYPE: names.BACKUP,
        names.BACKUP_SOURCE: source["metadata"]["name"],
    }
    node = (source.get("spec") or {}).get("nodeName")
    if node:
        _keep_off(pod["spec"], node)
    return pod


def backup_name(job: Job, kind: str, index: int, source: Object) -> str:
    """The same for the same source, whoever asks: an operator that was killed before it heard that it had made the pod
    makes no second one."""
    number = int(hashlib.sha256(source["metadata"]["uid"].encode()).hexdigest()[:8], 16) % 10000
    name = f"{job.pod_name(kind, index)}-hot-{number:04}"
    if name == source["metadata"]["name"]:
        name = f"{job.pod_name(kind, index)}-hot-{(number + 1) % 10000:04}"
    return name


def standby_pod(job: Job, name: str, around: Surroundings) -> Object:
    """A worker without a place: it starts, and waits in its launcher to be told whose place it takes.

    It is told by its own annotation, which the kubelet writes into a file of the pod: that needs no network, no
    permission, and nobody who would have to know of the pod. Its RANK is one that no pod of the job has.
    """
    pod = new_pod(job, names.WORKER, job.replicas(names.WORKER), around)
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["name"] = name
    for label in (names.REPLICA_INDEX, names.OLD_REPLICA_INDEX):
        del metadata["labels"][label]
    del metadata["annotations"][names.RANK_INDEX]
    metadata["annotations"][names.POD_TYPE] = names.STANDBY
    field = {"fieldPath": f"metadata.annotations['{names.RANK_INDEX}']"}
    items = [{"path": names.PLACE_FILE, "fieldRef": field}]
    spec.setdefault("volumes", []).append({"name": names.PLACE_VOLUME, "downwardAPI": {"items": items}})
    trains = ascend_container(pod).get("name")
    for container in spec.get("containers") or ():
        if container.get("name") == trains:
            mount = {"name": names.PLACE_VOLUME, "mountPath": names.PLACE_FOLDER, "readOnly": True}
            container.setdefault("volumeMounts", []).append(mount)
            container["env"].append({"name": names.PLACE_VARIABLE, "value": f"{names.PLACE_FOLDER}/{names.PLACE_FILE}"})
    return pod


def placed(job: Job, pod: Object, kind: str, index: int) -> Object:
    """The patch by which a pod that stands by gets a place."""
    annotations = {names.RANK_INDEX: str(job.rank(kind, index)), names.POD_TYPE: None}
    labels = {names.REPLICA_INDEX: str(index), names.OLD_REPLICA_INDEX: str(index)}
    return {"metadata": {"uid": pod["metadata"]["uid"], "labels": labels, "annotations": annotations}}


def _keep_off(spec: Object, node: str) -> None:
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    required["nodeSelectorTerms"] = required.get("nodeSelectorTerms") or [{}]
    for term in required["nodeSelectorTerms"]:  # one of them has to match
        term.setdefault("matchFields", []).append({"key": "metadata.name", "operator": "NotIn", "values": [node]})


def _mount_certificates(job: Job, spec: Object, container: Object) -> None:
    """For TaskD, unless the user has given it others."""
    written = {variable.get("name") for variable in container["env"]}
    if written & names.TLS_VARIABLES.keys():
        return
    items = [{"key": file, "path": file} for file in names.TLS_VARIABLES.values()]
    secret = {"secretName": job.token_secret_name, "items": items}
    spec.setdefault("volumes", []).append({"name": names.TLS_VOLUME, "secret": secret})
    mount = {"name": names.TLS_VOLUME, "mountPath": names.TLS_FOLDER, "readOnly": True}
    container.setdefault("volumeMounts", []).append(mount)
    for name, file in names.TLS_VARIABLES.items():
        container["env"].append({"name": name, "value": f"{names.TLS_FOLDER}/{file}"})


def token_secret(job: Job, token: str, certificates: Mapping[str, str] | None = None) -> Object:
    """By which the pods, and nobody else, get the token that the job shows to ClusterD, and its certificates."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": job.token_secret_name,
            "namespace": job.namespace,
            "ownerReferences": [job.owner_reference()],
        },
        "type": "Opaque",
        "stringData": {**({names.TOKEN_KEY: token} if token else {}), **(certificates or {})},
    }


def _templates_name_scheduler(job: Job) -> bool:
    return any((job.template(kind).get("spec") or {}).get("schedulerName") for kind in job.types)


def template_warnings(job: Job, gang: bool) -> list[tuple[str, str]]:
    """What the user may expect and won't get: (reason, message)."""
    found = []
    specs = {kind: job.template(kind).get("spec") or {} for kind in job.types}
    for kind, spec in specs.items():
        if spec.get("restartPolicy"):
            text = "Restart policy in pod template will be overwritten by restart policy in replica spec"
            found.append(("SettedPodTemplateRestartPolicy", f"{text} of {kind}"))
    if not gang:
        if job.total > 1:
            text = "Pods are scheduled one by one, not all or none: the operator runs without gang scheduling"
            found.append(("NoGangScheduling", text))
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


def is_standby(pod: Object) -> bool:
    return bool((pod["metadata"].get("annotations") or {}).get(names.POD_TYPE) == names.STANDBY)


def is_extra(pod: Object) -> bool:
    """It has no place of its own in the job yet."""
    return is_backup(pod) or is_standby(pod)


def annotations_of(pod: Object) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"].get("annotations") or {}
    return found


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


def ended_at(pod: Object) -> datetime | None:
    """When the last of its containers ended; None if nobody says so."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    times = [((status.get("state") or {}).get("terminated") or {}).get("finishedAt") for status in statuses]
    return max((parse_time(time) for time in times if time), default=None)


def exit_code(pod: Object) -> int:
    """The exit code of the container that trains."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status.get("name") == names.CONTAINER:
            terminated = (status.get("state") or {}).get("terminated")
            if terminated is not None and terminated.get("exitCode") is not None:
                return int(terminated["exitCode"])
    return NO_EXIT_CODE
