"""Hot switching: a second pod is started beside one whose node is not well, and takes its place. Pure.

ClusterD leads; pods carry what it wants of the operator, and how far that got:

    needOperatorOpe=create on a pod      a backup is made, and named on the pod (backupNewPodName) once it exists
    the pod is gone                      its backup takes its place: it loses podType and backupSourcePodName
    needOperatorOpe=delete on a pod      it is deleted at once
    the backup is gone                   the pod that named it is as if nothing had been

All of it can be told from the pods alone, so it doesn't matter who made the last step, or whether that one was killed
in the middle of it. A backup for which there is no reason any more, because ClusterD took its word back before it
could see the backup, is deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from evertrain.acjob import names
from evertrain.acjob.job import Job
from evertrain.acjob.pods import annotations_of, is_backup, is_going, phase, place
from evertrain.kube.port import POD, Object
from evertrain.operator.actions import Action, Delete, Patch

Place = tuple[str, int]


class Backups:
    def __init__(self, job: Job, pods: Sequence[Object], taken: Collection[Place], dismissed: Collection[str]) -> None:
        """All pods of the job, the places that are held by others than backups, and the uids of pods that a restart
        replaces anyway."""
        self._job = job
        self._names = {pod["metadata"]["name"] for pod in pods}
        self._here = [pod for pod in pods if not is_going(pod) and not _is_called_off(pod)]
        self._called_off = [pod for pod in pods if not is_going(pod) and _is_called_off(pod)]
        self._sources = {pod["metadata"]["name"]: pod for pod in pods if not is_backup(pod)}
        self._backups: dict[str, Object] = {}
        """By the name of their source."""
        self._useless: list[tuple[Object, str]] = []
        self._heirs: dict[Place, Object] = {}
        for pod in sorted((pod for pod in self._here if is_backup(pod)), key=self._preference):
            self._sort_in(pod, taken, dismissed)

    def _preference(self, backup: Object) -> tuple[bool, str, str]:
        source = self._sources.get(_source_name(backup))
        known = source is not None and annotations_of(source).get(names.BACKUP_NAME) == backup["metadata"]["name"]
        return not known, backup["metadata"].get("creationTimestamp") or "", backup["metadata"]["name"]

    def _sort_in(self, backup: Object, taken: Collection[Place], dismissed: Collection[str]) -> None:
        source, where = self._sources.get(_source_name(backup)), self._place(backup)
        if backup["metadata"]["uid"] in dismissed:
            self._useless.append((backup, "all pods start again"))
        elif source is not None:
            if not _is_in_flow(source):
                self._useless.append((backup, "the hot switch was called off"))
            elif _source_name(backup) in self._backups:
                self._useless.append((backup, "another pod stands in already"))
            else:
                self._backups[_source_name(backup)] = backup
        elif where is None or where in taken or where in self._heirs or phase(backup) not in ("Pending", "Running"):
            self._useless.append((backup, "nobody needs it any more"))
        else:
            self._heirs[where] = backup

    def _place(self, pod: Object) -> Place | None:
        """None if the job has no such place, or has it no more."""
        where = place(self._job, pod)
        if where is None or where[0] not in self._job.types or where[1] >= self._job.replicas(where[0]):
            return None
        return where

    @property
    def heirs(self) -> Collection[Place]:
        """Places whose pod is gone, and whose backup is about to have it."""
        return self._heirs.keys()

    @property
    def claimed(self) -> Collection[Place]:
        """Places that a backup has or will have."""
        return {*self._heirs, *(where for pod in self._backups.values() if (where := self._place(pod)) is not None)}

    def wanted(self) -> Iterator[tuple[str, int, Object]]:
        """Backups to be made: replica type, index, and the pod that each stands in for."""
        for pod in self._here:
            where = self._place(pod)
            known = is_backup(pod) or pod["metadata"]["name"] in self._backups
            if where is not None and not known and _is_wanted(pod):
                yield *where, pod

    def actions(self) -> Iterator[Action]:
        for pod in self._called_off:
            yield _delete(pod, "the hot switch was called off")
        for pod, why in self._useless:
            yield _delete(pod, why)
        for pod in self._heirs.values():
            yield _patch(pod, {names.POD_TYPE: None, names.BACKUP_SOURCE: None})
        for pod in self._here:
            if is_backup(pod):
                continue
            backup = self._backups.get(pod["metadata"]["name"])
            named = annotations_of(pod).get(names.BACKUP_NAME)
            if _is_wanted(pod):
                if backup is not None:
                    name = backup["metadata"]["name"]
                    yield _patch(pod, {names.OPERATOR_ORDER: None, names.BACKUP_NAME: name})
            elif named is not None and named not in self._names:
                yield _patch(pod, {names.IN_HOT_SWITCH: None, names.BACKUP_NAME: None})


def _source_name(backup: Object) -> str:
    return annotations_of(backup).get(names.BACKUP_SOURCE, "")


def _is_wanted(pod: Object) -> bool:
    return annotations_of(pod).get(names.OPERATOR_ORDER) == names.ORDER_CREATE


def _is_called_off(pod: Object) -> bool:
    return annotations_of(pod).get(names.OPERATOR_ORDER) == names.ORDER_DELETE


def _is_in_flow(source: Object) -> bool:
    return any(
        name in annotations_of(source) for name in (names.IN_HOT_SWITCH, names.OPERATOR_ORDER, names.BACKUP_NAME)
    )


def _patch(pod: Object, changes: dict[str, str | None]) -> Patch:
    metadata = pod["metadata"]
    patch = {"metadata": {"uid": metadata["uid"], "annotations": changes}}
    return Patch(POD, metadata["name"], metadata["namespace"], patch)


def _delete(pod: Object, why: str) -> Delete:
    metadata = pod["metadata"]
    return Delete(POD, metadata["name"], metadata["namespace"], metadata["uid"], why, 0)
