"""Every signal of ClusterD, every report of agents and workers: what the manager orders, in which order."""

from __future__ import annotations

import dataclasses
import json

import pytest

from evertrain.taskd import frames
from evertrain.taskd.frames import FaultReport
from evertrain.taskd.manager import orders as o
from evertrain.taskd.manager.decide import Decisions, Ended
from evertrain.taskd.manager.orders import End, NicReply, Order, Signal, StressReply, ToAgent, ToController, ToWorker
from evertrain.taskd.net.routing import Position
from evertrain.taskd.tracing import KINDS, switch

AGENTS = [Position("Agent", str(node)) for node in range(3)]


def job(recovers: bool = True, nodes: int = 3, restarts: int = 32767) -> Decisions:
    mind = Decisions("job-1", nodes, recovers)
    for agent in AGENTS[:nodes]:
        assert mind.heard(agent, frames.body("REGISTER", 0, "", {}), 0.0) == []
        mind.heard(agent, frames.body("STATUS", 201, str(restarts), {}), 0.0)
        for rank in (2 * int(agent.server), 2 * int(agent.server) + 1):
            mind.heard(Position("Worker", agent.server, str(rank)), frames.body("REGISTER", 101), 0.0)
    return mind


def register(mind: Decisions, node: int, now: float) -> None:
    mind.heard(AGENTS[node], frames.body("REGISTER", 0, "", {}), now)


def told(orders: list[Order]) -> list[str]:
    """Orders in short."""
    return [_short(order) for order in orders]


def _short(order: Order) -> str:
    match order:
        case ToAgent(node, body):
            return f"agent {node}: {body.code} {body.message}".rstrip()
        case ToWorker(rank, body):
            return f"worker {rank}: {body.code}"
        case ToController():
            faults = f" {dict(order.faults)}" if order.faults else ""
            words = [order.action, order.strategy, order.params, str(order.timeout or "")]
            return "controller: " + " ".join(word for word in words if word) + faults
    return str(order)


def signal(kind: str, *actions: str, **fields: object) -> Signal:
    return Signal(kind, uuid="u", job="job-1", actions=actions, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "orders"),
    [
        (signal("keep-alive"), []),
        (signal("preExitProcess", "pre exit process", faults={2: 1, 3: 1}, nodes=(1,)), ['agent 1: 213 ["2","3"]']),
        (signal("stopTrain", "stop_train", faults={2: 1}), ["controller: stop_train {2: 1}"]),
        (signal("stopTrain", "pause_train", timeout=900), ["controller: pause_train 900"]),
        (
            signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={2: 1, 3: 1}, nodes=(1,)),
            ["controller: on_global_rank {2: 1, 3: 1}", "agent 1: 203"],
        ),
        (
            signal("globalFault", "on_global_rank", faults={2: 2}, timeout=33),
            ["controller: on_global_rank 33 {2: 2}"],
        ),
        (
            signal("globalFault", "on_global_rank", "fault_nodes_restart", faults={2: 1}, nodes=(1,)),
            ["controller: on_global_rank {2: 1}", 'agent 1: 209 ["2"]'],
        ),
        (signal("changeStrategy", "change_strategy", strategy="retry"), ["controller: change_strategy retry"]),
        (signal("changeStrategy", "change_strategy", strategy="dump"), ["controller: change_strategy dump"]),
        (signal("changeStrategy", "change_strategy", strategy="continue"), ["controller: change_strategy continue"]),
        (signal("changeStrategy", "change_strategy", strategy="migration"), ["controller: change_strategy migration"]),
        (
            signal("changeStrategy", "change_strategy", strategy="recover", nodes=(1,)),
            ["agent 1: 203", "controller: change_strategy recover"],
        ),
        (
            signal(
                "changeStrategy", "change_strategy", "fault_nodes_restart",
                strategy="recover", extra="recover-in-place", faults={2: 1}, nodes=(1,),
            ),
            ["controller: change_strategy recover", 'agent 1: 209 ["2"]'],
        ),
        (
            signal("changeStrategy", "change_strategy", strategy="downgrade", extra='{"scale-in-strategy": "DP"}'),
            ['controller: change_strategy downgrade {"scale-in-strategy": "DP"}'],
        ),
        (
            signal("changeStrategy", "change_strategy", strategy="upgrade", extra='{"scale-out-strategy": "DP"}'),
            ['controller: change_strategy upgrade {"scale-out-strategy": "DP"}'],
        ),
        (
            signal("changeStrategy", "change_strategy", strategy="exit", extra="dump_exit", nodes=(1,)),
            [
                "controller: change_strategy exit", "agent 1: 203", "agent 0: 208 32766", "agent 2: 208 32766",
                "controller: restart_controller",
            ],
        ),
        (signal("faultNodesExit", "fault_nodes_exit", nodes=(1, 2)), ["agent 1: 203", "agent 2: 203"]),
        (signal("saveAndExit", "save_and_exit", nodes=(1,)), ["controller: save_and_exit", "agent 1: 203"]),
        (signal("hot-switch", "hot switch", faults={2: 1, 3: 1}), ["controller: hot switch {2: 1, 3: 1}"]),
        (signal("hot-switch", "new pod running"), ["controller: new pod running"]),
        (signal("hot-switch", "stop switch"), ["controller: stop switch"]),
        (signal("killMaster"), ["controller: destroy_controller", "agent 0: 203"]),
        (signal("strange"), []),
        (signal("changeStrategy", "change_strategy", strategy="strange"), []),
        (Signal("stopTrain", uuid="u", job="another", actions=("stop_train",)), []),
    ],
    ids=lambda each: f"{each.type} {' '.join(each.actions)} {each.strategy}" if isinstance(each, Signal) else "",
)  # fmt: skip
def test_every_signal_means_what_the_reference_says(given: Signal, orders: list[str]) -> None:
    assert told(job().signal(given)) == orders


def test_signals_in_a_burst_hide_nothing_and_repeat_nothing() -> None:
    mind = job()
    burst = [
        signal("stopTrain", "stop_train", faults={2: 1}),
        signal("globalFault", "on_global_rank", faults={2: 1}),
        signal("stopTrain", "stop_train", faults={2: 1}),
        signal("changeStrategy", "change_strategy", strategy="downgrade"),
        signal("changeStrategy", "change_strategy", strategy="upgrade"),
        signal("killMaster"),
    ]
    assert told([order for each in burst for order in mind.signal(each)]) == [
        "controller: stop_train {2: 1}",
        "controller: on_global_rank {2: 1}",
        "controller: change_strategy downgrade",
        "controller: change_strategy upgrade",
        "controller: destroy_controller",
        "agent 0: 203",
    ]
    assert told(mind.signal(Signal("stopTrain", uuid="next", actions=("stop_train",)))) == ["controller: stop_train"]


def test_the_exit_of_an_agent_says_what_it_is_for() -> None:
    (order,) = job().signal(signal("faultNodesExit", "fault_nodes_exit", nodes=(1,)))
    assert isinstance(order, ToAgent)
    assert order.body.extension == {"SignalType": "faultNodesExit", "Actions": '["fault_nodes_exit"]'}


# Starting.


def start(mind: Decisions, node: int, restarts: int) -> list[str]:
    return told(mind.heard(AGENTS[node], frames.body("STATUS", 201, str(restarts), {}), 0.0))


def test_an_agent_that_starts_gets_the_restarts_of_the_job() -> None:
    mind = Decisions("job-1", 2, False)
    assert start(mind, 0, 5) == ["agent 0: 210 5"]
    assert start(mind, 1, 9) == ["agent 1: 210 5"]
    mind.pods.restarts = 0
    assert start(mind, 1, 9) == ["agent 1: 210 0"], "none left is not the same as unknown"


def test_agents_wait_for_their_start_while_it_is_paused() -> None:
    mind = job()
    mind.signal(signal("pauseStartAgent", "pause_start_agent"))
    assert start(mind, 1, 7) == []
    assert told(mind.signal(signal("continueStartAgent", "continue_start_agent"))) == ["agent 1: 210 32767"]
    assert start(mind, 1, 7) == ["agent 1: 210 32767"]


def test_agents_do_not_wait_for_longer_than_any_stress_test_takes(caplog: pytest.LogCaptureFixture) -> None:
    mind = job()
    mind.signal(signal("pauseStartAgent", "pause_start_agent"), 100.0)
    mind.signal(signal("pauseStartAgent", "pause_start_agent"), 200.0)
    assert start(mind, 1, 7) == []
    assert mind.deadline == 200 + 900 and mind.tick(1099.0) == []
    assert told(mind.tick(1100.0)) == ["agent 1: 210 32767"]
    assert "agents need not wait for their start any more" in caplog.text and "nodes [1]" in caplog.text
    assert mind.deadline is None and start(mind, 2, 7) == ["agent 2: 210 32767"]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_clusterd_that_is_there_anew_has_to_say_again_that_agents_wait(repeated: bool) -> None:
    mind = job()
    mind.subscribed(0.0)
    assert mind.deadline is None
    mind.signal(signal("pauseStartAgent", "pause_start_agent"), 0.0)
    start(mind, 1, 7)
    mind.subscribed(100.0)
    assert mind.deadline == 105
    if repeated:
        mind.signal(signal("pauseStartAgent", "pause_start_agent"), 101.0)
        assert mind.deadline == 101 + 900
    else:
        assert told(mind.tick(105.0)) == ["agent 1: 210 32767"]


# Faults without process-level recovery.


def fault(mind: Decisions, node: int, ranks: list[int], restarts: int = -1, now: float = 0.0) -> list[str]:
    return told(mind.heard(AGENTS[node], frames.body("STATUS", 202, FaultReport(ranks, restarts).encode()), now))


def test_a_fault_on_node_0_ends_it() -> None:
    mind = job(recovers=False)
    assert fault(mind, 0, [1]) == ["agent 0: 203"]
    assert fault(mind, 0, [0, 1]) == [], "it was told once"


def test_a_fault_on_another_node_replaces_its_pod_and_restarts_the_others() -> None:
    mind = job(recovers=False, restarts=5)
    restart = ["agent 1: 203", "agent 0: 208 4", "agent 2: 208 4", "controller: restart_controller"]
    assert fault(mind, 1, [2], 5) == restart
    assert fault(mind, 1, []) == [], "its farewell"
    assert fault(mind, 2, [4, 5], 5) == [], "its processes failed because of the first fault; it restarts anyway"
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {}), 1.0)
    assert start(mind, 1, 5) == ["agent 1: 210 4"]
    assert fault(mind, 2, [4], 4) == [
        "agent 2: 203",
        "agent 0: 208 3",
        "agent 1: 208 3",
        "controller: restart_controller",
    ]


def test_agents_of_mindspore_restart_as_often_as_it_takes() -> None:
    """They say that they have one restart, and go on when there is none."""
    mind = job(recovers=False, restarts=1)
    for left in (1, 0, -1, -2):
        (leaves, *others) = fault(mind, 1, [2], left)
        assert leaves == "agent 1: 203" and others[0] == f"agent 0: 208 {left - 1}"
        if left != -1:  # as those say who don't know
            assert fault(mind, 2, [4], left) == [], "it has crossed the restart"
        register(mind, 1, 1.0)
        assert start(mind, 1, 1) == [f"agent 1: 210 {left - 1}"]


def test_when_no_restart_is_left_all_agents_hear_it() -> None:
    mind = job(recovers=False, restarts=0)
    assert "agent 0: 208 -1" in fault(mind, 1, [2], 0)


def test_a_pod_that_was_deleted_restarts_all_but_a_pod_that_we_replaced_does_not() -> None:
    mind = job(recovers=False, restarts=9)
    assert mind.retried(3) == [], "what was before us"
    assert told(mind.retried(4))[:3] == ["agent 0: 208 8", "agent 1: 208 8", "agent 2: 208 8"]
    fault(mind, 1, [2], 8)
    assert mind.retried(5) == [], "that was ours"
    assert mind.retried(5) == []
    assert "agent 0: 208 6" in told(mind.retried(6))


def test_a_scheduler_that_counts_only_what_it_deletes_is_believed() -> None:
    """A pod that ended by itself was not counted. When a deleted one is, the first has long been replaced."""
    mind = job(recovers=False, restarts=9)
    assert mind.retried(0) == []
    fault(mind, 1, [2], 9)
    register(mind, 1, now=100.0)
    assert "agent 0: 208 7" in told(mind.retried(1, counted=101.0))
    assert "agent 0: 208 6" in told(mind.retried(2, counted=102.0)), "nothing is left to be counted"


def test_a_count_that_comes_late_is_still_ours() -> None:
    """The file in the pod is older than what the scheduler has written."""
    mind = job(recovers=False, restarts=9)
    assert mind.retried(0) == []
    fault(mind, 1, [2], 9)
    assert mind.retried(1, counted=90.0) == [], "before the new pod is there"
    register(mind, 1, now=95.0)
    fault(mind, 1, [2], 8)
    register(mind, 1, now=100.0)
    assert mind.retried(2, counted=99.0) == []
    assert "agent 0: 208 6" in told(mind.retried(3, counted=99.0)), "one more than we have ordered"


def test_with_process_recovery_the_scheduler_s_count_is_no_reason_to_start_again() -> None:
    mind = job(recovers=True)
    assert mind.retried(0) == [] and mind.retried(1) == []


def test_with_process_recovery_an_unhandled_fault_on_node_0_ends_the_job_after_a_while() -> None:
    mind = job()
    assert fault(mind, 0, [1], now=100.0) == ["controller: process_ended {1: 1}"]
    assert fault(mind, 1, []) == [], "it only leaves"
    assert mind.deadline == 100.0 + 25 * 60
    assert told(mind.tick(mind.deadline)) == ["controller: destroy_controller", "agent 0: 203"]
    assert mind.deadline is None and mind.tick(1e9) == []


@pytest.mark.parametrize("heal", ["in place", "recovered", "registered"])
def test_a_fault_on_node_0_that_was_handled_does_not_end_the_job_later(heal: str) -> None:
    mind = job()
    fault(mind, 0, [1], now=100.0)
    if heal == "in place":
        mind.signal(signal("changeStrategy", "change_strategy", strategy="recover", extra=o.IN_PLACE, nodes=(0,)))
    elif heal == "recovered":
        mind.recovered()
    else:
        mind.heard(AGENTS[0], frames.body("REGISTER", 0, "", {}), 1.0)
    assert mind.deadline is None


def test_a_report_that_has_crossed_the_order_to_replace_its_processes_says_nothing_about_those_that_follow() -> None:
    mind = job()

    def reported(replaced: int) -> list[str]:
        extension = {frames.REPLACED: str(replaced)}
        return told(mind.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([3]).encode(), extension), 1.0))

    assert reported(0) == ["controller: process_ended {3: 1}"]
    fields = {"strategy": "recover", "extra": o.IN_PLACE, "nodes": (1,), "faults": {3: 1}}
    assert "agent 1: 209" in told(mind.signal(signal("changeStrategy", "change_strategy", **fields)))[1]
    assert reported(0) == []
    assert reported(1) == ["controller: process_ended {3: 1}"], "the replacement has failed"
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {}), 1.0)
    assert reported(0) == ["controller: process_ended {3: 1}"], "another agent"


def test_what_an_agent_says_that_was_told_to_leave_is_not_about_the_pod_that_follows() -> None:
    mind = job()
    fields = {"strategy": "recover", "nodes": (1,), "faults": {2: 1, 3: 1}}
    assert told(mind.signal(signal("changeStrategy", "change_strategy", **fields)))[0] == "agent 1: 203"
    assert fault(mind, 1, [2, 3]) == []
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {}), 1.0)
    assert fault(mind, 1, [2]) == ["controller: process_ended {2: 1}"]


def test_processes_of_a_new_pod_that_have_failed_already_are_started_again_although_nobody_names_their_node() -> None:
    """ClusterD waits for those of the new first pod to come; it can't know that one of them is gone again."""
    mind = job()
    fault(mind, 0, [1])
    anew = dict(strategy="recover", extra="recover-in-place", faults={0: 1, 1: 1})
    orders = told(mind.signal(signal("changeStrategy", "change_strategy", "fault_nodes_restart", **anew)))
    assert orders == ["controller: change_strategy recover", 'agent 0: 209 ["1"]']
    again = dataclasses.replace(signal("changeStrategy", "change_strategy", "fault_nodes_restart", **anew), uuid="v")
    assert told(mind.signal(again)) == ["controller: change_strategy recover"], "it was told"


def test_a_process_that_failed_in_a_pod_that_leaves_is_not_started_again() -> None:
    mind = job()
    fault(mind, 1, [3])
    leaving = signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={2: 1, 3: 1}, nodes=(1,))
    mind.signal(leaving)
    staying = dict(strategy="recover", extra="recover-in-place", faults={1: 1, 2: 1, 3: 1}, nodes=(0,))
    orders = told(mind.signal(signal("changeStrategy", "change_strategy", "fault_nodes_restart", **staying)))
    assert orders == ["controller: change_strategy recover", 'agent 0: 209 ["1","2","3"]']


def test_processes_that_no_agent_starts_are_not_waited_for() -> None:
    mind = job()
    ranks = frames.ranks_text([1, 2, 3])
    order = frames.body("ACTION", 209, ranks)
    assert told(mind.not_told(1, order, 2)) == ["controller: not_replaced {2: 1, 3: 1}"], "others are not its own"
    assert mind.not_told(1, frames.body("ACTION", 213, ranks), 2) == []
    assert job(recovers=False).not_told(1, order, 2) == []
    mind.signal(signal("faultNodesExit", "fault_nodes_exit", nodes=(1,)))
    assert mind.not_told(1, order, 2) == [], "those of another pod are waited for by now"


def lost(mind: Decisions, orders: list[Order]) -> None:
    """None of them arrives."""
    bodies = [(order.node, mind.addressed(order)) for order in orders if isinstance(order, ToAgent)]
    for node, body in bodies:
        mind.not_told(node, body, 2)


@pytest.mark.parametrize("recovers", [True, False])
def test_an_agent_that_could_not_be_told_to_restart_is_told_when_it_is_there_again(recovers: bool) -> None:
    mind = job(recovers, restarts=5)
    lost(mind, mind.pods.restart((1,)))
    assert sign(mind, 2, []) == ["agent 2: 208 4"] and sign(mind, 0, []) == ["agent 0: 208 4"]
    assert sign(mind, 2, []) == [], "once, as it may be on its way"
    assert sign(mind, 1, []) == [], "it was to leave"


def test_nor_is_the_start_or_the_end_of_processes_forgotten() -> None:
    mind = job(restarts=5)
    lost(mind, mind.heard(AGENTS[1], frames.body("STATUS", 201, "5", {}), 0.0))
    lost(mind, mind.signal(signal("preExitProcess", "pre exit process", faults={4: 1, 5: 1}, nodes=(2,))))
    assert alive(mind, 1, 5, running=False) == [("agent 1: 210 5", 0)]
    assert sign(mind, 2, [4])[-1] == 'agent 2: 213 ["4","5"]'


def test_what_was_obeyed_is_not_ordered_again_although_the_answer_was_lost() -> None:
    mind = job(restarts=5)
    lost(mind, [o.start_agent(0, 5), *o.restart_agents((1,), 4), *o.stop_workers((2,), (4,))])
    mind.pods.restarts = 4
    fault(mind, 2, [4], 4)
    assert sign(mind, 0, []) == sign(mind, 1, [], 4) == sign(mind, 2, [4], 4) == []


def test_an_order_that_was_lost_is_not_repeated_to_another_agent_or_after_a_newer_one() -> None:
    mind = job(restarts=5)
    lost(mind, o.restart_agents((1,), 4))
    register(mind, 1, 1.0)
    assert sign(mind, 1, []) == []
    lost(mind, o.restart_agents((1,), 4))
    for newer in o.stop_workers((1,), (2,)):
        assert isinstance(newer, ToAgent) and mind.addressed(newer)
    assert sign(mind, 1, []) == []
    first, second = (mind.addressed(ToAgent(1, frames.body("ACTION", 208, left))) for left in "43")
    mind.not_told(1, first, 2)
    assert sign(mind, 1, []) == [], "the second is on its way"
    mind.not_told(1, second, 2)
    assert sign(mind, 1, []) == ["agent 1: 208 3"]


def test_processes_are_not_stopped_any_more_when_the_training_goes_on() -> None:
    mind = job(restarts=5)
    lost(mind, o.stop_workers((1,), (2,)))
    mind.recovered()
    assert sign(mind, 1, []) == []


def test_a_pod_that_stood_by_takes_the_place_of_an_agent_that_has_not_left_yet() -> None:
    mind = job()
    exits = {"faults": {2: 1, 3: 1}, "nodes": (1,)}
    assert "agent 1: 203" in told(mind.signal(signal("globalFault", "on_global_rank", "fault_nodes_exit", **exits)))

    def says(agent: str, kind: str, code: int, text: str = "") -> list[str]:
        return told(mind.heard(AGENTS[1], frames.body(kind, code, text, {frames.AGENT_ID: agent}), 1.0))

    says("new", "REGISTER", 0)
    change = signal("changeStrategy", "change_strategy", "fault_nodes_exit", strategy="recover", nodes=(1,))
    assert told(mind.signal(change)) == ["controller: change_strategy recover"], "the one before is meant"
    assert says("new", "STATUS", 201, "32767") == ["agent 1: 210 32767"]
    assert says("old", "STATUS", 202, FaultReport([2]).encode()) == []
    assert says("old", "STATUS", 202, FaultReport([]).encode()) == [], "its farewell"
    again = dataclasses.replace(signal("globalFault", "fault_nodes_exit", nodes=(1,)), uuid="another")
    assert told(mind.signal(again)) == ["agent 1: 203"], "it has not left"


def test_a_new_pod_whose_repair_failed_starts_again_with_the_others() -> None:
    """ClusterD names every pod that was at fault, the replaced one too. Told to nothing, it would keep all waiting."""
    mind = job()
    mind.signal(signal("stopTrain", "stop_train", faults={2: 1, 3: 1}))
    mind.signal(signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={2: 1, 3: 1}, nodes=(1,)))
    register(mind, 1, 5.0)
    strategy = signal("changeStrategy", "change_strategy", strategy="exit", faults={2: 1, 3: 1}, nodes=(1, 2))
    assert told(mind.signal(strategy)) == [
        "controller: change_strategy exit", "agent 2: 203", "agent 0: 208 32766", "agent 1: 208 32766",
        "controller: restart_controller",
    ]  # fmt: skip
    assert mind.signal(strategy) == [], "the same again, after a connection that broke"
    failed = frames.body("STATUS", 202, FaultReport([3], 32766).encode(), {})
    assert told(mind.heard(AGENTS[1], failed, 9.0)) == ["controller: process_ended {3: 1}"], "it is listened to"


def test_a_pod_that_stood_by_takes_the_place_before_the_manager_hears_that_its_agent_is_to_exit() -> None:
    mind = job()
    before = mind.addressed(ToAgent(1, frames.body("ACTION", 203)))
    assert before.extension is None, "an agent that did not stand by is told what it always was"
    mind.signal(signal("stopTrain", "stop_train", faults={3: 1}))
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {frames.AGENT_ID: "new"}), 1.0)
    exits = signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={2: 1, 3: 1}, nodes=(1,))
    assert told(mind.signal(exits)) == ["controller: on_global_rank {2: 1, 3: 1}"], "the one before is meant"
    again = dataclasses.replace(exits, uuid="another")
    (order,) = [each for each in mind.signal(again) if isinstance(each, ToAgent)]
    assert mind.addressed(order).extension is not None
    assert mind.addressed(order).extension[frames.AGENT_ID] == "new"  # type: ignore[index]


def test_while_a_backup_gets_ready_the_agent_that_it_stands_in_for_is_heard() -> None:
    mind = job()
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {frames.AGENT_ID: "backup"}), 1.0)
    report = frames.body("STATUS", 202, FaultReport([3]).encode(), {frames.AGENT_ID: "old"})
    assert told(mind.heard(AGENTS[1], report, 1.0)) == ["controller: process_ended {3: 1}"]


def test_a_new_manager_learns_from_keep_alives_what_it_has_to_know() -> None:
    mind = Decisions("job-1", 3, False)
    for agent in AGENTS:
        mind.announced(agent)
    mind.heard(AGENTS[2], frames.body("KEEP_ALIVE", 0, FaultReport([], 4).encode()), 0.0)
    assert told(mind.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([2], 4).encode()), 0.0)) == [
        "agent 1: 203", "agent 0: 208 3", "agent 2: 208 3", "controller: restart_controller",
    ]  # fmt: skip


def alive(mind: Decisions, node: int, restarts: int, *, running: bool = True) -> list[tuple[str, int]]:
    """What follows from an agent's sign of life: orders, and how many nodes are said to be under way."""
    extension = {"RUNNING": "true"} if running else None
    sign = frames.body("KEEP_ALIVE", 0, FaultReport([], restarts).encode(), extension)
    return _with_under_way(mind.heard(AGENTS[node], sign, 0.0))


def sign(mind: Decisions, node: int, failed: list[int], restarts: int = 5, **extension: str) -> list[str]:
    """A sign of life that names what has failed."""
    body = frames.body("KEEP_ALIVE", 0, FaultReport(failed, restarts).encode(), {"RUNNING": "true", **extension})
    return told(mind.heard(AGENTS[node], body, 0.0))


@pytest.mark.parametrize("anew", [False, True])
def test_a_report_of_faults_that_this_manager_never_got_is_made_up_for_by_the_next_sign_of_life(anew: bool) -> None:
    ended: list[Ended] = []
    mind = Decisions("job-1", 3, True, ended.append) if anew else job()
    mind._tell_ended = ended.append
    ends = frames.ends_text({3: frames.ProcessEnd(-9, "killed")})
    assert sign(mind, 1, [3], PROCESS_ENDS=ends) == ["controller: process_ended {3: 1}"]
    assert [(each.ranks, dict(each.ends)) for each in ended] == [((3,), {3: frames.ProcessEnd(-9, "killed")})]
    assert sign(mind, 1, [3], PROCESS_ENDS=ends) == [], "said once"
    assert sign(mind, 1, [2, 3]) == ["controller: process_ended {2: 1, 3: 1}"]


def test_signs_of_life_repeat_no_fault_that_is_known_or_mended() -> None:
    mind = job(restarts=5)
    assert fault(mind, 1, [3], 5) == ["controller: process_ended {3: 1}"]
    assert sign(mind, 1, [3], REPLACED="0") == []
    fields = {"strategy": "recover", "extra": o.IN_PLACE, "nodes": (1,), "faults": {3: 1}}
    mind.signal(signal("changeStrategy", "change_strategy", **fields))
    assert sign(mind, 1, [3], REPLACED="0") == [], "it has crossed the order"
    assert sign(mind, 1, [3], REPLACED="1") == ["controller: process_ended {3: 1}"], "the replacement has failed, too"
    mind.recovered()
    assert sign(mind, 1, [3], REPLACED="1") == []
    mind.pods.restarts = 4
    assert sign(mind, 1, [3]) == [], "it has crossed a restart of all"
    mind.signal(signal("globalFault", "fault_nodes_exit", nodes=(1,)))
    assert sign(mind, 1, [2, 3], 4) == [], "it leaves"


def test_what_an_agent_has_said_before_is_not_said_again_of_the_processes_of_its_backup() -> None:
    mind = job(restarts=5)
    assert fault(mind, 1, [3], 5) == ["controller: process_ended {3: 1}"]
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {frames.AGENT_ID: "backup"}), 1.0)
    assert sign(mind, 1, [3]) == []
    assert sign(mind, 1, [2], AGENT_ID="backup") == ["controller: process_ended {2: 1}"]


def test_where_pods_are_the_unit_a_sign_of_life_with_a_fault_replaces_the_pod_once() -> None:
    mind = job(recovers=False, restarts=5)
    restart = ["agent 1: 203", "agent 0: 208 4", "agent 2: 208 4", "controller: restart_controller"]
    assert sign(mind, 1, [3]) == restart
    assert sign(mind, 1, [3]) == sign(mind, 2, [5]) == []


def asks(mind: Decisions, node: int, restarts: int) -> list[tuple[str, int]]:
    mind.heard(AGENTS[node], frames.body("REGISTER", 0, "", {}), 0.0)
    return _with_under_way(mind.heard(AGENTS[node], frames.body("STATUS", 201, str(restarts), {}), 0.0))


def _with_under_way(orders: list[Order]) -> list[tuple[str, int]]:
    return [(_short(order), frames.under_way(order.body)) for order in orders if isinstance(order, ToAgent)]


def test_the_agent_of_a_new_first_pod_hears_that_the_job_is_under_way() -> None:
    mind = Decisions("job-1", 3, True)
    assert alive(mind, 1, 4) == []
    assert asks(mind, 0, 32767) == [("agent 0: 210 4", 3)]
    assert alive(mind, 2, 4) == [], "it has been told"


def test_it_hears_so_too_when_the_others_find_the_new_manager_later() -> None:
    mind = Decisions("job-1", 3, True)
    assert asks(mind, 0, 32767) == [("agent 0: 210 32767", 0)]
    assert alive(mind, 1, 32767, running=False) == [], "that one waits for its start"
    assert alive(mind, 2, 4) == [("agent 0: 210 4", 3)]
    assert alive(mind, 2, 4) == alive(mind, 0, 4) == []


def test_where_all_start_together_nobody_is_told_that_the_job_is_under_way() -> None:
    mind = Decisions("job-1", 3, True)
    assert [asks(mind, node, 5) for node in (0, 1, 2)] == [[(f"agent {node}: 210 5", 0)] for node in (0, 1, 2)]
    assert alive(mind, 1, 5) == alive(mind, 0, 5) == []
    mind.pods.restart((2,))
    assert asks(mind, 2, 5) == [("agent 2: 210 4", 0)], "the others start again, too"
    assert alive(mind, 1, 5) == [], "a word from before"
    assert asks(mind, 2, 5) == [("agent 2: 210 4", 0)]
    assert alive(mind, 1, 4) == []
    assert asks(mind, 2, 5) == [("agent 2: 210 4", 3)]


def test_where_pods_are_the_unit_a_new_one_meets_all_others() -> None:
    mind = Decisions("job-1", 3, False)
    assert asks(mind, 0, 5) == [("agent 0: 210 5", 0)]
    assert alive(mind, 1, 5) == []
    assert asks(mind, 0, 5) == [("agent 0: 210 5", 0)]


def test_a_new_manager_does_not_wait_for_agents_that_had_ended_before() -> None:
    mind = Decisions("job-1", 3, False)
    for agent in AGENTS[:2]:
        mind.heard(agent, frames.body("KEEP_ALIVE", 0, FaultReport([], 5).encode()), 0.0)
    assert mind.heard(AGENTS[0], frames.body("STATUS", 203, "0", {}), 0.0) == []
    assert [type(each) for each in mind.heard(AGENTS[1], frames.body("STATUS", 203, "0", {}), 0.0)] == [End]


def test_a_manager_whose_pod_ends_is_over_too() -> None:
    mind = job()
    assert told(mind.signal(signal("killMaster"))) == ["controller: destroy_controller", "agent 0: 203"]
    (end,) = mind.heard(AGENTS[0], frames.body("STATUS", 202, FaultReport([], 5).encode()), 0.0)
    assert isinstance(end, End) and not end.ok


def test_an_agent_that_has_said_farewell_is_told_nothing_more_but_its_successor_is() -> None:
    mind = job(nodes=2)
    leave = signal("faultNodesExit", "fault_nodes_exit", nodes=(1,))
    assert told(mind.signal(leave)) == ["agent 1: 203"]
    assert fault(mind, 1, []) == []
    restart = signal("changeStrategy", "change_strategy", strategy="exit", nodes=(1,), extra="dump_exit")
    assert [each for each in told(mind.signal(restart)) if "agent" in each] == ["agent 0: 208 32766"]
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {}), 1.0)
    assert told(mind.signal(dataclasses.replace(leave, uuid="v"))) == ["agent 1: 203"]


def test_the_job_is_over_when_all_agents_have_succeeded() -> None:
    mind = job()
    ends = [mind.heard(agent, frames.body("STATUS", 203, "0", {}), 0.0) for agent in AGENTS]
    assert ends[:2] == [[], []] and isinstance(ends[2][0], End)


def test_the_job_is_not_over_before_all_nodes_have_come() -> None:
    mind = Decisions("job-1", 2, True)
    mind.heard(AGENTS[0], frames.body("REGISTER", 0, "", {}), 0.0)
    assert mind.heard(AGENTS[0], frames.body("STATUS", 203, "0", {}), 0.0) == []


def test_an_agent_that_has_ended_is_not_told_to_start_again() -> None:
    mind = job(recovers=False)
    mind.heard(AGENTS[2], frames.body("STATUS", 203, "0", {}), 0.0)
    assert fault(mind, 1, [2]) == ["agent 1: 203", "agent 0: 208 32766", "controller: restart_controller"]


def test_a_restart_of_all_deals_with_the_fault_on_node_0() -> None:
    mind = job()
    fault(mind, 0, [1], now=100.0)
    mind.signal(signal("changeStrategy", "change_strategy", strategy="exit"))
    assert mind.deadline is None


def test_the_start_of_an_agent_that_was_replaced_meanwhile_is_not_made_up_for() -> None:
    mind = job()
    mind.signal(signal("pauseStartAgent", "pause_start_agent"))
    assert start(mind, 1, 7) == []
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {}), 0.0)
    assert mind.signal(signal("continueStartAgent", "continue_start_agent")) == [], "it will ask by itself"


def test_an_agent_that_failed_is_not_a_success() -> None:
    mind = job()
    for agent, code in zip(AGENTS, ("0", "1", "0"), strict=True):
        assert mind.heard(agent, frames.body("STATUS", 203, code, {}), 0.0) == []


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (dict.fromkeys(KINDS, "off"), 700), (dict.fromkeys(KINDS, "on"), 711),
        ({**dict.fromkeys(KINDS, "off"), "Step": "on"}, 710), ({**dict.fromkeys(KINDS, "off"), "FP": "OFF"}, 710),
        (dict.fromkeys(KINDS[1:], "off"), 710), ({"CommunicationOperator": "on"}, 711), ({}, 710),
    ],
)  # fmt: skip
def test_the_default_domain_is_off_only_if_all_are_said_to_be(values: dict[str, str], code: int) -> None:
    assert switch(values).code == code


def test_a_new_manager_tells_processes_that_were_there_before_it_which_timings_to_write() -> None:
    off = dict.fromkeys(KINDS, "off")
    for wanted, code in ((off, 700), ({**off, "Step": "on"}, 710)):
        mind = Decisions("job-1", 1, True)
        mind.announced(Position("Worker", "0", "1"))
        mind.heard(Position("Worker", "0", "0"), frames.body("REGISTER", 101), 0.0)
        told_all = [f"worker 0: {code}"] if code != 700 else []
        assert told(mind.profile(wanted, 0.0)) == [*told_all, f"worker 1: {code}"], "a new process writes none"
        assert mind.profile(wanted, 1.0) == []
        mind.heard(Position("Worker", "0", "1"), frames.body("STATUS", 700 + code, ""), 2.0)
        assert code != 700 or mind.deadline is None


def test_members_that_no_job_has_do_not_keep_it_from_ending() -> None:
    mind = job(nodes=1)
    for ghost in (Position("Agent", "5000"), Position("Agent", "999999999"), Position("Worker", "0", "1000000")):
        mind.announced(ghost)
        assert mind.heard(ghost, frames.body("REGISTER", 0), 0.0) == []
    assert isinstance(mind.heard(AGENTS[0], frames.body("STATUS", 203, "0", {}), 0.0)[0], End)


@pytest.mark.parametrize("text", ["", "²", "--5", "-", "9" * 5000, "one", " 0"])
def test_numbers_that_are_none(text: str) -> None:
    mind = job(nodes=1)
    assert mind.heard(AGENTS[0], frames.body("STATUS", 201, text, {}), 0.0) == []
    assert mind.heard(AGENTS[0], frames.body("STATUS", 203, text, {}), 0.0) == []
    assert mind.pods.agents[0].ended == 1
    for who in (Position("Agent", text), Position("Worker", "0", text), Position("Worker", text, "0")):
        mind.announced(who)
        assert mind.heard(who, frames.body("REGISTER", 0), 0.0) == []
    assert list(mind.pods.agents) == [0] and mind.worker(0) == Position("Worker", "0", "0")


# A job that goes on without a node.


def without_node_1(*, said: bool = True) -> Decisions:
    mind = job(nodes=2)
    assert told(mind.signal(signal("faultNodesExit", "fault_nodes_exit", nodes=(1,)))) == ["agent 1: 203"]
    if said:
        assert fault(mind, 1, []) == []
    else:
        assert mind.not_told(1, frames.body("ACTION", 203), 2) == []
    return mind


def ends(mind: Decisions, node: int, code: int = 0) -> list[Order]:
    return mind.heard(AGENTS[node], frames.body("STATUS", 203, str(code), {}), 0.0)


@pytest.mark.parametrize("said", [True, False], ids=["its agent has left", "its agent is dead"])
def test_a_job_that_went_on_without_a_node_ends_without_it(said: bool) -> None:
    (end,) = ends(without_node_1(said=said), 0)
    assert isinstance(end, End) and end.ok


def test_the_last_agent_that_leaves_may_do_so_after_all_others_have_succeeded() -> None:
    mind = job(nodes=2)
    mind.signal(signal("faultNodesExit", "fault_nodes_exit", nodes=(1,)))
    assert ends(mind, 0) == [], "it has not left yet"
    (end,) = mind.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([]).encode()), 0.0)
    assert isinstance(end, End) and end.ok


def test_a_node_that_is_back_counts_again() -> None:
    mind = without_node_1()
    register(mind, 1, 1.0)
    assert ends(mind, 0) == []
    (end,) = ends(mind, 1)
    assert isinstance(end, End) and end.ok


def test_a_pod_that_is_replaced_on_our_order_is_waited_for() -> None:
    mind = job(recovers=False, nodes=2)
    fault(mind, 1, [2])
    fault(mind, 1, [])
    assert ends(mind, 0) == []


def test_when_all_agents_leave_that_is_no_success() -> None:
    mind = job(nodes=2)
    for node in (1, 0):
        orders = mind.heard(AGENTS[node], frames.body("STATUS", 202, FaultReport([]).encode()), 0.0)
    (end,) = orders
    assert isinstance(end, End) and not end.ok


@pytest.mark.parametrize("said", [True, False], ids=["its agent has left", "its agent is dead"])
def test_nobody_asks_the_processes_of_a_node_that_has_left_for_anything(said: bool) -> None:
    mind = without_node_1(said=said)
    assert told(mind.switch_nics("s1", "job-1", ["0"], [True], 0.0)) == ["worker 0: 204", "worker 1: 204"]
    assert [nic_result(mind, rank, "switchOK") for rank in (0, 1)] == [[], [NicReply("job-1", True)]]
    assert told(mind.profile({**OFF, "Step": "on"}, 0.0)) == ["worker 0: 710", "worker 1: 710"]
    (refused,) = mind.stress_test("t1", "job-1", {3: [0]}, 0.0)
    assert refused == StressReply("job-1", {"3": {"0": ("3", "worker is not registered")}})


def test_what_the_processes_of_a_node_were_to_do_fails_when_it_leaves() -> None:
    mind = job(nodes=2)
    mind.switch_nics("s1", "job-1", ["0"], [True], 0.0)
    mind.profile({**OFF, "Step": "on"}, 0.0)
    farewell = frames.body("STATUS", 202, FaultReport([]).encode())
    assert mind.heard(AGENTS[1], farewell, 0.0) == [NicReply("job-1", False)]
    assert told(mind.tick(30.0)) == ["worker 0: 710", "worker 1: 710"], "nobody tells the others again and again"


def test_a_backup_s_processes_stay_when_the_agent_leaves_that_it_stood_in_for() -> None:
    mind = job(nodes=2)
    mind.heard(AGENTS[1], frames.body("REGISTER", 0, "", {frames.AGENT_ID: "backup"}), 1.0)
    fault(mind, 1, [])
    assert mind.worker(3) is not None


# Link failover.


def nic_result(mind: Decisions, rank: int, text: str, uuid: str = "s1") -> list[Order]:
    body = frames.body("ACTION", 204, text, {"switchNicUUID": uuid})
    return mind.heard(Position("Worker", str(rank // 2), str(rank)), body, 1.0)


def test_all_workers_hear_of_a_switch_and_clusterd_hears_that_all_did_it() -> None:
    mind = job(nodes=2)
    orders = mind.switch_nics("s1", "job-1", ["0", "2"], [True, False], 0.0)
    assert told(orders) == [f"worker {rank}: 204" for rank in range(4)]
    assert isinstance(orders[0], ToWorker) and orders[0].body.extension == {
        "globalRankIDs": '["0","2"]', "globalOps": "[true,false]", "switchNicUUID": "s1",
    }  # fmt: skip
    assert [nic_result(mind, rank, "switchOK") for rank in range(4)] == [[], [], [], [NicReply("job-1", True)]]
    assert nic_result(mind, 0, "switchFail") == [], "too late"
    assert mind.deadline is None


def test_who_answers_twice_does_not_answer_for_another() -> None:
    mind = job(nodes=2)
    mind.switch_nics("s1", "job-1", ["0"], [True], 0.0)
    for rank in (0, 1, 2):
        assert nic_result(mind, rank, "switchOK") == []
    assert nic_result(mind, 0, "switchFail") == [], "it has said that it could"
    assert nic_result(mind, 3, "switchOK") == [NicReply("job-1", True)]


def test_one_that_could_not_is_enough() -> None:
    mind = job(nodes=2)
    mind.switch_nics("s1", "job-1", ["0"], [True], 0.0)
    assert nic_result(mind, 3, "switchFail", "another") == []
    assert nic_result(mind, 3, "switchFail") == [NicReply("job-1", False)]


def test_a_switch_that_nobody_can_do_or_that_takes_for_ever_has_failed() -> None:
    assert Decisions("job-1", 1, True).switch_nics("s1", "job-1", ["0"], [True], 0.0) == [NicReply("job-1", False)]
    mind = job(nodes=2)
    mind.switch_nics("s1", "job-1", ["0"], [True], 0.0)
    assert mind.deadline == 7200 and mind.tick(7200.0) == [NicReply("job-1", False)]
    mind.switch_nics("s2", "job-1", ["0"], [True], 0.0)
    assert mind.unreachable(1) == [NicReply("job-1", False)]


def test_a_switch_that_makes_no_sense_has_failed() -> None:
    mind = job(nodes=2)
    for ranks, ops in (([], []), (["0"], []), (["0"], [True, True])):
        assert mind.switch_nics("s1", "job-1", ranks, ops, 0.0) == [NicReply("job-1", False)]
    assert mind.deadline is None


def test_it_is_known_why_a_switch_has_failed() -> None:
    def why(orders: list[Order]) -> str:
        (reply,) = orders
        assert isinstance(reply, NicReply) and not reply.result
        return reply.why

    def switching() -> Decisions:
        mind = job(nodes=2)
        mind.switch_nics("s1", "job-1", ["0"], [True], 0.0)
        return mind

    nobody = Decisions("job-1", 1, True)
    assert why(nobody.switch_nics("s1", "job-1", ["0"], [True], 0.0)) == "no worker has registered"
    assert why(nobody.switch_nics("s1", "job-1", ["0"], [], 0.0)) == "1 ranks and 0 operations were named"
    assert why(nic_result(switching(), 3, "switchFail")) == "worker 3 answers 'switchFail'"
    assert why(switching().unreachable(1)) == "worker 1 can't be told, or was replaced"
    mind = switching()
    nic_result(mind, 0, "switchOK")
    assert why(mind.tick(7200.0)) == "3 workers did not answer within 7200 s: 1, 2, 3"


def test_a_process_that_is_replaced_before_it_has_changed_its_link_never_will() -> None:
    mind = job(nodes=2)
    mind.switch_nics("s1", "job-1", ["0"], [True], 0.0)
    assert nic_result(mind, 0, "switchOK") == []
    again = frames.body("REGISTER", 101)
    assert mind.heard(Position("Worker", "0", "0"), again, 1.0) == [], "the one before it has changed over"
    assert mind.heard(Position("Worker", "0", "1"), again, 1.0) == [NicReply("job-1", False)]


# Stress test.


def stress_test(mind: Decisions, ops: dict[int, list[int]], now: float = 0.0) -> None:
    """All have the order at once."""
    for order in mind.stress_test("t1", "job-1", ops, now):
        assert isinstance(order, ToWorker)
        mind.stress_test_told(order.rank, order.body, now)


def stress_result(mind: Decisions, rank: int, results: dict[str, tuple[str, str]]) -> list[Order]:
    message = json.dumps({"rankResult": {op: {"code": code, "result": text} for op, (code, text) in results.items()}})
    body = frames.body("ACTION", 205, message, {"stressTestUUID": "t1"})
    return mind.heard(Position("Worker", str(rank // 2), str(rank)), body, 1.0)


def test_the_named_workers_run_the_test_and_clusterd_hears_all_results() -> None:
    mind = job(nodes=2)
    orders = mind.stress_test("t1", "job-1", {1: [0], 3: [0, 1]}, 0.0)
    assert told(orders) == ["worker 1: 205", "worker 3: 205"]
    assert isinstance(orders[0], ToWorker)
    assert json.loads((orders[0].body.extension or {})["StressTestRankOPStr"]) == {
        "1": {"ops": [0]},
        "3": {"ops": [0, 1]},
    }
    assert stress_result(mind, 1, {"0": ("0", "OK")}) == []
    (reply,) = stress_result(mind, 3, {"0": ("0", "OK"), "1": ("2", "find fault rank")})
    assert reply == StressReply(
        "job-1", {"1": {"0": ("0", "OK")}, "3": {"0": ("0", "OK"), "1": ("2", "find fault rank")}}
    )


def test_a_silent_worker_is_given_up_and_one_that_lives_is_not() -> None:
    mind = job(nodes=2)
    stress_test(mind, {1: [0, 1], 3: [0]})
    for rank, now in ((1, 10.0), (3, 20.0)):
        mind.heard(Position("Worker", str(rank // 2), str(rank)), frames.body("KEEP_ALIVE", 0), now)
    assert mind.deadline == 40 and mind.tick(40.0) == []
    (reply,) = stress_result(mind, 3, {"0": ("0", "OK")})
    timeout = ("3", "worker heartbeat timeout")
    assert reply == StressReply("job-1", {"1": {"0": timeout, "1": timeout}, "3": {"0": ("0", "OK")}})


def test_a_worker_is_not_silent_before_it_has_been_told() -> None:
    """Of 10 000 the last one is told after half a minute."""
    mind = job(nodes=2)
    (first, last) = mind.stress_test("t1", "job-1", {1: [0], 3: [0]}, 0.0)
    assert isinstance(first, ToWorker) and isinstance(last, ToWorker)
    assert mind.deadline == 900, "nobody has been told"
    mind.stress_test_told(first.rank, first.body, 10.0)
    assert stress_result(mind, 1, {"0": ("0", "OK")}) == []
    mind.heard(Position("Worker", "1", "3"), frames.body("KEEP_ALIVE", 0), 20.0)  # of another test
    assert mind.deadline == 900 and mind.tick(100.0) == []
    mind.stress_test_told(last.rank, last.body, 100.0)
    assert mind.deadline == 130
    (reply,) = mind.tick(130.0)
    late = ("3", "worker heartbeat timeout")
    assert reply == StressReply("job-1", {"1": {"0": ("0", "OK")}, "3": {"0": late}})
    mind.stress_test_told(last.rank, last.body, 140.0)
    assert mind.deadline is None, "the test is over"


@pytest.mark.parametrize("end", ["result", "lost", "late"])
def test_a_worker_of_which_nobody_knows_whether_it_was_told_has_its_result_counted_too(end: str) -> None:
    mind = job(nodes=2)
    mind.stress_test("t1", "job-1", {3: [0]}, 0.0)
    if end == "result":
        assert stress_result(mind, 3, {"0": ("0", "OK")}) == [StressReply("job-1", {"3": {"0": ("0", "OK")}})]
    elif end == "lost":
        assert mind.unreachable(3) == [StressReply("job-1", {"3": {"0": ("3", "worker is lost")}})]
    else:
        assert mind.tick(900.0) == [StressReply("job-1", {"3": {"0": ("3", "stress test timeout")}})]


def test_a_worker_that_lives_does_not_hide_one_that_is_silent() -> None:
    mind = job(nodes=2)
    stress_test(mind, {1: [0], 3: [0]})
    mind.heard(Position("Worker", "0", "1"), frames.body("KEEP_ALIVE", 0), 10.0)
    assert mind.deadline == 30


def test_a_test_that_takes_too_long_is_given_up_although_its_worker_lives() -> None:
    mind = job(nodes=2)
    stress_test(mind, {1: [0]})
    for now in range(20, 900, 20):
        mind.heard(Position("Worker", "0", "1"), frames.body("KEEP_ALIVE", 0), float(now))
        assert mind.tick(float(now)) == []
    assert mind.deadline == 900
    assert mind.tick(900.0) == [StressReply("job-1", {"1": {"0": ("3", "stress test timeout")}})]


def test_a_test_ends_although_a_worker_was_never_there_or_says_nonsense() -> None:
    mind = job(nodes=2)
    assert isinstance(mind.stress_test("t0", "job-1", {77: [0]}, 0.0)[0], StressReply)
    mind.stress_test("t1", "job-1", {1: [0]}, 0.0)
    body = frames.body("ACTION", 205, "nonsense", {"stressTestUUID": "t1"})
    (reply,) = mind.heard(Position("Worker", "0", "1"), body, 1.0)
    assert reply == StressReply("job-1", {"1": {"0": ("1", "the result could not be read")}})


# Profiling.


def test_the_agents_of_a_large_job_say_less_often_that_they_are_alive() -> None:
    for nodes, seconds in ((2, 0), (199, 0), (1250, 12)):
        mind = Decisions("job-1", nodes, True)
        (order,) = mind.heard(Position("Agent", "1"), frames.body("STATUS", 201, "3", {}), 0.0)
        assert isinstance(order, ToAgent) and (order.body.code, order.body.message) == (210, "3")
        assert frames.alive_seconds(order.body) == seconds
        assert (order.body.extension is None) == (seconds == 0), "as the original says it"


OFF = dict.fromkeys(("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader"), "off")


def test_workers_hear_what_to_write_until_they_do() -> None:
    mind = job(nodes=1)
    assert mind.profile(OFF, 0.0) == []
    assert told(mind.profile({**OFF, "Step": "on"}, 0.0)) == ["worker 0: 710", "worker 1: 710"]
    mind.heard(Position("Worker", "0", "0"), frames.body("STATUS", 1410), 1.0)
    assert mind.deadline == 30 and told(mind.tick(30.0)) == ["worker 1: 710"]
    mind.heard(Position("Worker", "0", "1"), frames.body("STATUS", 1420), 31.0)
    assert mind.deadline is None, "it can't; telling it again does not help"
    assert told(mind.profile({**OFF, "CommunicationOperator": "on"}, 40.0)) == ["worker 0: 711", "worker 1: 711"]


def test_a_new_worker_hears_what_the_others_do() -> None:
    mind = job(nodes=1)
    mind.profile({**OFF, "Step": "on"}, 0.0)
    body = frames.body("REGISTER", 101)
    assert told(mind.heard(Position("Worker", "0", "0"), body, 1.0)) == ["worker 0: 710"], "the others have heard it"
    assert mind.deadline == 30 and told(mind.tick(30.0)) == ["worker 1: 710"] and mind.deadline == 31


def test_who_may_have_done_what_is_no_longer_wanted_is_told_so() -> None:
    mind = job(nodes=1)
    mind.profile({**OFF, "Step": "on"}, 0.0)
    mind.heard(Position("Worker", "0", "0"), frames.body("STATUS", 1410), 1.0)
    assert told(mind.profile(OFF, 1.0)) == ["worker 0: 700", "worker 1: 700"], "worker 1 has not confirmed anything yet"


def test_a_worker_that_does_otherwise_by_itself_is_told_once() -> None:
    mind = job(nodes=1)
    who = Position("Worker", "0", "1")
    assert told(mind.heard(who, frames.body("STATUS", 1411), 5.0)) == ["worker 1: 700"], "it had read it in a file"
    assert mind.heard(who, frames.body("STATUS", 1411), 6.0) == [], "it has been told"
    assert told(mind.tick(35.0)) == ["worker 1: 700"]


def test_a_manager_that_took_over_tells_workers_of_which_nobody_knows_what_they_do() -> None:
    mind = Decisions("job-1", 1, True)
    mind.announced(Position("Worker", "0", "3"))
    assert told(mind.profile(OFF, 0.0)) == ["worker 3: 700"]
    assert mind.profile(OFF, 1.0) == []
    mind.heard(Position("Worker", "0", "3"), frames.body("STATUS", 1400), 2.0)
    assert mind.deadline is None and mind.profile(OFF, 3.0) == []


def test_nonsense_is_ignored() -> None:
    mind = job()
    for body in (
        frames.body("STATUS", 999), frames.body("X", 0), frames.body("KEEP_ALIVE", 0, "x"),
        frames.body("STATUS", 202, "x"), frames.body("STATUS", 201, "x"),
    ):  # fmt: skip
        assert mind.heard(AGENTS[1], body, 0.0) == []
    assert mind.heard(Position("Worker", "0", "0"), frames.body("X", 3), 0.0) == []
    for who in (Position("Proxy", "0", "1"), Position("Agent", "x"), Position("Worker", "0", "-1"), Position("", "")):
        mind.announced(who)
        assert mind.heard(who, frames.body("REGISTER", 0), 0.0) == []


def test_what_an_agent_knew_is_over_when_the_training_goes_on() -> None:
    mind = job()
    report = frames.body("STATUS", 202, FaultReport([2]).encode(), {frames.FAULT_TYPES: '{"2":0}'})
    mind.heard(AGENTS[1], report, 0.0)
    mind.recovered()
    assert mind.types_of({2: 1}) == {2: 1}
    mind.heard(AGENTS[1], report, 0.0)
    assert mind.types_of({2: 1, 3: 1}) == {2: 0, 3: 1} and mind.types_of({2: 1}) == {2: 1}


def test_a_manager_that_gives_the_job_up_ends_all_agents_and_says_why() -> None:
    mind = job()
    verdict = Signal("killMaster", job="job-1", nodes=(0, 1, 2), extra="an error of the script")
    orders = mind.signal(verdict)
    assert told(orders) == ["controller: destroy_controller", "agent 0: 203", "agent 1: 203", "agent 2: 203"]
    assert all((each.body.extension or {})["Reason"] == verdict.extra for each in orders if isinstance(each, ToAgent))
    assert mind.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([], 5).encode()), 0.0) == []
    (end,) = mind.heard(AGENTS[0], frames.body("STATUS", 202, FaultReport([], 5).encode()), 0.0)
    assert end == End("an error of the script", ok=False)


def test_what_an_agent_says_about_the_end_of_its_processes_is_passed_on() -> None:
    heard: list[Ended] = []
    mind = Decisions("job-1", 3, True, heard.append)
    ends = {2: frames.ProcessEnd(1, "exited with code 1")}
    extension = {frames.PROCESS_ENDS: frames.ends_text(ends), frames.MAX_RESTARTS: "4"}
    mind.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([2, 3], 4).encode(), extension), 0.0)
    assert heard == [Ended((2, 3), ends, 4, 4)]
    mind.pods.restarts = 3
    mind.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([2, 3], 4).encode(), extension), 0.0)
    assert len(heard) == 1, "it has crossed with a restart"


def test_a_fault_may_be_the_first_that_a_manager_that_took_over_hears() -> None:
    mind = Decisions("job-1", 3, True)
    assert not mind.inherited
    mind.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([2], 4).encode()), 0.0)
    assert mind.inherited
    there = job()
    there.heard(AGENTS[1], frames.body("STATUS", 202, FaultReport([2], 4).encode()), 0.0)
    assert not there.inherited
