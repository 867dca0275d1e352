"""The platform's process was killed and started anew: its new controller finds a job that has long begun."""

from __future__ import annotations

import pytest

from evertrain.mindio.tft import environment, processor
from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.machine import Machine
from evertrain.mindio.tft.numbers import Result, TrainState
from evertrain.mindio.tft.requests import FromLink, Signal
from evertrain.mindio.tft.settings import EPOCH_REPAIRS
from tests.mindio import tft_controllers
from tests.mindio.tft_controllers import PATIENCE, ScriptedController
from tests.mindio.tft_job import PLATFORM_FAST, Job

RECOVER = PLATFORM_FAST | {"report_strategies": [Signal("strategy", text="recover")]}


def begun(**options: object) -> Job:
    job = Job(rank=-1, arf=True, platform=RECOVER, **options)  # type: ignore[arg-type]
    job.machine = Machine(job.machine.settings)
    job.wait(0)
    return job


def come_back(job: Job, *ranks: int, **status: object) -> None:
    for rank in ranks:
        job.start(rank, replaces=False, status=w.Status(**{"step": 7, **status}))  # type: ignore[arg-type]
        job.report(rank)


def test_a_job_that_is_well_goes_on() -> None:
    job = begun()
    come_back(job, 0, 1, 2, 3)
    assert job.machine.state == "NORMAL" and job.machine.repair_id == EPOCH_REPAIRS
    assert job.ranks(w.Continue) == [0, 1, 2, 3] and job.order(0, w.Continue).unlock
    assert not job.calls


def test_ranks_that_held_a_lock_are_let_go() -> None:
    job = begun()
    come_back(job, 0, 1, 2, 3)
    assert all(job.order(rank, w.Continue).unlock for rank in range(4))


def test_a_rank_that_died_meanwhile_is_missed_and_replaced() -> None:
    job = begun()
    come_back(job, 0, 1, 2)
    job.idle(job.machine.settings.takeover + 2 * job.machine.settings.grace + 1)
    assert job.calls[0][0] == "report_fault_ranks" and job.calls[0][1][0] == {3: 1}
    assert job.calls[-1][0] == "report_strategies"
    job.replace(3, TrainState.INIT_FINISH)
    assert job.processes[3].registered == w.Registered(result=Result.REPAIR, repair_id=EPOCH_REPAIRS + 1)
    job.beat(3, run_status=TrainState.PREREPAIR_FINISH)
    assert job.order(3, w.Repair).repair_id == EPOCH_REPAIRS + 1
    job.beat_all(step=8)
    assert job.calls[-1][0] == "report_result" and job.calls[-1][1][0] == 0


def test_several_ranks_that_died_meanwhile_can_be_replaced() -> None:
    """Such as those of a pod. What they were prepared for, their peers know."""
    job = begun()
    come_back(job, 2, 3)
    job.idle(job.machine.settings.takeover + 2 * job.machine.settings.grace + 1)
    assert job.calls[0][0] == "report_fault_ranks" and job.calls[0][1][0] == {0: 1, 1: 1}
    name, (_, offered) = job.calls[-1]
    assert name == "report_strategies" and "recover" in offered


def test_a_choice_for_faults_of_before_is_none_for_those_of_now() -> None:
    """The platform repeats what it told the controller before this one."""
    job = begun()
    come_back(job, 0, 1, 2)
    job.strategy("recover")
    job.idle(job.machine.settings.takeover + 2 * job.machine.settings.grace + 1)
    assert job.calls[-1][0] == "report_strategies"


def test_a_replacement_may_come_before_anybody_else() -> None:
    """It was ordered by the manager that is gone, and says that it is one."""
    job = begun()
    link = 77
    job.feed(FromLink(link, w.Hello(version=w.VERSION, rank=3, process="new")))
    job.machine.handle(FromLink(link, w.Register(status=w.Status(), repair_id=1, replaces=True)), 0.0)
    come_back(job, 0, 1, 2)
    job.idle(6)
    assert job.machine.roster.members[3].fresh
    assert job.calls[0][1][0] == {3: 1}


def test_a_recovery_in_flight_is_begun_anew() -> None:
    job = begun()
    come_back(job, 0, 1, 2, parked=True)
    job.idle(10)
    assert job.calls[0][1][0] == {3: 1} and job.calls[-1][0] == "report_strategies"


def test_the_first_start_of_a_job_is_none() -> None:
    job = begun()
    for rank in range(3):
        job.start(rank, replaces=rank > 0, status=w.Status())
        job.report(rank)
    job.idle(60)
    assert job.machine.state == "NORMAL" and job.machine.repair_id == 0 and not job.calls


def test_a_controller_in_a_rank_leaves_that_to_its_standbys() -> None:
    job = Job()
    job.machine = Machine(job.machine.settings)
    job.wait(0)
    come_back(job, 0)
    assert job.machine.state == "NORMAL"


@pytest.mark.parametrize("script", [{}, {"report_stop_complete": [Signal("global", limit=1)]}])
def test_a_platform_that_has_forgotten_begins_the_conversation_anew(script: dict[str, list[Signal]]) -> None:
    job = Job(rank=-1, arf=True, platform={"report_fault_ranks": [Signal("stop")], **script})
    job.kill(3)
    before = [name for name, _ in job.calls]
    job.signal("stop", faults={3: 1})
    assert [name for name, _ in job.calls] == before * 2 and job.machine.ended is None


# --- processors ------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    monkeypatch.setattr(environment, "connect_budget", lambda: 0.2)


def test_a_processor_of_a_platform_never_stops_looking(impatient: None) -> None:
    with tft_controllers.controller() as leader, tft_controllers.processor(leader) as member:
        leader.registrations.get(timeout=PATIENCE)
        leader.close()
        while not member.unprotected:
            member._kick.wait(0.01)
        with tft_controllers.controller(port=leader.address[1]) as other:
            other.greeting = w.Welcome(instance="two")
            assert not other.registrations.get(timeout=PATIENCE).replaces
            assert other.ask(w.Collect).result == Result.OK
            assert not member.unprotected


def test_after_a_peaceful_end_it_looks_again_a_little_later(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "AFTERWARDS", 0.3)
    with tft_controllers.controller() as leader, tft_controllers.processor(leader) as member:
        leader.registrations.get(timeout=PATIENCE)
        leader.order(w.Destroyed)
        leader.ask(w.Collect)
        leader.close()
        with tft_controllers.controller(port=leader.address[1]) as other:
            other.greeting = w.Welcome(instance="two")
            other.registrations.get(timeout=PATIENCE)
            assert other.ask(w.Collect).result == Result.OK
            assert not member.unprotected


def test_a_replacement_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTART_FAULT_PROCESS_TYPE", "worker")
    leader: ScriptedController
    with tft_controllers.controller() as leader, tft_controllers.processor(leader):
        first = leader.registrations.get(timeout=PATIENCE)
        assert first.replaces and first.repair_id == 1
