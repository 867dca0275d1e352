"""What the soak draws from its seed, and when it has failed."""

from __future__ import annotations

import pytest

from bench.soak import KINDS, NOT_THE_FIRST, Result, plan
from evertrain.clusterd.timeline.incident import Incident


def test_a_seed_names_the_faults_and_a_few_are_enough_for_each_kind() -> None:
    drawn = plan(1, len(KINDS))
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert drawn == plan(1, len(KINDS)) != plan(2, len(KINDS))
    assert all(fault.rank in (2, 3) for fault in drawn if fault.kind in NOT_THE_FIRST)


def incident(decision: str, *, ok: bool = True) -> Incident:
    return Incident("id", "uid", "job", "default", 1000, 1500, decision=decision, closed=True, ok=ok)


@pytest.mark.parametrize(
    ("result", "good"),
    [
        (Result([incident("retry")]), True),
        (Result([incident("retry", ok=False)]), False),
        (Result([incident("retry")], failure="rank 0, step 1"), False),
        (Result([incident("retry")], repeated=1), False),
        (Result([incident("retry"), incident("dump")], repeated=1), True),
        (Result([incident("dump")], repeated=2), False),
    ],
)
def test_a_step_may_be_done_again_only_after_a_last_checkpoint(result: Result, good: bool) -> None:
    assert result.ok is good
