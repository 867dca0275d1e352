"""The online stress test through all parts: training pauses, chips are tested, and a node that fails is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterd.chain import NAME, Chain, running
from tests.clusterd.closing import assert_told, assert_whole
from tests.clusterd.e2e.test_chain import begin
from tests.embedded.up import evertrain, needs_kubectl
from tests.taskd.e2e.test_chain import STEPS

pytestmark = needs_kubectl


def stress_test(chain: Chain, *options: str) -> tuple[int, str]:
    return chain.halts_for(*evertrain("stress-test", NAME, *options))


@pytest.mark.matrix
def test_training_goes_on_after_the_test_of_a_node_that_is_well(tmp_path: Path) -> None:
    with running(tmp_path, "recover", TASKD_STRESS_SECONDS="1") as chain:
        pods = begin(chain, "--taskd", "--faulty-chip=3")
        code, said = stress_test(chain, "--node", chain.node(0), "--op", "aic,p2p")
        assert code == 0, said
        assert said.count("test 0 OK, test 1 OK") == 2 and "stress test finish" in said, said
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
        (incident,) = chain.incidents()
        assert_whole(result, [incident])
        assert (incident["outcome"], incident["ok"]) == ("recovered", True)
        assert [phase["phase"] for phase in incident["phases"]] == ["detect", "pause", "stress test", "continue"]


def test_a_node_that_fails_is_isolated_and_its_pod_replaced(tmp_path: Path) -> None:
    with running(tmp_path, "recover", TASKD_STRESS_SECONDS="1") as chain:
        pods = begin(chain, "--taskd", "--faulty-chip=3")
        node = chain.node(1)
        code, said = stress_test(chain)
        assert code == 1 and f"stress test find fault, isolate node:{node}" in said, said
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1]
        assert chain.node(1) not in (node, chain.node(0))
        isolated = chain.up.get("node", node)
        (incident,) = chain.incidents()
        assert_whole(result, [incident], kept=[0, 1])
        assert isolated["metadata"]["annotations"]["NodeHealthyStatus"] == "UnHealthy"
        taints = {(taint["key"], taint.get("value")) for taint in isolated["spec"]["taints"]}
        assert ("evertrain.dev/fault", "Isolated") in taints
        assert_told(incident, "recover", {2, 3})
