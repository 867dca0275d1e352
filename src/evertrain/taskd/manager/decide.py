"""The manager's mind: from what it hears to what it orders. Pure; the shell around it is `shell`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evertrain.taskd import frames, tracing
from evertrain.taskd.codes import AGENT, KEEP_ALIVE, PROFILING_RESULTS, REGISTER, STATUS, WORKER, Code
from evertrain.taskd.frames import BadFrame, Body, FaultReport, ProcessEnd
from evertrain.taskd.manager import orders as o
from evertrain.taskd.manager.nic import NicSwitches
from evertrain.taskd.manager.orders import End, Order, Signal, ToAgent, ToController
from evertrain.taskd.manager.profiling import Profiling
from evertrain.taskd.manager.rescheduling import Rescheduling
from evertrain.taskd.manager.signals import Signals
from evertrain.taskd.manager.stress import StressTests
from evertrain.taskd.net.routing import Position, is_rank

log = logging.getLogger(__name__)

MOST_NODES, MOST_RANKS = 5000, 1_000_000
SIGNS_A_SECOND = 100
"""Signs of life of all agents. They are only of use to a manager that has taken over, and each costs it half a ms."""
_REPEATED = frozenset({Code.START_AGENT, Code.RESTART_AGENT, Code.STOP_WORKERS})
"""Orders to agents that are still of use when they come late."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What an agent says about processes of its node that have failed."""

    ranks: tuple[int, ...]
    ends: Mapping[int, ProcessEnd] = field(default_factory=dict)
    """As far as it knows."""
    max_restarts: int | None = None
    """What its launcher was given."""
    restarts_left: int = -1


class Decisions:
    def __init__(
        self,
        job: str,
        nodes: int,
        recovers_processes: bool,
        ended: Callable[[Ended], None] = lambda ended: None,
    ) -> None:
        """`ended` hears of processes that ended, where pods are not the unit."""
        self._nodes, self._tell_ended = nodes, ended
        self.pods = Rescheduling(recovers_processes)
        self._signals = Signals(job, self._restart)
        self._nics, self._stress, self._profiling = NicSwitches(), StressTests(), Profiling()
        self._workers: dict[int, int] = {}
        """By rank: the node of the worker."""
        self._withheld: dict[int, int] = {}
        """By node whose agent waits for its start: the restarts it was given."""
        self._running: dict[int, int] = {}
        """By node whose processes have been started: the restarts that were left then."""
        self._starting: dict[int, int] = {}
        """By node that was told to start when nothing was known of a job under way: the restarts it was given."""
        self._replacing: dict[int, int] = {}
        """By node: how often its agent was told to replace processes."""
        self._types: dict[int, int] = {}
        """By rank: what its agent knows about a fault that the controller hasn't reported yet."""
        self._ordered: dict[int, Body] = {}
        """By node: the newest order to its agent."""
        self._untold: dict[int, Body] = {}
        """By node: that order, if it has not arrived and is to be repeated."""
        self._told: dict[int, dict[int, int]] = {}
        """By node: ranks that its agent has reported as failed, with the restarts that were left then."""
        self._over = False
        self._verdict = ""
        """Why the manager gave the job up."""
        self._registered: set[int] = set()
        self._ids: dict[int, str] = {}
        """By node: which of the agents that have had the place has registered last."""
        self._leaving: dict[int, str] = {}
        """By node whose agent was told to exit: the recovery in which it was."""
        self._successors: dict[int, str] = {}
        """By node: the recovery in which the agent before was told to exit; empty if it was not."""
        self._recovery = ""
        """The last one that has begun."""
        self._joined: dict[int, str] = {}
        """By node: the recovery that was the last one when its agent registered."""
        self._inherited = False
        """Another manager led the job before. Agents that had ended by then will not say so again."""

    def worker(self, rank: int) -> Position | None:
        node = self._workers.get(rank)
        return Position(WORKER, str(node), str(rank)) if node is not None else None

    # What members of the tree say.

    def announced(self, who: Position) -> None:
        """A path to `who` was made known. This manager may have taken the place of another."""
        if not _may_be(who):
            return
        if who.role == AGENT:
            self.pods.known(int(who.server))
        elif who.role == WORKER:
            self._workers.setdefault(int(who.process), int(who.server))
            self._profiling.known(int(who.process))

    def heard(self, who: Position, body: Body, now: float) -> list[Order]:
        if who.role == AGENT and _may_be(who):
            return self._agent(int(who.server), body, now)
        if who.role == WORKER and _may_be(who):
            return self._worker(int(who.server), int(who.process), body, now)
        log.warning("a message of %s: nobody here has a use for it", who)
        return []

    def _agent(self, node: int, body: Body, now: float) -> list[Order]:
        speaks = (body.extension or {}).get(frames.AGENT_ID, "")
        if body.msg_type == REGISTER:
            self._ids[node], self._joined[node] = speaks, self._recovery
            self._successors[node] = self._leaving.pop(node, "")
            self._registered.add(node)
            self.pods.register(node, now)
            for kept in (self._withheld, self._running, self._starting, self._replacing):
                kept.pop(node, None)
            self._told.pop(node, None)
            self._untold.pop(node, None)
            return []
        self._ids.setdefault(node, speaks)
        if self._successors.get(node) and speaks != self._ids[node]:
            log.info("agent %d: a late word of the one that was told to exit: %d", node, body.code)
            return []
        if body.msg_type == KEEP_ALIVE:
            return self._alive(node, body, now)
        if body.msg_type != STATUS:
            log.warning("agent %d says %s %d: unknown", node, body.msg_type, body.code)
            return []
        match body.code:
            case Code.RESTART_TIMES:
                return self._starts(node, body)
            case Code.FAULT_RANKS:
                return self._faults(node, body, now)
            case Code.EXIT_AGENT:
                return self._ended(node, body)
        log.warning("agent %d says %s %d: unknown", node, body.msg_type, body.code)
        return []

    @property
    def inherited(self) -> bool:
        """Another manager has led the job before."""
        return self._inherited

    def _alive(self, node: int, body: Body, now: float) -> list[Order]:
        """A manager that took over learns from the agents how many restarts are left, and that the job is under way.
        And what was lost on the way is made up for: an order that the agent has not got, a report that nobody has."""
        inherited = node not in self._registered
        self._inherited |= inherited
        self.pods.known(node)
        try:
            report = frames.fault_report(body.message)
        except BadFrame:
            return []
        learnt = self._learn(node, body, report.restart_times, inherited)
        return [*learnt, *self._missed(node, body, report, now), *self._told_again(node, body, report)]

    def _told_again(self, node: int, sign: Body, report: FaultReport) -> list[Order]:
        """The order that could not be delivered, unless the agent has obeyed it: then only its answer was lost."""
        order = self._untold.get(node)
        if order is None or not self._has_the_place(node, sign):
            return []
        del self._untold[node]
        match order.code:
            case Code.START_AGENT:
                obeyed = frames.is_running(sign)
            case Code.RESTART_AGENT:
                obeyed = order.message == str(report.restart_times)
            case _:
                obeyed = set(frames.rank_list(order.message)) <= set(report.fault_ranks)
        if obeyed or self.pods.known(node).leaving:
            return []
        log.warning("agent %d is there again, and is told again what it has not got: %d", node, order.code)
        return [ToAgent(node, order)]

    def _missed(self, node: int, body: Body, report: FaultReport, now: float) -> list[Order]:
        """What has failed by a sign of life, if the report of it has never come."""
        told = self._told.get(node, {})
        if all(told.get(rank) == report.restart_times for rank in report.fault_ranks):
            return []
        if not self._has_the_place(node, body) or self._is_old(node, body) or self.pods.crossed(report):
            return []
        return self._faults(node, body, now)

    def _learn(self, node: int, body: Body, left: int, inherited: bool) -> list[Order]:
        if left < 0:
            return []
        running = frames.is_running(body)
        if self.pods.restarts is None or (running and inherited):
            # The agent of a new pod was told by its launcher how many there are; one that runs, how many are left.
            self.pods.restarts = left if self.pods.restarts is None else min(left, self.pods.restarts)
        if not running:
            return []
        self._running[node] = left
        self._starting.pop(node, None)
        waiting = sorted(self._starting.items()) if inherited and left == self.pods.restarts else []
        return [self._start(*each) for each in waiting] if self.pods.recovers_processes else []

    def runs(self, node: int) -> bool:
        """Its processes have been started, and are to stay."""
        return node in self._running and not self.pods.known(node).leaving

    def _under_way(self, node: int) -> bool:
        """Whether the others have met and train, without this node. Where pods are the unit all start again."""
        left = self.pods.restarts
        others = any(count == left for each, count in self._running.items() if each != node)
        return others and self.pods.recovers_processes

    def _starts(self, node: int, body: Body) -> list[Order]:
        if not is_rank(body.message.removeprefix("-")):
            log.warning("agent %d: %.100r is no number of restarts", node, body.message)
            return []
        given = int(body.message)
        if self._signals.paused:
            self._withheld[node] = given
            log.info("agent %d waits for its start, until ClusterD lets agents go on", node)
            return []
        return [self._start(node, given)]

    def _start_withheld(self) -> list[Order]:
        withheld, self._withheld = self._withheld, {}
        return [self._start(node, given) for node, given in sorted(withheld.items())]

    def _pause_is_over(self, now: float) -> list[Order]:
        """The word that ends it has not come."""
        if self._signals.paused_until is None or now < self._signals.paused_until:
            return []
        self._signals.paused_until = None
        log.warning(
            "agents need not wait for their start any more: ClusterD has not said so again (since it was away, or for "
            "as long as a stress test may take); those of nodes %s go on",
            sorted(self._withheld),
        )
        return self._start_withheld()

    def _start(self, node: int, given: int) -> Order:
        left, under_way = self.pods.starts(node, given), self._under_way(node)
        if under_way:
            self._starting.pop(node, None)
        else:
            self._starting[node] = given
        return o.start_agent(node, left, self._nodes // SIGNS_A_SECOND, self._nodes if under_way else 0)

    def _faults(self, node: int, body: Body, now: float) -> list[Order]:
        try:
            report = frames.fault_report(body.message)
        except BadFrame as error:
            log.warning("agent %d: %s", node, str(error))
            return []
        if not report.fault_ranks:
            self._running.pop(node, None)
        self._inherited |= node not in self._registered
        if not self._is_old(node, body):
            self._told[node] = dict.fromkeys(report.fault_ranks, report.restart_times)
        types = frames.fault_types(body.extension)
        self._types |= types
        log.info("agent %d: faults of ranks %s %s", node, report.fault_ranks, f"of types {types}" if types else "")
        orders = self.pods.reported(node, report, now)
        if not report.fault_ranks and self._has_the_place(node, body):
            orders += self._gone(node)
        if node == 0 and self.pods.agents[0].gone:
            pod_ends = "the agent of the first pod exits, and with it the pod: the cluster restarts the job"
            orders = [End(self._verdict or pod_ends, ok=False)]
        if report.fault_ranks and self.pods.recovers_processes and not self._is_old(node, body):
            orders.insert(0, ToController("process_ended", dict.fromkeys(report.fault_ranks, 1)))
            if not self.pods.crossed(report):
                ends, most = frames.process_ends(body.extension), frames.max_restarts(body.extension)
                self._tell_ended(Ended(tuple(report.fault_ranks), ends, most, report.restart_times))
        return orders

    def _has_the_place(self, node: int, body: Body) -> bool:
        """It is said by the agent that has registered last, not by one that a backup stands in for."""
        return (body.extension or {}).get(frames.AGENT_ID, "") == self._ids.get(node, "")

    def _is_old(self, node: int, body: Body) -> bool:
        """The report has crossed the order that has these processes replaced: it is not about those that follow."""
        count = frames.replaced(body.extension)
        return self.pods.known(node).leaving or (count is not None and count < self._replacing.get(node, 0))

    def _ended(self, node: int, body: Body) -> list[Order]:
        code = int(body.message) if is_rank(body.message) else 1
        self._running.pop(node, None)
        self.pods.ended(node, code)
        return self._end()

    def _gone(self, node: int) -> list[Order]:
        """There is no agent there any more, and none of its processes. It may have been the last one."""
        ranks = [rank for rank, where in self._workers.items() if where == node]
        for rank in ranks:
            del self._workers[rank]
            self._profiling.forget(rank)
        return [*(order for rank in ranks for order in self.unreachable(rank)), *self._end()]

    def _end(self) -> list[Order]:
        missing = len(self.pods.agents) < self._nodes and not self._inherited
        if self._over or missing or not self.pods.all_succeeded:
            return []
        self._over = True
        return [End("all agents have ended with success")]

    def _worker(self, node: int, rank: int, body: Body, now: float) -> list[Order]:
        if body.msg_type == REGISTER:
            self._workers[rank] = node
            return [*self.unreachable(rank), *self._profiling.joined(rank, now)]
        if body.msg_type == KEEP_ALIVE:
            self._stress.alive(rank, now)
            return []
        if body.code == Code.SWITCH_NIC:
            return self._nics.result(rank, body)
        if body.code == Code.STRESS_TEST:
            return self._stress.result(rank, body)
        if body.code in PROFILING_RESULTS:
            return self._profiling.result(rank, body.code, now)
        log.warning("worker %d says %s %d: unknown", rank, body.msg_type, body.code)
        return []

    def unreachable(self, rank: int) -> list[Order]:
        """A worker could not be told something, or a new process has its rank."""
        return [*self._nics.lost(rank), *self._stress.lost(rank)]

    def not_told(self, node: int, body: Body, per_node: int) -> list[Order]:
        """An agent does not hear an order. Processes that it was to start will not come, and others wait for them. One
        that was to exit has gone without a word, with its node. Other orders wait for its next sign of life, unless
        there is a newer one."""
        if body.code == Code.EXIT_AGENT and self.pods.known(node).leaving:
            self.pods.known(node).gone = True
            return self._gone(node)
        if body.code in _REPEATED and body is self._ordered.get(node):
            self._untold[node] = body
        if body.code != Code.RESTART_WORKERS or not self.pods.recovers_processes or self.pods.known(node).leaving:
            return []
        ranks = [rank for rank in frames.rank_list(body.message) if rank // per_node == node]
        return [ToController("not_replaced", dict.fromkeys(ranks, 1))]

    # What ClusterD and the scheduler say.

    def subscribed(self, now: float) -> None:
        """ClusterD hears us from now on, and need not know what it has said before."""
        self._signals.subscribed(now)

    def signal(self, signal: Signal, now: float = 0.0) -> list[Order]:
        orders, why = self._signals.handle(signal, now)
        if why:
            log.info("signal %s: %s", signal.type, why)
        if signal.type == o.KILL_MASTER:
            self._verdict = signal.extra
        if signal.type == o.STOP_TRAIN:
            self._recovery = signal.uuid
        if signal.type == o.CONTINUE_START:
            orders = self._start_withheld()
        orders = [order for order in orders if not self._is_for_the_one_before(order, signal)]
        orders += self._passed_over(signal) if orders else []
        replacing = [each for each in orders if isinstance(each, ToAgent) and each.body.code == Code.RESTART_WORKERS]
        for order in replacing:
            self._replacing[order.node] = self._replacing.get(order.node, 0) + 1
            for rank in frames.rank_list(order.body.message):
                self._told.get(order.node, {}).pop(rank, None)
        self.pods.healed(order.node for order in replacing)
        for each in orders:
            if isinstance(each, ToAgent) and each.body.code == Code.EXIT_AGENT:
                self.pods.known(each.node).leaving = True
        return [order for order in orders if not (isinstance(order, ToAgent) and self.pods.is_gone(order.node))]

    def _restart(self, nodes: tuple[int, ...], signal: Signal) -> list[Order]:
        """ClusterD names all pods that were at fault, also those that have new ones already: these start again as the
        others do."""
        leaving = tuple(node for node in nodes if not self._has_successor(node, signal))
        return self.pods.restart(leaving, signal)

    def _has_successor(self, node: int, signal: Signal) -> bool:
        """The agent that was told to exit in this recovery has been replaced."""
        return bool(signal.uuid) and self._successors.get(node) == signal.uuid

    def _passed_over(self, signal: Signal) -> list[Order]:
        """Processes of a new pod that have failed already, while ClusterD takes them for those that are to come: with
        the first pod the manager is new, and what it has told of them is what it misses."""
        if (signal.type, signal.strategy, signal.extra) != (o.CHANGE_STRATEGY, "recover", o.IN_PLACE):
            return []
        failed = self.pods.failed(signal.faults)
        return [
            order
            for node, ranks in failed.items()
            if node not in signal.nodes
            for order in o.restart_workers((node,), ranks)
        ]

    def _is_for_the_one_before(self, order: Order, signal: Signal) -> bool:
        """ClusterD tells agents to exit when it tells of the faults, and again with the strategy. A pod that stood by
        may have taken the place in between, or before."""
        if not isinstance(order, ToAgent) or order.body.code != Code.EXIT_AGENT or not signal.uuid:
            return False
        early = bool(self._ids.get(order.node)) and self._joined.get(order.node) == signal.uuid
        if signal.type == o.GLOBAL_FAULT and early:
            return True
        if signal.type == o.CHANGE_STRATEGY and self._has_successor(order.node, signal):
            return True
        self._leaving[order.node] = signal.uuid
        return False

    def addressed(self, order: ToAgent) -> Body:
        """What an agent is told from now on, instead of anything before. An order to exit names the one that is meant:
        another may have the place by the time that it arrives."""
        body, agent = order.body, self._ids.get(order.node, "")
        self._ordered[order.node] = body
        self._untold.pop(order.node, None)
        if body.code != Code.EXIT_AGENT or not agent:
            return body
        return frames.body(body.msg_type, body.code, body.message, {**(body.extension or {}), frames.AGENT_ID: agent})

    def types_of(self, faults: Mapping[int, int]) -> dict[int, int]:
        """The controller sees only that a process is gone; its agent may know of what."""
        return {rank: self._types.pop(rank, kind) for rank, kind in faults.items()}

    def recovered(self) -> None:
        """The controller reports that the training goes on."""
        self._types.clear()
        self.pods.healed()
        for node in [node for node, order in self._untold.items() if order.code == Code.STOP_WORKERS]:
            del self._untold[node]

    def switch_nics(self, uuid: str, job: str, ranks: Sequence[str], ops: Sequence[bool], now: float) -> list[Order]:
        return self._nics.order(uuid, job, ranks, ops, self._workers, now)

    def stress_test(self, uuid: str, job: str, ops: Mapping[int, Sequence[int]], now: float) -> list[Order]:
        return self._stress.order(uuid, job, ops, self._workers, now)

    def stress_test_told(self, rank: int, body: Body, now: float) -> None:
        """The worker has the order."""
        self._stress.told(rank, body, now)

    def profile(self, values: Mapping[str, str], now: float) -> list[Order]:
        return self._profiling.want(tracing.switch(values), now)

    def retried(self, times: int, counted: float | None = None) -> list[Order]:
        """`counted`: when the scheduler has, if it is known."""
        return self.pods.retried(times, counted)

    # Time.

    @property
    def deadline(self) -> float | None:
        parts = (self.pods, self._nics, self._stress, self._profiling)
        ends = (self._signals.paused_until, *(part.deadline for part in parts))
        return min((at for at in ends if at is not None), default=None)

    def tick(self, now: float) -> list[Order]:
        parts = (self.pods, self._nics, self._stress, self._profiling)
        return [*self._pause_is_over(now), *(each for part in parts for each in part.tick(now))]


def _may_be(who: Position) -> bool:
    """Whether a job can have such a member. Otherwise one word of nonsense, and nobody would see the job's end."""
    return who.is_named and int(who.server) < MOST_NODES and (who.role != WORKER or int(who.process) < MOST_RANKS)
