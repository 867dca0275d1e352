"""Process groups that a script makes for itself go on working after a recovery, in the same objects."""

from __future__ import annotations

import pytest

from tests.launch import harness
from tests.once import once

SCRIPT = harness.ROOT / "tests" / "torch" / "e2e" / "scripts" / "own_groups.py"


@once
def undisturbed() -> harness.Result:
    result = harness.run(script=SCRIPT)
    assert result.code == 0, result.explain()
    assert len(set(result.proof.values())) == 1, result.explain()
    return result


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            ("kill@step=4,rank=1,phase=backward", "kill@step=6,rank=0,phase=forward"),
            id="two-kills",
            marks=pytest.mark.matrix,
        ),
        pytest.param(("exception@step=4,rank=2,phase=backward",), id="exception", marks=pytest.mark.exhaustive),
        pytest.param(("hang@step=4,rank=3,phase=forward",), id="hang", marks=pytest.mark.exhaustive),
    ],
)
def test_a_scripts_groups_survive(faults: tuple[str, ...]) -> None:
    result = harness.run(script=SCRIPT, faults=faults)
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed().proof, result.explain()
    assert len(result.incidents) == len(faults), result.explain()
    for incident in result.incidents:
        assert (incident["outcome"], incident["steps_lost"]) == ("recovered", 0), result.explain()
