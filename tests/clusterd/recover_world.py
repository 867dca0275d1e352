"""A recovery machine with a job around it: pods that can be replaced, a clock that is turned, effects by kind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evertrain.clusterd.model import OTHER, SUB_HEALTHY, UNHEALTHY, Device, Job, JobFaults, Pod, RankFault
from evertrain.clusterd.recover.events import (
    Effect,
    Event,
    FaultsSeen,
    JobSeen,
    Note,
    PatchGroup,
    PatchPod,
    ReplacePods,
    Signal,
    Subscribed,
    Tick,
    WriteReset,
)
from evertrain.clusterd.recover.machine import Recovery

ALL = "retry,recover-in-place,recover,elastic-training,dump,exit"


def signal(
    type: str,
    *actions: str,
    strategy: str = "",
    faults: Mapping[int, str] | None = None,
    nodes: tuple[int, ...] = (),
    timeout: int = 0,
    extra: str = "",
) -> tuple[Any, ...]:
    return type, actions, strategy, dict(faults or {}), nodes, timeout, extra


def plain(each: Signal) -> tuple[Any, ...]:
    return each.type, each.actions, each.strategy, dict(each.faults), each.nodes, each.timeout, each.extra


def change(strategy: str, *more: str, **fields: Any) -> tuple[Any, ...]:
    return signal("changeStrategy", "change_strategy", *more, strategy=strategy, **fields)


class World:
    def __init__(
        self,
        strategies: str = "recover,dump",
        *,
        pods: int = 4,
        per_pod: int = 2,
        listening: bool = True,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        self.now = 1000.0
        self.uuids = itertools.count()
        self.machine = Recovery("job-uid", make_uuid=self.uuid)
        self.log: list[Effect] = []
        devices = tuple(Device(str(each)) for each in range(per_pod))
        self.job = Job(
            "job-uid",
            "train",
            "default",
            framework="pytorch",
            labels={"process-recover-enable": "on", **(labels or {})},
            annotations={"recover-strategy": strategies, **(annotations or {})},
            replicas=pods,
            per_pod=per_pod,
            status="running",
            complete=True,
            pods={
                rank: Pod(rank, f"pod-{rank}-0", f"train-{rank}", f"node-{rank}", phase="Running", devices=devices)
                for rank in range(pods)
            },
        )
        self.births = itertools.count(1)
        self.faults = JobFaults("job-uid")
        self.see()
        if listening:
            self.say(Subscribed())
        self.log.clear()

    def uuid(self) -> str:
        return f"uuid-{next(self.uuids)}"

    @property
    def state(self) -> str:
        return self.machine.state

    def say(self, event: Event, after: float = 0.1) -> list[Effect]:
        self.now += after
        effects = self.machine.handle(event, self.now)
        self.log += effects
        return effects

    def see(self, *, after: float = 0.1, **changes: Any) -> list[Effect]:
        self.job = replace(self.job, **changes)
        return self.say(JobSeen(self.job), after)

    def annotate(self, **annotations: str) -> list[Effect]:
        return self.see(annotations={**self.job.annotations, **annotations})

    def label(self, **labels: str) -> list[Effect]:
        return self.see(labels={**self.job.labels, **{key.replace("_", "-"): each for key, each in labels.items()}})

    def replace(self, *ranks: int, phase: str = "Running") -> list[Effect]:
        """Other pods take their places."""
        pods = dict(self.job.pods)
        for rank in ranks:
            node = f"spare-{rank}" if phase == "Running" else ""
            pods[rank] = replace(pods[rank], uid=f"pod-{rank}-{next(self.births)}", node=node, phase=phase)
        return self.see(pods=pods, after=2.0)

    def fault(self, rank: int, type: str = OTHER, code: str = "81078603", **fields: Any) -> RankFault:
        pod = self.job.pods[self.job.pod_of(rank)]
        given = {"level": "SeparateNPU", **fields}
        return RankFault(rank, pod.rank, pod.uid, pod.node, str(rank % self.job.per_pod), code, type=type, **given)

    def hit(self, *faults: RankFault, health: str = UNHEALTHY) -> list[Effect]:
        self.faults = JobFaults("job-uid", health if faults else "Healthy", faults)
        return self.say(FaultsSeen(self.faults))

    def ail(self, rank: int) -> RankFault:
        return self.fault(rank, code="110001", level="SubHealthFault")

    def sicken(self, *ranks: int) -> list[Effect]:
        return self.hit(*(self.ail(rank) for rank in ranks), health=SUB_HEALTHY if ranks else "Healthy")

    def tick(self) -> list[Effect]:
        """At the machine's deadline."""
        assert self.machine.deadline is not None, f"{self.state} has no deadline"
        self.now = max(self.now, self.machine.deadline)
        return self.say(Tick(), after=0.0)

    def wait(self) -> None:
        """Until time alone has changed the state."""
        before = self.state
        while self.state == before:
            self.tick()

    def restart(self, *, subscribed: bool = True, down: float = 1.0) -> list[Effect]:
        """ClusterD is killed, and started again."""
        self.now += down
        self.machine = Recovery.load(self.machine.dump(), "job-uid", make_uuid=self.uuid)
        effects = self.see()
        effects += self.say(FaultsSeen(self.faults))
        if subscribed:
            effects += self.say(Subscribed())
        return effects

    def wait_for_pods(self) -> None:
        """Until nobody can take a new pod for the one before."""
        self.see(after=60.0)

    # What it wanted.

    def take(self) -> list[tuple[Any, ...]]:
        """Signals since the last time."""
        found = [plain(each) for each in self.log if isinstance(each, Signal)]
        self.log.clear()
        return found

    @property
    def signals(self) -> list[Signal]:
        return [each for each in self.log if isinstance(each, Signal)]

    @property
    def transcript(self) -> list[tuple[Any, ...]]:
        return [plain(each) for each in self.signals]

    @property
    def resets(self) -> list[str]:
        return [each.operation for each in self.log if isinstance(each, WriteReset)]

    @property
    def replaced(self) -> list[ReplacePods]:
        return [each for each in self.log if isinstance(each, ReplacePods)]

    @property
    def group(self) -> list[dict[str, str | None]]:
        return [{**each.labels, **each.annotations} for each in self.log if isinstance(each, PatchGroup)]

    @property
    def patches(self) -> list[tuple[str, dict[str, str | None]]]:
        return [(each.name, {**each.labels, **each.annotations}) for each in self.log if isinstance(each, PatchPod)]

    def notes(self, kind: str) -> list[Note]:
        return [each for each in self.log if isinstance(each, Note) and each.kind == kind]

    @property
    def outcome(self) -> object:
        return self.notes("closed")[-1].details["outcome"]
