"""Who is where: nodes with what they publish, jobs with their pods and chips, and how they belong together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evertrain.clusterd.faults.inputs import MOST_NODES, KubeNode, NodeState
from evertrain.clusterd.faults.jobview import JobView, Place, look_at
from evertrain.clusterd.faults.seen import number
from evertrain.clusterd.model import Job

Reader = Callable[[NodeState, Mapping[str, str] | None], tuple[bool, list[str]]]


class Cluster:
    def __init__(self) -> None:
        self.nodes: dict[str, NodeState] = {}
        self.kube: dict[str, KubeNode] | None = None
        """None: nobody has said yet which nodes there are."""
        self.serials: dict[str, str] = {}
        self.jobs: dict[str, Job] = {}
        self.views: dict[str, JobView] = {}
        self.on: dict[str, set[str]] = {}
        """Jobs by node."""
        self.tables: dict[str, Job] = {}
        """From before a restart: where the pods of jobs were that have not found all their places again."""

    def read(self, name: str, data: Mapping[str, str] | None, read: Reader) -> tuple[bool, list[str]]:
        """Whether the node is another than before, and what can't be used."""
        state = self.nodes.get(name)
        if state is None:
            if data is None:
                return False, []
            if len(self.nodes) >= MOST_NODES:
                return False, [f"node {name} is ignored: there are {MOST_NODES} already"]
            state = self.nodes[name] = NodeState(name)
        changed, wrong = read(state, data)
        if state.empty and not changed:
            del self.nodes[name]
        return changed, wrong

    def set_kube(self, nodes: Mapping[str, KubeNode]) -> set[str]:
        """All nodes. Those that are others than before."""
        before = self.kube
        self.kube = dict(nodes)
        self.serials = {each.serial: name for name, each in nodes.items() if each.serial}
        if before is None:
            return {*self.nodes, *self.on, *nodes}
        return {name for name in {*before, *nodes} if before.get(name) != nodes.get(name)}

    def set_kube_node(self, name: str, node: KubeNode | None) -> bool:
        if self.kube is None or self.kube.get(name) == node:
            return False
        before = self.kube.pop(name, None)
        if before is not None and self.serials.get(before.serial) == name:
            del self.serials[before.serial]
        if node is not None:
            self.kube[name] = node
            if node.serial:
                self.serials[node.serial] = name
        return True

    def set_job(self, uid: str, job: Job | None) -> tuple[JobView | None, JobView | None]:
        """The job before, and now."""
        before = self.views.pop(uid, None)
        for name in before.nodes if before is not None else ():
            self.on[name].discard(uid)
            if not self.on[name]:
                del self.on[name]
        if job is None:
            self.jobs.pop(uid, None)
            self.tables.pop(uid, None)
            return before, None
        self.jobs[uid] = job
        found = look_at(job, before, self.tables.get(uid))
        if job.complete:
            self.tables.pop(uid, None)
        self.views[uid] = found
        for name in found.nodes:
            self.on.setdefault(name, set()).add(uid)
        return before, found

    def jobs_on(self, name: str) -> list[JobView]:
        return [self.views[uid] for uid in self.on.get(name, ())]

    def owners(self, name: str) -> dict[str, tuple[JobView, Place]]:
        """Who has which chip. Of two, the one that has it now: the other is on its way to other places."""
        owners: dict[str, tuple[JobView, Place]] = {}
        for view in self.jobs_on(name):
            for device, place in view.places.get(name, {}).items():
                if device not in owners or device in view.used.get(name, ()):
                    owners[device] = (view, place)
        return owners

    def used(self, name: str) -> tuple[frozenset[str], bool]:
        """The chips of the node that pods have, and whether there are any pods."""
        found = [view.used[name] for view in self.jobs_on(name) if name in view.used]
        return frozenset().union(*found), bool(found)

    def levels_of(self, view: JobView, pod: int) -> list[str]:
        """Of the faults of a pod's chips."""
        where = next((name for name, pods in view.pods.items() if any(each.rank == pod for each in pods)), "")
        state = self.nodes.get(where)
        if state is None or state.device is None:
            return []
        mine = {place.device for place in view.places.get(where, {}).values() if place.pod == pod}
        return [fault.level for fault in state.device.faults if number(fault.chip) in mine]

    def followers(self, name: str) -> set[str]:
        """Nodes of jobs that restart processes in place, where it matters how the pod with rank 0 is, which is here."""
        found: set[str] = set()
        for view in self.jobs_on(name):
            if view.restarts_in_place and any(pod.rank == 0 for pod in view.pods.get(name, ())):
                found.update(each for each in view.pods if each in self.nodes and self.nodes[each].troubled)
        return found

    def ready(self, name: str) -> bool:
        if self.kube is None:
            return True
        kube = self.kube.get(name)
        return kube is not None and kube.ready

    def kube_node(self, name: str) -> KubeNode:
        return (self.kube or {}).get(name) or KubeNode(self.ready(name))

    def present(self, name: str, chip: str, code: str) -> bool:
        """The node publishes this fault, of a chip or (with none) of its switch."""
        state = self.nodes.get(name)
        if state is None:
            return False
        if not chip:
            return state.switch is not None and any(each.code == code for each in state.switch.faults)
        faults = state.device.faults if state.device is not None else ()
        return any(each.chip == chip and each.code == code for each in faults)

    def super_pod(self, name: str) -> int | None:
        """Negative: in none. None: the node has not published its chips."""
        state = self.nodes.get(name)
        return state.device.super_pod if state is not None and state.device is not None else None


def pods_at(view: JobView, node: str, chip: str) -> list[str]:
    """Uids of the job's pods that have a chip, or (with none) are on a node."""
    if not chip:
        return [pod.uid for pod in view.pods.get(node, ())]
    place = view.places.get(node, {}).get(number(chip))
    return [place.pod_uid] if place is not None else []
