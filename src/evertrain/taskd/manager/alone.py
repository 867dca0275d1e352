"""The manager's own judgement, where there is no ClusterD: from the controller's reports to the same signals. Pure.

The policy is that of `evertrain launch`: the finest strategy that has a chance, coarser ones when the same rank fails
again without progress, and the end of the job where the script is to blame. What the job allows (`recover-strategy`)
and what the controller offers limit it. How processes have ended, agents say; how far the training is, the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from evertrain.mindio.controller import policy
from evertrain.mindio.protocol import Fault
from evertrain.taskd.frames import ProcessEnd
from evertrain.taskd.manager import orders as o
from evertrain.taskd.manager import reports
from evertrain.taskd.manager.orders import Signal
from evertrain.taskd.manager.reports import Progress, Report
from evertrain.taskd.manager.rescheduling import DEFAULT_RESTARTS

ISOLATED, NOT_READY, RETRY_FAILED = 201, 404, 405
_KINDS = {0: "uce", 1: "exit", 2: "hccl"}


@dataclass(slots=True)
class Alone:
    job: str
    world_size: int
    per_node: int
    allowed: Collection[str]
    """Names of `recover-strategy`; empty: everything but elastic training."""
    max_restarts: int | None = None
    """That the user asked for; None: nobody has."""
    turn: int = 0
    """How many faults were judged; a report of an agent that came before may be about one of them."""
    _faults: dict[int, int] = field(default_factory=dict)
    _ends: dict[int, ProcessEnd] = field(default_factory=dict)
    """How processes have ended, as their agents saw it."""
    _progress: Progress | None = None
    _active: bool = False
    _replacing: bool = False
    """Agents have been told to replace processes, and the others wait for them."""
    _trained: bool = False
    """A step was finished, or some recovery has succeeded, so there was a training."""
    _successes: int = 0
    _restarts: int = 0
    _verdict: str = ""
    """Why the job is to end once what can be saved is saved."""
    _out: set[int] = field(default_factory=set)
    """Nodes without which the job goes on."""
    _wanted_back: bool = False
    """The controller was told that they are there again."""
    _history: policy.History = field(default_factory=policy.History)

    def learn(self, progress: Progress | None) -> None:
        """How far the training is now; None if the controller does not tell."""
        self._progress = progress
        if progress is not None and progress.step > 0:
            self._trained = True

    def ended(self, ends: Mapping[int, ProcessEnd], max_restarts: int | None = None, left: int = -1) -> None:
        """An agent has seen processes end. `left` restarts are left for the job; -1 if it does not know."""
        self._ends |= ends
        if max_restarts is not None and max_restarts != DEFAULT_RESTARTS:
            self.max_restarts = max_restarts
            self._restarts = max_restarts - left if 0 <= left <= max_restarts else self._restarts

    def lacks(self, report: Report) -> set[int]:
        """Ranks of which it matters how their processes have ended, and nobody has said so yet.

        Before the first step that tells an error of the script from a process that was killed.
        """
        if self._trained or not (report.action == reports.RECOVER_STRATEGY or report.code == NOT_READY):
            return set()
        raised = self._progress.raised if self._progress is not None else {}
        lost = {rank for rank, kind in {**report.faults, **self._faults}.items() if kind == 1}
        return lost - self._ends.keys() - raised.keys()

    def report(self, report: Report) -> tuple[list[Signal], str]:
        """What to do next, and why."""
        match report.action:
            case reports.PROCESS_FAULT:
                return self._fault(report.faults)
            case reports.STOP_COMPLETE:
                return self._stopped(report)
            case reports.RECOVER_STRATEGY:
                return self._choose(report)
            case reports.RECOVER_STATUS:
                return self._result(report)
        return [], f"an unknown report: {report.action!r}"

    def unseen(self, ranks: Collection[int], protected: bool) -> tuple[list[Signal], str]:
        """Processes have ended, and the controller does not know of it: they had not come to it yet, or never will.

        `protected`: it knows some others.
        """
        self.turn += 1
        faults = dict.fromkeys(ranks, 1)
        if self._active:
            return self._during_recovery(faults, starting=True)
        decision = self._worst(faults, protected=protected, starting=True)
        if decision.strategy == policy.RECOVER_IN_PLACE:
            return [self._start_again(faults)], decision.explanation
        return [self._all_again()], decision.explanation

    def grow(self, runs: Callable[[int], bool]) -> tuple[list[Signal], str]:
        """When all nodes without which the job goes on have processes again. `runs`: whether a node has."""
        back = bool(self._out) and all(map(runs, self._out))
        if not back or self._active or self._wanted_back:
            self._wanted_back &= back  # whoever leaves and comes once more is another one
            return [], ""
        self._wanted_back = True
        return [self._change("upgrade")], f"nodes {policy.rank_list(sorted(self._out))} run again; the job grows"

    def _during_recovery(self, faults: Mapping[int, int], starting: bool) -> tuple[list[Signal], str]:
        """More processes have failed. Who waits for replacements is told by nobody else to replace these as well."""
        why = f"{_ranks(faults)} failed during the recovery"
        if not self._replacing:
            return [], why
        decision = self._worst(faults, starting=starting)
        if decision.strategy in (policy.RESTART, policy.EXIT):
            return [self._change("dump")], f"{why}: {decision.explanation}"
        return [self._start_again(faults)], f"{why}: {decision.explanation}"

    def _fault(self, faults: Mapping[int, int]) -> tuple[list[Signal], str]:
        self.turn += 1
        self._merge(faults)
        if self._active:
            return self._during_recovery(faults, starting=False)
        self._active = True
        signal = self._signal(o.STOP_TRAIN, "stop_train", faults=dict(self._faults))
        return [signal], f"{_ranks(faults)} failed; everybody stops"

    def _merge(self, faults: Mapping[int, int]) -> None:
        for rank, kind in faults.items():
            self._faults[rank] = 1 if kind == 1 or self._faults.get(rank) == 1 else kind

    def _stopped(self, report: Report) -> tuple[list[Signal], str]:
        if report.code == NOT_READY:
            return self._not_begun()
        if report.code:
            return self._give_up(f"the training could not be stopped ({report.code} {report.message})")
        self._merge(report.faults)
        return [self._known()], "everybody has stopped"

    def _known(self) -> Signal:
        """Tell which ranks are at fault. Where the job goes on without a node, that are all of this node."""
        faults = dict(self._faults)
        if self._may("downgrade") and not self._may("recover"):
            for node in self._lost_nodes() - {0}:
                faults |= dict.fromkeys(range(node * self.per_node, (node + 1) * self.per_node), 1)
        return self._signal(o.GLOBAL_FAULT, "on_global_rank", faults=faults)

    def _lost_nodes(self) -> set[int]:
        """With a process that is lost."""
        return set(self._of(rank for rank, kind in self._faults.items() if kind == 1))

    def _choose(self, report: Report) -> tuple[list[Signal], str]:
        self._merge(report.faults)
        wanted, why = self._judge()
        offered = [name for name in report.strategies if self._may(name)]
        if 0 in self._lost_nodes() and "downgrade" in offered:
            offered.remove("downgrade")  # this manager would leave with its node
        for strategy in _FROM[wanted]:
            if strategy in offered or strategy == "exit":
                return [self._change(strategy)], f"{strategy}: {why}"
        return self._give_up("the controller offers nothing")

    def _not_begun(self) -> tuple[list[Signal], str]:
        """The controller can do nothing, so all start again, unless that is of no use."""
        faults = {**dict.fromkeys(self._ends, 1), **self._faults}
        decision = self._worst(faults, starting=True) if faults else None
        if decision is None or decision.strategy not in (policy.RESTART, policy.EXIT):
            decision = self._settled(policy.fallback("the training had not begun", self._situation(True, True)))
        return [self._all_again()], decision.explanation

    def _judge(self) -> tuple[str, str]:
        """The coarsest that any of the faults needs."""
        if not self._faults:
            return policy.RETRY, "no rank is at fault any more"
        begun = self._progress is None or self._trained
        worst = self._worst(self._faults, starting=not begun)
        return worst.strategy, worst.explanation

    def _worst(self, faults: Mapping[int, int], *, protected: bool = True, starting: bool) -> policy.Decision:
        decisions = []
        for fault in self._causes([self._fault_of(rank, kind) for rank, kind in sorted(faults.items())]):
            # Whoever has left the training function by an exception had come to it.
            situation = self._situation(protected, starting and fault.kind != "exception")
            decision = policy.decide(fault, situation, self._history)
            self._history.note(fault, situation, decision)
            decisions.append(decision)
        return self._settled(max(decisions, key=lambda each: each.severity))

    def _settled(self, decision: policy.Decision) -> policy.Decision:
        self._verdict = decision.explanation if decision.strategy == policy.EXIT else ""
        return decision

    def _fault_of(self, rank: int, kind: int) -> Fault:
        if kind != 1:
            return Fault(kind=_KINDS.get(kind, "exit"), rank=rank)
        if (end := self._ends.get(rank)) is not None:
            return Fault(kind="exit", rank=rank, exit_code=end.code, detail=end.cause)
        if self._progress is not None and rank in self._progress.raised:
            return Fault(kind="exception", rank=rank, detail=self._progress.raised[rank])
        return Fault(kind="disconnected", rank=rank)

    def _causes(self, faults: list[Fault]) -> list[Fault]:
        """Without those that may be mere consequences: who loses a peer fails, too."""
        killed = [fault for fault in faults if fault.kind in policy.PROCESS_LOST and not _by_itself(fault)]
        return killed or faults

    def _situation(self, protected: bool, starting: bool) -> policy.Situation:
        return policy.Situation(
            step=self._successes if self._progress is None else self._progress.step,
            starting=starting,
            trained=self._trained or not starting,
            protected=protected,
            released=False,
            world_size=self.world_size,
            restarts_used=self._restarts,
            max_restarts=DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts,
            completed=self._progress is None or self._trained,
            asked=self.max_restarts is not None,
        )

    def _may(self, strategy: str) -> bool:
        if strategy in ("dump", "exit", "continue"):
            return True
        if strategy == "recover":
            return not self.allowed or bool({"recover", o.IN_PLACE} & set(self.allowed))
        if strategy in ("downgrade", "upgrade"):
            return "elastic-training" in self.allowed
        return strategy == "retry" and (not self.allowed or "retry" in self.allowed)

    def _change(self, strategy: str) -> Signal:
        if strategy == "exit":
            return self._all_again()
        self._replacing = strategy == "recover"
        if strategy == "recover":
            actions = ("change_strategy", "fault_nodes_restart")
            faults = dict(self._faults)
            self._forget_ends(faults)
            return self._signal(
                o.CHANGE_STRATEGY, *actions, strategy=strategy, extra=o.IN_PLACE, faults=faults, nodes=self._of(faults)
            )
        extra = {"downgrade": '{"scale-in-strategy": "DP"}', "upgrade": '{"scale-out-strategy": "DP"}'}.get(
            strategy, ""
        )
        return self._signal(o.CHANGE_STRATEGY, "change_strategy", strategy=strategy, extra=extra)

    def _start_again(self, faults: Mapping[int, int]) -> Signal:
        """Only these processes; the controller is told nothing."""
        self._forget_ends(faults)
        return self._signal(o.GLOBAL_FAULT, "fault_nodes_restart", faults=dict(faults), nodes=self._of(faults))

    def _all_again(self) -> Signal:
        """All processes, or none any more."""
        self._clear()
        self._out.clear()
        if self._verdict:
            nodes = self._of(range(self.world_size))
            return self._signal(o.KILL_MASTER, "fault_nodes_exit", nodes=nodes, extra=self._verdict)
        self._restarts += 1
        return self._signal(o.CHANGE_STRATEGY, "change_strategy", strategy="exit")

    def _of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Their nodes."""
        return tuple(sorted({rank // self.per_node for rank in ranks}))

    def _forget_ends(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._ends.pop(rank, None)

    def _result(self, report: Report) -> tuple[list[Signal], str]:
        if report.code == ISOLATED:
            self._out.update(leaving := self._of(report.faults))
            leave = self._signal(o.FAULT_NODES_EXIT, "fault_nodes_exit", nodes=leaving)
            return [leave], "these go on without the others"
        if report.code == 0 and report.strategy == "dump":
            return [self._all_again()], f"the checkpoint is written; {self._then()}"
        if report.code == 0:
            if report.strategy == "upgrade":
                self._out.clear()
            self._clear()
            self._successes += 1
            self._trained = True
            self._history.failed_starts.clear()
            return [], f"the training goes on after {report.strategy}"
        if report.code == RETRY_FAILED and report.strategy == "retry":
            self._faults = dict.fromkeys({**self._faults, **report.faults}, 1)
            return [self._known()], f"{report.strategy} failed ({report.message}); their processes are replaced"
        if report.strategy in ("dump", "exit"):
            return [self._all_again()], f"{report.strategy} failed ({report.message}); {self._then()}"
        return [self._change("dump")], f"{report.strategy} failed ({report.code} {report.message}); the state is saved"

    def _give_up(self, why: str) -> tuple[list[Signal], str]:
        decision = self._settled(policy.fallback(why, self._situation(True, False)))
        return [self._all_again()], decision.explanation

    def _then(self) -> str:
        return f"the job ends: {self._verdict}" if self._verdict else "all start again from it"

    def _clear(self) -> None:
        self._faults.clear()
        self._ends.clear()
        self._active = self._replacing = False

    def _signal(self, kind: str, *actions: str, **fields: object) -> Signal:
        return Signal(kind, job=self.job, actions=actions, **fields)  # type: ignore[arg-type]


_FROM = {
    policy.RETRY: ("retry", "recover", "downgrade", "dump", "exit"),
    policy.RECOVER_IN_PLACE: ("recover", "downgrade", "dump", "exit"),
    policy.ELASTIC: ("downgrade", "recover", "dump", "exit"),
    policy.RESTART: ("dump", "exit"),
    policy.EXIT: ("dump", "exit"),
}
"""By what the policy wants: what is asked of the controller, the first that it offers."""


def _by_itself(fault: Fault) -> bool:
    return fault.kind == "exit" and fault.exit_code is not None and fault.exit_code >= 0


def _ranks(faults: Mapping[int, int]) -> str:
    return f"rank{'s' if len(faults) > 1 else ''} {policy.rank_list(sorted(faults))}"
