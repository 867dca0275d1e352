"""Platform mode: somebody outside decides, by annotations."""

from __future__ import annotations

import pytest

from evertrain.clusterd.model import MEMORY, OTHER
from evertrain.clusterd.recover.events import ProcessFault, Status, StopComplete, Strategies
from tests.clusterd.recover_world import World, change, signal

POD_1 = {2: "1", 3: "1"}


def platform(strategies: str = "retry,recover,dump", wish: str = "") -> World:
    return World(strategies, annotations={"ProcessRecoverStrategy": wish})


def test_recover_step_by_step() -> None:
    world = platform()
    world.say(ProcessFault({3: OTHER}))
    assert (world.state, world.take()) == ("NotifyWaitFaultFlushingState", [])
    world.annotate(ProcessRecoverStrategy=" recover,")
    assert world.take() == [signal("stopTrain", "stop_train", faults={3: "1"})]
    world.say(StopComplete(0))
    assert world.group == [{"ProcessConfirmFault": "3:1"}]
    assert (world.state, world.take()) == ("NotifyGlobalFaultState", [])
    world.annotate(ProcessResultFault="3:1, 5:1, nonsense, 7:9")
    faults = {**POD_1, 4: "1", 5: "1"}
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodes=(1, 2))]
    world.say(Strategies(("recover", "dump", "exit")))
    assert (world.state, world.take()) == ("NotifyDecidedStrategyState", [])
    world.annotate(RankTableReady="true")
    assert world.take() == [change("recover", faults=faults, nodes=(1, 2))]
    world.say(Status(0, "recover"))
    assert {"ProcessRecoverStatus": "recover-success"} in world.group
    assert {"ProcessConfirmFault": None} in world.group
    assert world.replaced == []  # that is the platform's business
    assert (world.state, world.outcome) == ("INIT", "recovered")


def test_retry() -> None:
    world = platform(wish="retry")
    world.say(ProcessFault({3: MEMORY}))
    world.say(StopComplete(0))
    world.annotate(ProcessResultFault="")
    assert world.take()[-1] == signal("globalFault", "on_global_rank", faults={3: "0"})
    world.say(Strategies(("retry", "exit")))
    assert world.take() == [change("retry", faults={3: "0"}, nodes=(1,))]


def test_the_platform_wants_no_retry() -> None:
    world = platform(wish="recover")
    world.say(ProcessFault({3: MEMORY}))
    world.say(StopComplete(0))
    world.take()
    world.annotate(ProcessResultFault="")
    assert world.take() == [signal("globalFault", "on_global_rank", "fault_nodes_exit", faults=POD_1, nodes=(1,))]


def test_the_platform_changes_its_mind() -> None:
    world = platform(wish="recover")
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0))
    world.annotate(ProcessRecoverStrategy="dump", ProcessResultFault="3:1")
    world.say(Strategies(("recover", "dump", "exit")))
    assert world.take()[-1] == change("dump", faults=POD_1, nodes=(1,))


def test_only_a_checkpoint() -> None:
    world = platform(wish="dump")
    world.say(ProcessFault({3: OTHER}))
    assert world.take() == [signal("saveAndExit", "save_and_exit", nodes=(1,))]
    world.say(Status(0, "dump"))
    assert world.take() == [change("exit", nodes=(1,), extra="dump_exit")]
    world.wait()
    assert (world.state, world.replaced) == ("INIT", [])


@pytest.mark.parametrize("ready", ["false", None])
def test_no_rank_table(ready: str | None) -> None:
    world = platform(wish="recover")
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0))
    world.annotate(ProcessResultFault="")
    world.say(Strategies(("recover", "dump", "exit")))
    world.take()
    world.job.annotations["ProcessRecoverStrategy"] = "dump"  # type: ignore[index]
    if ready is None:
        world.see()
        world.wait()
    else:
        world.annotate(RankTableReady=ready)
    assert world.take() == [change("dump", faults=POD_1, nodes=(1,))]


def test_the_platform_says_nothing() -> None:
    world = platform()
    world.say(ProcessFault({3: OTHER}))
    world.wait()
    assert {"process-recover-enable": "pause"} in world.group
    assert world.take() == [change("exit", nodes=(1,), extra="dump_exit")]
    world.wait()
    assert world.state == "INIT"  # the job runs, and the rest is the platform's business


def test_the_platform_does_not_confirm() -> None:
    world = platform(wish="recover")
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0))
    world.take()
    world.wait()
    assert world.take() == [change("exit", nodes=(1,), extra="dump_exit")]


def test_faults_while_the_platform_thinks_are_part_of_the_round() -> None:
    world = platform()
    world.say(ProcessFault({3: OTHER}))
    world.say(ProcessFault({5: OTHER}))
    world.annotate(ProcessRecoverStrategy="recover")
    assert world.take() == [signal("stopTrain", "stop_train", faults={3: "1", 5: "1"})]
