"""Jobs on two nodes: a node is lost and comes back, and the end is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.cluster import cluster

ARGS = ("--steps=30",)


@pytest.mark.timeout(180)
def test_a_lost_node_comes_back(tmp_path: Path) -> None:
    with cluster(tmp_path, *ARGS, ft=("--ft-warm=0",)) as job:
        job.wait_for("step 6/")
        job.nodes[1].kill()
        job.start(1)
        result = job.finish()
    harness.assert_same_end(result, *ARGS)
    (incident,) = result.incidents
    assert incident["restarted"] == [2, 3] and incident["steps_lost"] == 0, incident
    assert incident["decision"] == "recover-in-place"
    assert any(fault["kind"] == "agent" and "node 1" in fault["detail"] for fault in incident["faults"]), incident


@pytest.mark.timeout(180)
def test_node_0_is_lost_with_controller_and_store(tmp_path: Path) -> None:
    with cluster(tmp_path, *ARGS, ft=("--ft-warm=0",)) as job:
        job.wait_for("step 6/")
        job.nodes[0].kill()
        job.start(0)
        result = job.finish()
    harness.assert_same_end(result, *ARGS)
    (incident,) = result.incidents
    assert incident["restarted"] == [0, 1] and incident["steps_lost"] == 0, incident
    assert [event["event"] for event in result.events].count("takeover") == 1
