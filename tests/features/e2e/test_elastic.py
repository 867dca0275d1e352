"""Elastic training: a node goes and there is no other one; training goes on smaller, and grows when it is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterd.chain import running
from tests.clusterd.closing import assert_kept_processes, assert_told
from tests.clusterd.e2e.test_chain import FAULT_STEP, begin
from tests.embedded.up import needs_kubectl
from tests.taskd.e2e.test_chain import STEPS
from tests.taskd.e2e.test_flows_elastic import assert_samples

pytestmark = [needs_kubectl, pytest.mark.matrix, pytest.mark.timeout(400)]

TWO_NODES = ("--nodes", "2", "--node-grace", "5")
SMALL = FAULT_STEP + 4
"""The last step that is trained with fewer ranks."""
PATIENCE = {"MINDIO_WAIT_MINDX_TIME": "15"}
"""Seconds. ClusterD looks for a spare node for ten less."""


def test_smaller_without_a_node_and_whole_again_with_it(tmp_path: Path) -> None:
    """The same samples in every step, and a loss within 1e-4 of that of the undisturbed run."""
    with running(tmp_path, "elastic-training", *TWO_NODES, **PATIENCE) as chain:
        pods = begin(chain)
        node = chain.node(1)
        chain.up.evertrain("node", "stop", node)
        chain.to(SMALL, 0, 1)
        chain.up.evertrain("node", "start", node)
        chain.until(lambda: "upgrade_rebuild" in dict(chain.result().events[0]), "the growth")
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1]
        assert chain.node(1) == node
        (incident,) = chain.incidents()
    assert_samples(result, small=range(FAULT_STEP + 1, SMALL + 1))
    assert_kept_processes(result, 0, 1)
    assert_told(incident, "elastic-training", {2, 3})
    names = [phase["phase"] for phase in incident["phases"]]
    assert names[-2:] == ["smaller", "grow"], names
