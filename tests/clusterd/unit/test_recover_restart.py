"""ClusterD is killed after each step of each flow, before or after its signals are out: it ends in the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evertrain.clusterd.model import MEMORY, NETWORK, OTHER
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover.events import (
    JobSeen,
    Lost,
    Note,
    ProcessFault,
    Signal,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    Subscribed,
    SwitchNics,
    Unsubscribed,
)
from evertrain.clusterd.recover.machine import Recovery, Unreadable
from evertrain.clusterd.recover.state import is_idle
from tests.clusterd.recover_play import Play
from tests.clusterd.recover_states import STATES
from tests.clusterd.recover_world import World, change

HOT = {"subHealthyStrategy": "hotSwitch"}


def process(kind: str = OTHER, **fields: object) -> Callable[[], Play]:
    def build() -> Play:
        play = Play(**fields)  # type: ignore[arg-type]
        play.report(ProcessFault({3: kind}))
        return play

    return build


def hardware(**fields: object) -> Callable[[], Play]:
    def build() -> Play:
        play = Play(**fields)  # type: ignore[arg-type]
        play.events.append(lambda: hit(play))
        return play

    def hit(play: Play) -> object:
        from evertrain.clusterd.model import JobFaults
        from evertrain.clusterd.recover.events import FaultsSeen

        play.faults = JobFaults("job-uid", "UnHealthy", (play.fault(3, level="RestartBusiness", in_place=True),))
        return FaultsSeen(play.faults)

    return build


def ordered(order: object, **fields: object) -> Callable[[], Play]:
    def build() -> Play:
        play = Play(**fields)  # type: ignore[arg-type]
        play.report(order)  # type: ignore[arg-type]
        return play

    return build


def hot(**fields: object) -> Callable[[], Play]:
    def build() -> Play:
        play = Play("recover", labels=HOT, **fields)  # type: ignore[arg-type]
        play.events.append(lambda: sicken(play))
        return play

    def sicken(play: Play) -> object:
        from evertrain.clusterd.model import JobFaults
        from evertrain.clusterd.recover.events import FaultsSeen

        play.faults = JobFaults("job-uid", "SubHealthy", (play.ail(3),))
        return FaultsSeen(play.faults)

    return build


PLAYS: dict[str, Callable[[], Play]] = {
    "retry": process(MEMORY, strategies="retry,recover,dump"),
    "retry of the network": process(NETWORK, strategies="retry,recover,dump"),
    "retry, then recover": process(MEMORY, strategies="retry,recover,dump", codes={"retry": [405]}),
    "retry, then dump": process(MEMORY, strategies="retry,recover,dump", codes={"retry": [406]}),
    "retry, then exit": process(MEMORY, strategies="retry,recover,dump", codes={"retry": [499]}),
    "in place": process(strategies="recover-in-place,dump"),
    "a chip that stays faulty": hardware(strategies="recover-in-place,recover"),
    "recover": process(strategies="recover,dump"),
    "recover, from hardware": hardware(strategies="recover,dump"),
    "recover, then dump": process(strategies="recover,dump", codes={"recover": [406]}),
    "recover, then exit": process(strategies="recover", codes={"recover": [406]}),
    "elastic": process(strategies="elastic-training,dump", slow=True),
    "elastic, the pods are back early": process(strategies="elastic-training,dump"),
    "elastic, if there is no spare": process(
        strategies="elastic-training,dump", slow=True, labels={"fault-scheduling": "grace"}
    ),
    "elastic, then dump": process(strategies="elastic-training,dump", codes={"downgrade": [499]}),
    "elastic, then up in vain": process(strategies="elastic-training,dump", codes={"upgrade": [499]}),
    "dump": process(strategies="dump"),
    "dump in vain": process(strategies="dump", codes={"dump": [499]}),
    "exit": process(strategies="exit"),
    "exit, slowly": process(strategies="exit", slow=True),
    "not begun": process(strategies="recover", stop=404),
    "links": ordered(SwitchNics({2: True}), strategies="recover"),
    "links in vain": ordered(SwitchNics({2: True}), strategies="recover", codes={"nic": [1]}),
    "links, then not on": ordered(SwitchNics({2: True}), strategies="recover", codes={"continue": [499]}),
    "stress": ordered(StressTest({2: (0,)}), strategies="recover"),
    "stress with a fault": ordered(StressTest({2: (0,)}), strategies="recover", codes={"stress": [2]}),
    "hot switch": hot(),
    "hot switch in vain": hot(codes={"migration": [406]}),
    "platform": process(
        strategies="recover",
        annotations={"ProcessRecoverStrategy": "recover", "ProcessResultFault": "", "RankTableReady": "true"},
    ),
}


def undisturbed(name: str) -> Play:
    play = PLAYS[name]()
    play.run()
    return play


@pytest.mark.parametrize("lost", [False, True], ids=["signals out", "signals lost"])
@pytest.mark.parametrize("name", PLAYS)
def test_killed_after_every_step(name: str, lost: bool) -> None:
    whole = undisturbed(name)
    assert whole.state == n.INIT
    for step in range(len(whole.states)):
        play = PLAYS[name]()
        for _ in range(step):
            play.step()
        play.step(lost=lost)
        killed_in = play.state
        play.kill()
        play.run()
        assert play.result == whole.result, f"killed in {killed_in}, after step {step}"


def test_the_walk_comes_by_every_state() -> None:
    """But for those that need somebody to be silent; they are looked at one by one below."""
    seen = {state for name in PLAYS for state in undisturbed(name).states}
    beside = {n.FLUSHING, n.STOPPING, n.FAULT_RETRY}
    assert seen | beside == set(n.STATES)


@pytest.mark.parametrize("state", n.STATES)
def test_killed_in_a_state_and_only_time_passes(state: str) -> None:
    """The same as without, with a client that is back at once."""

    def run(killed: bool) -> tuple[object, ...]:
        world = STATES[state]()
        if killed:
            world.restart()
        for _ in range(30):
            if world.machine.deadline is None:
                break
            world.tick()
        closed = world.notes("closed")
        return world.state, [each.details["outcome"] for each in closed[-1:]], world.transcript[-1:]

    expected = run(False)
    if state in (n.STOPPING, n.FLUSHING):  # nobody listened there
        assert run(True)[0] == n.INIT
    else:
        assert run(True) == expected


@pytest.mark.parametrize("state", n.STATES)
def test_what_is_kept_says_all(state: str) -> None:
    world = STATES[state]()
    kept = world.machine.dump()
    again = Recovery.load(kept, "job-uid", make_uuid=world.uuid)
    assert again.data == world.machine.data
    assert again.state == state
    assert again.worth_keeping == (state != n.INIT)


def test_what_was_dealt_with_is_worth_keeping() -> None:
    play = undisturbed("recover, from hardware")
    assert play.machine.worth_keeping  # as long as the fault lasts
    play.restart()
    assert play.state == n.INIT
    play.hit()
    play.wait_for_pods()
    assert not play.machine.worth_keeping


@pytest.mark.parametrize(
    "kept",
    [b"", b"no", b"[]", b'{"version": 99}', b'{"state": "nowhere"}', b'{"faults": {"x": "1"}}', b'{"until": "soon"}'],
)
def test_what_can_not_be_read(kept: bytes) -> None:
    with pytest.raises(Unreadable):
        Recovery.load(kept, "job-uid", make_uuid=lambda: "")


def test_the_timeline_of_whoever_takes_over_is_told_what_began_and_what_was_decided() -> None:
    machine = Recovery("job-uid", make_uuid=lambda: "a")
    play = Play("recover-in-place")
    machine.handle(JobSeen(play.job), 10.0)
    machine.handle(Subscribed(), 10.0)
    machine.handle(ProcessFault({3: OTHER}), 11.0)
    machine.handle(StopComplete(0), 12.0)
    first = [each for each in machine.handle(Strategies(("recover",)), 13.0) if isinstance(each, Note)]
    taken = Recovery.load(machine.dump(), "job-uid", make_uuid=lambda: "b")
    told = {each.kind: each for each in taken.handle(JobSeen(play.job), 20.0) if isinstance(each, Note)}
    assert told["opened"].text == "rank 3 failed, as the training says"
    assert told["opened"].details["faults"] == {3: OTHER} and told["opened"].details["began"] == 11.0
    assert [told["decision"].text] == [each.text for each in first if each.kind == "decision"]
    assert not any(isinstance(each, Note) for each in taken.handle(JobSeen(play.job), 21.0)), "once"


@pytest.mark.parametrize("report_first", [False, True], ids=["subscribes", "reports"])
@pytest.mark.parametrize("decided", [False, True], ids=["undecided", "decided"])
def test_a_new_manager_of_the_training_begins_anew(decided: bool, report_first: bool) -> None:
    """It may report the fault before it listens."""
    uuids = iter("abcdefghij")
    machine = Recovery("job-uid", make_uuid=lambda: next(uuids))
    machine.handle(JobSeen(Play("recover-in-place").job), 10.0)
    machine.handle(Subscribed(), 10.0)
    machine.handle(ProcessFault({3: OTHER}), 11.0)
    if decided:
        machine.handle(StopComplete(0), 12.0)
        machine.handle(Strategies(("recover",)), 13.0)
    machine.handle(Unsubscribed(), 14.0)
    told = [Subscribed(), ProcessFault({3: OTHER})]
    out = [each for event in (told[::-1] if report_first else told) for each in machine.handle(event, 15.0)]
    signals = [each for each in out if isinstance(each, Signal)]
    assert [each.type for each in signals if each.type == n.STOP_TRAIN] == [n.STOP_TRAIN], "once"
    assert signals[-1].type == n.STOP_TRAIN and machine.state == n.STOPPED
    machine.handle(StopComplete(0), 16.0)
    (last,) = [each for each in machine.handle(Strategies(("recover",)), 17.0) if isinstance(each, Signal)]
    assert (last.strategy, last.extra) == ("recover", "recover-in-place")


def test_a_manager_that_is_the_old_one_after_all_has_done_what_it_was_told() -> None:
    """It repeats its report because it has not heard the decision; meanwhile that arrives."""
    uuids = iter("abcdefghij")
    machine = Recovery("job-uid", make_uuid=lambda: next(uuids))
    machine.handle(JobSeen(Play("recover-in-place").job), 10.0)
    machine.handle(Subscribed(), 10.0)
    machine.handle(ProcessFault({3: OTHER}), 11.0)
    machine.handle(StopComplete(0), 12.0)
    machine.handle(Strategies(("recover",)), 13.0)
    for event in (Unsubscribed(), Subscribed(), ProcessFault({3: OTHER})):
        machine.handle(event, 14.0)
    machine.handle(Status(0, "retry"), 15.0)
    machine.handle(Status(406, "recover"), 15.0)
    assert machine.state == n.STOPPED
    machine.handle(Status(0, "recover"), 15.0)
    assert machine.state == n.INIT and machine.may_start_om()


@pytest.mark.parametrize("manager_is_new", [False, True])
def test_that_all_start_again_is_not_over_before_somebody_has_heard_it(manager_is_new: bool) -> None:
    """The client is lost while it writes its report of the checkpoint."""
    world = World("dump")
    world.say(ProcessFault({3: OTHER}))
    world.say(Unsubscribed())
    world.say(Status(0, "dump"))
    assert world.state == n.RESCHEDULING
    world.log.clear()
    world.replace(1, 0) if manager_is_new else world.replace(1)
    world.say(Subscribed(), after=10.0)
    if manager_is_new:  # it can't tell the other pods what it has not heard
        assert world.state == n.RESCHEDULING and world.signals == []
        world.wait()
        assert world.state == n.FAULT_RETRY and world.replaced[-1].whole_job
    else:
        assert [each.strategy for each in world.signals] == [n.EXIT]
        world.wait()
        assert (world.state, world.outcome) == (n.INIT, n.FELL_BACK)


def test_a_recovery_that_nobody_knows_ends_with_the_whole_job_started_again() -> None:
    world = World("recover,dump", listening=False)
    world.say(Lost("it is of version 2"))
    assert world.state == n.FAULT_RETRY
    assert world.notes("opened")[0].text.endswith("can't be read: it is of version 2")
    assert [each.whole_job for each in world.replaced] == [True]
    world.say(Subscribed())
    assert world.transcript == [change("exit", extra="dump_exit")], "whoever was told to wait"
    world.replace(*world.job.pods)
    world.tick()
    assert (world.state, world.outcome) == (n.INIT, "fell back")


def test_of_a_recovery_that_nobody_knows_nothing_is_left_when_its_job_has_ended_or_a_fault_began_another() -> None:
    world = World("recover,dump")
    world.see(status="complete")
    world.say(Lost("it is of version 2"))
    assert world.state == n.INIT and not world.replaced
    world = World("recover,dump")
    world.say(ProcessFault({3: OTHER}))
    world.say(Lost("it is of version 2"))
    assert world.state == n.STOPPED


@pytest.mark.parametrize("state", n.STATES)
def test_what_can_not_be_decoded_says_whether_a_recovery_was_going_on(state: str) -> None:
    assert is_idle(STATES[state]().machine.dump()) == (state == n.INIT)


@pytest.mark.parametrize(("kept", "idle"), [(b"", False), (b"{", False), (b'{"version":9,"handled":"all"}', True)])
def test_what_can_not_be_read_at_all_may_be_one(kept: bytes, idle: bool) -> None:
    assert is_idle(kept) == idle
