"""Link failover and stress test: signals, notifications, and the answer to who ordered it."""

from __future__ import annotations

import json

import pytest

from evertrain.clusterd.model import OTHER
from evertrain.clusterd.recover.events import (
    Answer,
    Failed,
    IsolateNode,
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    ProcessFault,
    Status,
    StopComplete,
    StressTest,
    StressTested,
    SwitchNics,
)
from tests.clusterd.recover_states import continuing, pausing, stressing, switching_nics
from tests.clusterd.recover_world import World, change, signal

PAUSE_AGENTS = signal("pauseStartAgent", "pause_start_agent")
RELEASE_AGENTS = signal("continueStartAgent", "continue_start_agent")
STOP = signal("stopTrain", "stop_train")
OK = ("0", "ok")


def answers(world: World) -> list[str]:
    return [each.text for each in world.log if isinstance(each, Answer)]


def test_links() -> None:
    world = World("recover")
    world.say(SwitchNics({2: True, 3: False}))
    assert world.take() == [signal("stopTrain", "pause_train")]
    world.say(StopComplete(0))
    assert NotifyNics({2: True, 3: False}) in world.log
    assert world.take() == []
    world.say(NicsSwitched(True))
    assert world.take() == [change("continue")]
    assert answers(world) == []
    world.say(Status(0, "continue"))
    assert answers(world) == ["switch nic finish"]
    assert (world.state, world.outcome) == ("INIT", "recovered")
    assert world.machine.may_start_om()


def test_stress() -> None:
    world = World("recover")
    world.say(StressTest({2: (0, 1), 3: (0,)}))
    assert world.take() == [signal("stopTrain", "pause_train", timeout=900)]
    world.say(StopComplete(0))
    assert NotifyStress({2: (0, 1), 3: (0,)}) in world.log
    assert world.resets == ["notifyFaultFlushing"]
    assert world.take() == [PAUSE_AGENTS]
    world.say(StressTested({2: {"0": OK, "1": ("1", "no memory")}, 3: {"0": OK}}))
    assert world.resets == ["clear"]
    assert world.take() == [RELEASE_AGENTS, change("continue")]
    world.say(Status(0, "continue"))
    (text,) = answers(world)
    assert text.startswith("stress test finish, result:")
    result = json.loads(text.partition("result:")[2])
    assert result["node-1"]["0"]["rankResult"]["1"] == {"code": "1", "result": "no memory"}
    assert set(result["node-1"]) == {"0", "1"}
    assert world.state == "INIT"


def test_agents_are_let_go_even_if_clusterd_dies_before_it_says_so() -> None:
    world = stressing()
    world.say(StressTested({2: {"0": ("3", "")}}))
    world.take()
    world.restart()
    assert [each[0] for each in world.take()] == ["continueStartAgent", "stopTrain"]


def test_a_stress_test_that_finds_a_fault_isolates_the_node() -> None:
    world = stressing()
    world.take()
    world.say(StressTested({2: {"0": ("2", "bad")}, 3: {"0": OK}}))
    assert IsolateNode("node-1", "the stress test has found a fault") in world.log
    assert answers(world) == ["stress test find fault, isolate node:node-1"]
    assert world.take() == [RELEASE_AGENTS, signal("stopTrain", "stop_train", faults={2: "1", 3: "1"})]
    world.say(StopComplete(0))
    assert [each.uids for each in world.replaced] == [("pod-1-0",)]


@pytest.mark.parametrize("code", ["3", "4"])
def test_a_stress_test_that_hangs_makes_the_rank_faulty(code: str) -> None:
    world = stressing()
    world.take()
    world.say(StressTested({2: {"0": (code, "")}, 3: {"0": OK}}))
    assert answers(world) == ["stress test timeout fault, faultRank:2"]
    assert world.take() == [RELEASE_AGENTS, signal("stopTrain", "stop_train", faults={2: "1"})]


def test_a_fault_during_a_stress_test_waits_for_its_end() -> None:
    world = stressing()
    world.take()
    world.say(Status(406, "continue"))
    assert (world.state, answers(world)) == ("WaitStressTestFinishedState", ["recv fault, when stressing test"])
    world.say(StressTested({2: {"0": OK}, 3: {"0": OK}}))
    assert len(answers(world)) == 1
    assert world.take() == [RELEASE_AGENTS, STOP]


def test_a_process_ends_during_a_stress_test() -> None:
    world = stressing()
    world.take()
    world.say(ProcessFault({5: OTHER}))
    assert answers(world) == ["recv fault, when stressing test"]
    world.say(StressTested({}))
    assert world.take() == [RELEASE_AGENTS, signal("stopTrain", "stop_train", faults={5: "1"})]


def test_faults_that_the_stress_test_makes_are_none() -> None:
    world = stressing()
    world.hit(world.fault(3, code="80818C05"), world.fault(5, code="81078603"))
    world.say(StressTested({2: {"0": OK}, 3: {"0": OK}}))
    world.log.clear()
    world.say(Status(0, "continue"))
    assert world.transcript == [
        signal("preExitProcess", "pre exit process", faults={5: "1"}, nodes=(2,)),
        signal("stopTrain", "stop_train", faults={5: "1"}),
    ]


@pytest.mark.parametrize("build", [pausing, switching_nics, continuing])
def test_a_process_ends_during_a_switch(build: object) -> None:
    world = build()  # type: ignore[operator]
    world.log.clear()
    world.say(ProcessFault({5: OTHER}))
    assert world.transcript == [signal("stopTrain", "stop_train", faults={5: "1"})]
    assert len(answers(world)) == 1
    assert world.state == "WaitReportStopCompleteState"


def test_training_can_not_be_paused() -> None:
    world = pausing()
    world.take()
    world.say(StopComplete(499))
    assert answers(world) == ["om failed, pause train failed"]
    assert world.take() == [signal("killMaster")]


def test_training_ends_before_it_could_pause() -> None:
    """Nothing was done and nothing is wrong: the job comes to its end as if nobody had ordered anything."""
    world = pausing()
    world.log.clear()
    world.say(StopComplete(406))
    assert answers(world) == ["om failed, pause train failed"]
    assert world.transcript == [] and world.replaced == []
    assert (world.state, world.outcome) == ("INIT", "cancelled")


def test_links_can_not_be_switched() -> None:
    world = switching_nics()
    world.take()
    world.say(NicsSwitched(False))
    assert answers(world) == ["switch nic failed, switch nic failed"]
    assert world.take() == [STOP]


def test_an_error_while_links_are_switched() -> None:
    world = switching_nics()
    world.take()
    world.say(Status(406, "continue"))
    assert answers(world) == ["switch nic failed, report error when switching nic"]
    assert world.take() == [STOP]


def test_after_a_failed_switch_mindspore_writes_no_checkpoint() -> None:
    from evertrain.clusterd.recover.events import Strategies

    for framework, chosen in (("mindspore", "exit"), ("pytorch", "dump")):
        world = World("recover,dump", labels={"framework": framework})
        world.say(SwitchNics({2: True}))
        world.say(StopComplete(0))
        world.say(NicsSwitched(False))
        world.say(StopComplete(0, {2: OTHER}))
        world.say(Strategies(("dump", "exit")))
        assert world.transcript[-1][2] == chosen


@pytest.mark.parametrize(("code", "kind"), [(499, "killMaster"), (406, "stopTrain")])
def test_training_can_not_continue(code: int, kind: str) -> None:
    world = continuing()
    world.log.clear()
    world.say(Status(code, "continue"))
    assert answers(world) == ["switch nic failed, continue train failed"]
    assert [each[0] for each in world.transcript] == [kind]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (pausing, "pause train timeout"),
        (switching_nics, "switch nic failed, report switch nic timeout"),
        (stressing, "stress test failed, report stress test timeout"),
        (continuing, "switch nic failed, continue train timeout"),
    ],
)
def test_it_takes_too_long(build: object, text: str) -> None:
    world = build()  # type: ignore[operator]
    world.log.clear()
    world.wait()
    assert answers(world) == [text]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (pausing, "pause train failed, job service not ready"),
        (switching_nics, "switch nic failed, job service not ready"),
        (continuing, "continue train failed, job service not ready"),
    ],
)
def test_the_client_is_gone(build: object, text: str) -> None:
    from evertrain.clusterd.recover.events import Unsubscribed

    world = build()  # type: ignore[operator]
    world.say(Unsubscribed())
    world.log.clear()
    world.wait()
    assert answers(world) == [text]
    assert world.replaced[0].whole_job


def test_nobody_listens_at_all() -> None:
    world = World("recover", listening=False)
    world.say(SwitchNics({2: True}))
    assert (world.state, answers(world)) == ("INIT", ["pause train failed, job service not ready"])


def test_an_order_of_nothing_is_done_at_once() -> None:
    world = World("recover")
    world.say(SwitchNics({}))
    world.say(StressTest({}))
    assert (world.state, answers(world)) == ("INIT", ["switch nic finish", "stress test finish"])


@pytest.mark.parametrize("effect", [NotifyNics({2: True}), NotifyStress({2: (0,)})])
def test_workers_that_can_not_be_told(effect: NotifyNics | NotifyStress) -> None:
    """Nothing was touched, so training goes on."""
    world = switching_nics() if isinstance(effect, NotifyNics) else stressing()
    world.take()
    world.say(Failed(effect, "nobody subscribes"))
    assert answers(world)[0].endswith("signal failed, please check manually")
    assert world.take()[-1] == change("continue")
    world.say(Status(0, "continue"))
    assert (world.state, world.outcome) == ("INIT", "cancelled")


def test_a_late_word_of_the_workers_is_ignored() -> None:
    world = World("recover")
    world.say(NicsSwitched(True))
    world.say(StressTested({2: {"0": OK}}))
    assert world.state == "INIT"
