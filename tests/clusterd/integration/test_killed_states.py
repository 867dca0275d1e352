"""ClusterD is killed in every state, and another one goes on: all ends as if nothing had been.

That all states are among those of the flows says `tests/clusterd/unit/test_killed_flows.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterd.killing import AFTER, BEFORE, FLOWS, IN, play

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1200)]

REST = {"in place", "exit"}
"""Their states are those of `recover`, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in REST else []) for name in FLOWS]
)
async def test_killed_in_every_state(tmp_path: Path, name: str) -> None:
    flow = FLOWS[name]
    expected, undisturbed = await play(tmp_path / "undisturbed", flow, lambda when, moment: False)
    assert expected.ok, expected
    states: set[str] = set()
    moments: list[tuple[str, int | str]] = [(IN, state) for state in flow.held]
    if not flow.only_held:
        moments += [(AFTER, 0)]
        moments += [(when, at + 1) for at in range(len(undisturbed.heard)) for when in (BEFORE, AFTER)]
    for when, moment in moments:
        left = [(when, moment)]

        def kill(when: str, moment: int | str, left: list[tuple[str, int | str]] = left) -> bool:
            return (when, moment) in left and not left.clear()

        result, played = await play(tmp_path / f"killed-{when}-{moment}", flow, kill)
        assert result == expected, f"killed {when} {moment}, in {played.states}"
        assert len(played.states) == 1
        if when == IN:
            assert played.states == [moment]
        states.update(played.states)
    assert states >= flow.kills
