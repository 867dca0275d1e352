"""Jobs as their AscendJobs, PodGroups and pods say. Pure.

A pod that was read once is not read again until it changes, so that a change of one pod costs little however many pods
its job has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evertrain.acjob import names
from evertrain.acjob.job import Job as AscendJob
from evertrain.acjob.job import ascend_container
from evertrain.acjob.pods import is_backup, is_extra, is_going, phase
from evertrain.clusterd.model import Device, Job, Pod
from evertrain.kube.port import Object
from evertrain.kube.times import parse_time

PENDING, RUNNING, COMPLETE, FAILED = "pending", "running", "complete", "failed"
MIN_AVAILABLE = "huawei.com/schedule_minAvailable"
BACKUP_OF = "backupSourcePodName"
MAX_PER_POD = 1024


def owner_uid(item: Object) -> str | None:
    """The uid of the AscendJob that an object belongs to."""
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == names.KIND:
            return str(owner.get("uid") or "") or None
    return None


class Table:
    """What was read, by uid."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self._pods: dict[str, tuple[str, Pod]] = {}
        self._of_job: dict[str, set[str]] = {}
        self._sources: dict[str, tuple[str, AscendJob]] = {}

    def update(self, item: Object, group: Object | None, pods: Sequence[Object]) -> tuple[Job, bool]:
        """The job as it is now, and whether that is news."""
        uid = str(item["metadata"]["uid"])
        before = self.jobs.get(uid)
        read = [(pod, self._read(pod)) for pod in pods]
        present = {each.uid for _, each in read}
        for gone in self._of_job.get(uid, set()) - present:
            self._pods.pop(gone, None)
        self._of_job[uid] = present
        job = read_job(item, group, read, before, self._source(item))
        self.jobs[uid] = job
        return job, job != before

    def remove(self, uid: str) -> Job | None:
        for gone in self._of_job.pop(uid, set()):
            self._pods.pop(gone, None)
        self._sources.pop(uid, None)
        return self.jobs.pop(uid, None)

    def _source(self, item: Object) -> AscendJob:
        metadata = item["metadata"]
        uid, version = str(metadata.get("uid")), str(metadata.get("resourceVersion") or "")
        known = self._sources.get(uid)
        if known is not None and version and known[0] == version:
            return known[1]
        found = AscendJob(item)
        self._sources[uid] = (version, found)
        return found

    def _read(self, pod: Object) -> Pod:
        metadata = pod["metadata"]
        uid, version = str(metadata.get("uid")), str(metadata.get("resourceVersion") or "")
        known = self._pods.get(uid)
        if known is not None and version and known[0] == version:
            return known[1]
        found = read_pod(pod)
        self._pods[uid] = (version, found)
        return found


def read_pod(pod: Object) -> Pod:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    configuration = device_configuration(annotations)
    return Pod(
        rank=_number(annotations.get(names.RANK_INDEX), -1),
        uid=str(metadata.get("uid")),
        name=metadata["name"],
        node=str(spec.get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        host_ip=str(status.get("hostIP") or configuration.get("host_ip") or ""),
        phase=phase(pod),
        devices=tuple(_device(device) for device in configuration.get("devices") or ()),
        labels=dict(metadata.get("labels") or {}),
        annotations=dict(annotations),
        deleting=is_going(pod),
        containers={
            str(each.get("name")): str(each.get("containerID"))
            for each in status.get("containerStatuses") or ()
            if each.get("containerID")
        },
        env={
            str(each.get("name")): str(each["value"])
            for each in ascend_container(pod).get("env") or ()
            if each.get("value") is not None
        },
    )


def device_configuration(annotations: Mapping[str, str]) -> dict[str, Any]:
    """What the scheduler wrote about a pod's chips; empty if it didn't yet, or nobody can read it."""
    text = next((annotations[name] for name in names.DEVICE_CONFIGURATIONS if name in annotations), "")
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    devices = found.get("devices") if isinstance(found, dict) else None
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        return {}
    return dict(found)


def _device(device: Mapping[str, Any]) -> Device:
    id, ip, super_id = (str(device.get(name, "")) for name in ("device_id", "device_ip", "super_device_id"))
    return Device(id, ip, super_id)


def read_job(
    item: Object,
    group: Object | None,
    pods: Sequence[tuple[Object, Pod]],
    before: Job | None = None,
    source: AscendJob | None = None,
) -> Job:
    """`pods` are the job's, as they are and as they were read; `source` is the AscendJob as it was read."""
    source = source if source is not None else AscendJob(item)
    labels, annotations = dict(source.labels), dict(source.annotations)
    if group is not None:
        labels |= group["metadata"].get("labels") or {}
        annotations |= group["metadata"].get("annotations") or {}
    resource, chips = source.chips
    framework = labels.get(names.FRAMEWORK, "")
    replicas = _training_pods(source)
    own = [each for raw, each in pods if not is_extra(raw)]
    training = {each.rank: each for each in _training(source, own)}
    per_pod = _per_pod(source, [raw for raw, _ in pods], training.values(), chips)
    complete = len(training) >= replicas > 0 and all(
        each.node and not each.deleting and (each.devices or not chips) for each in training.values()
    )
    group_spec = (group or {}).get("spec") or {}
    fewest = max(
        _number(group_spec.get("minMember"), source.min_available if group is None else 0),
        max((_number(each.annotations.get(MIN_AVAILABLE), 0) for each in own), default=0),
    )
    return Job(
        uid=source.uid,
        name=source.name,
        namespace=source.namespace,
        framework=framework,
        labels=labels,
        annotations=annotations,
        group="" if group is None else str(group["metadata"]["name"]),
        group_phase="" if group is None else str((group.get("status") or {}).get("phase") or ""),
        replicas=replicas,
        per_pod=per_pod,
        status=status(own, max(1, fewest), bool(chips), _ended(item), _was(item, before)),
        ended=bool(_ended(item)),
        pods=training,
        backups={
            each.annotations.get(BACKUP_OF) or each.name: each
            for raw, each in sorted(pods, key=lambda pair: pair[1].name)
            if is_backup(raw)
        },
        complete=complete,
        created=_seconds(item["metadata"].get("creationTimestamp")),
        master=_master(pods) if framework == names.PYTORCH else "",
        resource=resource,
    )


def same_places(one: Job, other: Job) -> bool:
    """The two differ at most in what pods are labelled with. Cheap: a recovery labels pods, perhaps thousands."""
    if replace(one, pods={}, backups={}) != replace(other, pods={}, backups={}):
        return False
    return _same_pods(one.pods, other.pods) and _same_pods(one.backups, other.backups)


def _same_pods(ones: Mapping[Any, Pod], others: Mapping[Any, Pod]) -> bool:
    return ones.keys() == others.keys() and all(
        one is others[key] or replace(one, labels={}) == replace(others[key], labels={}) for key, one in ones.items()
    )


def status(pods: Sequence[Pod], fewest: int, chips: bool, ended: str, was: str) -> str:
    """`ended` is the job's own word that it is over: it counts, for its pods may be gone by then. A job that runs is
    not pending again because a pod of it is replaced: until all run again it has failed."""
    if ended:
        return ended
    if any(pod.phase == "Failed" for pod in pods):
        return FAILED
    if len(pods) >= fewest:
        if pods and all(pod.phase == "Succeeded" for pod in pods):
            return COMPLETE
        ready = all(pod.phase in ("Running", "Succeeded") for pod in pods)
        # A leader that only coordinates has no chips; somebody has, if the job asked for any.
        if ready and (not chips or any(pod.devices for pod in pods)):
            return RUNNING
    return FAILED if was in (RUNNING, FAILED) else PENDING


def _was(item: Object, before: Job | None) -> str:
    """Who has only just begun to look asks the job whether it ran before."""
    if before is not None:
        return before.status
    conditions = (item.get("status") or {}).get("conditions") or ()
    return RUNNING if any(each.get("type") in ("Running", "Restarting") for each in conditions) else PENDING


def _ended(item: Object) -> str:
    for condition in (item.get("status") or {}).get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("Succeeded", "Failed"):
            return COMPLETE if condition["type"] == "Succeeded" else FAILED
    return ""


def _training_pods(source: AscendJob) -> int:
    return source.training_pods if source.framework in names.LEADERS else source.total


def _training(source: AscendJob, pods: Iterable[Pod]) -> list[Pod]:
    """By rank, without a leader that only coordinates: it shares its rank with a pod that trains. Of two that have a
    rank, as while one is on its way out, the one that stays."""
    leads_only = source.framework in names.LEADERS and not source.leader_trains
    found: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda pod: (not pod.deleting, pod.name)):
        kind = pod.labels.get(names.REPLICA_TYPE, names.WORKER.lower())
        if pod.rank >= 0 and not (leads_only and kind != names.WORKER.lower()):
            found[pod.rank] = pod
    return [found[rank] for rank in sorted(found)]


def _per_pod(source: AscendJob, raw: Sequence[Object], training: Iterable[Pod], chips: int) -> int:
    """Ranks of a pod: its chips if it has any, else those it asks for, else what it is told (LOCAL_WORLD_SIZE)."""
    if source.is_soft_share:
        return 1
    devices = max((len(pod.devices) for pod in training), default=0)
    if devices or chips:
        return devices or min(chips, MAX_PER_POD)
    templates = [*raw, *(source.template(kind) for kind in source.types)]
    for variable in ("LOCAL_WORLD_SIZE", "MS_LOCAL_WORKER", "CM_LOCAL_WORKER"):
        for pod in templates:
            number = _number(_variable(pod, variable), 0)
            if 0 < number <= MAX_PER_POD:
                return number
    return 1


def _variable(pod: Object, name: str) -> str:
    for variable in ascend_container(pod).get("env") or ():
        if variable.get("name") == name:
            return str(variable.get("value") or "")
    return ""


def _master(pods: Sequence[tuple[Object, Pod]]) -> str:
    return next((found for raw, _ in pods if (found := _variable(raw, "MASTER_ADDR"))), "")


def _number(value: object, default: int) -> int:
    if isinstance(value, int):
        return value
    text = str(value or "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else default


def _seconds(text: object) -> int:
    try:
        return int(parse_time(str(text)).timestamp())
    except ValueError:
        return 0
