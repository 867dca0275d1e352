"""Recovery in place has a limit: torchrun's --max_restarts is the number of faults that a container may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterd.chain import PODS, running
from tests.clusterd.closing import assert_adds_up, assert_kept_processes, assert_told
from tests.clusterd.e2e.test_chain import FAULT_STEP, begin
from tests.embedded.up import needs_kubectl
from tests.taskd.documents import START
from tests.taskd.e2e.test_chain import STEPS, assert_same_end, undisturbed_run

pytestmark = [needs_kubectl, pytest.mark.matrix, pytest.mark.timeout(400)]

ONCE = START.replace("--max_restarts 32767", "--max_restarts 1")
UNSAID = START.replace(" --max_restarts 32767", "")
TWICE = (f"--fault={FAULT_STEP}:3:kill", f"--fault={FAULT_STEP + 3}:2:kill")
"""Two processes of one pod, one after the other."""
ENDS_ALL = "    cleanPodPolicy: Running"
TOLD = "more faults in this container than --max_restarts 1 allows"


def test_one_fault_more_than_max_restarts_ends_the_training(tmp_path: Path) -> None:
    """And the job: its other pod ends and frees its chips, if its policy is that of the examples."""
    with running(tmp_path, "recover-in-place", start=ONCE, run_policy=ENDS_ALL) as chain:
        begin(chain, *TWICE)
        chain.pace.allow(STEPS)
        chain.comes_to("Failed")
        first, second = chain.incidents(2)
        chain.up.kubectl("wait", "--for=delete", f"pod/{PODS[0]}", "--timeout=200s")
        (ended,) = chain.up.get("pod", PODS[1])["status"]["containerStatuses"]
        result = chain.result()
        assert TOLD in result.outputs[1] and TOLD not in result.outputs[0]
        assert ended["state"]["terminated"]["exitCode"] == 1, ended
        assert_told(first, "recover-in-place", {3})
        assert (second["decision"], second["outcome"], second["ok"]) == ("recover-in-place", "failed", False), second
        assert_adds_up(second)
        whole = undisturbed_run()
        for rank, steps in result.steps.items():
            assert steps == whole.steps[rank][: FAULT_STEP + 3], f"rank {rank}"
        assert_kept_processes(result, 0, 1, 2)


def test_without_the_option_a_container_may_have_many(tmp_path: Path) -> None:
    assert "--max_restarts" not in UNSAID
    with running(tmp_path, "recover-in-place", start=UNSAID) as chain:
        pods = begin(chain, *TWICE)
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
        first, second = chain.incidents(2)
    assert_same_end(result)
    assert_kept_processes(result, 0, 1)
    assert_told(first, "recover-in-place", {3})
    assert_told(second, "recover-in-place", {2})


def test_a_job_that_may_be_retried_goes_on_in_a_new_container(tmp_path: Path) -> None:
    with running(tmp_path, "recover-in-place", start=ONCE, labels='    fault-retry-times: "1"') as chain:
        pods = begin(chain, *TWICE)
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1]
        first, second = chain.incidents(2)
        assert_same_end(result)
        assert_kept_processes(result, 0, 1)
        assert TOLD in result.outputs[1]
        assert_told(first, "recover-in-place", {3})
        assert_told(second, "recover-in-place", {2})
