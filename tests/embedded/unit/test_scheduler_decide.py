"""What the scheduler decides: gangs, chips, refusals and their words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.embedded import resources
from evertrain.embedded.scheduler import chips
from evertrain.embedded.scheduler.decide import Decision, World, decide
from evertrain.embedded.scheduler.shell import _pod_matters
from evertrain.embedded.scheduler.views import read_group, read_node, read_pod, read_queue

CHIP = "huawei.com/Ascend910"
CONFIGURATION = "ascend.kubectl.kubernetes.io/ascend-910-configuration"
Object = dict[str, Any]


def node(name: str, chips: int = 8, labels: dict[str, str] | None = None, **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110", CHIP: str(chips)},
            "addresses": [{"type": "InternalIP", "address": "127.64.0.1"}],
        },
    }


def pod(name: str, chips: int = 0, group: str = "", on: str = "", **more: Any) -> Object:
    annotations: dict[str, str] = dict(more.pop("annotations", {}))
    if group:
        annotations["scheduling.k8s.io/group-name"] = group
    requests = {**({CHIP: str(chips)} if chips else {}), **more.pop("requests", {})}
    spec = {"containers": [{"name": "ascend", "resources": {"requests": requests}}], "schedulerName": "volcano"}
    if on:
        spec["nodeName"] = on
    phase = more.pop("phase", "Running" if on else "Pending")
    labels = more.pop("labels", {})
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "labels": labels,
        "annotations": annotations,
    }
    metadata |= more.pop("metadata", {})
    return {"metadata": metadata, "spec": {**spec, **more}, "status": {"phase": phase}}


def group(name: str, members: int, phase: str = "Inqueue", created: str = "", **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": created},
        "spec": {"minMember": members, **spec},
        "status": {"phase": phase} if phase else {},
    }


def run(
    pods: list[Object], nodes: list[Object], groups: Sequence[Object] = (), queues: list[Object] | None = None
) -> Decision:
    if queues is None:
        queues = [{"metadata": {"name": "default"}}]
    return decide(
        World(
            [read_pod(p) for p in pods],
            [read_node(n) for n in nodes],
            [read_group(g) for g in groups],
            [read_queue(q) for q in queues],
        ),
        now_ns=1_700_000_000_000_000_000,
    )


def places(decision: Decision) -> dict[str, str]:
    return {binding.pod.name: binding.node for binding in decision.bindings}


def phase(decision: Decision) -> str:
    (verdict,) = decision.verdicts
    return verdict.phase


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("1", 1000), (2, 2000), ("100m", 100), ("1Ki", 1024_000), ("1.5", 1500), ("2e3", 2_000_000), ("1n", 1), ("0", 0)],
)
def test_quantities(quantity: object, expected: int) -> None:
    assert resources.thousandths(quantity) == expected


@pytest.mark.parametrize("quantity", ["", "x", "1 Gi", "--1", "1e", "1.2.3", "1Zi"])
def test_what_is_no_quantity(quantity: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        resources.thousandths(quantity)


def test_requests_are_the_containers_or_the_largest_init_container() -> None:
    spec = {
        "containers": [{"resources": {"limits": {"cpu": "1"}}}, {"resources": {"requests": {"cpu": "500m"}}}],
        "initContainers": [{"resources": {"requests": {"cpu": "2", "memory": "1"}}}],
    }
    assert resources.pod_requests(spec) == {"cpu": 2000, "memory": 1000, "pods": 1000}


def test_a_gang_is_bound_with_its_chips() -> None:
    world = [
        pod("a", 2, "g", annotations={"hccl/rankIndex": "0"}),
        pod("b", 2, "g", annotations={"hccl/rankIndex": "1"}),
    ]
    decision = run(world, [node("n0", 4)], [group("g", 2)])
    assert places(decision) == {"a": "n0", "b": "n0"}
    written = {binding.pod.name: binding.annotations for binding in decision.bindings}
    assert written["a"][CHIP] == "Ascend910-0,Ascend910-1"
    assert written["b"][CHIP] == "Ascend910-2,Ascend910-3"
    assert written["a"]["predicate-time"] == "1700000000000000000"
    configuration = json.loads(written["b"][CONFIGURATION])
    assert configuration["pod_name"] == "b"
    assert configuration["server_id"] == "uid-b"
    assert configuration["host_ip"] == "127.64.0.1"
    assert [device["device_id"] for device in configuration["devices"]] == ["2", "3"]
    assert "hccl/rankIndex" not in written["a"]  # the pod's own, which stays
    assert phase(decision) == "Running"


def test_half_a_gang_is_not_bound() -> None:
    decision = run([pod("a", 8, "g"), pod("b", 8, "g")], [node("n0", 8)], [group("g", 2)])
    assert places(decision) == {}
    assert decision.verdicts[0].complaint == (
        "2/2 tasks in gang unschedulable: pod group is not ready, 2 Pending, 2 minAvailable"
    )
    assert decision.complaints["default/a"] == "pod group is not ready, 2 Pending, 2 minAvailable"


def test_a_gang_waits_for_its_pods_and_its_tasks() -> None:
    assert places(run([pod("a", 1, "g")], [node("n0")], [group("g", 2)])) == {}
    workers = [pod(name, 1, "g", annotations={"volcano.sh/task-spec": "worker"}) for name in "ab"]
    two = group("g", 2, minTaskMember={"master": 1, "worker": 1})
    assert places(run(workers, [node("n0")], [two])) == {}


def test_a_lost_member_is_replaced_while_the_others_run() -> None:
    world = [pod("a", 4, "g", on="n0", annotations={CHIP: "Ascend910-0,Ascend910-1,Ascend910-2,Ascend910-3"})]
    decision = run([*world, pod("b", 4, "g")], [node("n0", 8)], [group("g", 2, "Running")])
    assert places(decision) == {"b": "n0"}
    assert decision.bindings[0].chips[CHIP] == (4, 5, 6, 7)
    alone = run(world, [node("n0", 8)], [group("g", 2, "Running")])
    assert phase(alone) == "Unknown"  # the gate stays open: what runs goes on


def test_an_unknown_group_is_waited_for() -> None:
    decision = run([pod("a", 1, "g")], [node("n0")])
    assert places(decision) == {}
    assert decision.complaints == {"default/a": "pod group default/g not found"}


def test_a_group_is_let_in_when_the_cluster_could_hold_it() -> None:
    big = group("g", 2, "", minResources={CHIP: "16"})
    assert phase(run([], [node("n0"), node("n1")], [big])) == "Inqueue"
    refused = run([], [node("n0")], [big])
    assert phase(refused) == "Pending"
    assert refused.verdicts[0].complaint == "resource in cluster is overused: Insufficient huawei.com/Ascend910"
    busy = pod("x", 1, on="n0")
    assert phase(run([busy], [node("n0"), node("n1")], [big])) == "Pending"
    assert phase(run([], [node("n0"), node("n1", unschedulable=True)], [big])) == "Pending"


def test_a_promise_is_kept_until_the_pods_have_had_their_chance() -> None:
    first = group("a", 2, "Inqueue", "2026-01-01T00:00:00Z", minResources={CHIP: "8"})
    second = group("b", 1, "", "2026-01-01T00:00:01Z", minResources={CHIP: "8"})
    phases = {v.group.name: v.phase for v in run([], [node("n0")], [first, second]).verdicts}
    assert phases == {"a": "Inqueue", "b": "Pending"}
    misfits = [pod(name, 4, "a", nodeSelector={"no": "such"}) for name in "xy"]
    decision = run([*misfits, pod("z", 8, "b")], [node("n0")], [first, second])
    assert places(decision) == {"z": "n0"}


def test_the_places_of_a_gang_that_restarts_are_kept_for_it() -> None:
    """Neither while its old pods end, nor before the new ones are there, does another group get their chips."""
    first = group("a", 2, "Running", "2026-01-01T00:00:05Z", minResources={CHIP: "8"})
    second = group("b", 1, "Pending", "2026-01-01T00:00:00Z", minResources={CHIP: "8"})
    chips = [f"{CHIP.removeprefix('huawei.com/')}-{i}" for i in range(8)]
    members = [pod(n, 4, "a", on="n0", annotations={CHIP: ",".join(chips[4 * i :][:4])}) for i, n in enumerate("xy")]

    def phases(*pods: Object) -> dict[str, str]:
        return {v.group.name: v.phase for v in run(list(pods), [node("n0")], [first, second]).verdicts}

    ending = [{**m, "metadata": {**m["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}} for m in members]
    assert phases(*ending) == {"a": "Inqueue", "b": "Pending"}
    assert phases(members[0], ending[1]) == {"a": "Unknown", "b": "Pending"}
    assert phases(members[0]) == {"a": "Unknown", "b": "Pending"}
    assert phases({**members[0], "status": {"phase": "Failed"}}, {**members[1], "status": {"phase": "Failed"}}) == {
        "a": "Completed",
        "b": "Inqueue",
    }


def test_an_older_gang_that_does_not_fit_holds_nobody_up() -> None:
    groups = [group("old", 1, created="2026-01-01T00:00:00Z"), group("new", 1, created="2026-01-02T00:00:00Z")]
    assert places(run([pod("a", 9, "old"), pod("b", 1, "new")], [node("n0")], groups)) == {"b": "n0"}
    assert places(run([pod("a", 8, "old"), pod("b", 1, "new")], [node("n0")], groups)) == {"a": "n0"}


def test_a_finished_gang_is_completed_and_can_start_again() -> None:
    done = [pod("a", 8, "g", on="n0", phase="Succeeded"), pod("b", 8, "g", on="n1", phase="Failed")]
    nodes = [node("n0"), node("n1")]
    assert phase(run(done, nodes, [group("g", 2, "Running")])) == "Completed"
    assert phase(run([], nodes, [group("g", 2, "Completed")])) == "Completed"
    again = run([pod("a", 8, "g"), pod("b", 8, "g")], nodes, [group("g", 2, "Completed")])
    assert len(places(again)) == 2


def test_queues() -> None:
    wanting = group("g", 1, "", queue="q", minResources={CHIP: "4"})
    nodes = [node("n0")]
    assert run([], nodes, [wanting]).verdicts[0].complaint == "queue q not found"
    closed = {"metadata": {"name": "q"}, "status": {"state": "Closed"}}
    assert run([], nodes, [wanting], [closed]).verdicts[0].complaint == "queue q is not open"
    small = {"metadata": {"name": "q"}, "spec": {"capability": {CHIP: "3"}}}
    assert run([], nodes, [wanting], [small]).verdicts[0].complaint.startswith("queue resource quota insufficient")
    enough = {"metadata": {"name": "q"}, "spec": {"capability": {CHIP: "4"}}}
    assert phase(run([], nodes, [wanting], [enough])) == "Inqueue"


APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {"matchExpressions": [{"key": "job-name", "operator": "In", "values": ["j"]}]},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }
}


def test_anti_affinity_spreads_a_gang() -> None:
    members = [pod(name, 1, "g", labels={"job-name": "j"}, affinity=APART) for name in "ab"]
    assert sorted(places(run(members, [node("n0"), node("n1")], [group("g", 2)])).values()) == ["n0", "n1"]
    decision = run(members, [node("n0")], [group("g", 2)])
    assert places(decision) == {}


def test_anti_affinity_looks_at_pods_that_have_none_themselves() -> None:
    decision = run(
        [pod("a", on="n0", labels={"job-name": "j"}), pod("b", labels={"job-name": "j"}, affinity=APART)], [node("n0")]
    )
    assert decision.complaints["default/b"] == (
        "0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules."
    )


def test_the_anti_affinity_of_others_counts() -> None:
    there = pod("a", on="n0", labels={"job-name": "j"}, affinity=APART)
    decision = run([there, pod("b", labels={"job-name": "j"})], [node("n0")])
    assert decision.complaints["default/b"] == (
        "0/1 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules."
    )


def test_affinity_wants_company_except_for_the_first() -> None:
    together = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    ]}}  # fmt: skip
    nodes = [node("n0", 1), node("n1", 4)]
    members = [pod(name, 1, "g", labels={"app": "x"}, affinity=together) for name in "abc"]
    assert set(places(run(members, nodes, [group("g", 3)])).values()) == {"n1"}
    lonely = run([pod("a", affinity=together)], nodes)
    assert lonely.complaints["default/a"] == "0/2 nodes are available: 2 node(s) didn't match pod affinity rules."


def test_the_words_of_a_refusal() -> None:
    nodes = [
        node("n0", 1),
        node("n1", 8, taints=[{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]),
        node("n2", unschedulable=True),
        node("n3", labels={"disk": "slow"}),
    ]
    selecting = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "disk", "operator": "DoesNotExist"}]}
    ]}}}  # fmt: skip
    decision = run([pod("a", 2, affinity=selecting)], nodes)
    assert decision.complaints["default/a"] == (
        "0/4 nodes are available: 1 Insufficient huawei.com/Ascend910, "
        "1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint {dedicated: x}, "
        "1 node(s) were unschedulable."
    )
    tolerant = pod("a", 2, affinity=selecting, tolerations=[{"key": "dedicated", "operator": "Exists"}])
    assert places(run([tolerant], nodes)) == {"a": "n1"}
    assert run([pod("a")], []).complaints["default/a"] == "no nodes available to schedule pods"


@pytest.mark.parametrize(("operator", "values", "there"), [("In", ["b"], 0), ("Gt", ["4"], 1), ("Lt", ["4"], None)])
def test_node_affinity(operator: str, values: list[str], there: int | None) -> None:
    nodes = [node("n0", labels={"k": "b"}), node("n1", labels={"k": "5"})]
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "k", "operator": operator, "values": values}]}]}
    wanting = pod("a", affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}})
    assert places(run([wanting], nodes)) == ({} if there is None else {"a": f"n{there}"})


def on_host_port(name: str, number: int, *, protocol: str = "", address: str = "", **more: Any) -> Object:
    made = pod(name, **more)
    port = {"containerPort": number, "hostPort": number, "protocol": protocol or "TCP"}
    made["spec"]["containers"][0]["ports"] = [port | ({"hostIP": address} if address else {})]
    return made


TAKEN = "node(s) didn't have free ports for the requested pod ports"


def test_a_port_of_a_node_is_given_once() -> None:
    there = on_host_port("there", 2222, on="n0")
    both = run([there, on_host_port("a", 2222)], [node("n0"), node("n1")])
    assert places(both) == {"a": "n1"}
    full = run([there, on_host_port("a", 2222)], [node("n0")])
    assert full.complaints == {"default/a": f"0/1 nodes are available: 1 {TAKEN}."}
    for other in (
        on_host_port("a", 2223),
        on_host_port("a", 2222, protocol="UDP"),
        pod("a"),
    ):
        assert places(run([there, other], [node("n0")])) == {"a": "n0"}
    there["status"]["phase"] = "Succeeded"
    assert places(run([there, on_host_port("a", 2222)], [node("n0")])) == {"a": "n0"}


def test_a_port_of_two_addresses_of_a_node_is_two_ports() -> None:
    there = on_host_port("there", 2222, address="10.0.0.1", on="n0")
    assert places(run([there, on_host_port("a", 2222, address="10.0.0.2")], [node("n0")])) == {"a": "n0"}
    for address in ("10.0.0.1", "0.0.0.0", ""):
        assert places(run([there, on_host_port("a", 2222, address=address)], [node("n0")])) == {}


def test_a_gang_with_ports_of_its_nodes_is_spread_or_waits() -> None:
    pods = [on_host_port(f"p{number}", 2222, chips=1, group="g") for number in range(3)]
    decision = run(pods, [node(f"n{number}") for number in range(3)], [group("g", 3)])
    assert sorted(places(decision).values()) == ["n0", "n1", "n2"]
    assert places(run(pods, [node("n0"), node("n1")], [group("g", 3)])) == {}
    # Others get what a gang that did not fit has tried.
    late = on_host_port("late", 2222)
    assert places(run([*pods, late], [node("n0"), node("n1")], [group("g", 3)])) == {"late": "n0"}


def test_only_containers_that_run_together_hold_ports() -> None:
    there = pod("there", on="n0")
    port = {"containerPort": 2222, "hostPort": 2222}
    there["spec"]["initContainers"] = [{"name": "first", "ports": [port]}]
    assert places(run([there, on_host_port("a", 2222)], [node("n0")])) == {"a": "n0"}
    there["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    assert places(run([there, on_host_port("a", 2222)], [node("n0")])) == {}


def test_pods_of_other_schedulers_are_left_alone() -> None:
    decision = run([pod("a", schedulerName="mine")], [node("n0")])
    assert not decision.bindings
    assert not decision.complaints


def test_a_pod_that_was_bound_by_hand_gets_chips() -> None:
    taken = pod("a", 1, on="n0", annotations={CHIP: "Ascend910-0"})
    (binding,) = run([taken, pod("b", 1, on="n0")], [node("n0")]).bindings
    assert binding.bound
    assert binding.annotations[CHIP] == "Ascend910-1"


def test_chips_of_one_ring() -> None:
    assert chips.choose({0, 1, 2, 4, 5, 6, 7}, 3, ring=4) == (0, 1, 2)
    assert chips.choose({2, 3, 4, 5, 6, 7}, 2, ring=4) == (2, 3)
    assert chips.choose({3, 4, 5, 6}, 4, ring=4) == (3, 4, 5, 6)
    assert chips.ring_size("chip4-node8") == 4
    assert chips.ring_size("multilevel") == 0


def test_a_gang_fits_although_the_greedy_way_does_not() -> None:
    nodes = [node("n0", 3), node("n1", 4)]
    sizes = {"a": 2, "b": 2, "c": 3}
    members = [pod(name, size, "g") for name, size in sizes.items()]
    assert len(places(run(members, nodes, [group("g", 3)]))) == 3


def test_thousand_pods_of_a_gang() -> None:
    nodes = [node(f"n{i}", 100) for i in range(10)]
    members = [pod(f"p{i}", 1, "g", labels={"job-name": "k"}) for i in range(1000)]
    assert len(places(run(members, nodes, [group("g", 1000)]))) == 1000
    assert len(places(run([*members, pod("one-more", 1, "g")], nodes, [group("g", 1001)]))) == 0


worlds = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),  # chips of each node
    st.lists(  # gangs: chips of their pods, apart or not, how many of them are enough
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.integers(1, 4)),
        max_size=3,
    ),
)


def fits(free: list[int], wanted: list[int], apart: bool, need: int) -> bool:
    """By trying everything."""
    for chosen in itertools.combinations(range(len(wanted)), need):
        for spots in itertools.product(range(len(free)), repeat=need):
            if apart and len(set(spots)) < need:
                continue
            used = [
                sum(wanted[i] for i, spot in zip(chosen, spots, strict=True) if spot == n) for n in range(len(free))
            ]
            if all(u <= f for u, f in zip(used, free, strict=True)):
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_never_too_much_never_half_never_starved(world: tuple[list[int], list[tuple[list[int], bool, int]]]) -> None:
    capacities, gangs = world
    nodes = [node(f"n{i}", count) for i, count in enumerate(capacities)]
    pods, groups = [], []
    for number, (wanted, apart, minimum) in enumerate(gangs):
        affinity = {"affinity": json.loads(json.dumps(APART).replace('"j"', f'"j{number}"'))} if apart else {}
        groups.append(group(f"g{number}", min(minimum, len(wanted)), created=f"2026-01-01T00:00:0{number}Z"))
        for index, count in enumerate(wanted):
            labels = {"job-name": f"j{number}"}
            pods.append(pod(f"p{number}-{index}", count, f"g{number}", labels=labels, **affinity))
    decision = run(pods, nodes, groups)
    by_chip: dict[tuple[str, int], str] = {}
    free = dict(enumerate(capacities))
    for binding in decision.bindings:
        assert sum(map(len, binding.chips.values())) == binding.pod.requests.get(CHIP, 0) // 1000
        for chip in binding.chips.get(CHIP, ()):
            assert 0 <= chip < capacities[int(binding.node[1:])]
            assert by_chip.setdefault((binding.node, chip), binding.pod.key) == binding.pod.key
            free[int(binding.node[1:])] -= 1
    for number, (wanted, apart, minimum) in enumerate(gangs):
        bound = [binding for binding in decision.bindings if binding.pod.group == f"default/g{number}"]
        need = min(minimum, len(wanted))
        assert not bound or len(bound) >= need
        if apart:
            assert len({binding.node for binding in bound}) == len(bound)
        if not bound:
            assert not fits(list(free.values()), wanted, apart, need)
        assert len(bound) + sum(f"default/p{number}-{i}" in decision.complaints for i in range(len(wanted))) == len(
            wanted
        )


@pytest.mark.parametrize(
    ("annotations", "matters"),
    [
        ({"somebody": "else's"}, False),
        ({"scheduling.k8s.io/group-name": "gang"}, True),
        ({"huawei.com/Ascend910": "Ascend910-0"}, True),
        ({"hccl/rankIndex": "1"}, True),
        ({"volcano.sh/task-spec": "worker"}, True),
    ],
)
def test_only_what_is_read_of_a_pod_makes_the_scheduler_look(annotations: dict[str, str], matters: bool) -> None:
    """With a thousand pods a look costs more than the request that caused it."""
    before = {"metadata": {"name": "p"}, "spec": {}}
    assert _pod_matters(before, {"metadata": {"name": "p", "annotations": annotations}, "spec": {}}) == matters
