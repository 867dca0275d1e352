"""Strategies combined by commas: each is made to fail in turn, and the next one takes over, within one recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterd.chain import PACED, running
from tests.clusterd.closing import assert_told, assert_whole
from tests.clusterd.e2e.test_chain import BROKEN_CHIP, FAULT_STEP, begin
from tests.embedded.up import needs_kubectl
from tests.features.e2e.test_dump import EVERY
from tests.taskd.e2e.test_chain import STEPS
from tests.taskd.e2e.test_flows_failing import FAILING

pytestmark = needs_kubectl

REASONS = {
    ("retry", "recover-in-place"): "running the step again did not help",
    ("recover-in-place", "recover"): "rank 3 failed again",
    ("recover", "dump"): "rank 3 failed again in a new pod",
}


@pytest.mark.parametrize(
    ("fault", "first", "reasons"),
    [
        pytest.param("hurt", "retry", {("retry", "dump"): REASONS["retry", "recover-in-place"]}, id="one"),
        pytest.param("broken", "retry,recover-in-place,recover", REASONS, id="each", marks=pytest.mark.matrix),
    ],
)
def test_each_strategy_fails_and_the_next_one_takes_over(
    tmp_path: Path, fault: str, first: str, reasons: dict[tuple[str, str], str]
) -> None:
    """An error of memory. Rank 3 dies while it is repaired, then where it is started again, then in its new pod."""
    with running(tmp_path, f"{first},dump") as chain:
        pods = begin(chain, f"--fault={FAULT_STEP}:3:{fault}")
        chain.pace.allow(STEPS)
        result = chain.ends()
        now = chain.uids()
        assert now[0] == pods[0] and now[1] != pods[1]
        (incident,) = chain.incidents()
        shown = chain.up.evertrain("timeline", "train").stdout
    assert_whole(result, [incident], kept=[], again_from=FAULT_STEP + 1)
    assert_told(incident, "dump", {3}, "fell back")
    assert [(each["from"], each["to"]) for each in incident["fallbacks"]] == list(reasons), incident
    for each, reason in zip(incident["fallbacks"], reasons.values(), strict=True):
        assert reason in each["reason"], incident
        assert reason in shown, shown
    phases = [phase["phase"] for phase in incident["phases"]]
    tried = [name for name in phases if name in ("retry", "recover", "rebuild", "dump")]
    assert tried == ["retry", *(["recover", "rebuild"] if len(reasons) == 3 else []), "dump"], phases


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_without_a_spare_node_the_survivors_save_a_checkpoint(tmp_path: Path) -> None:
    """Nothing but a node is missing; when its chip is well, the job goes on from there."""
    patience = '    wait-reschedule-timeout: "30"'
    with running(tmp_path, "recover,dump", "--nodes", "2", annotations=patience) as chain:
        begin(chain)
        chain.up.evertrain("inject", "chip", BROKEN_CHIP, "--node", chain.node(1), "--chip", "1")
        chain.until((chain.job.work / f"iter_{FAULT_STEP:07d}").exists, "the checkpoint")
        chain.up.evertrain("inject", "clear")
        chain.pace.allow(STEPS)
        result = chain.ends()
        (incident,) = chain.incidents()
    assert_whole(result, [incident], kept=[], again_from=FAULT_STEP + 1)
    assert_told(incident, "dump", {2, 3}, "fell back")
    ((left, taken, why),) = ((each["from"], each["to"], each["reason"]) for each in incident["fallbacks"])
    assert (left, taken) == ("recover", "dump") and "the replacements found no place" in why, incident


@pytest.mark.matrix
def test_a_last_checkpoint_that_can_not_be_saved_leaves_the_one_before(tmp_path: Path) -> None:
    failing = {"FAILS": "save_ckpt:1", "FAILS_IN": str(PACED)}
    with running(tmp_path, "dump", script=FAILING, **failing) as chain:
        begin(chain, f"--fault={FAULT_STEP}:3:kill", f"--checkpoint-every={EVERY}")
        chain.pace.allow(STEPS)
        result = chain.ends()
        (incident,) = chain.incidents()
        assert (chain.job.folder / "failed.save_ckpt").exists()
        assert not (chain.job.work / f"iter_{FAULT_STEP:07d}").exists()
    assert_whole(result, [incident], kept=[], again_from=EVERY + 1)
    assert result.steps[0][EVERY : FAULT_STEP + 1].count(result.steps[0][EVERY]) == 2, "repeated from the last one"
    assert_told(incident, "dump", {3}, "fell back", all_phases=False)
    ((left, taken, why),) = ((each["from"], each["to"], each["reason"]) for each in incident["fallbacks"])
    assert (left, taken) == ("dump", "exit") and "no checkpoint was written" in why, incident
