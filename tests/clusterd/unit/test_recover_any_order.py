"""Faults, reports, pods, orders, time and restarts in any order: what holds in every recovery, however unlucky.

The client answers what it is told, but its answers wait until Hypothesis delivers them, so that anything can cross with
anything; and words are said that nobody asked for. At the end only time passes, and the recovery has to end by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evertrain.clusterd.model import JobFaults
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import view
from evertrain.clusterd.recover.events import (
    Effect,
    Event,
    Failed,
    FaultsSeen,
    JobSeen,
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    PatchGroup,
    PatchPod,
    ProcessFault,
    ReplacePods,
    Signal,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    StressTested,
    Subscribed,
    SwitchNics,
    Tick,
    Unsubscribed,
    WriteReset,
)
from evertrain.clusterd.recover.machine import Recovery
from tests.clusterd.recover_play import Play

PODS, PER_POD = 3, 2
ORDER = ("continue", "retry", "recover", "downgrade", "upgrade", "migration", "dump", "exit")
"""A strategy is only followed by a coarser one, in one round."""

ranks = st.integers(0, PODS * PER_POD - 1)
types = st.sampled_from(["0", "1", "2"])
faulty = st.dictionaries(ranks | st.just(99), types, max_size=2)
codes = st.sampled_from([0, 0, 0, 201, 404, 405, 406, 499, 700])
names = st.sampled_from([*ORDER, "", "nonsense"])
offers = st.lists(
    st.sampled_from(["retry", "recover", "downgrade", "upgrade", "dump", "exit", "migration"]), max_size=5
)
results = st.dictionaries(
    ranks, st.dictionaries(st.sampled_from("01"), st.tuples(st.sampled_from("01234x"), st.just(""))), max_size=3
)
hardware = st.lists(
    st.tuples(
        ranks,
        types,
        st.sampled_from(["81078603", "80818C05", ""]),
        st.sampled_from(["SeparateNPU", "RestartBusiness", "SubHealthFault", "NotHandleFault"]),
        st.booleans(),
    ),
    max_size=3,
)

said: st.SearchStrategy[Event] = st.one_of(
    st.builds(ProcessFault, faulty),
    st.builds(StopComplete, codes, faulty),
    st.builds(Strategies, offers.map(tuple), faulty),
    st.builds(Status, codes, names, st.lists(ranks, max_size=2).map(tuple)),
    st.builds(SwitchNics, st.dictionaries(ranks, st.booleans(), max_size=2)),
    st.builds(StressTest, st.dictionaries(ranks, st.just((0, 1)), max_size=2)),
    st.builds(NicsSwitched, st.booleans()),
    st.builds(StressTested, results),
    st.builds(
        Failed,
        st.sampled_from(
            [
                WriteReset("clear"),
                PatchGroup(labels={"process-recover-enable": "pause"}),
                PatchGroup(labels={"process-recover-enable": "on"}),
                PatchPod("train-1", "x", annotations={"needOperatorOpe": "create"}),
                ReplacePods(("x",), ""),
                NotifyNics({}),
                NotifyStress({}),
                Signal("stopTrain", "x"),
            ]
        ),
        st.just("no"),
    ),
)
moves = st.one_of(
    st.tuples(st.just("answer"), st.integers(1, 4)),
    st.tuples(st.just("answer"), st.integers(1, 4)),
    st.tuples(st.just("fault"), st.dictionaries(ranks, types, min_size=1, max_size=2)),
    st.tuples(st.just("hardware"), hardware),
    st.tuples(st.just("say"), said),
    st.tuples(st.just("tick"), st.none()),
    st.tuples(st.just("time"), st.sampled_from([1.0, 5.0, 61.0, 300.0, -100.0, 1000.0])),
    st.tuples(st.just("restart"), st.booleans()),
    st.tuples(st.just("subscribe"), st.none()),
    st.tuples(st.just("unsubscribe"), st.none()),
    st.tuples(st.just("pods"), st.lists(st.integers(0, PODS - 1), min_size=1, max_size=PODS, unique=True)),
    st.tuples(st.just("pending"), st.integers(0, PODS - 1)),
    st.tuples(st.just("running"), st.none()),
    st.tuples(st.just("lose"), st.integers(0, PODS - 1)),
    st.tuples(st.just("label"), st.sampled_from(["on", "pause", "off"])),
    st.tuples(st.just("wish"), st.sampled_from(["", "retry", "recover", "dump", "exit"])),
    st.tuples(st.just("confirm"), st.sampled_from(["", "3:1", "x"])),
    st.tuples(st.just("status"), st.sampled_from(["complete", "failed", "running"])),
    st.tuples(st.just("table"), st.sampled_from(["true", "false"])),
)
jobs = st.fixed_dictionaries(
    {
        "strategies": st.lists(st.sampled_from(n.LADDER), max_size=6, unique=True).map(", ".join),
        "labels": st.fixed_dictionaries(
            {},
            optional={
                "fault-scheduling": st.just("grace"),
                "subHealthyStrategy": st.sampled_from(["hotSwitch", "hotSwitch", "graceExit", "ignore"]),
                "framework": st.sampled_from(["mindspore", "tensorflow"]),
            },
        ),
        "annotations": st.fixed_dictionaries({}, optional={"ProcessRecoverStrategy": st.sampled_from(["", "recover"])}),
        "codes": st.dictionaries(
            st.sampled_from(["retry", "recover", "downgrade", "upgrade", "dump", "continue", "migration"]),
            st.lists(codes, min_size=1, max_size=2),
        ),
        "slow": st.booleans(),
    }
)


class Luck(Play):
    """Checks after every event."""

    def __init__(self, **fields: object) -> None:
        self.told: dict[str, list[str]] = {}
        self.ended: set[str] = set()
        self.stopped: dict[str, bool] = {}
        """By incident: training was stopped or paused in it, and nobody has seen to it yet."""
        super().__init__(pods=PODS, per_pod=PER_POD, **fields)  # type: ignore[arg-type]

    def say(self, event: Event, after: float = 0.1) -> list[Effect]:
        deadline = self.machine.deadline
        incident, before = self.machine.data.id, self.machine.data.clock
        effects = super().say(event, after)
        expired = deadline is not None and self.now >= deadline
        set_back = self.now < before
        for effect in effects:
            if isinstance(effect, Signal):
                self.check(effect, event, expired or set_back)
        self.follow(incident, event, effects)
        machine = self.machine
        if machine.state not in (n.INIT, n.SCALED):
            assert machine.deadline is not None, f"{machine.state} may last for ever"
        else:
            assert machine.data.until is None
        assert machine.deadline is None or machine.deadline > self.now, "a deadline that is over comes for ever"
        assert Recovery.load(machine.dump(), "job-uid", make_uuid=self.uuid).data == machine.data
        return effects

    def check(self, signal: Signal, event: Event, expired: bool) -> None:
        if signal.type in (n.PRE_EXIT, n.CONTINUE_START) or not signal.uuid:
            return
        assert signal.uuid not in self.ended or signal.type == n.KILL_MASTER, f"{signal} after the end"
        if signal.type == n.KILL_MASTER:
            self.ended.add(signal.uuid)
        if signal.type != n.CHANGE_STRATEGY:
            return
        told = self.told.setdefault(signal.uuid, [])
        if told and told[-1] != signal.strategy:
            assert ORDER.index(told[-1]) < ORDER.index(signal.strategy), f"{told} and then {signal.strategy}"
            heard = isinstance(event, Status | Strategies | JobSeen | FaultsSeen | Subscribed)
            # A rank that fails again in its new pod ends the strategy, as a result would.
            heard = heard or (isinstance(event, ProcessFault) and told[-1] == n.RECOVER)
            assert heard or expired, f"{told[-1]} was on its way, and {event} led to {signal.strategy}"
        told.append(signal.strategy)

    def follow(self, incident: str, event: Event, effects: list[Effect]) -> None:
        """Whoever is stopped goes on, or is started again."""
        for effect in effects:
            match effect:
                case Signal(type=n.STOP_TRAIN) | Signal(type=n.SAVE_AND_EXIT):
                    self.stopped[""] = True
                case Signal(type=n.KILL_MASTER) | Signal(strategy=n.EXIT) | ReplacePods(whole_job=True):
                    self.stopped.pop("", None)
                case PatchGroup(annotations={"ProcessRecoverStatus": "exit-completed"}) if self.machine.config.platform:
                    self.stopped.pop("", None)
        accepted = isinstance(event, Status) and event.code == 0
        closed = [each for each in effects if getattr(each, "kind", "") == "closed"]
        renewed = any("whole job was started again" in each.text for each in closed)  # type: ignore[union-attr]
        renewed = renewed or self.job.ended or self.job.status == "complete"
        if renewed or (closed and accepted) or (isinstance(event, JobSeen) and event.job is None):
            if not any(isinstance(each, Signal) and each.type == n.STOP_TRAIN for each in effects):
                self.stopped.pop("", None)
        elif self.machine.state == n.SCALED:
            self.stopped.pop("", None)

    # What happens.

    def play(self, move: str, what: object) -> None:
        act: Callable[..., object] = getattr(self, f"do_{move}")
        effects = act(what) if what is not None else act()
        for effect in effects if isinstance(effects, list) else ():
            self.react(effect)

    def do_answer(self, times: int) -> None:
        for _ in range(times):
            if self.events or self.pods:
                self.step()

    def do_fault(self, faults: dict[int, str]) -> list[Effect]:
        return self.say(ProcessFault(faults))

    def do_hardware(self, found: list[tuple[int, str, str, str, bool]]) -> list[Effect]:
        made = tuple(
            self.fault(rank, kind, code, level=level, in_place=in_place)
            for rank, kind, code, level, in_place in found
            if self.job.pod_of(rank) in self.job.pods
        )
        sub = all(each.level in ("SubHealthFault", "NotHandleFault") for each in made)
        self.faults = JobFaults("job-uid", ("SubHealthy" if sub else "UnHealthy") if made else "Healthy", made)
        return self.say(FaultsSeen(self.faults))

    def do_say(self, event: Event) -> list[Effect]:
        if isinstance(event, SwitchNics | StressTest) and not self.machine.may_start_om():
            return []  # 411
        return self.say(event)

    def do_tick(self) -> list[Effect]:
        return self.tick() if self.machine.deadline is not None else []

    def do_time(self, seconds: float) -> list[Effect]:
        return self.say(Tick(), after=seconds)

    def do_restart(self, subscribed: bool) -> list[Effect]:
        return self.restart(subscribed=subscribed)

    def do_subscribe(self) -> list[Effect]:
        return self.say(Subscribed())

    def do_unsubscribe(self) -> list[Effect]:
        return self.say(Unsubscribed())

    def do_pods(self, which: list[int]) -> list[Effect]:
        return self.replace(*(each for each in which if each in self.job.pods))

    def do_pending(self, which: int) -> list[Effect]:
        return self.replace(which, phase="Pending") if which in self.job.pods else []

    def do_running(self) -> list[Effect]:
        pods = {rank: replace(pod, phase="Running", node=pod.node or "n") for rank, pod in self.job.pods.items()}
        return self.see(pods=pods)

    def do_lose(self, which: int) -> list[Effect]:
        return self.see(pods={rank: pod for rank, pod in self.job.pods.items() if rank != which})

    def do_label(self, value: str) -> list[Effect]:
        return self.label(process_recover_enable=value)

    def do_status(self, status: str) -> list[Effect]:
        return self.see(status=status, ended=status == "failed")

    def do_wish(self, value: str) -> list[Effect]:
        return self.annotate(ProcessRecoverStrategy=value) if n.PLATFORM_STRATEGY in self.job.annotations else []

    def do_confirm(self, value: str) -> list[Effect]:
        return self.annotate(ProcessResultFault=value)

    def do_table(self, value: str) -> list[Effect]:
        return self.annotate(RankTableReady=value)

    def react(self, effect: Effect) -> None:
        if isinstance(effect, PatchGroup) and n.ENABLE in effect.labels:
            value = effect.labels[n.ENABLE] or ""
            self.events.append(lambda: self.labelling(value))
        super().react(effect)

    def labelling(self, value: str) -> Event:
        self.job = replace(self.job, labels={**self.job.labels, n.ENABLE: value})
        return JobSeen(self.job)

    def come_to_rest(self) -> None:
        """Only time passes; the client says nothing any more, and no pod is replaced."""
        for _ in range(60):
            if self.machine.deadline is None:
                return
            for effect in self.tick():
                if isinstance(effect, PatchGroup) and n.ENABLE in effect.labels:
                    self.say(self.labelling(effect.labels[n.ENABLE] or ""))
        raise AssertionError(f"{self.state} does not end")


beginnings = st.one_of(
    st.just([]),
    st.tuples(
        st.one_of(
            st.tuples(st.just("fault"), st.dictionaries(ranks, types, min_size=1, max_size=2)),
            st.tuples(st.just("hardware"), hardware),
            st.tuples(st.just("say"), st.builds(SwitchNics, st.just({2: True}))),
            st.tuples(st.just("say"), st.builds(StressTest, st.just({2: (0,)}))),
        ),
        st.tuples(st.just("answer"), st.integers(1, 8)),
    ).map(list),
)
"""Without one, few would come far."""


def job_of(strategies: str, **codes: list[int]) -> dict[str, object]:
    return {"strategies": strategies, "labels": {}, "annotations": {}, "codes": codes, "slow": False}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(  # a rank fails again in its new pod
    job=job_of("retry, recover"),
    beginning=[],
    luck=[("fault", {0: "1"}), ("answer", 1), ("answer", 2), ("fault", {0: "0"})],
)
@example(  # the client is lost before it is told to end, and so is its pod
    job=job_of("retry, recover-in-place, recover, elastic-training, dump", retry=[0], recover=[201]),
    beginning=[],
    luck=[("fault", {2: "0", 4: "1"}), ("answer", 4), ("unsubscribe", None), ("answer", 1), ("pending", 0)],
)
@example(  # the node of the first pod is lost while training is smaller
    job=job_of("elastic-training, dump", downgrade=[0]),
    beginning=[],
    luck=[
        ("fault", {4: "1"}), ("answer", 3), ("pending", 2), ("say", Status(0, "downgrade")),
        ("hardware", [(0, "1", "", "SeparateNPU", False)]), ("unsubscribe", None),
    ],
)  # fmt: skip
@given(job=jobs, beginning=beginnings, luck=st.lists(moves, max_size=20))
def test_any_order(job: dict[str, object], beginning: list[tuple[str, object]], luck: list[tuple[str, object]]) -> None:
    world = Luck(**job)
    for move, what in [*beginning, *luck]:
        world.play(move, what)
    world.come_to_rest()
    assert world.state in (n.INIT, n.SCALED)
    if world.state == n.SCALED and not world.machine.listening:
        away = view.away(world.job, world.faults)
        assert away <= world.machine.data.pods.keys(), "it trains on with pods that are lost"
    assert not world.stopped, "training was left paused"
    assert world.job.labels[n.ENABLE] != n.PAUSE, "the job would not recover any more"
    machine = world.machine
    if world.state == n.INIT and machine.config.enabled and not machine._sub_healthy:
        assert machine._new_faults() == [], "a fault was dropped"
    if world.state == n.INIT:
        assert not machine.data.later


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(job=jobs, faults=st.dictionaries(ranks, types, min_size=1, max_size=2), kills=st.lists(st.integers(0, 6)))
def test_a_client_that_answers_gets_to_an_end_however_often_clusterd_dies(
    job: dict[str, object], faults: dict[int, str], kills: list[int]
) -> None:
    world = Luck(**job)
    world.report(ProcessFault(faults))
    for steps in kills:
        world.do_answer(steps)
        world.kill()
    world.run()
    assert world.state in (n.INIT, n.SCALED)
    assert not world.stopped
    assert world.notes("opened"), "the fault was not taken up"
