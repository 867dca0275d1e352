"""Hot switch, signal by signal, and every way in which nothing comes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evertrain.clusterd.model import OTHER, SUB_HEALTHY
from evertrain.clusterd.recover.events import Failed, PatchPod, ProcessFault, Status, Strategies, Subscribed
from tests.clusterd.recover_states import backed_up, hot_switch, migrating, paused_for_switch, promote, run_backup
from tests.clusterd.recover_world import World, change, signal

STOP_SWITCH = signal("hot-switch", "stop switch")
NEVER = "sub-health 110001 in the first pod, which is never switched: sub-health is ignored"
ROLLED_BACK = ("train-1", {"inHotSwitchFlow": None, "backupNewPodName": None, "needOperatorOpe": None})


def test_the_whole_way() -> None:
    world = World("recover", labels={"subHealthyStrategy": "hotSwitch"})
    world.sicken(3)
    assert world.patches == [("train-1", {"inHotSwitchFlow": "true", "needOperatorOpe": "create"})]
    assert world.signals[0].uuid
    assert world.take() == [signal("hot-switch", "hot switch", faults={2: "1", 3: "1"})]
    run_backup(world, "Pending")
    assert (world.state, world.take()) == ("WaitNewPodState", [])
    run_backup(world)
    assert world.take() == [signal("hot-switch", "new pod running")]
    world.say(Strategies(("migration",)))
    assert world.patches == [("train-1", {"fault-type": "SubHealth", "needVolcanoOpe": "delete"})]
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    assert world.take() == []
    promote(world)
    assert world.take() == [change("migration")]
    world.say(Status(0, "migration"))
    assert world.patches == [("train-1-hot-0001", {"inHotSwitchFlow": None})]
    assert (world.state, world.outcome) == ("INIT", "recovered")


def test_the_node_is_well_again_before_the_backup_runs() -> None:
    world = hot_switch()
    run_backup(world, "Pending")
    world.log.clear()
    world.sicken()
    assert world.transcript == [STOP_SWITCH]
    assert world.patches == [ROLLED_BACK, ("train-1-hot-0001", {"needOperatorOpe": "delete"})]
    assert (world.state, world.outcome) == ("INIT", "cancelled")
    world.see(backups={})
    world.log.clear()
    world.sicken(3)  # and ill once more: it is tried again
    assert world.transcript[0][1] == ("hot switch",)


def test_the_node_is_well_again_before_the_backup_is_ready() -> None:
    world = backed_up()
    world.log.clear()
    world.sicken()
    assert world.transcript == [STOP_SWITCH]
    assert world.patches == [ROLLED_BACK, ("train-1-hot-0001", {"needOperatorOpe": "delete"})]
    assert (world.state, world.outcome) == ("INIT", "cancelled")


@pytest.mark.parametrize("phase", ["Failed", None])
def test_the_backup_ends_before_it_is_ready(phase: str | None) -> None:
    """Its program does not start, or its node is lost. Nobody pauses for it, so nothing has to be started again."""
    world = backed_up()
    world.log.clear()
    if phase is None:
        world.see(backups={})
    else:
        run_backup(world, phase)
    assert world.transcript == [STOP_SWITCH] and world.replaced == []
    assert (world.state, world.outcome) == ("INIT", "cancelled")
    assert "ended before it was ready: sub-health is ignored" in world.notes("closed")[0].text
    world.sicken(3, 5)
    assert world.state == "INIT"


def test_training_pauses_before_the_cluster_tells_that_the_backup_runs() -> None:
    world = hot_switch()
    run_backup(world, "Pending")
    world.log.clear()
    world.say(Strategies(("migration",)))
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]
    promote(world)
    assert world.take() == [change("migration")]
    world.say(Status(0, "migration"))
    assert world.patches == [("train-1-hot-0001", {"inHotSwitchFlow": None})]
    assert (world.state, world.outcome) == ("INIT", "recovered")


def test_no_spare() -> None:
    world = hot_switch()
    world.log.clear()
    world.wait()
    assert world.transcript == [STOP_SWITCH]
    assert (world.state, world.outcome) == ("INIT", "cancelled")
    assert "no spare node" in world.notes("closed")[0].text
    assert "ignored" in world.notes("closed")[0].text
    world.take()
    world.sicken(3, 5)
    assert (world.state, world.take()) == ("INIT", [])
    world.sicken()
    world.sicken(5)
    assert world.state == "WaitNewPodState"


def test_a_backup_that_comes_too_late_is_sent_away() -> None:
    world = hot_switch()
    world.wait()
    world.log.clear()
    run_backup(world)
    assert world.patches == [("train-1-hot-0001", {"needOperatorOpe": "delete"})]
    world.see()
    assert len(world.patches) == 1


@pytest.mark.parametrize("offers", [(), ("exit",)])
def test_training_can_not_pause(offers: tuple[str, ...]) -> None:
    world = backed_up()
    world.log.clear()
    world.say(Strategies(offers))
    assert world.patches == [
        ("train-0", {"fault-type": "SubHealth", "needVolcanoOpe": "delete"}),
        ROLLED_BACK,
        ("train-1-hot-0001", {"needOperatorOpe": "delete"}),
    ]
    assert world.replaced[0].whole_job
    assert world.state == "NotifyStopJobState"
    world.replace(0, 1, 2, 3)
    assert (world.state, world.outcome) == ("INIT", "fell back")


@pytest.mark.parametrize("code", [406, 499, 405, 700])
def test_the_backup_can_not_take_over(code: int) -> None:
    world = migrating()
    world.log.clear()
    world.say(Status(code, "migration"))
    assert world.state == "NotifyStopJobState"
    assert world.replaced[0].whole_job


@pytest.mark.parametrize("build", [hot_switch, backed_up])
def test_a_process_fails_meanwhile(build: object) -> None:
    world = build()  # type: ignore[operator]
    world.log.clear()
    world.say(ProcessFault({5: OTHER}))
    assert world.transcript == [STOP_SWITCH, signal("stopTrain", "stop_train", faults={5: "1"})]
    assert world.state == "WaitReportStopCompleteState"


@pytest.mark.parametrize("build", [hot_switch, backed_up])
def test_a_worse_fault_comes_first(build: object) -> None:
    world = build()  # type: ignore[operator]
    world.log.clear()
    world.hit(world.ail(3), world.fault(5))
    assert [each[0] for each in world.transcript] == ["hot-switch", "preExitProcess", "stopTrain"]


def test_processes_end_with_the_old_pod() -> None:
    world = paused_for_switch()
    world.say(ProcessFault({2: OTHER, 3: OTHER}))
    promote(world)
    world.say(Status(0, "migration"))
    assert (world.state, world.outcome) == ("INIT", "recovered")


def test_another_process_ends_while_the_backup_takes_over() -> None:
    world = migrating()
    world.say(ProcessFault({5: OTHER}))
    world.log.clear()
    world.say(Status(0, "migration"))
    assert world.transcript == [signal("stopTrain", "stop_train", faults={5: "1"})]


def test_one_pod_after_the_other_and_never_the_first() -> None:
    world = World("recover", labels={"subHealthyStrategy": "hotSwitch"})
    world.sicken(1, 3, 5)
    assert [note.text for note in world.notes("closed")] == [NEVER]
    assert [each.rank for each in world.notes("opened")[0].details["faults"]] == [1]
    assert world.take() == [signal("hot-switch", "hot switch", faults={2: "1", 3: "1"})]
    run_backup(world)
    world.say(Strategies(("migration",)))
    promote(world)
    world.take()
    world.say(Status(0, "migration"))
    assert world.outcome == "recovered", "of the first pod nothing is said again"
    assert world.take() == [signal("hot-switch", "hot switch", faults={4: "1", 5: "1"})]


def test_the_sub_health_of_the_first_pod_is_told_and_no_reason_to_leave_others() -> None:
    world = World("recover", labels={"subHealthyStrategy": "hotSwitch"})
    world.sicken(1)
    assert (world.state, world.transcript, world.outcome) == ("INIT", [], "cancelled")
    assert world.notes("closed")[0].text == NEVER
    world.take()
    world.see()
    assert world.take() == [], "it is told once"
    world.sicken(1, 3)
    assert world.state == "WaitNewPodState"


def test_too_many_pods() -> None:
    world = World("recover", pods=12, labels={"subHealthyStrategy": "hotSwitch"})
    world.sicken(*range(2, 24))
    assert (world.state, world.transcript, world.outcome) == ("INIT", [], "cancelled")
    assert "11 pods" in world.notes("opened")[0].text


def test_another_framework() -> None:
    world = World("recover", labels={"subHealthyStrategy": "hotSwitch", "framework": "tensorflow"})
    world.sicken(3)
    assert (world.state, world.transcript, world.outcome) == ("INIT", [], "cancelled")
    world.sicken(3, 5)
    assert len(world.notes("opened")) == 1


@pytest.mark.parametrize("strategy", ["ignore", "forceExit", "graceExit", ""])
def test_sub_health_is_ignored_otherwise(strategy: str) -> None:
    world = World("recover,dump", labels={"subHealthyStrategy": strategy})
    world.sicken(3)
    assert (world.state, world.log) == ("INIT", [])


def test_a_graceful_exit_writes_a_checkpoint_first() -> None:
    world = World("dump", labels={"subHealthyStrategy": "graceExit"})
    world.sicken(3)
    assert world.transcript == [signal("saveAndExit", "save_and_exit", nodes=(1,))]


def test_nobody_listens_yet() -> None:
    world = World("recover", listening=False, labels={"subHealthyStrategy": "hotSwitch"})
    world.sicken(3)
    assert world.state == "INIT"
    world.say(Subscribed())
    assert world.state == "WaitNewPodState"


def test_the_operator_can_not_be_asked() -> None:
    world = hot_switch()
    world.log.clear()
    world.say(Failed(PatchPod("train-1", "pod-1-0", annotations={"needOperatorOpe": "create"}), "forbidden"))
    assert (world.state, world.outcome, world.transcript) == ("INIT", "cancelled", [STOP_SWITCH])


def test_the_pod_is_replaced_by_somebody_else() -> None:
    world = hot_switch()
    world.log.clear()
    world.replace(1)
    assert (world.state, world.outcome, world.transcript) == ("INIT", "cancelled", [STOP_SWITCH])


def test_other_faults_of_the_cluster_wait_until_the_backup_has_taken_over() -> None:
    world = paused_for_switch()
    world.hit(world.ail(3), world.fault(5))
    assert world.state == "WaitOldPodDeletedState"
    promote(world)
    world.log.clear()
    world.say(Status(0, "migration"))
    assert [each[0] for each in world.transcript] == ["preExitProcess", "stopTrain"]


def test_the_sickness_of_a_backup_is_no_reason_to_call_it_off() -> None:
    world = hot_switch()
    sick = replace(world.ail(3), code="110002")
    world.hit(sick, health=SUB_HEALTHY)
    assert world.state == "WaitNewPodState"
