"""Which pods are replaced for which fault, by every label of a job; and what becomes of nodes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.clusterd.resched import launchers, reasons, taints
from evertrain.clusterd.resched.decide import (
    Decision,
    Delete,
    Leave,
    Mark,
    Record,
    Restart,
    Retry,
    Settings,
    decide,
    replaced,
)
from evertrain.clusterd.resched.views import GONE, JobView, NodeView, PodView, read_job, read_node, read_pod
from evertrain.kube.port import Object
from evertrain.wire.clusterinfo import Health

NOW = 1_000_000.0
WELL = NodeView()
CARD = NodeView(Health(unhealthy=frozenset({"Ascend910-0"})))
OTHER_CARD = NodeView(Health(unhealthy=frozenset({"Ascend910-7"})))
LOST = NodeView(Health("UnHealthy"))
SILENT = NodeView(ready=False)
SUB = NodeView(Health(sub_healthy=frozenset({"Ascend910-0"})))


def pod(rank: int, **fields: Any) -> PodView:
    name = "master-0" if rank == 0 else f"worker-{rank - 1}"
    made: dict[str, Any] = {
        "rank": rank,
        "node": f"n{rank}",
        "chips": frozenset({"Ascend910-0", "Ascend910-1"}),
        "leads": rank == 0,
        "created": NOW - 1000,
    }
    return PodView(name, f"uid-{rank}", **(made | fields))


def job(
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    pods: tuple[PodView, ...] = (),
    **fields: Any,
) -> JobView:
    pods = pods or (pod(0), pod(1), pod(2))
    return JobView("default", "j", "U", labels or {}, annotations or {}, pods, **fields)


def nodes(**known: NodeView) -> dict[str, NodeView]:
    return {"n0": WELL, "n1": WELL, "n2": WELL} | known


def gone(decision: Decision) -> list[int]:
    return sorted(action.pod.rank for action in decision.actions if isinstance(action, Delete))


def graces(decision: Decision) -> set[int | None]:
    return {action.grace for action in decision.actions if isinstance(action, Delete)}


def reason(decision: Decision) -> list[tuple[int, str]]:
    return [(p.rank, why) for action in decision.actions if isinstance(action, Record) for p, why in action.tasks]


FORCE, GRACE = {"fault-scheduling": "force"}, {"fault-scheduling": "grace"}
POD, PROCESS = {"pod-rescheduling": "on"}, {"process-recover-enable": "on"}
RECOVER = {"recover-strategy": "recover"}


# Labels, annotations, rank of the pod with the fault, ranks that are replaced.
SCOPES: list[tuple[dict[str, str], dict[str, str], int, list[int]]] = [
    ({}, {}, 1, []),
    ({"fault-scheduling": "off"}, {}, 1, []),
    ({"fault-scheduling": "nonsense"}, {}, 1, []),
    (FORCE, {}, 1, [0, 1, 2]),
    (GRACE, {}, 1, [0, 1, 2]),
    (FORCE, {}, 0, [0, 1, 2]),
    (FORCE | POD, {}, 1, [1]),
    (FORCE | POD, {}, 0, [0, 1, 2]),
    (FORCE | {"pod-rescheduling": "off"}, {}, 1, [0, 1, 2]),
    (FORCE, {"huawei.com/recover_policy_path": "pod"}, 1, [1]),
    (FORCE, {"huawei.com/recover_policy_path": "job"}, 1, [0, 1, 2]),
    (FORCE | PROCESS, {}, 1, [1]),
    (FORCE | PROCESS, {}, 0, [0]),
    (FORCE | PROCESS | POD, {}, 0, [0]),
    (FORCE | {"process-recover-enable": "pause"}, RECOVER, 1, [0, 1, 2]),
    (FORCE | {"process-recover-enable": "off"}, RECOVER, 1, [0, 1, 2]),
    (FORCE | POD | {"process-recover-enable": "pause"}, RECOVER, 1, [1]),
    (FORCE | PROCESS, RECOVER, 1, []),  # its recovery leads
    (FORCE | PROCESS, {"recover-strategy": ""}, 1, [1]),
    (FORCE, {"ProcessRecoverStrategy": "recover"}, 1, []),
    (FORCE | POD, {"ProcessRecoverStrategy": ""}, 1, []),
    ({"fault-scheduling": "external-force"}, {}, 1, []),
    ({"fault-scheduling": "external-grace"} | POD, {}, 1, []),
]


@pytest.mark.parametrize(("labels", "annotations", "rank", "expected"), SCOPES)
@pytest.mark.parametrize("state", [CARD, LOST, SILENT, GONE, NodeView(isolated=True)])
def test_scope(
    state: NodeView, labels: dict[str, str], annotations: dict[str, str], rank: int, expected: list[int]
) -> None:
    decision = decide(job(labels, annotations), nodes(**{f"n{rank}": state}), NOW)
    assert gone(decision) == expected
    assert bool(decision.why) == bool(expected)
    if expected:
        assert reason(decision) == [(rank, "CardUnhealthy" if state is CARD else "NodeUnhealthy")]
        last = [action.pod.rank for action in decision.actions if isinstance(action, Delete) and action.last]
        assert last == [rank], "the reason stays until the others are on their way"
        assert isinstance([each for each in decision.actions if isinstance(each, Delete)][-1], Delete)


@pytest.mark.parametrize(
    ("scheduling", "state", "expected"),
    [("force", CARD, {1}), ("force", SILENT, {0, 1}), ("grace", CARD, {None}), ("grace", SILENT, {None})],
)
def test_how_much_time_pods_have(scheduling: str, state: NodeView, expected: set[int | None]) -> None:
    assert graces(decide(job({"fault-scheduling": scheduling}), nodes(n1=state), NOW)) == expected


@pytest.mark.parametrize(
    "state",
    [
        WELL,
        OTHER_CARD,
        NodeView(Health(closed=frozenset({"Ascend910-0"}))),
        NodeView(Health(leaving=True)),
        SUB,
        NodeView(Health(switch="SubHealthy")),
    ],
)
def test_faults_that_do_not_drive_pods_away(state: NodeView) -> None:
    assert decide(job(FORCE), nodes(n1=state), NOW).actions == []


def test_what_makes_a_pod_none_to_be_replaced() -> None:
    for fields in ({"deleting": True, "asked": NOW}, {"node": ""}, {"phase": "Succeeded"}):
        found = decide(job(FORCE, pods=(pod(0), pod(1, **fields), pod(2))), nodes(n1=LOST), NOW)
        assert found.why == ""
        assert gone(found) == []
    assert decide(job(FORCE, over=True), nodes(n1=LOST), NOW) == Decision()


def test_relation_faults() -> None:
    separate = pod(1, labels={"fault-type": "Separate"})
    decision = decide(job(FORCE, pods=(pod(0), separate)), nodes(), NOW)
    assert (gone(decision), reason(decision)) == ([0, 1], [(1, "RelationFaultSeparate")])
    software = pod(1, labels={"fault-type": "software"})
    assert gone(decide(job(FORCE, pods=(pod(0), software)), nodes(), NOW)) == []


SUB_HEALTHS: list[tuple[dict[str, str], dict[str, str], list[int], set[int | None], bool]] = [
    ({}, {}, [], set(), False),
    ({"subHealthyStrategy": "ignore"}, {}, [], set(), False),
    ({"subHealthyStrategy": "nonsense"}, {}, [], set(), False),
    ({"subHealthyStrategy": "hotSwitch"}, {}, [], set(), False),
    ({"subHealthyStrategy": "forceExit"}, {}, [0, 1, 2], {1}, False),
    ({"subHealthyStrategy": "graceExit"}, {}, [0, 1, 2], {None}, True),
    ({"subHealthyStrategy": "graceExit"} | POD, {}, [1], {None}, True),
    ({"subHealthyStrategy": "graceExit"} | PROCESS, RECOVER, [1], {None}, False),
    ({"subHealthyStrategy": "forceExit"} | PROCESS, RECOVER, [1], {1}, False),
    ({"subHealthyStrategy": "graceExit"} | PROCESS, {"recover-strategy": "dump"}, [], set(), False),
    ({"subHealthyStrategy": "forceExit"} | PROCESS, {"recover-strategy": "dump"}, [1], {1}, False),
]


@pytest.mark.parametrize(("labels", "annotations", "expected", "grace", "leaves"), SUB_HEALTHS)
@pytest.mark.parametrize("scheduling", [FORCE, GRACE])
@pytest.mark.parametrize("by", ["chip", "switch", "label"])
def test_sub_health(
    by: str,
    scheduling: dict[str, str],
    labels: dict[str, str],
    annotations: dict[str, str],
    expected: list[int],
    grace: set[int | None],
    leaves: bool,
) -> None:
    states = {"chip": SUB, "switch": NodeView(Health(switch="SubHealthy")), "label": WELL}
    pods = (pod(0), pod(1, labels={"fault-type": "SubHealth"} if by == "label" else {}), pod(2))
    decision = decide(job(scheduling | labels, annotations, pods), nodes(n1=states[by]), NOW)
    assert gone(decision) == expected
    assert graces(decision) == grace
    assert (Leave() in decision.actions) == leaves
    assert reason(decision) == ([(1, "SubHealthFault")] if expected else [])


def test_sub_health_needs_fault_scheduling() -> None:
    assert decide(job({"subHealthyStrategy": "forceExit"}), nodes(n1=SUB), NOW).actions == []


@pytest.mark.parametrize(
    ("scheduling", "acts"), [(None, True), ("force", True), ("grace", True), ("off", False), ("external-force", False)]
)
@pytest.mark.parametrize("led", [True, False])
def test_the_order_of_a_hot_switch_takes_just_that_pod_and_at_once(
    scheduling: str | None, acts: bool, led: bool
) -> None:
    labels = {"subHealthyStrategy": "hotSwitch"} | (PROCESS if led else {})
    labels |= {} if scheduling is None else {"fault-scheduling": scheduling}
    old = pod(1, annotations={"needVolcanoOpe": "delete"})
    backup = PodView("worker-0-hot-1", "uid-b", 1, "n2", annotations={"backupSourcePodName": old.name})
    switching = job(labels, RECOVER if led else {}, (pod(0), old, pod(2)), backups=(backup,))
    decision = decide(switching, nodes(n1=SUB), NOW)
    assert gone(decision) == ([1] if acts else [])
    if acts:
        assert {each.pod.uid for each in decision.actions if isinstance(each, Delete)} == {"uid-1"}
        assert graces(decision) == {1}


def test_the_mark_on_rank_0_means_the_whole_job_and_its_backups() -> None:
    first = pod(0, annotations={"needVolcanoOpe": "delete"})
    backup = PodView("worker-0-hot-1", "uid-b", 1, "n2", annotations={"backupSourcePodName": "worker-0"})
    labels = FORCE | PROCESS | {"subHealthyStrategy": "hotSwitch"}
    decision = decide(job(labels, RECOVER, (first, pod(1)), backups=(backup,)), nodes(), NOW)
    assert [each.pod.uid for each in decision.actions if isinstance(each, Delete)] == ["uid-b", "uid-1", "uid-0"]


@pytest.mark.parametrize("how", ["external-force", "external-grace"])
def test_who_is_outside_is_told(how: str) -> None:
    decision = decide(job({"fault-scheduling": how}), nodes(n1=CARD), NOW)
    assert decision.actions == [Mark(pod(1), {"huawei.com/pod-status": "Unhealthy-CardUnhealthy"})]
    told = pod(1, annotations={"huawei.com/pod-status": "Unhealthy-CardUnhealthy"})
    assert decide(job({"fault-scheduling": how}, pods=(pod(0), told)), nodes(n1=CARD), NOW).actions == []
    failed = pod(1, phase="Failed")
    labels = {"fault-scheduling": how, "fault-retry-times": "1"}
    decision = decide(job(labels, pods=(pod(0), failed)), nodes(), NOW)
    assert decision.actions == [Mark(failed, {"huawei.com/pod-status": "Unhealthy-pod-failed"})]


@pytest.mark.parametrize(("times", "written"), [("3", True), ("0", False), ("", False), ("many", False)])
def test_pods_that_failed_are_the_operators_and_only_written_down(times: str, written: bool) -> None:
    failed = pod(1, phase="Failed")
    decision = decide(job(FORCE | {"fault-retry-times": times}, pods=(pod(0), failed)), nodes(), NOW)
    assert decision.actions[:1] == ([Record(((failed, "pod-failed"),))] if written else [])
    told = [each.strategy for each in decision.actions[1:] if isinstance(each, Retry)]
    assert len(decision.actions[1:]) == len(told) and told == (["job-rescheduling"] if written else [])


@pytest.mark.parametrize(("rank", "strategy"), [(0, "job-rescheduling"), (1, "pod-rescheduling")])
def test_the_operator_starts_one_pod_again_or_all(rank: int, strategy: str) -> None:
    pods = tuple(replace(pod(each), phase="Failed" if each == rank else "Running") for each in range(3))
    labels = FORCE | POD | {"fault-retry-times": "2"}
    (told,) = (each for each in decide(job(labels, pods=pods), nodes(), NOW).actions if isinstance(each, Retry))
    again = "it" if rank else "all pods"
    assert told.strategy == strategy
    assert told.cause == f"pod-failed of pod {pods[rank].name} on node n{rank}"
    assert told.why == f"{told.cause}: the operator starts {again} again (fault-retry-times: 2)"


def test_launchers_are_told_of_pods_that_were_replaced_alone() -> None:
    def told(decision: Decision) -> list[Restart]:
        return [action for action in decision.actions if isinstance(action, Restart)]

    assert told(decide(job(FORCE | POD), nodes(n1=CARD), NOW)) == [Restart(("uid-1",), False)]
    assert told(decide(job(FORCE | POD), nodes(n0=CARD), NOW)) == [Restart(("uid-0",), True)]
    for other in (FORCE, FORCE | POD | PROCESS):
        assert told(decide(job(other), nodes(n1=CARD), NOW)) == []


def test_several_faults_are_one_decision() -> None:
    decision = decide(job(FORCE | POD), nodes(n1=CARD, n2=LOST), NOW)
    assert gone(decision) == [1, 2]
    assert reason(decision) == [(1, "CardUnhealthy"), (2, "NodeUnhealthy")]
    assert decision.why == "CardUnhealthy of pod worker-0 on node n1 and 1 more: 2 pods are replaced"


# Escalation.


@pytest.mark.parametrize(
    ("labels", "annotations", "after", "expected"),
    [
        (FORCE | POD, {}, 11, []),
        (FORCE | POD, {}, 12, [0, 2]),
        (FORCE | POD, {"huawei.com/recover_policy_path": "pod"}, 100, []),
        (FORCE | POD | PROCESS, {}, 100, []),
        (FORCE, {"huawei.com/recover_policy_path": "pod"}, 100, []),
        (POD, {}, 100, []),
    ],
)
def test_a_pod_without_a_place_takes_the_others_with_it_in_the_end(
    labels: dict[str, str], annotations: dict[str, str], after: float, expected: list[int]
) -> None:
    waiting = stuck_pod(after)
    decision = decide(job(labels, annotations, (pod(0), waiting, pod(2))), nodes(), NOW, rescheduled=NOW - after)
    assert gone(decision) == expected
    if expected:
        assert Restart(("uid-0", "uid-2"), True) in decision.actions
    elif after == 11:
        assert decision.wake == NOW + 1


def stuck_pod(after: float) -> PodView:
    return replace(
        pod(1),
        uid="new",
        node="",
        phase="Pending",
        version=1,
        created=NOW - after,
        unschedulable=True,
        chips=frozenset(),
    )


def test_no_escalation_without_a_cause() -> None:
    waiting, labels = stuck_pod(100), FORCE | POD
    others = (pod(0), waiting, pod(2))
    assert gone(decide(job(labels, pods=others), nodes(), NOW)) == [], "nobody has replaced anything"
    assert gone(decide(job(labels, pods=others), nodes(), NOW, rescheduled=NOW - 50)) == [], "that was later"
    leaving = (pod(0), waiting, replace(pod(2), deleting=True, asked=NOW, grace=30))
    assert gone(decide(job(labels, pods=leaving), nodes(), NOW, rescheduled=NOW - 100)) == []
    silent = (pod(0), replace(waiting, unschedulable=False), pod(2))
    assert gone(decide(job(labels, pods=silent), nodes(), NOW, rescheduled=NOW - 100)) == []
    first = (replace(pod(0), version=1), waiting, replace(pod(2), version=1))
    assert gone(decide(job(labels, pods=first), nodes(), NOW, rescheduled=NOW - 100)) == [], "all are new"


def test_the_logical_super_pod_goes_first() -> None:
    pods = (pod(0), stuck_pod(7), pod(2), pod(3))
    around = nodes(n3=WELL)
    labels, annotations = FORCE | POD, {"sp-block": "4"}
    decision = decide(job(labels, annotations, pods), around, NOW, rescheduled=NOW - 7)
    assert gone(decision) == [0], "two pods of two chips each are one block of four"
    assert decision.wake == NOW + 5
    early = (pod(0), stuck_pod(5), pod(2), pod(3))
    decision = decide(job(labels, annotations, early), around, NOW, rescheduled=NOW - 5)
    assert (gone(decision), decision.wake) == ([], NOW + 1)


# Time that is over.


@pytest.mark.parametrize(
    ("scheduling", "node", "since", "forced"),
    [
        ("grace", WELL, 899, False),
        ("grace", WELL, 900, True),
        ("grace", SILENT, 0, False),
        ("grace", SILENT, 1, True),
        ("force", WELL, 15, False),
        ("force", WELL, 17, True),
        ("force", SILENT, 0, True),
        ("off", SILENT, 10_000, False),
        ("external-force", SILENT, 10_000, False),
    ],
)
def test_pods_that_do_not_go_are_forced_to(scheduling: str, node: NodeView, since: float, forced: bool) -> None:
    lingering = replace(pod(1), deleting=True, asked=NOW - since, grace=1)
    decision = decide(job({"fault-scheduling": scheduling}, pods=(pod(0), lingering)), nodes(n1=node), NOW)
    assert gone(decision) == ([1] if forced else [])
    assert graces(decision) == ({0} if forced else set())
    if not forced and scheduling in ("grace", "force"):
        assert decision.wake is not None


def test_grace_over_time_can_be_set() -> None:
    lingering = replace(pod(1), deleting=True, asked=NOW - 5)
    small = Settings(grace_over_time=5)
    assert graces(decide(job(GRACE, pods=(lingering,)), nodes(), NOW, settings=small)) == {0}


# What a job's own recovery decides.


@pytest.mark.parametrize(
    ("labels", "annotations", "expected", "grace"),
    [
        (PROCESS, RECOVER, [1], {None}),
        (PROCESS | FORCE, RECOVER, [1], {1}),
        (PROCESS | GRACE, RECOVER, [1], {None}),
        (PROCESS | {"fault-scheduling": "off"}, RECOVER, [], set()),
        (PROCESS | {"fault-scheduling": "external-force"}, RECOVER, [], set()),
        (PROCESS | FORCE, RECOVER | {"ProcessRecoverStrategy": ""}, [], set()),
    ],
)
def test_pods_that_the_recovery_names(
    labels: dict[str, str], annotations: dict[str, str], expected: list[int], grace: set[int | None]
) -> None:
    decision = replaced(job(labels, annotations), ("uid-1", "gone"), "its chip is broken", nodes())
    assert gone(decision) == expected
    assert graces(decision) == grace
    if expected:
        assert reason(decision) == [(1, "its chip is broken")]
    assert decision.why
    assert bool([each for each in decision.actions if isinstance(each, Mark)]) == ("external" in str(labels))


def test_the_whole_job_with_all_that_does_not_train() -> None:
    leader = PodView("scheduler-0", "uid-s", 0, "n0", leads=True)
    backup = PodView("worker-0-hot-1", "uid-b", 1, "n2")
    pods = (leader, pod(1), pod(2))
    decision = replaced(
        job(PROCESS, RECOVER, pods, backups=(backup,)), ("uid-1", "uid-2"), "x", nodes(), whole_job=True
    )
    order = [each.pod.uid for each in decision.actions if isinstance(each, Delete)]
    assert order == ["uid-b", "uid-s", "uid-1", "uid-2"]


def test_asked_again_the_whole_job_is_only_what_is_left_of_it() -> None:
    new = replace(pod(1), uid="new", version=1)
    decision = replaced(job(PROCESS, RECOVER, (pod(0), new)), ("uid-0", "uid-1"), "x", nodes(), whole_job=True)
    assert [each.pod.uid for each in decision.actions if isinstance(each, Delete)] == ["uid-0"]
    decision = replaced(job(PROCESS, RECOVER, (new,)), ("uid-0", "uid-1"), "x", nodes(), whole_job=True)
    assert decision == Decision()
    assert replaced(job(PROCESS, over=True), ("uid-0",), "x", nodes()) == Decision()


# All together.


@given(
    labels=st.fixed_dictionaries(
        {},
        optional={
            "fault-scheduling": st.sampled_from(["grace", "force", "off", "external-force"]),
            "pod-rescheduling": st.sampled_from(["on", "off"]),
            "process-recover-enable": st.sampled_from(["on", "pause", "off"]),
            "subHealthyStrategy": st.sampled_from(["ignore", "graceExit", "forceExit", "hotSwitch"]),
            "fault-retry-times": st.sampled_from(["0", "3"]),
        },
    ),
    annotations=st.sampled_from([{}, RECOVER, {"recover-strategy": "dump"}, {"huawei.com/recover_policy_path": "pod"}]),
    states=st.lists(st.sampled_from([WELL, CARD, LOST, SILENT, SUB]), min_size=3, max_size=3),
    killed=st.integers(0, 4),
)
def test_whoever_is_killed_in_the_middle_is_followed_by_one_who_goes_on(
    labels: dict[str, str], annotations: dict[str, str], states: list[NodeView], killed: int
) -> None:
    """The first deletes some of the pods and dies; the second ends with the same pods gone as if nothing had been."""
    around = {f"n{rank}": state for rank, state in enumerate(states)}
    item = job(labels, annotations)
    wanted = {each.pod.uid for each in decide(item, around, NOW).actions if isinstance(each, Delete)}
    done = [each for each in decide(item, around, NOW).actions if isinstance(each, Delete)][:killed]
    deleted = {each.pod.uid for each in done}
    left = replace(
        item,
        pods=tuple(
            replace(each, deleting=True, asked=NOW, grace=30) if each.uid in deleted else each for each in item.pods
        ),
    )
    again = {
        each.pod.uid
        for each in decide(left, around, NOW).actions
        if isinstance(each, Delete) and each.reason != "it did not go in time"
    }
    assert deleted | again == wanted
    assert not deleted & again


# Nodes.


@pytest.mark.parametrize(
    ("state", "chips", "expected"),
    [
        (WELL, False, None),
        (SILENT, False, None),
        (LOST, True, ("NodeUnhealthy", "NoSchedule")),
        (NodeView(Health(switch="UnHealthy")), True, ("NodeUnhealthy", "NoSchedule")),
        (NodeView(isolated=True), True, ("Isolated", "NoSchedule")),
        (NodeView(Health(leaving=True)), True, ("PreSeparate", "NoSchedule")),
        (CARD, False, ("CardUnhealthy", "NoSchedule")),
        (CARD, True, None),
        (NodeView(Health(closed=frozenset({"Ascend910-1"}))), False, ("CardUnhealthy", "NoSchedule")),
        (SUB, False, ("SubHealthy", "PreferNoSchedule")),
        (SUB, True, None),
    ],
)
def test_taints(state: NodeView, chips: bool, expected: tuple[str, str] | None) -> None:
    assert taints.fault(state, chips=chips) == expected


def test_only_our_own_taints_are_set_and_lifted() -> None:
    theirs = {"key": "theirs", "effect": "NoExecute"}
    ours = {"key": "evertrain.dev/fault", "value": "NodeUnhealthy", "effect": "NoSchedule"}
    node: Object = {"metadata": {"name": "n"}, "spec": {"taints": [theirs]}}
    assert taints.wanted(node, None) is None
    assert taints.wanted(node, ("NodeUnhealthy", "NoSchedule")) == [theirs, ours]
    tainted: Object = {"metadata": {"name": "n"}, "spec": {"taints": [ours, theirs]}}
    assert taints.wanted(tainted, ("NodeUnhealthy", "NoSchedule")) is None
    assert taints.wanted(tainted, None) == [theirs]
    assert taints.wanted(tainted, ("Isolated", "NoSchedule")) == [theirs, {**ours, "value": "Isolated"}]
    assert taints.wanted({"metadata": {"name": "n"}}, None) is None


# Views.


def test_what_is_read() -> None:
    raw: Object = {
        "metadata": {
            "name": "j-worker-0",
            "uid": "P",
            "labels": {"training.kubeflow.org/replica-type": "worker", "version": "2"},
            "annotations": {"hccl/rankIndex": "1", "huawei.com/Ascend910": "Ascend910-2,Ascend910-3"},
            "creationTimestamp": "1970-01-01T00:01:40Z",
            "deletionTimestamp": "1970-01-01T00:03:20Z",
            "deletionGracePeriodSeconds": 30,
        },
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", "conditions": [{"type": "PodScheduled", "reason": "Unschedulable"}]},
    }
    found = read_pod(raw)
    assert (found.name, found.uid, found.rank, found.node, found.version) == ("j-worker-0", "P", 1, "n1", 2)
    assert found.chips == {"Ascend910-2", "Ascend910-3"}
    assert (found.created, found.deleting, found.asked, found.grace) == (100.0, True, 170.0, 30)
    assert found.unschedulable
    assert not found.leads
    item = {"metadata": {"name": "j", "namespace": "ns", "uid": "U", "labels": {"a": "1", "b": "1"}}}
    group = {"metadata": {"name": "g", "labels": {"b": "2"}, "annotations": {"c": "3"}}}
    backup = {"metadata": {"name": "b", "uid": "B", "annotations": {"podType": "backup"}}}
    view = read_job(item, group, [raw, backup])
    assert (view.labels, view.annotations, view.id) == ({"a": "1", "b": "2"}, {"c": "3"}, "ns/j-U")
    assert ([each.name for each in view.pods], [each.name for each in view.backups]) == (["j-worker-0"], ["b"])
    assert view.grouped
    assert not read_job(item, None, []).grouped


def test_nodes_are_well_if_they_are_ready_and_nobody_objects() -> None:
    node: Object = {"metadata": {"name": "n"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert read_node(node) == WELL
    assert read_node({"metadata": {"name": "n"}}).lost
    node["metadata"]["annotations"] = {"NodeHealthyStatus": "UnHealthy"}
    assert read_node(node).lost
    node["metadata"]["annotations"] = {"NodeHealthyStatus": "Healthy"}
    assert not read_node(node).lost


def test_without_a_pod_group_the_strategy_alone_says_that_the_recovery_leads() -> None:
    assert gone(decide(job(FORCE, RECOVER, grouped=False), nodes(n1=CARD), NOW)) == []
    assert gone(decide(job(FORCE, RECOVER, grouped=False), nodes(n1=CARD), NOW, led=False)) == [1]
    assert gone(decide(job(FORCE, RECOVER), nodes(n1=CARD), NOW)) == [0, 1, 2]


# Records.


def test_records() -> None:
    task = ("CardUnhealthy", "j-worker-0", "n1", "1")
    text = reasons.recorded("", "ns/j-U", [task], 1_700_000_000.9, 1_600_000_000)
    assert text is not None
    assert json.loads(text) == {
        "ns/j-U": {
            "JobID": "ns/j-U",
            "TotalRescheduleTimes": 1,
            "RescheduleRecords": [
                {
                    "LogFileFormatTime": "I1114 22:13:20",
                    "RescheduleTimeStamp": 1_700_000_000,
                    "ReasonOfTask": [
                        {
                            "RescheduleReason": "CardUnhealthy",
                            "PodName": "j-worker-0",
                            "NodeName": "n1",
                            "NodeRankIndex": "1",
                        }
                    ],
                }
            ],
        }
    }
    assert reasons.recorded(text, "ns/j-U", [task], 1_700_000_005, 1_600_000_000) is None, "the same again"
    again = reasons.recorded(text, "ns/j-U", [task], 1_700_000_005, 1_700_000_003)
    assert again is not None, "another pod by that name"
    assert reasons.last(reasons.read(again), "ns/j-U") == 1_700_000_005
    assert json.loads(again)["ns/j-U"]["TotalRescheduleTimes"] == 2


def test_records_are_few_and_never_too_large() -> None:
    text = ""
    for number in range(12):
        tasks = [("x", f"pod-{number}-{each}", "n", "0") for each in range(20)]
        text = reasons.recorded(text, "a", tasks, number, 0) or ""
    entry = json.loads(text)["a"]
    assert entry["TotalRescheduleTimes"] == 12
    assert [each["RescheduleTimeStamp"] for each in entry["RescheduleRecords"]] == list(range(11, 1, -1))
    assert {len(each["ReasonOfTask"]) for each in entry["RescheduleRecords"]} == {10}
    large = [("x" * 20_000, f"p{each}", "n", "0") for each in range(10)]
    for number, name in itertools.product(range(2), "bcdefg"):
        text = reasons.recorded(text, name, large, 100 + number, 0) or text
    assert len(text) <= 950 * 1024
    assert "g" in json.loads(text)


SPOILT = [
    "[]",
    "null",
    "[" * 100_000,
    '{"a": 1}',
    '{"a": {"RescheduleRecords": [1]}}',
    '{"a": {"TotalRescheduleTimes": "x", "RescheduleRecords": []}}',
    '{"a": {"TotalRescheduleTimes": [], "RescheduleRecords": []}}',
    '{"a": {"RescheduleRecords": [{"RescheduleTimeStamp": 1' + "0" * 400 + ', "ReasonOfTask": []}]}}',
]


@pytest.mark.parametrize("text", SPOILT)
def test_of_records_that_nobody_can_read_no_time_is_known(text: str) -> None:
    assert reasons.last(reasons.read(text), "a") is None


@given(st.one_of(st.text(), st.sampled_from(SPOILT)))
def test_records_that_nobody_can_read_are_replaced(text: str) -> None:
    assert json.loads(reasons.recorded(text, "a", [("x", "p", "n", "0")], 5, 0) or "")["a"]["TotalRescheduleTimes"] == 1


# Launchers.


def reset(**fields: object) -> Object:
    return {"metadata": {"name": "reset-config-j"}, "data": {"reset.json": json.dumps(fields), "other": "x"}}


def test_launchers_hear_of_a_restart_once() -> None:
    item = launchers.restarted(reset(RetryTime=2, RankList=[{"RankId": 1}]), ["a", "b"], False, 5)
    assert item is not None
    expected = {
        "RankList": [],
        "UpdateTime": 5,
        "RetryTime": 3,
        "FaultFlushing": False,
        "GracefulExit": 0,
        "RestartFaultProcess": False,
    }
    assert json.loads(item["data"]["reset.json"]) == expected
    assert list(json.loads(item["data"]["reset.json"])) == list(expected)
    assert item["data"]["restartType"] == "podReschedule"
    assert item["data"]["other"] == "x"
    assert len(item["data"]["checkCode"]) == 64
    assert launchers.restarted(item, ["a", "b"], False, 6) is None
    whole = launchers.restarted(item, ["c"], True, 6)
    assert whole is not None
    assert json.loads(whole["data"]["reset.json"])["RetryTime"] == 0


def test_launchers_are_asked_to_end_in_good_order() -> None:
    item = launchers.leaving(reset(RetryTime=2), True, 5)
    assert item is not None
    assert json.loads(item["data"]["reset.json"])["GracefulExit"] == 1
    assert json.loads(item["data"]["reset.json"])["RetryTime"] == 2
    assert launchers.leaving(item, True, 6) is None
    back = launchers.leaving(item, False, 6)
    assert back is not None
    assert json.loads(back["data"]["reset.json"])["GracefulExit"] == 0


@pytest.mark.parametrize("data", [{}, {"reset.json": "["}, {"reset.json": "[]"}, None])
def test_a_config_map_of_another_kind_is_left_alone(data: object) -> None:
    item: Object = {"metadata": {"name": "reset-config-j"}, "data": data}
    assert launchers.restarted(item, ["a"], False, 5) is None
    assert launchers.leaving(item, True, 5) is None
