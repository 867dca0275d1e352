"""ClusterD is killed in the middle of a recovery and started again: the job ends as if nothing had happened to it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clusterd.chain import running, running_beside
from tests.clusterd.closing import assert_kept_processes, assert_told, assert_whole
from tests.clusterd.e2e.test_chain import FAULT_STEP, begin
from tests.embedded.up import needs_kubectl
from tests.taskd.e2e.test_chain import STEPS, assert_same_end

pytestmark = [needs_kubectl, pytest.mark.matrix]

STATES = ("WaitReportStopCompleteState", "WaitReportRecoverStrategyState", "WaitReportProcessRecoverStatusState")
"""Training stops, training says what it can do, processes are replaced."""


@pytest.mark.parametrize(
    ("state", "strategy"),
    [  # in place the later ones are over before kubectl shows them
        pytest.param(0, "recover-in-place", id="stop-in-place"),
        pytest.param(0, "recover", id="stop", marks=pytest.mark.exhaustive),
        pytest.param(1, "recover", id="offers"),
    ],
)
def test_killed_in_the_middle_of_a_recovery(tmp_path: Path, state: int, strategy: str) -> None:
    """In that state, or in a later one if this one was over sooner than we could be there."""
    with running_beside(tmp_path, strategy) as (chain, clusterd), ThreadPoolExecutor(1) as background:
        killed = background.submit(clusterd.kill_in, chain, STATES[state:])
        pods = begin(chain, f"--fault={FAULT_STEP}:3:kill")
        chain.pace.allow(STEPS - 1)
        killed.result()
        clusterd.start()
        (incident,) = chain.incidents()
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        in_place = strategy == "recover-in-place"
        assert now[0] == pods[0] and (now[1] == pods[1]) == in_place
    assert_same_end(result)
    assert_kept_processes(result, *((0, 1, 2) if in_place else (0, 1)))
    assert_told(incident, strategy, {3}, all_phases=False)  # the newest ones may not have been written down


def test_a_fault_that_comes_while_it_is_away(tmp_path: Path) -> None:
    """The training waits until somebody leads it."""
    with running_beside(tmp_path, "recover-in-place") as (chain, clusterd):
        pods = begin(chain, f"--fault={FAULT_STEP}:3:kill")
        clusterd.kill()
        chain.pace.allow(STEPS - 1)
        chain.until(lambda: "rank 3" in (chain.job.folder / "pod1.out").read_text(), "the end of rank 3")
        clusterd.start()
        (incident,) = chain.incidents()
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
    assert_same_end(result)
    assert_kept_processes(result, 0, 1, 2)
    assert_told(incident, "recover-in-place", {3})


@pytest.mark.parametrize("state", [0], ids=["stop"])
def test_the_manager_of_the_job_is_killed_in_the_middle_of_a_recovery(tmp_path: Path, state: int) -> None:
    """Another one takes its place, and the recovery begins anew or goes on."""
    with running(tmp_path, "recover-in-place") as chain, ThreadPoolExecutor(1) as background:

        def kill() -> None:
            chain.until_recovery(STATES[state:])
            for pid in chain.managers():
                os.kill(pid, signal.SIGKILL)

        killed = background.submit(kill)
        pods = begin(chain, f"--fault={FAULT_STEP}:3:kill")
        chain.pace.allow(STEPS - 1)
        killed.result()
        chain.pace.allow(STEPS)
        result = chain.ends()
        assert chain.uids() == pods
        incidents = chain.incidents()
    assert_whole(result, incidents, kept=(0, 1, 2))
    assert incidents[-1]["outcome"] == "recovered", incidents
