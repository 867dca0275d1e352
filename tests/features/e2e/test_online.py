"""Online recovery of a network fault that is one: the connections between two pods are cut, and no process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.cli.demo.cutting import cut
from tests.clusterd.chain import running
from tests.clusterd.closing import assert_kept_processes, assert_told
from tests.clusterd.e2e.test_chain import begin
from tests.embedded.up import needs_kubectl
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = [needs_kubectl, pytest.mark.matrix, pytest.mark.timeout(400)]

NETWORK = "2"


def test_cut_connections_between_two_pods_are_mended_and_nobody_restarts(tmp_path: Path) -> None:
    with running(tmp_path, "retry,recover") as chain:
        pods = begin(chain)
        assert cut(chain.training(0), chain.training(1)) >= 4
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
        (incident,) = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1, 2, 3)
    assert_told(incident, "retry", set())
    assert {str(fault["type"]) for fault in incident["faults"]} == {NETWORK}, incident
