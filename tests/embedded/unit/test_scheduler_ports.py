"""Jobs with the same container port, where all pods share the network of this machine."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.scheduler.decide import Decision, World, decide
from evertrain.embedded.scheduler.ports import Ports, remember
from evertrain.embedded.scheduler.views import read_group, read_node, read_pod, read_queue
from tests.embedded.unit.test_scheduler_decide import group, node, pod

Object = dict[str, Any]
QUEUE = {"metadata": {"name": "default"}}


def listening(name: str, *ports: int, owner: str = "", **more: Any) -> Object:
    made = pod(name, **more)
    made["spec"]["containers"][0]["ports"] = [{"containerPort": port} for port in ports]
    if owner:
        made["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
    return made


def run(
    pods: list[Object], groups: list[Object], *, shared: bool = True, ports: dict[str, Ports] | None = None
) -> Decision:
    nodes = [read_node(node(f"node-{number}")) for number in range(2)]
    return decide(
        World(
            [read_pod(p) for p in pods],
            nodes,
            [read_group(g) for g in groups],
            [read_queue(QUEUE)],
            shared_network=shared,
            ports=ports or {},
        ),
        now_ns=1,
    )


def placed(decision: Decision) -> list[str]:
    return sorted(binding.pod.name for binding in decision.bindings if not binding.bound)


def job(name: str, *ports: int, on: str = "") -> list[Object]:
    return [
        listening(f"{name}-master-0", *ports, group=name, on=on, chips=1),
        pod(f"{name}-worker-0", 1, group=name, on=on),
    ]


def test_the_second_job_on_a_port_waits_and_is_told_why() -> None:
    groups = [group("one", 2, "Running"), group("two", 2)]
    decision = run([*job("one", 2222, 8000, on="node-0"), *job("two", 8000)], groups)
    assert placed(decision) == []
    text = (
        "port 8000 is that of pod default/one-master-0 of another job, and all pods share the network of this machine. "
        "It waits for that job's end; to run both at once, give one of them another port, or start the cluster with "
        "--own-network, which says what is missing where that can't be"
    )
    assert decision.complaints == {"default/two-master-0": text, "default/two-worker-0": text}
    (verdict,) = [each for each in decision.verdicts if each.group.name == "two"]
    assert verdict.complaint == f"2/2 tasks in gang unschedulable: {text}"


def test_jobs_on_different_ports_or_with_networks_of_their_own_run_at_once() -> None:
    groups = [group("one", 2, "Running"), group("two", 2)]
    pods = [*job("one", 2222, on="node-0"), *job("two", 2223)]
    assert placed(run(pods, groups)) == ["two-master-0", "two-worker-0"]
    pods = [*job("one", 2222, on="node-0"), *job("two", 2222)]
    assert placed(run(pods, groups, shared=False)) == ["two-master-0", "two-worker-0"]


def test_of_two_that_wait_the_older_one_goes_first() -> None:
    groups = [group("two", 2, created="2026-01-02"), group("one", 2, created="2026-01-01")]
    decision = run([*job("two", 2222), *job("one", 2222)], groups)
    assert placed(decision) == ["one-master-0", "one-worker-0"]
    assert "pod default/one-master-0" in decision.complaints["default/two-master-0"]


def test_a_port_is_free_when_its_job_has_ended_and_not_before_its_pods_are_gone() -> None:
    groups = [group("one", 2, "Completed"), group("two", 2)]
    over = [pod | {"status": {"phase": "Failed"}} for pod in job("one", 2222, on="node-0")]
    assert placed(run([*over, *job("two", 2222)], groups)) == ["two-master-0", "two-worker-0"]
    leaving = job("one", 2222, on="node-0")
    leaving[0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert placed(run([*leaving, *job("two", 2222)], groups)) == []


def test_pods_of_one_job_may_have_the_same_port() -> None:
    pods = [listening(f"pod-{number}", 2222, group="one") for number in range(2)]
    assert placed(run(pods, [group("one", 2)])) == ["pod-0", "pod-1"]
    pods = [listening(f"pod-{number}", 2222, owner="uid-of-the-job") for number in range(2)]
    assert placed(run(pods, [])) == ["pod-0", "pod-1"]
    pods = [listening(f"pod-{number}", 2222) for number in range(2)]
    assert len(placed(run(pods, []))) == 1, "pods of no job are strangers to each other"


def test_a_job_keeps_its_ports_while_a_pod_of_it_is_replaced() -> None:
    groups = [group("one", 2, "Running"), group("two", 2)]
    known = remember([read_pod(each) for each in job("one", 2222, on="node-0")], {}, ["default/one"])
    worker = job("one", 2222, on="node-0")[1:]
    assert placed(run([*worker, *job("two", 2222)], groups, ports=known)) == []
    assert placed(run([*worker, *job("two", 2222)], groups)) != [], "nobody else knows that port"
    back = run([*worker, *job("one", 2222)[:1], *job("two", 2222)], groups, ports=known)
    assert placed(back) == ["one-master-0"]
    assert placed(run(job("two", 2222), groups, ports=known)) == ["two-master-0", "two-worker-0"], "nothing is left"


def test_what_is_remembered_of_ports() -> None:
    first, second = (read_pod(listening("a", port, group="one")) for port in (1, 2))
    known = remember([first], {}, ["default/one", "default/two"])
    assert known == {"default/one": frozenset({1})}
    assert remember([second], known, ["default/one"]) == {"default/one": frozenset({1, 2})}
    assert remember([], known, ["default/two"]) == {}
