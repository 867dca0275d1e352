"""Several nodes: whose agent starts which rank, and what happens when a whole node is lost.

Ranks are dealt out to the nodes in equal blocks, so the node of a rank is known before its agent is. A node counts as
lost when its agent is: then nobody watches or replaces its processes, whether they live or not. All of its ranks are
lost at once, in one incident. The job waits for a new launcher with the same node number, which gets the orders that
its predecessor can't carry out any more; its ranks come back like any other replacement, without a step lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evertrain.mindio.controller import policy
from evertrain.mindio.controller.planned import Planned
from evertrain.mindio.controller.roster import Member, Place
from evertrain.mindio.controller.states import Closing, Dumping, Gathering, Idle, ToAgent
from evertrain.mindio.protocol import Exit, Fault, Hello, Observed, Spares, Spawn

WAIT, SHRINK, EXIT = NODE_LOSS = ("wait", "shrink", "exit")
DEFAULT_NODE_WAIT = 300.0


class Nodes(Planned):
    def __init__(
        self, world_size: int, *job: Any, nnodes: int, node_loss: str, node_wait: float, least_nodes: int, **more: Any
    ) -> None:
        super().__init__(world_size, *job, **more)
        if nnodes < 1 or world_size % nnodes:
            raise ValueError(f"{world_size} ranks can't be dealt out to {nnodes} nodes in equal parts")
        if node_loss not in NODE_LOSS:
            raise ValueError(f"node_loss must be one of {', '.join(NODE_LOSS)}, not {node_loss!r}")
        self.nnodes = nnodes
        self.node_loss = node_loss
        self.node_wait = node_wait
        self.least_nodes = least_nodes
        """With how few nodes the job may go on, if it may at all."""
        self._agents: set[int] = set()
        self._master = ""
        self._spares: dict[int, int] = {}
        """By node: warm spares that wait at its agent, as far as known."""
        self._stuck: dict[int, tuple[int, int]] = {}
        """By node: (generation, step) at which all of its ranks were found waiting in a collective."""

    @property
    def per_node(self) -> int:
        return self.world_size // self.nnodes

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    def agent_refusal(self, hello: Hello) -> str | None:
        """Why an agent that introduces itself like this has no place in the job, or None if it has."""
        if hello.world_size not in (0, self.world_size):
            return f"the agent starts {hello.world_size} ranks, the job has {self.world_size}"
        if not 0 <= hello.node < self.nnodes:
            return f"node {hello.node} is not in a job of {self.nnodes}"
        expected = self.ranks_of(hello.node)
        if hello.ranks and hello.ranks != list(expected):
            return (
                f"node {hello.node} wants to start ranks {hello.ranks[0]} to {hello.ranks[-1]}, its place in the job "
                f"is {expected[0]} to {expected[-1]}: --nnodes and --nproc-per-node must be the same on all nodes"
            )
        return None

    # Agents come and go.

    def _on_agent(self, node: int, hello: Hello) -> None:
        self._agents.add(node)
        if node == 0 and hello.master_port:
            self._master = f"{hello.address}:{hello.master_port}"
        if isinstance(self.state, Idle):
            if len(self._agents) == self.nnodes:
                self.state = Gathering()
                for member in self._roster:
                    self._spawn(member)
            elif self.state.deadline is None:
                self.state.deadline = self._now + self.node_wait
            return
        if self.nnodes > 1:
            self._tell("node", node=node, present=True)
        for member in self._of_node(node):
            if member.awaits_node and member.place is Place.STARTING:
                self._spawn(member)

    def _on_agent_lost(self, node: int, reason: str) -> None:
        self._agents.discard(node)
        if self.nnodes == 1:
            return self._end(70, reason)
        if isinstance(self.state, Idle):
            return
        if self._is_awaited(node):
            return  # known already: a new controller misses agents that its predecessor had lost
        self._tell("node", node=node, present=False, detail=reason)
        if self._shadow is not None and self.node_of(self._shadow.member.rank) == node:
            self._end_shadow(f"node {node} is lost")
        members = self._staying(node)
        if not members:
            return
        for member in members:
            # If only its agent is gone, the process must not go on beside its replacement.
            self._send(member, Exit(reason=f"node {node} is lost"))
        first = members[0]
        ranks = self.ranks_of(node)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        fault = self._own_fault(first, "agent", f"node {node} ({who}) is lost: {reason}")
        situation = self._situation(first, self._step)
        self._list(fault, -1, lost=True)
        if isinstance(self.state, Closing | Dumping):
            return self._node_lost_while_closing(members)
        remaining = self._remaining(node) if self.node_loss == SHRINK else 0
        decision = policy.node_lost(fault, situation, self.node_loss, self.node_wait, remaining)
        self._decided(decision)
        self._forgive_consequences()
        if decision.strategy in (policy.RESTART, policy.EXIT):
            for member in members:
                self._roster.move(member, Place.LOST)
            return self._give_up_on_processes(decision)
        patience = 0.0 if decision.strategy == policy.ELASTIC else self.node_wait
        self._tell("waiting", node=node, ranks=list(ranks), seconds=patience)
        if decision.strategy == policy.ELASTIC:
            self._aside.update(member.rank for member in members)
        for member in members:
            self._spawn(member)
        self._recover()

    def _staying(self, node: int) -> list[Member]:
        """Those of the node's ranks that have not left in order."""
        return [member for member in self._of_node(node) if member.rank not in self._left]

    def _is_awaited(self, node: int) -> bool:
        """The node is lost, and its ranks are started when it is back."""
        members = self._staying(node)
        return bool(members) and all(each.awaits_node and each.place is Place.STARTING for each in members)

    def _remaining(self, node: int) -> int:
        """How many ranks can go on without this node; 0 if they have to wait for it."""
        if not self._trained or not self._can_share:
            return 0
        remaining = self.world_size - len(self._aside | set(self.ranks_of(node)))
        if 2 * remaining < len(self._active):
            return 0  # the others may be alive somewhere, with a controller of their own
        return remaining if remaining >= max(self.elastic, self.least_nodes * self.per_node) else 0

    def _node_lost_while_closing(self, members: Iterable[Member]) -> None:
        for member in members:
            self._fault_while_closing(member, True)

    def _fault_while_closing(self, member: Member, lost: bool) -> None:
        """Nobody is replaced any more; the question is only who can still write the checkpoint."""
        if lost:
            self._roster.move(member, Place.LOST)
        if isinstance(self.state, Closing):
            self._closing_progress(member)
        elif isinstance(self.state, Dumping) and lost and member.rank in self.state.waiting:
            self._dump(self.state.closing, self.state.tried | {member.rank}, self.state.written)

    def _node_did_not_come(self, member: Member) -> None:
        node = self.node_of(member.rank)
        detail = f"node {node} did not come back within {self.node_wait:g} s"
        self._list(self._own_fault(member, "agent", detail), -1, lost=True)
        decision = policy.Decision(policy.EXIT, detail)
        self._decided(decision)
        for each in self._of_node(node):
            self._roster.move(each, Place.LOST)
        self._give_up_on_processes(decision)

    def _idle_too_long(self) -> None:
        missing = [str(node) for node in range(self.nnodes) if node not in self._agents]
        who = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(missing[:8])}"
        reason = f"{who} did not come within {self.node_wait:g} s; each node needs a launcher with its own --node-rank"
        self._end(1, reason)

    # Orders to the agent that owns a rank.

    def _spawn(self, member: Member) -> None:
        self._stuck.clear()
        node = self.node_of(member.rank)
        self._spares[node] = max(self._spares.get(node, 0) - 1, 0)
        super()._spawn(member)

    def _on_spares(self, spares: Spares, node: int) -> None:
        self._spares[node] = spares.ready

    def _has_spare(self, rank: int) -> bool:
        return self._spares.get(self.node_of(rank), 0) > 0

    def _order_process(self, member: Member) -> None:
        node = self.node_of(member.rank)
        member.awaits_node = node not in self._agents and self.nnodes > 1
        if member.awaits_node:
            aside = member.rank in self._aside
            self._roster.expire(member, None if aside else self._now + self.node_wait)
            return
        order = Spawn(rank=member.rank, incarnation=member.incarnation, restart=self.restarts, master=self._master)
        self._actions.append(ToAgent(order))

    def _of_node(self, node: int) -> list[Member]:
        return [self._roster[rank] for rank in self.ranks_of(node)]

    # Judgements that take all agents.

    def _on_partial(self, observed: Observed, node: int) -> Fault | None:
        """All ranks of one node wait in a collective. They may well wait for a rank of another node; only when every
        node that trains says the same of the same step, nobody is left that they could be waiting for."""
        self._stuck[node] = (self.generation, observed.step)
        training = {self.node_of(rank) for rank in self._active}
        if {self._stuck.get(each) for each in training} != {self._stuck[node]}:
            return None
        self._stuck.clear()
        return observed.fault
