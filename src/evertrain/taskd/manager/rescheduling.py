"""Restarts of whole pods and of the whole job: how many are left, who leaves, who starts again. Pure.

Without process-level recovery a fault on node 0 ends its agent, and with it the job's first pod: the whole job is
rescheduled. A fault anywhere else ends that node's agent and lets all others start their processes again, while the
lost pod is replaced. With process-level recovery ClusterD decides, and this is what its strategy `exit` means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from evertrain.taskd.frames import FaultReport
from evertrain.taskd.manager import orders as o
from evertrain.taskd.manager.orders import Order, ToController

DEFAULT_RESTARTS = 32767
UNKNOWN = -1
"""What an agent that is not ours says about restarts. Those of MindSpore may be less: they have as many as needed."""
PATIENCE = 25 * 60.0
"""Seconds in which a fault on node 0 has to be dealt with before the job is given up."""


@dataclass(slots=True)
class Agent:
    node: int
    faulty_since: float | None = None
    failed: set[int] = field(default_factory=set)
    """Ranks of its processes that have failed, and that it was not told to start again."""
    leaving: bool = False
    """Told to exit; a replacement will register."""
    gone: bool = False
    """It has said that it exits, or could not be told to: there is nobody to be told anything."""
    ended: int | None = None
    """Its exit code, once it has said so."""


@dataclass(slots=True)
class Ordered:
    """A pod whose replacement was ordered here."""

    node: int
    back: float | None = None
    """Since when the new one is there."""


@dataclass(slots=True)
class Rescheduling:
    recovers_processes: bool
    agents: dict[int, Agent] = field(default_factory=dict)
    restarts: int | None = None
    """Left for the job; None until an agent has said how many there are."""
    _retry_time: int | None = None
    _uncounted: list[Ordered] = field(default_factory=list)
    """Replacements that the scheduler has not counted, or not yet."""

    def register(self, node: int, now: float) -> None:
        """A new agent, or one that this manager did not know yet."""
        self.agents[node] = Agent(node)
        for ordered in self._uncounted:
            if ordered.node == node and ordered.back is None:
                ordered.back = now

    def known(self, node: int) -> Agent:
        return self.agents.setdefault(node, Agent(node))

    def starts(self, node: int, restarts: int) -> int:
        """An agent says how many restarts it was given; how many it has."""
        self.known(node)
        if self.restarts is None:
            self.restarts = restarts
        return self.restarts

    def reported(self, node: int, report: FaultReport, now: float) -> list[Order]:
        """An agent says which of its processes failed; none of them: it is about to exit."""
        agent = self.known(node)
        if not report.fault_ranks:
            agent.leaving = agent.gone = True
            return []
        if agent.leaving or self.crossed(report):
            return []
        if self.recovers_processes:
            agent.faulty_since = now if agent.faulty_since is None else agent.faulty_since
            agent.failed.update(report.fault_ranks)
            return []
        if node == 0:
            agent.leaving = True
            return o.exit_agents((0,))
        return self.restart((node,))

    def crossed(self, report: FaultReport) -> bool:
        """The fault happened before the restart that its agent has been told of meanwhile."""
        return report.restart_times != UNKNOWN and self.restarts is not None and report.restart_times > self.restarts

    def is_gone(self, node: int) -> bool:
        return node in self.agents and self.agents[node].gone

    def healed(self, nodes: Iterable[int] | None = None) -> None:
        for node in self.agents if nodes is None else nodes:
            if node in self.agents:
                self.agents[node].faulty_since = None
                self.agents[node].failed.clear()

    def failed(self, ranks: Iterable[int]) -> dict[int, set[int]]:
        """By node whose agent stays: which of these ranks have no process there."""
        wanted = set(ranks)
        agents = [agent for _, agent in sorted(self.agents.items()) if not agent.leaving and agent.ended is None]
        return {agent.node: agent.failed & wanted for agent in agents if agent.failed & wanted}

    def restart(self, leaving: tuple[int, ...], signal: o.Signal | None = None) -> list[Order]:
        """Replace the pods of some nodes, and start all processes of the others again."""
        self.restarts = (DEFAULT_RESTARTS if self.restarts is None else self.restarts) - 1
        for node in leaving:
            self.known(node).leaving = True
        self._uncounted += map(Ordered, leaving)
        self.healed()
        staying = [node for node, agent in sorted(self.agents.items()) if not agent.leaving and agent.ended is None]
        return [
            *o.exit_agents(leaving, signal),
            *o.restart_agents(staying, self.restarts),
            ToController("restart_controller"),
        ]

    def retried(self, times: int, counted: float | None = None) -> list[Order]:
        """The scheduler's count of replaced pods has changed. One that nobody here ordered: a pod was deleted.

        Some schedulers count the pods that ended by themselves, too, and the count may come late. What was `counted`
        when the new pod was there already is no such thing: this scheduler does not count those.
        """
        before, self._retry_time = self._retry_time, times
        if before is None or times <= before or self.recovers_processes:
            return []
        if counted is not None:
            self._uncounted = [each for each in self._uncounted if each.back is None or counted < each.back]
        own = min(times - before, len(self._uncounted))
        del self._uncounted[:own]
        return self.restart(()) if times - before > own else []

    def ended(self, node: int, code: int) -> None:
        self.known(node).ended = code

    @property
    def all_succeeded(self) -> bool:
        """An agent that has left counts only if this manager has ordered another pod in its place: a job that goes on
        smaller ends without it."""
        awaited = {ordered.node for ordered in self._uncounted if ordered.back is None}
        left = {agent.node for agent in self.agents.values() if agent.gone} - awaited
        return len(left) < len(self.agents) and all(
            agent.ended == 0 for agent in self.agents.values() if agent.node not in left
        )

    @property
    def deadline(self) -> float | None:
        agent = self.agents.get(0)
        return agent.faulty_since + PATIENCE if agent and agent.faulty_since is not None else None

    def tick(self, now: float) -> list[Order]:
        if self.deadline is None or now < self.deadline:
            return []
        self.agents[0].faulty_since = None
        return [ToController("destroy_controller"), *o.exit_agents((0,))]
