"""manager.py, torchrun and a training with MindIO's callbacks, as the documents have them; no ClusterD."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tests.taskd.jobs import GATE, Result, TwoPods, example_with

STEPS = 16


@once
def undisturbed_run() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        result = TwoPods(Path(folder) / "job").run(f"--steps={STEPS}")
        assert result.codes == [0, 0], result.explain()
        return result


def undisturbed() -> dict[int, Any]:
    return ends(undisturbed_run())


def ends(result: Result) -> dict[int, Any]:
    """By rank: the last step, and after it the weights and the rank's part of the optimizer."""
    return {rank: (each["step"], each["weights"], each["state"]) for rank, each in result.results.items()}


def assert_same_end(result: Result, again_from: int = STEPS + 1) -> None:
    """Codes, weights, the optimizer, and steps without a gap, each with the same samples, loss and weights; those from
    `again_from` may have been done twice."""
    assert result.codes == [0, 0], result.explain()
    assert ends(result) == undisturbed()
    whole = undisturbed_run().steps
    for rank, steps in result.steps.items():
        for record in steps:
            assert record == whole[rank][record[0] - 1], f"rank {rank}: {record}"
        seen = [step for step, *_ in steps]
        for before, step in zip(seen, seen[1:], strict=False):
            in_order = step == before + 1 or again_from <= step <= before
            assert in_order, f"rank {rank}: a gap, or a step twice: {seen}"
        assert seen[0] == 1 and seen[-1] == STEPS, f"rank {rank}: {seen}"


@pytest.mark.matrix
def test_a_killed_process_is_replaced_in_its_pod_and_the_others_live_on(tmp_path: Path) -> None:
    pods = TwoPods(tmp_path / "job", EVERTRAIN_LAZY_DYNAMO="0")  # with all of torch, as a user's processes are
    result = pods.run(f"--steps={STEPS}", "--fault=6:3:kill")
    assert_same_end(result)
    for rank in (0, 1, 2):
        assert len({pid for _, pid in result.events[rank]}) == 1, "it kept its process"
    assert [step for step, *_ in result.steps[3]][:7] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.matrix
def test_a_killed_process_is_replaced_by_a_warm_spare(tmp_path: Path) -> None:
    pods = TwoPods(tmp_path / "job", script=example_with(GATE, tmp_path / "gated.py"), TASKD_WARM_SPARES="1")
    for node in (0, 1):
        pods.start(node, f"--steps={STEPS}", "--fault=6:3:gate", *(f"--fault=6:{rank}:hold" for rank in range(3)))
    end = time.monotonic() + 300
    while "a warm spare is ready" not in pods.log(1) and time.monotonic() < end:
        time.sleep(0.02)
    for name in ("gate", "go"):
        (pods.work / name).touch()
    assert_same_end(pods.wait())
    assert "was a warm spare" in pods.log(1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "fault",
    ["6:0:kill", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("6:1:uce", "6:0:network"))],
)
def test_other_faults(tmp_path: Path, fault: str) -> None:
    assert_same_end(TwoPods(tmp_path / "job").run(f"--steps={STEPS}", f"--fault={fault}"))
