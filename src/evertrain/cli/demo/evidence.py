"""What is known about a job when it has ended, and what of the promises it proves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evertrain.cli.demo import clocks

if TYPE_CHECKING:
    from evertrain.clusterd.timeline.incident import Incident

Verdict = tuple[str, bool]
"""What was promised, and whether it is true."""


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    node: str

    def is_of(self, kind: str) -> bool:
        return f"-{kind}-" in self.name


@dataclass(frozen=True)
class Evidence:
    incidents: Sequence[Incident]
    before: Sequence[Pod]
    """The pods before anything happened."""
    pods: Sequence[Pod]
    processes: Mapping[int, int]
    """How many each rank has had."""
    repeated: int
    """Steps that were done more than once."""
    checkpoints: Sequence[str]
    links: Sequence[str]
    """Over which the traffic went, one after the other."""
    done: Sequence[int]
    """When each step of each rank was done, in order, in milliseconds by the clock of the timeline."""
    happened_ms: int | None
    """When something was broken from here, by the same clock."""

    def decided(self, strategy: str, times: int = 1) -> Verdict:
        taken = [incident.decision for incident in self.incidents if incident.ok]
        often = " each time" if times > 1 else ""
        return f"ClusterD decided for {strategy}{often}, and it worked", taken[-times:] == [strategy] * times

    def fell_back(self, *strategies: str) -> Verdict:
        """From each to the next, within one recovery."""
        incident = self.incidents[-1]
        tried = (*(fallback.left for fallback in incident.fallbacks), incident.decision)
        return f"ClusterD tried {', '.join(strategies)}, one after the other", tried == strategies

    def obeyed(self, times: int) -> Verdict:
        good = [incident.ok for incident in self.incidents] == [True] * times
        return f"{times} orders were given and carried out", good

    def halted_in(self, *phases: str) -> Verdict:
        """Training went on in all others."""
        incident = self.incidents[-1]
        halted = sum(took for name, took in incident.durations if name in phases)
        names = {name for name, _ in incident.durations}
        return f"training halted for {halted} ms of {incident.total_ms} ms", set(phases) <= names

    def kept_pods(self) -> Verdict:
        return "both pods are still the same", set(self.pods) == set(self.before)

    def moved(self, kind: str) -> Verdict:
        """Only this pod, to a node that had none."""
        ((old,), kept), ((new,), now) = (
            ([pod for pod in pods if pod.is_of(kind)], [pod for pod in pods if not pod.is_of(kind)])
            for pods in (self.before, self.pods)
        )
        good = kept == now and new.node not in {pod.node for pod in self.before}
        return f"the {kind}'s pod moved from {old.node} to {new.node}, the other one stayed", good

    def replaced_all(self, kind: str) -> Verdict:
        """And none is where this one was."""
        (old,) = [pod.node for pod in self.before if pod.is_of(kind)]
        good = not {pod.uid for pod in self.before} & {pod.uid for pod in self.pods} and all(
            pod.node != old for pod in self.pods
        )
        return f"all pods are new, and none is on {old}", good and len(self.pods) == len(self.before)

    def restarted(self, *ranks: int) -> Verdict:
        found = {rank for rank, count in self.processes.items() if count > 1}
        if not ranks:
            return "all ranks kept their processes", not found
        if set(ranks) == set(self.processes):
            return "all ranks have new processes", found == set(ranks)
        names = " and ".join(str(rank) for rank in ranks)
        text = f"only rank {names} has a new process" if len(ranks) == 1 else f"only ranks {names} have new processes"
        return text, found == set(ranks)

    def timed(self) -> Verdict:
        """The record of each incident, and the training's own clock."""
        said, seen, good = [], [], bool(self.incidents)
        for incident in self.incidents:
            happened = self.happened(incident)
            began = incident.opened_ms if happened is None else happened
            after = clocks.next_step(incident, happened, self.done)
            good = good and incident.closed and incident.total_ms > 0 and clocks.agree(incident, after)
            said.append(str(incident.updated_ms - began))
            seen.append("none" if after is None else str(after - began))
        recorded, own = (" and ".join(times) for times in (said, seen))
        text = f"the phases add up to {recorded} ms; by the training's own clock its next step was done after {own} ms"
        return text, good

    def happened(self, incident: Incident) -> int | None:
        """When the fault was made, if it is known: that of the incidents from then on."""
        known = self.happened_ms is not None and incident.opened_ms >= self.happened_ms
        return self.happened_ms if known else None

    def did_again(self, most: int) -> Verdict:
        return f"steps that had to be done again: {self.repeated or 'none'}", self.repeated <= most

    def saved_one_checkpoint(self) -> Verdict:
        return f"the checkpoint: {', '.join(self.checkpoints) or 'none'}", len(self.checkpoints) == 1

    def used_links(self, *names: str) -> Verdict:
        return f"traffic went over the {', then the '.join(names)} links", list(self.links) == list(names)
