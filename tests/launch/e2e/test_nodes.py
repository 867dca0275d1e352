"""Jobs on two nodes: a node is lost and comes back, and the end is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import harness
from tests.launch.cluster import cluster

ARGS = ("--steps=30",)


@pytest.mark.timeout(180)
@pytest.mark.matrix
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_lost_node_comes_back(node: int, tmp_path: Path) -> None:
    """With node 0 the controller and the store are lost as well."""
    with cluster(tmp_path, *ARGS, ft=("--ft-warm=0",)) as job:
        job.wait_for("step 6/")
        job.nodes[node].kill()
        job.start(node)
        result = job.finish()
    harness.assert_same_end(result, *ARGS)
    (incident,) = result.incidents
    assert incident["restarted"] == [2 * node, 2 * node + 1] and incident["steps_lost"] == 0, incident
    assert incident["decision"] == "recover-in-place"
    assert any(fault["kind"] == "agent" and f"node {node}" in fault["detail"] for fault in incident["faults"]), incident
    assert [event["event"] for event in result.events].count("takeover") == int(node == 0)


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_both_nodes_are_lost_one_after_the_other(tmp_path: Path) -> None:
    """The standby takes over, a new one stands by where the first controller was, and takes over in its turn."""
    args = ("--steps=60",)
    with cluster(tmp_path, *args, ft=("--ft-warm=0",)) as job:
        job.wait_for("step 6/")
        for node in (0, 1):
            job.nodes[node].kill()
            job.start(node)
            job.wait_for_event("incident", node + 1)
            job.wait_for_event("standby", node + 2)
        result = job.finish()
    harness.assert_same_end(result, *args)
    assert [incident["restarted"] for incident in result.incidents] == [[0, 1], [2, 3]]
    assert [incident["id"] for incident in result.incidents] == ["i-0001", "i-0002"]
    assert not any(incident["steps_lost"] for incident in result.incidents)
    assert [event["event"] for event in result.events].count("takeover") == 2


@pytest.mark.matrix
@pytest.mark.timeout(180)
def test_the_others_go_on_without_node_0(tmp_path: Path) -> None:
    with cluster(tmp_path, "--steps=200", ft=("--ft-warm=0", "--ft-node-loss=shrink")) as job:
        job.wait_for("step 6/")
        job.nodes[0].kill()
        lines = job.wait_for("2 of 4|resumed at step")
        job.start(0)
        job.wait_for("resumed at step", after=lines)
        result = job.finish(120)
    assert result.code == 0, result.explain()
    assert {line["step"] for line in result.ranks.values()} == {200} and len(result.ranks) == 4
    assert {incident["decision"] for incident in result.incidents} == {"elastic-training"}
    assert not any(incident["steps_lost"] for incident in result.incidents)


@pytest.mark.matrix
@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", [pytest.param("running", marks=pytest.mark.exhaustive), "incident"])
def test_the_controller_of_one_node_is_killed(moment: str, tmp_path: Path) -> None:
    """Running: nobody is interrupted. In the middle of an incident: it is finished by the other controller."""
    fault = ("--ft-fault=kill@step=8,rank=1",) if moment == "incident" else ()
    with cluster(tmp_path, *ARGS, nnodes=1, nproc=4, ft=("--ft-warm=0", "--ft-standby=1", *fault)) as job:
        job.wait_for("step 6/")
        if moment == "incident":
            job.wait_for_event("fault")
        job.controller().kill()
        result = job.finish()
    harness.assert_same_end(result, *ARGS)
    assert [event["event"] for event in result.events].count("takeover") == 1
    assert not any(incident["steps_lost"] for incident in result.incidents)
    assert [incident["restarted"] for incident in result.incidents] == ([[1]] if fault else [])
