"""What whole jobs are judged by: a record that contradicts the training's own clock is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.clusterd.timeline.incident import wall_time
from tests.clusterd.closing import assert_halted
from tests.taskd.jobs import Result

OPENED = 1_700_000_000_000
RETRIED = {"detect": 10, "stop": 100, "agree": 50, "prepare": 3000, "retry": 200}
STEPS = (-500, -100, 60, 3300, 3400)
"""Milliseconds after the fault: the last one before the halt was under way, the first one after it is told late."""


def halted(phases: dict[str, int], opened_ms: int = OPENED, steps: tuple[int, ...] = STEPS) -> None:
    incident: dict[str, Any] = {
        "opened": wall_time(opened_ms),
        "phases": [{"phase": name, "ms": took} for name, took in phases.items()],
    }
    assert_halted(Result([], {}, {}, {}, [], [OPENED + step for step in steps]), incident)


def test_steps_are_done_before_the_halt_and_after_it() -> None:
    halted(RETRIED)
    halted({"detect": 1, "stop": 10, "agree": 9, "shrink": 80, "smaller": 2000, "grow": 1000}, steps=(-1, 150, 2000))
    halted({"detect": 1, "backup": 3000, "get ready": 500, "delete pod": 100, "migrate": 300}, steps=(-1, 500, 3500))


@pytest.mark.parametrize("late_ms", [-200, 500])
def test_a_record_of_another_time_is_noticed(late_ms: int) -> None:
    with pytest.raises(AssertionError, match="steps were done at"):
        halted(RETRIED, OPENED + late_ms)


def test_a_phase_that_is_told_too_long_is_noticed() -> None:
    with pytest.raises(AssertionError, match="'prepare'.* steps were done at"):
        halted(RETRIED | {"prepare": 4000})
