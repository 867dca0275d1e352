"""The places of a job, one for each replica type and index, and the pods in them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evertrain.acjob.job import Job
from evertrain.acjob.pods import is_extra, is_going, is_owned, phase, place, version
from evertrain.acjob.status import Rounds
from evertrain.kube.port import Object
from evertrain.operator.hotswitch import Backups, Place
from evertrain.operator.standby import Standbys


class Slots:
    def __init__(self, job: Job, pods: Sequence[Object]) -> None:
        self.job = job
        self._all = [pod for pod in pods if is_owned(pod, job.uid)]
        self.pods = [pod for pod in self._all if not is_extra(pod)]
        self._surplus: list[Object] = []
        self._taken: dict[Place, Object] = {}
        """The pod of each place. A pod that is on its way out holds its place until it is gone, as its name does."""
        self._dismissed: dict[str, tuple[Object, str]] = {}
        for pod in sorted(self.pods, key=_age):
            where = place(job, pod)
            if where is None:
                continue
            kind, index = where
            if kind not in job.types or index >= job.replicas(kind):
                self._surplus.append(pod)
            elif where not in self._taken or is_going(self._taken[where]):
                self._taken[where] = pod
            elif not is_going(pod):
                self._taken[where] = pod  # two for one place: the younger one, as after a hot switch

    def versions(self) -> list[int]:
        return [version(pod) for pod in self.pods]

    def alive(self) -> Iterator[tuple[str, Object]]:
        """The pods that stay, with their replica type."""
        for (kind, _), pod in self._taken.items():
            if not is_going(pod) and pod["metadata"]["uid"] not in self._dismissed:
                yield kind, pod

    def lost(self, created: dict[str, int] | None) -> bool:
        """A pod of those that were there once is gone or going."""
        if not created:
            return False
        return any(
            (kind, index) not in self._taken or is_going(self._taken[kind, index])
            for kind in self.job.types
            for index in range(min(created.get(kind, 0), self.job.replicas(kind)))
        )

    def failed(self, rounds: Rounds) -> list[tuple[str, Object]]:
        """Failed pods about which nothing was decided yet."""
        return [
            (kind, pod)
            for kind, pod in self.alive()
            if phase(pod) == "Failed" and version(pod) >= rounds.floor and pod["metadata"]["uid"] not in rounds.doomed
        ]

    def dismiss(self, rounds: Rounds) -> None:
        """From here on the pods that a restart replaces don't count any more."""
        doomed = set(rounds.doomed)
        for pod in (*self._taken.values(), *filter(is_extra, self._all)):
            if version(pod) < rounds.floor or pod["metadata"]["uid"] in doomed:
                self._dismissed[pod["metadata"]["uid"]] = (pod, f"restart {rounds.count}")

    def all_there(self, rounds: Rounds) -> bool:
        doomed = set(rounds.doomed)
        found = sum(
            1 for _, pod in self.alive() if version(pod) >= rounds.floor and pod["metadata"]["uid"] not in doomed
        )
        return found == self.job.total

    def unwanted(self, replaced: bool = True) -> Iterator[tuple[Object, str]]:
        """Pods to delete, and why: those beyond the wished number, and those that a restart replaces (unless it is for
        others to delete these)."""
        for pod in self._surplus:
            if not is_going(pod):
                yield pod, "there are fewer replicas now"
        for pod, why in self._dismissed.values() if replaced else ():
            if not is_going(pod) and not is_extra(pod):
                yield pod, why

    def missing(self) -> list[Place]:
        heirs = {*self.backups().heirs, *self.standbys().heirs}
        return [where for where in self.job.indices() if where not in self._taken and where not in heirs]

    def backups(self) -> Backups:
        """Of pods that are being switched. Nothing else here knows of them."""
        return Backups(self.job, self._all, self._taken.keys(), self._dismissed.keys())

    def standbys(self) -> Standbys:
        return Standbys(self.job, self._all, self._taken, self.backups().claimed, self._dismissed.keys())

    def counted(self) -> list[tuple[str, Object]]:
        return list(self.alive())

    def in_phase(self, wanted: str) -> int:
        return sum(1 for _, pod in self.alive() if phase(pod) == wanted)

    def has_ended(self, leftovers: bool) -> bool:
        """No pod will do any more work. With `leftovers`, pods that never got a node are not waited for."""
        ended = 0
        for _, pod in self.alive():
            waits = phase(pod) == "Pending" and not (pod.get("spec") or {}).get("nodeName")
            if phase(pod) == "Succeeded" or (leftovers and waits):
                ended += 1
        return ended == self.job.total


def _age(pod: Object) -> tuple[str, str]:
    metadata = pod["metadata"]
    return metadata.get("creationTimestamp") or "", metadata["name"]
