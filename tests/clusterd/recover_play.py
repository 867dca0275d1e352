"""A job with a client and a cluster that do what the machine asks: the whole way of a recovery, step by step.

The client does what TaskD and MindIO do: it answers signals by reports, in order, drops a signal that it has had, and
sends a report again that was not taken. The cluster replaces pods, and runs backups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from evertrain.clusterd.model import Pod
from evertrain.clusterd.recover.events import (
    Effect,
    Event,
    FaultsSeen,
    JobSeen,
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    PatchPod,
    ReplacePods,
    Signal,
    Status,
    StopComplete,
    Strategies,
    StressTested,
    Subscribed,
)
from evertrain.clusterd.recover.machine import Recovery
from tests.clusterd.recover_world import World

OFFERS = ("retry", "recover", "downgrade", "upgrade", "dump", "exit")


class Play(World):
    def __init__(
        self,
        strategies: str,
        *,
        codes: dict[str, Sequence[int]] | None = None,
        stop: int = 0,
        offers: Sequence[str] = OFFERS,
        slow: bool = False,
        **fields: object,
    ) -> None:
        """`codes`: how each strategy goes, one time after the other; well if nothing is said.

        `slow`: pods are replaced when the client has nothing more to say.
        """
        self.slow = slow
        self.codes = {strategy: deque(each) for strategy, each in (codes or {}).items()}
        self.stop, self.offers = stop, tuple(offers)
        self.events: deque[Callable[[], Event]] = deque()
        self.pods: deque[Callable[[], Event]] = deque()
        self.had: set[str] = set()
        self.states: list[str] = []
        super().__init__(strategies, **fields)  # type: ignore[arg-type]

    def report(self, event: Event) -> None:
        self.events.append(lambda: event)

    def step(self, *, lost: bool = False) -> None:
        """One event, or the next deadline. `lost`: ClusterD dies before its signals are out."""
        if not self.events and self.pods:
            self.events.append(self.pods.popleft())
        effects = self.say(self.events.popleft()(), after=1.1) if self.events else self.tick()
        self.states.append(self.state)
        for effect in effects:
            if not (lost and isinstance(effect, Signal | NotifyNics | NotifyStress)):
                self.react(effect)

    def run(self) -> None:
        for _ in range(200):
            if not self.events and not self.pods and self.machine.deadline is None:
                return
            self.step()
        raise AssertionError(f"no end: {self.state}")

    def kill(self) -> None:
        """ClusterD dies, and comes back."""
        self.machine = Recovery.load(self.machine.dump(), "job-uid", make_uuid=self.uuid)
        for event in (JobSeen(self.job), FaultsSeen(self.faults), Subscribed()):
            for effect in self.say(event):
                self.react(effect)

    def react(self, effect: Effect) -> None:
        match effect:
            case Signal():
                if repr(effect) not in self.had:
                    self.had.add(repr(effect))
                    self.obey(effect)
            case NotifyNics():
                self.report(NicsSwitched(not self.codes.get("nic")))
            case NotifyStress(ops=ops):
                code = str(self.codes["stress"][0]) if "stress" in self.codes else "0"
                self.report(StressTested({rank: {"0": (code, "")} for rank in ops}))
            case ReplacePods(uids=uids):
                (self.pods if self.slow else self.events).append(lambda: self.replacing(uids))
            case PatchPod(annotations={"needOperatorOpe": "create"}):
                self.events.append(self.backing)
            case PatchPod(annotations={"needOperatorOpe": "delete"}):
                self.events.append(self.dismissing)

    def replacing(self, uids: tuple[str, ...]) -> Event:
        pods, backups = dict(self.job.pods), dict(self.job.backups)
        for rank, pod in self.job.pods.items():
            if pod.uid in uids:
                backup = backups.pop(pod.name, None)
                new = replace(pod, uid=f"pod-{rank}-{next(self.births)}", node=f"spare-{rank}", phase="Running")
                pods[rank] = backup or new
        self.job = replace(self.job, pods=pods, backups=backups)
        return JobSeen(self.job)

    def backing(self) -> Event:
        self.job = replace(
            self.job, backups={"train-1": Pod(1, "backup-uid", "train-1-hot-0001", "spare-1", phase="Running")}
        )
        return JobSeen(self.job)

    def dismissing(self) -> Event:
        self.job = replace(self.job, backups={})
        return JobSeen(self.job)

    def obey(self, signal: Signal) -> None:
        for action in signal.actions:
            match action:
                case "stop_train" | "pause_train":
                    self.report(StopComplete(self.stop, signal.faults))
                case "on_global_rank":
                    self.report(Strategies(self.offers))
                case "save_and_exit":
                    self.report(Status(self.code("dump"), "dump"))
                case "new pod running":
                    self.report(Strategies(("migration",)))
                case "fault_nodes_exit" if signal.type == "faultNodesExit":
                    self.report(Status(self.code("downgrade"), "downgrade"))
        if signal.strategy == "downgrade":
            self.report(Status(201, "downgrade", isolate=tuple(signal.faults)))
        elif signal.strategy in ("retry", "recover", "upgrade", "dump", "continue", "migration"):
            self.report(Status(self.code(signal.strategy), signal.strategy))

    def code(self, strategy: str) -> int:
        codes = self.codes.get(strategy)
        return codes.popleft() if codes else 0

    @property
    def result(self) -> tuple[object, ...]:
        """How it ended for the job: outcome, last strategy, what the platform reads, who was replaced."""
        status = [each["ProcessRecoverStatus"] for each in self.group if "ProcessRecoverStatus" in each]
        strategies = [each.strategy for each in self.signals if each.strategy]
        replaced = {rank for rank, pod in self.job.pods.items() if pod.uid != f"pod-{rank}-0"}
        killed = any(each.type == "killMaster" for each in self.signals)
        return self.state, self.outcome, strategies[-1:], status[-1:], replaced, killed
