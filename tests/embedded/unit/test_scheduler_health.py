"""No pod is put on a chip or a node of which ClusterD says that it is not well; who is there stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from evertrain.embedded.scheduler.decide import Decision, World, decide
from evertrain.embedded.scheduler.views import read_group, read_node, read_pod, read_queue
from evertrain.kube.port import Object
from evertrain.wire.clusterinfo import WELL, Health

CHIP = "huawei.com/Ascend910"


def node(name: str, chips: int = 8) -> Object:
    allocatable = {"cpu": "4", "memory": "8Gi", "pods": "110", CHIP: str(chips)}
    return {"metadata": {"name": name}, "status": {"allocatable": allocatable}}


def pod(name: str, chips: int = 0, group: str = "", on: str = "", has: str = "") -> Object:
    annotations = {"scheduling.k8s.io/group-name": group} if group else {}
    if has:
        annotations[CHIP] = has
    requests = {CHIP: str(chips)} if chips else {}
    spec: Object = {"containers": [{"name": "ascend", "resources": {"requests": requests}}], "schedulerName": "volcano"}
    if on:
        spec["nodeName"] = on
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running" if on else "Pending"}}


def group(name: str, phase: str = "Inqueue", **spec: object) -> Object:
    metadata = {"name": name, "namespace": "default"}
    return {"metadata": metadata, "spec": {"minMember": 1, **spec}, "status": {"phase": phase} if phase else {}}


def run(
    pods: list[Object], nodes: list[Object], health: Mapping[str, Health], groups: Sequence[Object] = ()
) -> Decision:
    views = [read_node(each) for each in nodes]
    return decide(
        World(
            [read_pod(each) for each in pods],
            [replace(view, health=health.get(view.name, WELL)) for view in views],
            [read_group(each) for each in groups],
            [read_queue({"metadata": {"name": "default"}})],
        ),
        now_ns=1,
    )


def given(decision: Decision) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {binding.pod.name: (binding.node, tuple(binding.chips.get(CHIP, ()))) for binding in decision.bindings}


@pytest.mark.parametrize("kind", ["unhealthy", "closed"])
def test_a_faulty_chip_is_given_to_nobody(kind: str) -> None:
    faulty = Health(**{kind: frozenset({"Ascend910-0", "Ascend910-2"})})
    decision = run([pod("a", 2)], [node("n0", 4)], {"n0": faulty})
    assert given(decision) == {"a": ("n0", (1, 3))}
    decision = run([pod("a", 3)], [node("n0", 4)], {"n0": faulty})
    assert given(decision) == {}
    assert decision.complaints["default/a"] == f"0/1 nodes are available: 1 Insufficient {CHIP}."


def test_who_has_a_faulty_chip_keeps_it_and_is_not_counted_twice() -> None:
    holder = pod("a", 2, on="n0", has="Ascend910-0,Ascend910-1")
    faulty = Health(unhealthy=frozenset({"Ascend910-0"}))
    decision = run([holder, pod("b", 2)], [node("n0", 4)], {"n0": faulty})
    assert given(decision) == {"b": ("n0", (2, 3))}


def test_a_group_is_not_let_in_for_chips_that_are_faulty() -> None:
    wanted = group("g", phase="", minResources={CHIP: "4"})
    decision = run([], [node("n0", 4)], {"n0": Health(unhealthy=frozenset({"Ascend910-0"}))}, [wanted])
    (verdict,) = decision.verdicts
    assert verdict.phase == "Pending"
    (verdict,) = run([], [node("n0", 4)], {}, [wanted]).verdicts
    assert verdict.phase == "Inqueue"


@pytest.mark.parametrize("health", [Health("UnHealthy"), Health(switch="UnHealthy"), Health(leaving=True)])
def test_a_node_that_is_not_well_gets_no_pods(health: Health) -> None:
    decision = run([pod("a")], [node("n0"), node("n1")], {"n0": health})
    assert given(decision) == {"a": ("n1", ())}
    decision = run([pod("a")], [node("n0")], {"n0": health})
    assert decision.complaints["default/a"] == "0/1 nodes are available: 1 node(s) were unhealthy."


@pytest.mark.parametrize("health", [Health(switch="SubHealthy"), Health(sub_healthy=frozenset({"Ascend910-7"}))])
@pytest.mark.parametrize(
    ("strategy", "anywhere"),
    [
        ("", True),
        ("ignore", True),
        ("nonsense", True),
        ("graceExit", False),
        ("forceExit", False),
        ("hotSwitch", False),
    ],
)
def test_a_node_that_is_not_quite_well_is_for_jobs_that_ignore_that(
    health: Health, strategy: str, anywhere: bool
) -> None:
    item = group("g")
    item["metadata"]["labels"] = {"subHealthyStrategy": strategy} if strategy else {}
    decision = run([pod("a", 1, "g")], [node("n0")], {"n0": health}, [item])
    assert (given(decision) == {"a": ("n0", (0,))}) == anywhere
    decision = run([pod("a", 1, "g")], [node("n0"), node("n1")], {"n0": health}, [item])
    assert len(decision.bindings) == 1
    assert anywhere or decision.bindings[0].node == "n1"
