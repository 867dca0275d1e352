"""Pause, hot switch, elastic jobs and standbys, with scripted ranks."""

from __future__ import annotations

import pytest

from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.machine import Machine
from evertrain.mindio.tft.members import Member
from evertrain.mindio.tft.numbers import RepairType, Result, TrainState
from evertrain.mindio.tft.requests import FromLink, Send, Signal
from evertrain.mindio.tft.settings import Settings
from evertrain.mindio.tft.standbys import choose
from tests.mindio.tft_job import PLATFORM_FAST, Job

OK = "Mindio do repair operation ok"
HIGH = TrainState.UCE_HIGH


def choosing(strategy: str, param: str = "") -> dict[str, list[Signal]]:
    return PLATFORM_FAST | {"report_strategies": [Signal("strategy", text=strategy, param=param)]}


# --- pause -----------------------------------------------------------------------------------------------------------


def test_pause_and_continue() -> None:
    job = Job(platform={})
    job.beat(2, step=7)
    job.signal("pause", limit=60)
    assert job.counts() == {"Pause": 4}
    assert job.order(0, w.Pause).step == 8
    assert job.calls == [("report_stop_complete", (0, "pause complete", {}))]
    job.idle(50)
    job.strategy("continue")
    assert job.counts() == {"Pause": 4, "Continue": 4}
    assert job.results() == [(0, OK, "continue")] and job.machine.state == "NORMAL"


def test_a_rank_that_has_gone_past_the_step_of_a_pause_moves_it() -> None:
    """It did the step after the collection and before the order. The others halt there, and would never meet it.

    Where steps are short that may happen again and again, unless the order aims further ahead each time.
    """
    job = Job(platform={})
    late = iter([1, 1, 1, 1, 0])

    def past(process: object, order: w.Pause) -> w.Reply:
        behind = next(late)
        status = job.processes[2].change(step=order.step + behind - 1)
        return w.Reply(sn=order.sn, result=Result.NEED_RETRY if behind else Result.OK, status=status)

    job.processes[2].answers["Pause"] = past
    job.signal("pause", limit=60)
    assert [m.step for rank, m in job.sent if rank == 0 and isinstance(m, w.Pause)] == [6, 8, 12, 20, 36]
    assert job.calls == [("report_stop_complete", (0, "pause complete", {}))]


def test_what_was_offered_for_a_fault_does_not_hinder_the_end_of_a_pause() -> None:
    """The platform may only choose what was offered, and `continue` never is."""
    job = Job(platform=choosing("retry"))
    job.beat(3, npu_status=HIGH)
    assert job.machine.unconfirmed is not None and job.machine.offered == []
    small = Job(world=8, kinds=TENSOR_PAIRS, platform=choosing("downgrade", DOWN), zit=True)
    small.kill(6)
    assert small.machine.state == "DOWNGRADE" and small.machine.offered == []


def test_a_pause_is_ended_by_nothing_but_its_end() -> None:
    job = Job(platform={})
    job.signal("pause", limit=60)
    job.strategy("exit")
    assert job.counts() == {"Pause": 4, "Exit": 4}, "nobody goes on"


def test_a_rank_that_can_t_be_paused() -> None:
    job = Job(platform={})
    job.processes[1].answers["Pause"] = Result.TIMEOUT
    job.signal("pause", limit=60)
    assert job.calls[-1][1][0] == 499
    assert job.counts()["Exit"] == 4


def test_a_fault_before_all_have_come_to_a_pause_is_recovered_from() -> None:
    """The others wait for the faulty rank in a collective, where no pause finds them."""
    job = Job(platform=choosing("retry"))
    for process in job.processes.values():
        process.answers["Pause"] = None
    job.signal("pause", limit=60)
    assert job.calls == []
    job.beat(3, npu_status=HIGH)
    assert job.calls[0] == ("report_fault_ranks", ({3: 0}, {3: ""}))
    assert job.counts()["NotifyNormal"] == 4 and "Exit" not in job.counts()


def test_a_rank_that_can_t_continue() -> None:
    job = Job(platform={})
    job.processes[1].answers["Continue"] = 1
    job.signal("pause", limit=60)
    job.strategy("continue")
    assert job.results() == [(499, "continue failed", "continue")]
    assert job.counts()["Exit"] == 4


def test_a_pause_that_is_stopped_by_the_platform_is_a_recovery() -> None:
    job = Job(platform=choosing("retry"))
    job.signal("pause", limit=60)
    job.processes[3].change(npu_status=HIGH)
    job.signal("stop", faults={3: 0})
    assert job.results() == [], "silently"
    assert job.counts()["NotifyNormal"] == 4
    assert job.order(0, w.Rollback).step == 6


def test_a_fault_during_a_pause() -> None:
    job = Job(platform=choosing("retry"))
    job.signal("pause", limit=60)
    job.beat(3, npu_status=HIGH)
    assert job.results()[0][0] == 406
    assert job.counts()["NotifyNormal"] == 4


def test_a_pause_that_nobody_ends() -> None:
    """The platform is told; training is not left hanging."""
    job = Job(platform={})
    job.signal("pause", limit=60)
    job.idle(61)
    assert [code for code, _, _ in job.results()] == [406]
    job.idle(31)
    assert job.counts() == {"Pause": 4, "Continue": 4} and job.machine.state == "NORMAL"


ENDING = (406, "the training has come to its end", {})


@pytest.mark.parametrize("leavers", [(0,), (0, 1, 2, 3)])
def test_training_ends_before_the_step_of_a_pause(leavers: tuple[int, ...]) -> None:
    """The order aims beyond the last step: who halts at it goes on to its end, and nobody is told to exit."""
    job = Job(platform={})
    for rank in leavers:
        job.processes[rank].answers["Pause"] = None
    job.signal("pause", limit=60)
    leaving(job, *leavers)
    assert job.calls == [("report_stop_complete", ENDING)]
    assert job.ranks(w.Continue) == [rank for rank in range(4) if rank not in leavers]
    assert "Exit" not in job.counts() and job.machine.ended is None


@pytest.mark.parametrize("leavers", [(0,), (0, 1, 2, 3)])
def test_training_has_ended_before_a_pause(leavers: tuple[int, ...]) -> None:
    """That nobody is left to halt is not that all have halted, nor is it if only the others do."""
    job = Job(platform={})
    leaving(job, *leavers)
    job.signal("pause", limit=60)
    assert job.calls == [("report_stop_complete", ENDING)]
    assert "Exit" not in job.counts() and job.machine.ended is None


def test_training_ends_with_the_step_of_a_pause() -> None:
    """It halted at its last step. A rank that was let go may be gone before its answer is there: it has gone on."""
    job = Job(platform={})
    job.signal("pause", limit=60)
    for rank in (1, 2):
        job.processes[rank].answers["Continue"] = None
    job.strategy("continue")
    leaving(job, 1, 2, 0, 3)
    assert job.results() == [(0, OK, "continue")]
    assert "Exit" not in job.counts() and job.machine.ended is None


# --- hot switch ------------------------------------------------------------------------------------------------------


def shadowed(job: Job, *ranks: int) -> dict[int, object]:
    job.signal("hot switch", faults=dict.fromkeys(ranks, 1))
    return {rank: job.start(rank) for rank in ranks}


def test_a_hot_switch() -> None:
    job = Job(platform={"report_strategies": [Signal("strategy", text="migration")]}, arf=True)
    job.signal("hot switch", faults={3: 1})
    old = job.processes[3]
    new = job.start(3)
    assert new.registered == w.Registered(result=Result.REPAIR, repair_id=1, hot_switch=True)
    assert job.processes[3] is old and job.counts() == {}
    new.status = w.Status(run_status=TrainState.PREREPAIR_FINISH)
    job.feed(FromLink(new.link, w.Heartbeat(status=new.status, repair_id=1)))
    assert job.calls == [("report_strategies", ({}, ["migration"]))]
    assert old.link in job.closed
    counts = job.counts()
    assert counts == {"Pause": 4, "Continue": 4, "RebuildGroup": 4, "Repair": 2, "Rollback": 4, "NotifyNormal": 4}
    assert all(m.step == 6 for _, m in job.sent if isinstance(m, w.Pause))
    assert all(m.leave for _, m in job.sent if isinstance(m, w.Continue))
    assert [type(m).__name__ for m in new.orders] == ["RebuildGroup", "Repair", "Rollback", "NotifyNormal"]
    assert job.units() == {1: (RepairType.RT_SEND.value, [(1, 3)]), 3: (RepairType.RT_RECV_REPAIR.value, [(1, 3)])}
    assert job.order(0, w.Rollback).repair_type == 5, "a switch has no name"
    job.beat(0, step=7)
    assert job.results() == [(0, OK, "migration")] and job.machine.state == "NORMAL"


def test_a_hot_switch_that_is_cancelled() -> None:
    job = Job(platform={}, arf=True)
    shadow = shadowed(job, 3)[3]
    job.signal("stop switch")
    assert shadow.link in job.closed  # type: ignore[attr-defined]
    assert job.machine.shadows == {} and job.machine.hot == set()
    job.beat_all()
    assert job.counts() == {}
    assert job.start(3).registered == w.Registered(result=Result.ERROR, repair_id=1)


def test_the_process_of_a_cancelled_switch_does_not_take_the_rank() -> None:
    """Its link is closed, so it comes again, as a process that has registered before."""
    job = Job(platform={}, arf=True)
    old = job.processes[3]
    shadowed(job, 3)
    job.signal("stop switch")
    back = job.start(3, replaces=False, status=w.Status(run_status=TrainState.PREREPAIR_FINISH))
    assert back.registered == w.Registered(result=Result.STOP_SERVICE, repair_id=1)
    assert old.link not in job.closed and job.machine.roster.members[3].link == old.link


def test_a_shadow_whose_link_broke_stays_a_shadow() -> None:
    job = Job(platform={}, arf=True, report=False)
    for rank in range(3):
        job.report(rank)
    old = job.processes[3]
    shadowed(job, 3)
    status = w.Status(run_status=TrainState.ISOLATE)
    back = job.start(3, replaces=False, status=status)
    assert back.registered == w.Registered(result=Result.REPAIR, repair_id=1, hot_switch=True)
    assert job.machine.shadows[3].status == status and job.machine.roster.members[3].link == old.link
    group = w.ReplicaGroup(rank_list=[0, 1, 2, 3], replica_cnt=2)
    job.feed(FromLink(back.link, w.InitReport(groups=[group])))
    assert not job.machine.roster.initialised(), "rank 3 itself has reported nothing"


def test_a_shadow_that_dies_is_no_fault() -> None:
    job = Job(platform={}, arf=True)
    shadow = job.start(3) if shadowed(job, 3) else None
    assert shadow is not None
    job.by_link.pop(shadow.link)
    from evertrain.mindio.tft.requests import LinkLost

    job.feed(LinkLost(shadow.link))
    job.idle(2)
    assert job.counts() == {} and job.machine.state == "NORMAL"


def test_the_old_process_may_end_before_the_switch() -> None:
    job = Job(platform={}, arf=True)
    job.signal("hot switch", faults={3: 1})
    new = job.start(3)
    new.status = w.Status(run_status=TrainState.PREREPAIR_FINISH)
    job.feed(FromLink(new.link, w.Heartbeat(status=new.status)))
    assert job.names() == ["report_strategies"]
    job.kill(3)
    job.processes[3] = new
    job.strategy("migration")
    assert job.machine.state == "NORMAL"
    job.beat(0, step=7)
    assert job.results() == [(0, OK, "migration")]


def switching(job: Job) -> object:
    """As far as it goes until somebody answers."""
    job.signal("hot switch", faults={3: 1})
    new = job.start(3)
    job.feed(FromLink(new.link, w.Heartbeat(status=w.Status(run_status=TrainState.PREREPAIR_FINISH))))
    return new


def test_a_switch_that_is_called_off_while_the_ranks_halt() -> None:
    job = Job(platform={}, arf=True)
    process = job.processes[0]
    process.answers["Pause"] = None
    new = switching(job)
    job.signal("stop switch")
    del process.answers["Pause"]
    reply = process.obey(process.orders[-1])
    assert reply is not None
    job.feed(FromLink(process.link, reply))
    assert job.calls == [] and job.machine.state == "NORMAL" and job.machine.ended is None
    assert new.link in job.closed  # type: ignore[attr-defined]
    assert job.counts() == {"Pause": 4, "Continue": 4} and not job.order(0, w.Continue).leave
    job.beat_all(step=7)
    assert job.results() == []


def test_a_switch_that_is_called_off_when_the_ranks_have_left_the_training() -> None:
    """Its offer and ClusterD's patience have crossed: the old processes take up where they left."""
    job = Job(platform={}, arf=True)
    new = switching(job)
    assert job.calls == [("report_strategies", ({}, ["migration"]))]
    job.signal("stop switch")
    assert job.machine.state == "NORMAL" and job.machine.ended is None
    assert new.link in job.closed  # type: ignore[attr-defined]
    assert job.counts() == {"Pause": 4, "Continue": 4, "Rollback": 4, "NotifyNormal": 4}
    assert job.order(0, w.Rollback).step == 6
    job.beat_all(step=7)
    assert job.results() == []


def test_the_platform_has_time_to_delete_the_old_pod() -> None:
    job = Job(platform={}, arf=True)
    switching(job)
    job.idle(120.0)
    job.strategy("migration")
    assert job.machine.state == "NORMAL"


def test_ranks_that_do_not_come_to_the_step_of_a_switch() -> None:
    job = Job(platform={"report_strategies": [Signal("strategy", text="exit")]}, arf=True)
    job.processes[0].answers["Pause"] = Result.TIMEOUT
    job.signal("hot switch", faults={3: 1})
    new = job.start(3)
    job.feed(FromLink(new.link, w.Heartbeat(status=w.Status(run_status=TrainState.PREREPAIR_FINISH))))
    assert job.calls == [("report_strategies", ({}, ["exit"]))]
    assert job.machine.ended is not None


def leaving(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.feed(FromLink(job.processes[rank].link, w.Bye()))


def test_training_has_ended_before_the_new_processes_are_ready() -> None:
    """Nobody is asked to pause: that nobody could be the same as that all do, and the new ones would wait for a state
    that nobody has any more."""
    job = Job(platform={}, arf=True)
    job.signal("hot switch", faults={3: 1})
    new = job.start(3)
    leaving(job, 0, 1, 2, 3)
    job.feed(FromLink(new.link, w.Heartbeat(status=w.Status(run_status=TrainState.PREREPAIR_FINISH))))
    assert job.calls == [] and job.counts() == {}
    assert new.link in job.closed and job.machine.ended is None


@pytest.mark.parametrize("leavers", [(0,), (0, 1, 2, 3)])
def test_training_ends_before_the_step_of_a_switch(leavers: tuple[int, ...]) -> None:
    """The order to pause came after the last step: who halts at it goes on to its end."""
    job = Job(platform={}, arf=True)
    for rank in leavers:
        job.processes[rank].answers["Pause"] = None
    new = switching(job)
    leaving(job, *leavers)
    assert job.calls == [] and job.machine.ended is None
    assert new.link in job.closed  # type: ignore[attr-defined]
    assert job.ranks(w.Continue) == [rank for rank in range(4) if rank not in leavers]


def test_training_ends_when_a_switch_is_called_off() -> None:
    job = Job(platform={}, arf=True)
    job.processes[0].answers["Pause"] = None
    for rank in (1, 2, 3):
        job.processes[rank].answers["Continue"] = None
    switching(job)
    leaving(job, 0, 1, 2, 3)
    assert job.calls == [] and job.machine.ended is None


def test_a_fault_while_a_switch_is_prepared_is_an_ordinary_one() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    shadow = shadowed(job, 3)[3]
    job.kill(2)
    assert shadow.link in job.closed  # type: ignore[attr-defined]
    job.replace(2)
    assert job.machine.state == "NORMAL" and job.ranks(w.Repair) == [0, 2]


# --- elastic ---------------------------------------------------------------------------------------------------------

TENSOR_PAIRS = [[[0, 2, 4, 6], [1, 3, 5, 7]]]
DOWN, UP = '{"scale-in-strategy": "DP"}', '{"scale-out-strategy": "DP"}'


def test_a_job_shrinks_and_grows_back() -> None:
    job = Job(world=8, kinds=TENSOR_PAIRS, platform=choosing("downgrade", DOWN), zit=True)
    job.kill(6)
    assert job.calls[2][1][1] == ["exit", "dump", "downgrade", "upgrade"]
    assert job.calls[3] == ("report_result", (201, "isolate ranks 6, 7", {6: 1, 7: 1}, "downgrade"))
    assert job.counts() == {"DeviceStop": 7, "DeviceClean": 7, "DowngradeRebuild": 6, "NotifyNormal": 6}
    order = job.order(4, w.DowngradeRebuild)
    assert order.world_ranks == [0, 1, 2, 3, 4, 5] and order.groups == [[0, 2, 4]] and order.param == DOWN
    assert job.machine.state == "DOWNGRADE"
    job.beat(0, step=6)
    assert job.results()[-1] == (0, OK, "downgrade")

    job.kill(7)  # the platform ends the processes that were isolated
    assert job.machine.state == "DOWNGRADE"
    job.sent.clear()
    job.strategy("upgrade", UP)
    job.replace(6)
    assert job.counts() == {}
    job.replace(7)
    assert job.counts() == {
        "DeviceStop": 6,
        "DeviceClean": 6,
        "RebuildGroup": 8,
        "Repair": 4,
        "Rollback": 8,
        "NotifyNormal": 8,
    }
    rebuild = job.order(0, w.RebuildGroup)
    assert rebuild.upgrade and rebuild.fault_ranks == [6, 7] and rebuild.param == UP
    assert {rank: pairs for rank, (_, pairs) in job.units().items()} == {
        2: [(2, 6)],
        3: [(3, 7)],
        6: [(2, 6)],
        7: [(3, 7)],
    }
    assert job.order(6, w.Repair).upgrade and job.order(6, w.Rollback).upgrade
    assert job.machine.state == "NORMAL"
    job.beat(0, step=7)
    assert job.results()[-1] == (0, OK, "upgrade")


def test_a_healthy_process_that_was_isolated_can_come_back_as_it_is() -> None:
    job = Job(world=8, kinds=TENSOR_PAIRS, platform=choosing("downgrade", DOWN), zit=True)
    job.kill(6)
    job.beat_all(step=6)
    job.strategy("upgrade", UP)
    job.replace(6)
    assert job.machine.state == "NORMAL"
    assert job.units()[7][1] == [(3, 7)]


def test_who_has_a_memory_error_when_it_is_stopped_leaves_as_well() -> None:
    """Its state is not known to be good, and in a job that shrinks nobody is repaired."""
    job = Job(world=8, kinds=TENSOR_PAIRS, platform=choosing("downgrade", DOWN), zit=True)
    broken = job.processes[4]

    def stop(_: object, order: w.DeviceStop) -> w.Reply:
        return w.Reply(sn=order.sn, result=0, status=broken.change(npu_status=HIGH))

    broken.answers["DeviceStop"] = stop
    job.kill(6)
    assert job.calls[3][1][:2] == (201, "isolate ranks 4, 5, 6, 7")
    assert job.order(0, w.DowngradeRebuild).world_ranks == [0, 1, 2, 3]


def test_rank_0_can_t_leave() -> None:
    job = Job(world=8, kinds=TENSOR_PAIRS, platform=choosing("downgrade", DOWN), zit=True)
    job.kill(1)  # its index includes rank 0
    assert job.results()[0][0] == 406


def test_a_job_does_not_shrink_to_less_than_a_whole_copy() -> None:
    job = Job(world=4, copies=1, platform=choosing("downgrade", DOWN), zit=True)
    job.kill(3)
    assert job.results()[0][0] == 499


def test_a_fault_in_a_job_that_has_shrunk() -> None:
    job = Job(world=8, copies=4, kinds=TENSOR_PAIRS, platform=choosing("downgrade", DOWN), zit=True)
    job.kill(6)
    job.beat(0, step=6)
    job.script["report_strategies"] = []
    job.kill(2)
    assert job.calls[-1] == ("report_strategies", ({2: 1}, ["exit", "dump"]))
    job.strategy("dump")
    assert job.ranks(w.SaveCheckpoint) == [0, 1]


def test_a_growth_that_fails() -> None:
    job = Job(world=8, kinds=TENSOR_PAIRS, platform=choosing("downgrade", DOWN), zit=True)
    job.kill(6)
    job.beat(0, step=6)
    job.strategy("upgrade", UP)
    job.processes[0].answers["RebuildGroup"] = 1
    job.replace(6)
    job.wait(2)
    assert job.results()[-1][0] == 406
    job.strategy("dump")
    assert job.results()[-1] == (0, "do dump success", "dump")


def test_a_replacement_that_can_t_be_found_becomes_a_smaller_job() -> None:
    job = Job(world=8, kinds=TENSOR_PAIRS, platform=choosing("recover"), arf=True, zit=True)
    job.kill(6)
    job.strategy("downgrade", DOWN)
    assert job.machine.state == "DOWNGRADE"
    assert job.counts()["DeviceStop"] == 7
    job.beat(0, step=6)
    assert job.results()[-1] == (0, OK, "downgrade")


# --- standbys --------------------------------------------------------------------------------------------------------


def test_standbys_are_on_other_machines_if_there_are_any() -> None:
    members = {rank: Member(rank=rank, ip=f"10.0.0.{rank // 2}") for rank in range(8)}
    assert choose(members, 0, range(8)) == [2, 4]
    same = {rank: Member(rank=rank, ip="10.0.0.1") for rank in range(8)}
    assert choose(same, 0, range(8)) == [1, 2]
    assert choose({0: Member(rank=0)}, 0, [0]) == []


def test_standbys_are_asked_and_everybody_is_told() -> None:
    job = Job(world=6, report=False)
    for rank in range(6):
        job.report(rank)
    asked = [(rank, m) for rank, m in job.sent if isinstance(m, w.Standbys)]
    assert [rank for rank, _ in asked] == [2, 4]
    assert asked[0][1].addresses == [(2, "10.0.0.1", 0), (4, "10.0.0.2", 0)] and asked[0][1].epoch == 0
    job.sent.clear()
    job.feed(FromLink(job.processes[2].link, w.StandbyUp(ip="10.0.0.1", port=7000)))
    told = [(rank, m) for rank, m in job.sent if isinstance(m, w.Standbys)]
    assert [rank for rank, _ in told] == [0, 1, 2, 3, 4, 5]
    assert told[0][1].addresses == [(2, "10.0.0.1", 7000)]


def test_a_lost_standby_gets_a_successor() -> None:
    job = Job(world=6, copies=3, report=False, arf=True, platform=choosing("recover"))
    for rank in range(6):
        job.report(rank)
    for rank, port in ((2, 7000), (4, 7001)):
        job.feed(FromLink(job.processes[rank].link, w.StandbyUp(ip="", port=port)))
    job.kill(2)
    job.sent.clear()
    job.replace(2)
    asked = [
        m for rank, m in job.sent if isinstance(m, w.Standbys) and rank == 2 and not all(a[2] for a in m.addresses)
    ]
    assert asked[0].addresses == [(4, "10.0.0.2", 7001), (2, "10.0.0.1", 0)]
    assert asked[0].epoch + 1 + 1 == 3, "no standby gets the epoch of another"


def test_the_platform_s_own_controller_has_no_standbys() -> None:
    job = Job(world=4, rank=-1, report=False)
    for rank in range(4):
        job.report(rank)
    assert not any(isinstance(m, w.Standbys) for _, m in job.sent)


class Standby(Job):
    """A job whose ranks have not come yet."""

    def __init__(self, world: int, **settings: object) -> None:
        super().__init__(world=0)
        self.own, self.copies = [{rank: list(range(world)) for rank in range(world)}], 2
        self.machine = Machine(Settings(world_size=world, passive=True, epoch=1, rank=1, **settings))  # type: ignore[arg-type]

    def come(self, rank: int, status: w.Status) -> None:
        process = self.start(rank, replaces=False, status=status)
        if isinstance(process.welcome, w.Welcome):
            self.processes[rank] = process

    def settle(self, statuses: dict[int, w.Status]) -> None:
        """All these ranks come at the same time."""
        from tests.mindio.tft_job import Process

        for rank, status in statuses.items():
            process = self.processes[rank] = Process(rank, next(self.ids))
            process.status = status
            self.by_link[process.link] = process
            self.feed(FromLink(process.link, w.Hello(version=w.VERSION, rank=rank, ip="")))
        for rank, status in statuses.items():
            self.feed(FromLink(self.processes[rank].link, w.Register(status=status, replaces=False)))
            self.report(rank)


def test_a_standby_waits_for_half_of_the_ranks() -> None:
    job = Standby(4)
    job.feed(FromLink(1, w.Hello(version=w.VERSION, rank=1)))
    assert not job.machine.active
    sent = [a for a in job.machine.handle(FromLink(2, w.Hello(version=w.VERSION, rank=2)), 0.1) if isinstance(a, Send)]
    assert job.machine.active and list(sent[0].links) == [1, 2] and isinstance(sent[0].message, w.Welcome)


def test_a_rank_that_waits_in_vain_is_sent_to_look_elsewhere() -> None:
    job = Standby(4)
    process = job.start(1, replaces=False)
    assert process.link in job.closed, "it registered without being welcome"
    assert not job.machine.active


def test_a_job_goes_on_under_a_standby() -> None:
    job = Standby(4)
    job.settle({rank: w.Status(step=9) for rank in range(4)})
    assert job.machine.state == "NORMAL" and job.counts() == {"Continue": 4}, "a pause would be ended"
    assert job.order(0, w.Continue).unlock, "and a lock: nobody knows what it was for"
    job.sent.clear()
    job.beat(3, npu_status=HIGH)
    assert job.counts() == {"DeviceStop": 4, "DeviceClean": 4, "Repair": 2, "Rollback": 4, "NotifyNormal": 4}
    assert job.order(0, w.Rollback).repair_id == 20_001


def test_a_recovery_that_was_under_way_is_done_anew() -> None:
    job = Standby(4)
    statuses = {rank: w.Status(step=9, parked=True) for rank in range(4)}
    statuses[3] = w.Status(step=9, parked=True, npu_status=HIGH)
    job.settle(statuses)
    assert job.ranks(w.Repair) == [1, 3] and job.machine.state == "NORMAL"


def test_ranks_that_are_locked_stay_so_while_others_are_in_a_recovery() -> None:
    """Let go, they would do a step that those who have left the training function can't do any more."""
    job = Standby(4)
    job.settle({rank: w.Status(step=9, parked=rank == 2) for rank in range(4)})
    assert not job.order(0, w.Continue).unlock
    assert job.machine.state == "NORMAL" and job.ranks(w.NotifyNormal) == [0, 1, 2, 3]


def test_a_fault_that_was_none_holds_nobody() -> None:
    job = Job()
    for _ in range(10):  # rank 2 is silent until it is asked
        for rank in (0, 1, 3):
            job.beat(rank)
        job.wait(1.0)
    assert job.machine.repair_id == 1
    assert job.machine.state == "NORMAL" and job.counts() == {"Continue": 4} and job.order(2, w.Continue).unlock


def test_a_recovery_of_which_only_the_end_was_missing() -> None:
    job = Standby(4)
    job.settle({rank: w.Status(step=9, parked=True) for rank in range(4)})
    assert job.machine.state == "NORMAL"
    assert job.ranks(w.NotifyNormal) == [0, 1, 2, 3]


def test_a_replacement_that_the_old_controller_had_taken_in() -> None:
    job = Standby(4, arf=True)
    statuses = {rank: w.Status(step=9, parked=True) for rank in range(4)}
    statuses[3] = w.Status(run_status=TrainState.PREREPAIR_FINISH, parked=True)
    job.settle(statuses)
    assert job.ranks(w.SaveCheckpoint) == [0, 1], "nobody could start another process; but nothing is lost"


def test_a_target_of_a_repair_that_was_cut_short_is_repaired() -> None:
    job = Standby(4)
    statuses = {rank: w.Status(step=9, parked=True) for rank in range(4)}
    statuses[3] = w.Status(step=9, parked=True, data_status=1)
    job.settle(statuses)
    assert job.units()[3] == (RepairType.RT_RECV_REPAIR.value, [(1, 3)])


def test_the_rank_that_was_lost_with_the_controller_is_soon_missed() -> None:
    job = Standby(4)
    job.settle({rank: w.Status(step=9) for rank in (1, 2, 3)})
    job.wait(1.5)
    assert job.ranks(w.SaveCheckpoint) == [1, 2]


@pytest.mark.parametrize("missing", [{2, 3}, {3}])
def test_ranks_that_find_the_standby_later(missing: set[int]) -> None:
    job = Standby(4)
    here = {rank: w.Status(step=9) for rank in range(4) if rank not in missing}
    job.settle(here)
    job.wait(0.5)
    for rank in missing:
        job.come(rank, w.Status(step=9))
        job.report(rank)
    job.idle(6)
    assert job.counts() == {"Continue": 4} and job.machine.state == "NORMAL"


def test_the_controller_shows_that_it_lives() -> None:
    job = Job()
    job.sent.clear()
    job.idle(20)
    assert 4 <= sum(isinstance(m, w.Alive) and rank == 2 for rank, m in job.sent) <= 6
    assert job.processes[2].welcome.patience == 12 and job.processes[2].welcome.heartbeat == 1


def test_in_a_big_job_there_are_fewer_signs_of_life() -> None:
    big = Settings(world_size=10_000)
    assert big.world_size / big.heartbeat <= 500 and big.world_size / big.alive_every <= 250
    assert big.longest_silence > 3 * big.heartbeat and big.patience > 2 * big.alive_every
