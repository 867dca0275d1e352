"""Whether and where the pods of a gang fit. Pure.

A gang is placed by a depth-first search over its pods, the most demanding first, each on the fullest node that takes
it. Pods of the same make are put on nodes in one order only, which makes the usual gang (many equal pods) a single
pass; a gang that can't fit by plain counting is refused before the search; and the search has a bound, because a
puzzle of many different pods may not hold up everybody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from evertrain.embedded import matching, resources
from evertrain.embedded.resources import Amounts
from evertrain.embedded.scheduler import chips
from evertrain.embedded.scheduler.views import CHIP_RESOURCES, HostPort, NodeView, PodView, Term
from evertrain.wire.clusterinfo import WELL

MAX_STEPS = 5000
"""Pods tried on nodes in the search for one gang, beyond one try for each."""
MAX_SEARCHED = 300
"""Larger gangs are placed in one pass, without going back."""

Domain = tuple[str, str]
"""Topology key and its value on a node."""


@dataclass
class Room:
    """A node and what is free on it."""

    node: NodeView
    free: Amounts
    chips: dict[str, set[int]]
    pods: int = 0
    host_ports: set[HostPort] = field(default_factory=set)

    def domain(self, key: str) -> Domain | None:
        value = self.node.labels.get(key)
        return None if value is None else (key, value)


@dataclass(frozen=True)
class Neighbours:
    """What the pods that are placed already mean for one more."""

    forbidden: frozenset[Domain]
    """Its own anti-affinity."""
    defended: frozenset[Domain]
    """The anti-affinity of the others."""
    required: tuple[tuple[str, frozenset[Domain] | None], ...]
    """Its affinity: per term the topology key and where its company is; None if it is the first of its kind."""


ALONE = Neighbours(frozenset(), frozenset(), ())


@dataclass
class Placement:
    pod: PodView
    room: Room
    chips: Mapping[str, tuple[int, ...]]


class Space:
    """All nodes, and the pods on them. Placements change it."""

    def __init__(self, nodes: Iterable[NodeView], pods: Iterable[PodView]) -> None:
        self.rooms = {
            node.name: Room(
                node=node,
                free=dict(node.allocatable),
                chips={name: set(range(node.allocatable.get(name, 0) // 1000)) for name in CHIP_RESOURCES},
            )
            for node in sorted(nodes, key=lambda node: natural(node.name))
        }
        self._placed: list[tuple[PodView, Room]] = []
        self._repelling: list[tuple[PodView, Room]] = []
        self._version = 0
        self._memory: dict[str, tuple[int, str]] = {}
        """Refusals of pods that look at nodes only: they hold until somebody is placed."""
        self.unnumbered: list[tuple[PodView, Room]] = []
        """Pods that somebody else has bound, which have no chips yet."""
        for pod in pods:
            room = self.rooms.get(pod.node)
            if pod.holds and room is not None:
                self._occupy(pod, room, pod.chips)
                if pod.chip_requests and not pod.chips and not pod.deleting:
                    self.unnumbered.append((pod, room))
        for room in self.rooms.values():
            _take_out_faulty_chips(room)

    def free(self) -> Amounts:
        """What is free on nodes that take pods, together."""
        return resources.add(*(room.free for room in self.rooms.values() if takes_pods(room.node)))

    def put(self, pod: PodView, room: Room, ring: int) -> Placement:
        allocated = {name: chips.choose(room.chips[name], count, ring) for name, count in pod.chip_requests.items()}
        self._occupy(pod, room, allocated)
        return Placement(pod, room, allocated)

    def take_back(self, placement: Placement) -> None:
        """The last one that was put."""
        self._version += 1
        room = placement.room
        room.free = resources.add(room.free, placement.pod.requests)
        room.pods -= 1
        room.host_ports -= placement.pod.host_ports
        for name, numbers in placement.chips.items():
            room.chips[name] |= set(numbers)
        self._placed.pop()
        if placement.pod.repel:
            self._repelling.pop()

    def _occupy(self, pod: PodView, room: Room, allocated: Mapping[str, Iterable[int]]) -> None:
        self._version += 1
        room.free = resources.subtract(room.free, pod.requests)
        room.pods += 1
        room.host_ports |= pod.host_ports
        for name, numbers in allocated.items():
            room.chips.setdefault(name, set()).difference_update(numbers)
        self._placed.append((pod, room))
        if pod.repel:
            self._repelling.append((pod, room))

    def neighbours(self, pod: PodView) -> Neighbours:
        if not (pod.attract or pod.repel or self._repelling):
            return ALONE
        forbidden, defended = set(), set()
        company: list[set[Domain]] = [set() for _ in pod.attract]
        for other, room in self._placed if pod.attract or pod.repel else self._repelling:
            for term in pod.repel:
                if matches(term, other) and (domain := room.domain(term.topology)):
                    forbidden.add(domain)
            for term in other.repel:
                if matches(term, pod) and (domain := room.domain(term.topology)):
                    defended.add(domain)
            for term, domains in zip(pod.attract, company, strict=True):
                if matches(term, other) and (domain := room.domain(term.topology)):
                    domains.add(domain)
        return Neighbours(
            forbidden=frozenset(forbidden),
            defended=frozenset(defended),
            required=tuple(
                (term.topology, None if not domains and matches(term, pod) else frozenset(domains))
                for term, domains in zip(pod.attract, company, strict=True)
            ),
        )

    def refusal(self, pod: PodView, room: Room, neighbours: Neighbours) -> list[str]:
        """Why the node doesn't take the pod, in the words of Kubernetes; empty if it does."""
        node = room.node
        if node.unschedulable:
            return ["node(s) were unschedulable"]
        if node.closed or (pod.cautious and node.health.is_sub_healthy):
            return ["node(s) were unhealthy"]
        if pod.picky and not matching.matches_node(pod.spec, node.name, node.labels):
            return ["node(s) didn't match Pod's node affinity/selector"]
        if node.taints and (taint := matching.untolerated(node.taints, pod.spec.get("tolerations") or [])):
            return [f"node(s) had untolerated taint {{{taint.get('key', '')}: {taint.get('value', '')}}}"]
        if pod.host_ports and any(one.clashes(other) for one in pod.host_ports for other in room.host_ports):
            return ["node(s) didn't have free ports for the requested pod ports"]
        if not all(room.free.get(name, 0) >= amount for name, amount in pod.requests.items()):
            missing = resources.lacking(room.free, pod.requests)
            return ["Too many pods" if name == resources.PODS else f"Insufficient {name}" for name in missing]
        for name, count in pod.chip_requests.items():
            if len(room.chips[name]) < count:
                return [f"Insufficient {name}"]
        for key, domains in neighbours.required:
            domain = room.domain(key)
            if domain is None or (domains is not None and domain not in domains):
                return ["node(s) didn't match pod affinity rules"]
        if neighbours.forbidden and any(room.domain(key) == (key, value) for key, value in neighbours.forbidden):
            return ["node(s) didn't match pod anti-affinity rules"]
        if neighbours.defended and any(room.domain(key) == (key, value) for key, value in neighbours.defended):
            return ["node(s) didn't satisfy existing pods anti-affinity rules"]
        return []

    def explain(self, pod: PodView) -> str:
        """Why no node takes the pod; empty if one does."""
        if not self.rooms:
            return "no nodes available to schedule pods"
        version, text = self._memory.get(pod.shape, (-1, ""))
        if version == self._version:
            return text
        text = self._explain(pod)
        if not (pod.attract or pod.repel or self._repelling):
            self._memory[pod.shape] = (self._version, text)
        return text

    def _explain(self, pod: PodView) -> str:
        neighbours = self.neighbours(pod)
        counts: Counter[str] = Counter()
        for room in self.rooms.values():
            refusal = self.refusal(pod, room, neighbours)
            if not refusal:
                return ""
            counts.update(refusal)
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
        return f"0/{len(self.rooms)} nodes are available: {listed}."


def _take_out_faulty_chips(room: Room) -> None:
    """Those that are free. Who has one keeps it until somebody deletes the pod."""
    for name, free in room.chips.items():
        faulty = {chip for chip in free if not room.node.has_use_for(name, chip)} if room.node.health != WELL else set()
        if faulty:
            free -= faulty
            room.free = resources.subtract(room.free, {name: 1000 * len(faulty)})


def natural(name: str) -> tuple[str, int, str]:
    """node-2 before node-10."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits or -1), name


def takes_pods(node: NodeView) -> bool:
    """Open to pods that tolerate nothing."""
    return not node.unschedulable and not node.closed and matching.untolerated(node.taints, []) is None


def matches(term: Term, pod: PodView) -> bool:
    if term.namespaces is not None and pod.namespace not in term.namespaces:
        return False
    return matching.matches_labels(term.selector, pod.labels)


def _make(pod: PodView, terms: Sequence[Term], neighbours: Neighbours) -> str:
    """Pods with the same make are interchangeable."""
    if not terms and not neighbours.defended:
        return pod.shape
    return f"{pod.shape} {[matches(term, pod) for term in terms]} {sorted(neighbours.defended)}"


class Search:
    """Places at least `need` of the pods, or none."""

    def __init__(self, space: Space, pods: Sequence[PodView], need: int, ring: int) -> None:
        self._space = space
        self._ring = ring
        self._skips = len(pods) - need
        self._steps = MAX_STEPS + len(pods) * len(space.rooms)
        terms = [term for pod in pods for term in (*pod.attract, *pod.repel)]
        first = {pod.key: space.neighbours(pod) for pod in pods}
        makes = {pod.key: _make(pod, terms, first[pod.key]) for pod in pods}
        self._pods = sorted(
            pods, key=lambda pod: (_leans_on_others(pod), _demand(pod), makes[pod.key], pod.rank, pod.name)
        )
        self._makes = [makes[pod.key] for pod in self._pods]
        self._first = first
        self._done: list[Placement] = []
        self._rooms: list[Room] = []

    def run(self) -> list[Placement] | None:
        if self._skips < 0 or not self._enough_by_counting():
            return None
        if len(self._pods) > MAX_SEARCHED:
            return self._one_pass()
        return self._done if self._from(0, 0, 0) else None

    def _one_pass(self) -> list[Placement] | None:
        previous, rooms, start = "", list[Room](), 0
        for pod, make in zip(self._pods, self._makes, strict=True):
            if make != previous:
                previous, rooms, start = make, self._order(pod), 0
            neighbours = self._space.neighbours(pod)
            while start < len(rooms) and self._space.refusal(pod, rooms[start], neighbours):
                start += 1
            if start < len(rooms):
                self._done.append(self._space.put(pod, rooms[start], self._ring))
        if len(self._pods) - len(self._done) <= self._skips:
            return self._done
        while self._done:
            self._space.take_back(self._done.pop())
        return None

    def _enough_by_counting(self) -> bool:
        """A bound from above, make by make, as if each make were alone."""
        members: dict[str, list[PodView]] = {}
        for pod, make in zip(self._pods, self._makes, strict=True):
            members.setdefault(make, []).append(pod)
        missing = 0
        for pods in members.values():
            pod, count = pods[0], 0
            if not pod.attract and self._space.explain(pod):
                missing += len(pods)
                continue
            alone = any(term.topology == "kubernetes.io/hostname" and matches(term, pod) for term in pod.repel)
            neighbours = self._first[pod.key]
            lenient = Neighbours(neighbours.forbidden, neighbours.defended, ()) if pod.attract else neighbours
            for room in self._space.rooms.values():
                if not self._space.refusal(pod, room, lenient):
                    count += 1 if alone else _how_many(room, pod)
                if count >= len(pods):
                    break
            missing += max(0, len(pods) - count)
        return missing <= self._skips

    def _from(self, index: int, skipped: int, start: int) -> bool:
        if index == len(self._pods):
            return True
        pod = self._pods[index]
        same_as_before = index > 0 and self._makes[index] == self._makes[index - 1]
        rooms = self._rooms if same_as_before else self._order(pod)
        neighbours = self._space.neighbours(pod)
        for position in range(start if same_as_before else 0, len(rooms)):
            if self._steps <= 0:
                return False
            self._steps -= 1
            room = rooms[position]
            if self._space.refusal(pod, room, neighbours):
                continue
            self._rooms = rooms
            placement = self._space.put(pod, room, self._ring)
            self._done.append(placement)
            if self._from(index + 1, skipped, position):
                return True
            self._done.pop()
            self._space.take_back(placement)
        self._rooms = rooms
        return skipped < self._skips and self._from(index + 1, skipped + 1, len(rooms))

    def _order(self, pod: PodView) -> list[Room]:
        """The fullest node first for pods with chips, so that free nodes stay whole; the emptiest for the others."""
        wanted = list(pod.chip_requests)
        rooms = list(self._space.rooms.values())
        if wanted:
            return sorted(rooms, key=lambda room: sum(len(room.chips[name]) for name in wanted))
        return sorted(rooms, key=lambda room: room.pods)


def _leans_on_others(pod: PodView) -> bool:
    """It has to be where another pod is, which therefore goes first."""
    return any(not matches(term, pod) for term in pod.attract)


def _demand(pod: PodView) -> list[int]:
    """Sorts the most demanding first."""
    asked = [sum(pod.requests.get(name, 0) for name in CHIP_RESOURCES)]
    asked += [len(pod.spec.get("nodeSelector") or {}), len(pod.repel)]
    asked += [pod.requests.get("memory", 0), pod.requests.get("cpu", 0)]
    return [-amount for amount in asked]


def _how_many(room: Room, pod: PodView) -> int:
    if pod.host_ports:
        return 1
    return min(room.free.get(name, 0) // amount for name, amount in pod.requests.items() if amount > 0)
