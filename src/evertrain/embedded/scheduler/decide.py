"""Which pods go where, with which chips, and what to say about the others. Pure.

One decision looks at everything there is and doesn't remember: the same world gives the same answer, and a decision
that was carried out by half is completed by the next one. Groups are taken by age, and none waits for another: a gang
that fits is placed although an older one doesn't.

A pod group is let in (`Inqueue`) when the cluster could hold its minResources beside what is used and what groups
that were let in before will use. Whoever creates the pods waits for that, so a full cluster has waiting groups rather
than waiting pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evertrain.embedded import resources
from evertrain.embedded.resources import Amounts
from evertrain.embedded.scheduler import chips
from evertrain.embedded.scheduler.placement import Placement, Search, Space
from evertrain.embedded.scheduler.ports import Ports, SharedPorts
from evertrain.embedded.scheduler.views import (
    COMPLETED,
    INQUEUE,
    PENDING,
    RUNNING,
    SCHEDULERS,
    UNKNOWN,
    GroupView,
    NodeView,
    PodView,
    QueueView,
)


@dataclass(frozen=True)
class World:
    pods: Sequence[PodView]
    nodes: Sequence[NodeView]
    groups: Sequence[GroupView] = ()
    queues: Sequence[QueueView] = ()
    shared_network: bool = False
    """All pods are in the network of this machine: jobs that listen on the same port can't run at the same time."""
    ports: Mapping[str, Ports] = field(default_factory=dict)
    """By party: those that its pods had so far."""


@dataclass(frozen=True)
class Binding:
    pod: PodView
    node: str
    annotations: Mapping[str, str]
    chips: Mapping[str, tuple[int, ...]]
    bound: bool = False
    """Somebody else has chosen the node; only the chips are ours to give."""


@dataclass(frozen=True)
class Verdict:
    """The state of a pod group."""

    group: GroupView
    phase: str
    running: int
    succeeded: int
    failed: int
    complaint: str = ""
    """Why it can't go on, if it can't."""


@dataclass(frozen=True)
class Decision:
    bindings: list[Binding] = field(default_factory=list)
    complaints: dict[str, str] = field(default_factory=dict)
    """By key of the pod: why it has no place."""
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass
class _Gang:
    group: GroupView | None
    members: list[PodView]
    age: tuple[str, str]
    waiting: list[PodView] = field(default_factory=list)
    holding: list[PodView] = field(default_factory=list)
    leaving: list[PodView] = field(default_factory=list)
    """On a node, but being deleted: their places will be free for those who replace them."""
    succeeded: int = 0
    failed: int = 0
    placed: int = 0

    def sort_out(self) -> None:
        for pod in self.members:
            if pod.phase == "Succeeded":
                self.succeeded += 1
            elif pod.phase == "Failed":
                self.failed += 1
            elif pod.waits:
                self.waiting.append(pod)
            elif pod.holds:
                (self.leaving if pod.deleting else self.holding).append(pod)

    @property
    def need(self) -> int:
        """How many of the waiting pods have to be placed for any to be."""
        if self.group is None:
            return 1
        return max(1 if self.waiting else 0, self.group.min_member - len(self.holding) - self.succeeded)

    @property
    def fresh(self) -> bool:
        """A group that has to be let in first: a new one, one that was refused, or one of which nothing is left."""
        group = self.group
        if group is None or group.phase == INQUEUE or self.holding or self.leaving:
            return False
        if group.phase == COMPLETED:
            return bool(self.waiting)
        return group.phase not in (RUNNING, UNKNOWN) or not self.succeeded + self.failed

    @property
    def expects_pods(self) -> bool:
        """Pods that it needs are still to come, the first ones or those that replace lost ones, and their places are
        kept. Once they are there and find none, the group must not keep others out."""
        if self.group is None or self.fresh or self.group.phase not in (INQUEUE, RUNNING, UNKNOWN):
            return False
        there = len(self.holding) + len(self.waiting) + self.succeeded + self.failed
        return there < self.group.min_member

    @property
    def running(self) -> int:
        return sum(pod.phase == "Running" for pod in self.holding)


def decide(world: World, now_ns: int) -> Decision:
    space = Space(world.nodes, world.pods)
    decision = Decision()
    _number_strangers(space, decision, now_ns)
    gangs = _gangs(world, decision)
    ports = _shared_ports(world, gangs)
    # Those who are in come first: the others are let in to what is left then.
    for gang in gangs:
        if not gang.fresh:
            _settle(gang, space, ports, decision, now_ns)
    door = _Door(space, gangs, world.queues)
    for gang in gangs:
        if gang.fresh:
            _settle(gang, space, ports, decision, now_ns, door.refusal(gang))
    return decision


def _shared_ports(world: World, gangs: Iterable[_Gang]) -> SharedPorts | None:
    if not world.shared_network:
        return None
    return SharedPorts(
        world.pods, [gang.group.key for gang in gangs if gang.group is not None and gang.expects_pods], world.ports
    )


def _settle(
    gang: _Gang, space: Space, ports: SharedPorts | None, decision: Decision, now_ns: int, refusal: str = ""
) -> None:
    """Places the gang if it may be, and says what became of it."""
    placements: list[Placement] = []
    complaint = refusal
    clash = ports.clash(gang.waiting) if ports is not None and not refusal else ""
    if clash:
        decision.complaints.update({pod.key: clash for pod in gang.waiting})
        complaint = f"{len(gang.waiting)}/{len(gang.members)} tasks in gang unschedulable: {clash}"
    elif gang.waiting and not refusal:
        placements, complaint = _place(gang, space, decision)
    elif gang.waiting:
        decision.complaints.update({pod.key: refusal for pod in gang.waiting})
    for placement in placements:
        node = placement.room.node
        written = chips.describe(placement.pod, node, placement.chips, now_ns)
        decision.bindings.append(Binding(placement.pod, node.name, written, placement.chips))
        if ports is not None:
            ports.take(placement.pod)
    gang.placed = len(placements)
    if gang.group is not None:
        decision.verdicts.append(_verdict(gang, gang.group, refusal, complaint))


def _number_strangers(space: Space, decision: Decision, now_ns: int) -> None:
    for pod, room in space.unnumbered:
        wanted = pod.chip_requests
        if any(len(room.chips.get(name, ())) < count for name, count in wanted.items()):
            continue
        allocated = {name: chips.choose(room.chips[name], count) for name, count in wanted.items()}
        for name, numbers in allocated.items():
            room.chips[name].difference_update(numbers)
        written = chips.describe(pod, room.node, allocated, now_ns)
        decision.bindings.append(Binding(pod, room.node.name, written, allocated, bound=True))


def _gangs(world: World, decision: Decision) -> list[_Gang]:
    """By age. A pod without a group is a gang of one."""
    gangs = {group.key: _Gang(group, [], (group.created, group.key)) for group in world.groups}
    ailing = any(node.health.is_sub_healthy for node in world.nodes)
    for pod in world.pods:
        if pod.group in gangs:
            group = gangs[pod.group].group
            if ailing and group is not None and group.cautious and pod.waits:
                pod = replace(pod, cautious=True, shape=f"{pod.shape} cautious")
            gangs[pod.group].members.append(pod)
        elif not pod.waits or pod.spec.get("schedulerName", "default-scheduler") not in SCHEDULERS:
            continue
        elif pod.group:
            decision.complaints[pod.key] = f"pod group {pod.group} not found"
        else:
            gangs[f"pod {pod.key}"] = _Gang(None, [pod], (pod.created, pod.key))
    for gang in gangs.values():
        gang.sort_out()
    return sorted(gangs.values(), key=lambda gang: gang.age)


class _Door:
    """Lets groups in. Those that are in are not put out again."""

    def __init__(self, space: Space, gangs: Iterable[_Gang], queues: Sequence[QueueView]) -> None:
        self._queues = {queue.name: queue for queue in queues}
        self._idle = space.free()
        self._used: dict[str, Amounts] = {}
        for gang in gangs:
            group = gang.group
            if group is None:
                continue
            held = resources.add(*(pod.requests for pod in gang.holding))
            promised = _missing(group, gang) if gang.expects_pods else {}
            self._idle = resources.subtract(self._idle, promised)
            self._used[group.queue] = resources.add(self._used.get(group.queue, {}), held, promised)

    def refusal(self, gang: _Gang) -> str:
        """Why the group stays outside; empty if it is let in."""
        group = gang.group
        if group is None:
            return ""
        missing = _missing(group, gang)
        complaint = self._queue_complaint(group, missing)
        if not complaint and (short := resources.lacking(self._idle, missing)):
            complaint = f"resource in cluster is overused: {_insufficient(short)}"
        if not complaint:
            self._idle = resources.subtract(self._idle, missing)
            self._used[group.queue] = resources.add(self._used.get(group.queue, {}), missing)
        return complaint

    def _queue_complaint(self, group: GroupView, missing: Amounts) -> str:
        queue = self._queues.get(group.queue)
        if queue is None:
            return f"queue {group.queue} not found"
        if not queue.open:
            return f"queue {group.queue} is not open"
        used = self._used.get(group.queue, {})
        over = resources.lacking(
            resources.subtract(queue.capability, used), {name: missing.get(name, 0) for name in queue.capability}
        )
        return f"queue resource quota insufficient: {_insufficient(over)}" if over else ""


def _insufficient(names: Iterable[str]) -> str:
    return ", ".join(f"Insufficient {name}" for name in names)


def _missing(group: GroupView, gang: _Gang) -> Amounts:
    held = resources.add(*(pod.requests for pod in (*gang.holding, *gang.leaving)))
    left = resources.subtract(group.min_resources, {name: held.get(name, 0) for name in group.min_resources})
    return {name: amount for name, amount in left.items() if amount > 0}


def _place(gang: _Gang, space: Space, decision: Decision) -> tuple[list[Placement], str]:
    """The placements of the gang, and what to say about it if there are none."""
    group = gang.group
    ring = chips.ring_size(group.annotations.get(chips.POLICY, "")) if group is not None else 0
    found = None
    if len(gang.waiting) >= gang.need and not _task_missing(gang):
        found = Search(space, gang.waiting, gang.need, ring).run()
    if found is not None:
        placed = {placement.pod.key for placement in found}
        for pod in gang.waiting:
            if pod.key not in placed:
                decision.complaints[pod.key] = space.explain(pod) or _not_ready(gang)
        return found, ""
    reasons = {pod.key: space.explain(pod) for pod in gang.waiting}
    for pod in gang.waiting:
        decision.complaints[pod.key] = reasons[pod.key] or _not_ready(gang)
    unplaceable = sum(bool(reason) for reason in reasons.values()) or len(gang.waiting)
    return [], f"{unplaceable}/{len(gang.members)} tasks in gang unschedulable: {_not_ready(gang)}"


def _task_missing(gang: _Gang) -> bool:
    """Each kind of task has its own minimum, unless the minimum of the whole is less than their sum."""
    group = gang.group
    if group is None or not group.min_task_member or group.min_member < sum(group.min_task_member.values()):
        return False
    counts: dict[str, int] = {}
    for pod in gang.members:
        if pod in gang.waiting or pod in gang.holding or pod.phase == "Succeeded":
            counts[pod.task] = counts.get(pod.task, 0) + 1
    named = any(pod.task for pod in gang.members)
    return named and any(counts.get(task, 0) < count for task, count in group.min_task_member.items())


def _not_ready(gang: _Gang) -> str:
    minimum = gang.group.min_member if gang.group is not None else 1
    counts = [(len(gang.waiting), "Pending"), (gang.running, "Running"), (gang.succeeded, "Succeeded")]
    counts.append((len(gang.holding) - gang.running, "Bound"))
    listed = ", ".join(f"{count} {word}" for count, word in counts if count)
    return f"pod group is not ready, {listed or '0 Pending'}, {minimum} minAvailable"


def _verdict(gang: _Gang, group: GroupView, refusal: str, complaint: str) -> Verdict:
    allocated = len(gang.holding) + gang.placed + gang.succeeded
    done = gang.succeeded + gang.failed
    over = done >= max(1, group.min_member) and not gang.holding and not gang.waiting
    if refusal:
        phase = PENDING
    elif over or (group.phase == COMPLETED and not gang.members):
        phase = COMPLETED
    elif allocated and allocated >= group.min_member:
        phase = RUNNING
    elif gang.holding:
        phase = UNKNOWN
    else:
        phase = INQUEUE
    return Verdict(group, phase, gang.running, gang.succeeded, gang.failed, complaint)
