"""From the fault to the repaired training, through all parts: AscendJob, torchrun, TaskD, MindIO, ClusterD, operator.

The script of the job is the documents' own. Every test ends with the weights of a run without faults, and no step is
lost or done twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterd.chain import Chain, running
from tests.clusterd.closing import assert_kept_processes, assert_told, assert_whole
from tests.embedded.up import needs_kubectl
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = needs_kubectl

FAULT_STEP = 6
BROKEN_CHIP, MEMORY = "A8028801", "80E01801"
"""SeparateNPU, and RestartBusiness of which the training says that it has an error of memory."""


def begin(chain: Chain, *args: str) -> list[str]:
    """Up to the step before the fault; the uids of the pods."""
    chain.start(f"--steps={STEPS}", *args)
    chain.to(FAULT_STEP)
    return chain.uids()


def test_a_killed_process_is_replaced_in_its_pod(tmp_path: Path) -> None:
    with running(tmp_path, "recover-in-place") as chain:
        pods = begin(chain, f"--fault={FAULT_STEP}:3:kill")
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
        (incident,) = chain.incidents()
    assert_whole(result, [incident], kept=[0, 1, 2])
    assert_told(incident, "recover-in-place", {3})


def test_a_memory_error_is_retried_and_nobody_restarts(tmp_path: Path) -> None:
    """The chip says so to its node, and the training finds out by itself: two views of one fault."""
    with running(tmp_path, "retry,recover") as chain:
        pods = begin(chain, f"--fault={FAULT_STEP}:3:uce")
        chain.up.evertrain("inject", "chip", MEMORY, "--node", chain.node(1), "--chip", "1", "--for", "20")
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
        (incident,) = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1, 2, 3)
    assert_told(incident, "retry", {3})
    assert MEMORY in {fault["code"] for fault in incident["faults"]}, incident


def test_a_killed_process_without_recovery_in_place_costs_its_pod(tmp_path: Path) -> None:
    with running(tmp_path, "recover") as chain:
        pods = begin(chain, f"--fault={FAULT_STEP}:3:kill")
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1]
        (incident,) = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    assert_told(incident, "recover", {3})


@pytest.mark.matrix
@pytest.mark.parametrize(
    "pod", [pytest.param(1, id="a-pod", marks=pytest.mark.exhaustive), pytest.param(0, id="the-first-pod")]
)
def test_a_broken_chip_moves_its_pod_to_the_spare_node(tmp_path: Path, pod: int) -> None:
    """With recover-in-place beside it: what is broken can't stay.

    With the first pod go the manager, the controller and torchrun's store; how long a machine takes to start them is
    not what is tried here, so processes are given the time to wait for it.
    """
    with running(tmp_path, "recover-in-place,recover", TTP_RETRY_TIMES="60") as chain:
        pods = begin(chain)
        node = chain.node(pod)
        chain.up.evertrain("inject", "chip", BROKEN_CHIP, "--node", node, "--chip", "1")
        chain.until_replaced(pod, pods[pod])
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[1 - pod] == pods[1 - pod] and now[pod] != pods[pod]
        assert chain.node(pod) not in (node, chain.node(1 - pod))
        incidents = chain.incidents()
    assert_same_end(result)
    survivors, ranks = ((0, 1), {2, 3}) if pod else ((2, 3), {0, 1})
    assert_kept_processes(result, *survivors)
    assert_told(incidents[-1], "recover", ranks)
    (fault,) = [fault for fault in incidents[0]["faults"] if fault["code"]]
    assert (fault["code"], fault["level"], fault["node"]) == (BROKEN_CHIP, "SeparateNPU", node)


@pytest.mark.matrix
def test_a_node_loses_its_power(tmp_path: Path) -> None:
    with running(tmp_path, "recover", "--node-grace", "15") as chain:
        pods = begin(chain)
        node = chain.node(1)
        chain.up.evertrain("node", "stop", node)
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1]
        assert chain.node(1) not in (node, chain.node(0))
        incidents = chain.incidents()
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    assert_told(incidents[-1], "recover", {2, 3})
