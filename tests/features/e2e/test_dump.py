"""The dying gasp and the exit: all start again, from the checkpoint that is written now or from the last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterd.chain import running
from tests.clusterd.closing import assert_told, assert_whole
from tests.clusterd.e2e.test_chain import FAULT_STEP, begin
from tests.embedded.up import needs_kubectl
from tests.taskd.e2e.test_chain import STEPS

pytestmark = needs_kubectl

EVERY = 5


@pytest.mark.parametrize(
    ("strategy", "again_from"),
    [
        pytest.param("dump", FAULT_STEP + 1, id="dump"),  # no step that was done is done again
        pytest.param("exit", EVERY + 1, id="exit", marks=pytest.mark.matrix),
    ],
)
def test_all_start_again_from_a_checkpoint(tmp_path: Path, strategy: str, again_from: int) -> None:
    with running(tmp_path, strategy) as chain:
        pods = begin(chain, f"--fault={FAULT_STEP}:3:kill", f"--checkpoint-every={EVERY}")
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1]
        (incident,) = chain.incidents()
        saved = (chain.job.work / f"iter_{FAULT_STEP:07d}").exists()
    assert_whole(result, [incident], kept=[], again_from=again_from)
    assert saved == (strategy == "dump")
    assert_told(incident, strategy, {3}, "fell back", all_phases=False)
