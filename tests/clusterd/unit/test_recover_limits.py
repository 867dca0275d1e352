"""Every state that waits has an end to its patience, and something happens then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from evertrain.clusterd.model import MEMORY, OTHER
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover import timing
from evertrain.clusterd.recover.events import (
    Failed,
    JobSeen,
    PatchGroup,
    ProcessFault,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    Subscribed,
    SwitchNics,
    Unsubscribed,
    WriteReset,
)
from evertrain.clusterd.recover.machine import _TIMEOUTS
from tests.clusterd.recover_states import STATES
from tests.clusterd.recover_world import World, change, signal

NEXT = {
    n.FLUSHING: n.FAULT_RETRY,
    n.STOPPED: n.FAULT_RETRY,
    n.GLOBAL_FAULT: n.OFFERS,
    n.OFFERS: n.FAULT_RETRY,
    n.DECIDED: n.SCALE_IN_RANKS,
    n.RETRY_STATUS: n.FAULT_RETRY,
    n.RECOVER_STATUS: n.FAULT_RETRY,
    n.DUMP_STATUS: n.FAULT_RETRY,
    n.SCALE_IN_RANKS: n.DUMP_STATUS,
    n.SCALE_IN_STATUS: n.FAULT_RETRY,
    n.SCALE_OUT_STATUS: n.FAULT_RETRY,
    n.KILL_JOB: n.INIT,
    n.PAUSING: n.KILL_JOB,
    n.SWITCHING_NICS: n.STOPPED,
    n.STRESSING: n.STOPPED,
    n.CONTINUING: n.KILL_JOB,
    n.NEW_POD: n.INIT,
    n.HOT_PAUSE: n.STOP_JOB,
    n.OLD_POD: n.STOP_JOB,
    n.MIGRATING: n.STOP_JOB,
    n.STOP_JOB: n.KILL_JOB,
    n.STOPPING: n.FAULT_RETRY,
    n.FAULT_RETRY: n.INIT,
    n.RESCHEDULING: n.INIT,
}


@pytest.mark.parametrize("state", [each for each in n.STATES if each not in (n.INIT, n.SCALED)])
def test_where_a_state_leads_that_lasts_too_long(state: str) -> None:
    world = STATES[state]()
    assert world.state == state
    assert state in _TIMEOUTS
    world.wait()
    assert world.state == NEXT[state]


@pytest.mark.parametrize("state", n.STATES)
def test_every_state_ends_if_only_time_passes(state: str) -> None:
    world = STATES[state]()
    assert rest(world).state == (n.SCALED if state == n.SCALED else n.INIT)


def rest(world: World) -> World:
    for _ in range(20):
        if world.machine.deadline is None:
            break
        world.tick()
    return world


@pytest.mark.parametrize("state", n.STATES)
def test_every_state_ends_if_nobody_listens_any_more(state: str) -> None:
    world = STATES[state]()
    world.say(Unsubscribed())
    # Who trains smaller does so with nobody to listen, too.
    assert rest(world).state == (n.SCALED if state == n.SCALED else n.INIT)


@pytest.mark.parametrize("state", n.STATES)
def test_every_state_ends_if_the_node_of_the_first_pod_is_lost(state: str) -> None:
    world = STATES[state]()
    world.hit(world.fault(0, code="", level=""))
    world.say(Unsubscribed())
    assert rest(world).state == n.INIT


def test_a_job_that_trains_smaller_and_has_lost_the_node_of_its_first_pod_is_rescheduled() -> None:
    world = STATES[n.SCALED]()
    world.log.clear()
    world.hit(world.fault(2, code="", level=""))  # that one is out anyway
    world.say(Unsubscribed())
    assert (world.state, world.machine.deadline) == (n.SCALED, None)
    world.hit(world.fault(0, code="", level=""))
    assert limit(world) == timing.SUBSCRIBER
    world.say(Subscribed())
    assert world.machine.deadline is None, "it lives: only the cluster does not hear of its node"
    world.say(Unsubscribed())
    world.wait()
    assert world.state == n.FAULT_RETRY
    assert [each.whole_job for each in world.replaced] == [True]


def test_a_job_that_trains_smaller_and_ends_is_not_rescheduled() -> None:
    world = STATES[n.SCALED]()
    world.say(Unsubscribed())
    world.see(pods={rank: replace(pod, phase="Succeeded") for rank, pod in world.job.pods.items()})
    assert world.machine.deadline is None


def test_a_first_pod_that_has_gone_from_a_job_that_trains_smaller_is_waited_for() -> None:
    world = STATES[n.SCALED]()
    world.say(Unsubscribed())
    began = world.now
    world.see(pods={rank: pod for rank, pod in world.job.pods.items() if rank})
    world.wait()
    assert world.state == n.FAULT_RETRY
    assert world.now - began >= timing.RESCHEDULE


def limit(world: World) -> float:
    at = world.machine.data.until or world.machine.deadline
    assert at is not None
    return round(at - world.now, 6)


@pytest.mark.parametrize(
    ("state", "seconds"),
    [
        (n.STOPPED, 900),
        (n.OFFERS, 900),
        (n.RETRY_STATUS, 900),
        (n.DUMP_STATUS, 900),
        (n.PAUSING, 900),
        (n.CONTINUING, 900),
        (n.FLUSHING, 300),
        (n.GLOBAL_FAULT, 15),
        (n.DECIDED, 20),
        (n.NEW_POD, 60),
        (n.FAULT_RETRY, 135),
        (n.RESCHEDULING, 270),
        (n.STOPPING, timing.SUBSCRIBER),
    ],
)
def test_how_long(state: str, seconds: float) -> None:
    assert limit(STATES[state]()) == pytest.approx(seconds, abs=0.5)


def test_the_whole_job_is_rescheduled_by_label_word_and_deed() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    world.take()
    world.wait()
    assert world.resets == ["clear"]
    assert world.group == [{"process-recover-enable": "pause"}]
    assert world.replaced[0].whole_job
    assert world.take() == [change("exit", nodes=(1,), extra="dump_exit")]
    world.see(pods={})
    world.wait()
    assert world.group == [{"process-recover-enable": "on"}]
    assert world.transcript == [signal("killMaster")]
    while world.state != "INIT":
        world.wait()
    assert world.outcome == "failed"


def test_pods_that_are_not_replaced_after_exit() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0))
    world.say(Strategies(("exit",)))
    world.see(pods={rank: pod for rank, pod in world.job.pods.items() if rank != 1})
    world.wait()
    assert world.state == "FaultRetryState"


def test_the_label_can_not_be_set() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    world.wait()
    world.take()
    world.say(Failed(PatchGroup(labels={"process-recover-enable": "pause"}), "forbidden"))
    assert world.transcript == [signal("killMaster")]


def test_a_reset_file_that_can_not_be_written_does_not_end_the_job() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    world.say(Failed(WriteReset("notifyFaultFlushing"), "no such ConfigMap"))
    assert world.state == "WaitReportStopCompleteState"
    assert "no such ConfigMap" in world.notes("ignored")[0].text


def test_a_clock_that_is_set_back_takes_the_deadlines_along() -> None:
    world = World("recover")
    world.say(ProcessFault({3: OTHER}))
    world.now -= 500_000
    world.say(ProcessFault({3: OTHER}), after=0)
    assert limit(world) == 900
    world.wait()
    assert world.state == "FaultRetryState"


@pytest.mark.parametrize("build", [STATES[n.STOPPED], STATES[n.RECOVER_STATUS], STATES[n.PAUSING]])
def test_a_deadline_that_passed_while_clusterd_was_away_leaves_the_client_time_to_come_back(
    build: Callable[[], World],
) -> None:
    world = build()
    state = world.state
    world.restart(subscribed=False, down=10_000)
    assert world.state == state
    assert world.machine.deadline == pytest.approx(world.now + timing.SUBSCRIBER, abs=1)


def test_orders_while_something_goes_on_are_not_carried_out() -> None:
    world = World("retry")
    world.say(ProcessFault({3: MEMORY}))
    assert not world.machine.may_start_om()
    world.take()
    world.say(SwitchNics({3: True}))
    world.say(StressTest({3: (0,)}))
    assert (world.state, world.take()) == ("WaitReportStopCompleteState", [])
    world.say(Status(0, "retry"))
    assert world.state == "WaitReportStopCompleteState"


def test_it_is_not_over_as_long_as_nobody_has_heard_that_all_start_again() -> None:
    world = STATES[n.OFFERS]()
    world.say(Unsubscribed())
    world.say(Strategies(("exit",)))
    world.replace(1)
    assert (world.state, world.transcript[-1][0]) == (n.RESCHEDULING, "globalFault")
    world.say(Subscribed())
    assert world.transcript[-1][2] == "exit"
    world.tick()
    assert world.state == n.INIT


def test_a_limit_does_not_outlive_its_state() -> None:
    world = STATES[n.FAULT_RETRY]()
    world.say(Failed(PatchGroup(labels={"process-recover-enable": "pause"}), "forbidden"))
    world.say(JobSeen(world.job))
    assert world.machine.deadline == pytest.approx(world.now + timing.KILLED, abs=0.5)
