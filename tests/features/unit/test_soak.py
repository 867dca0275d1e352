"""What the soak draws from its seed, and when it has failed."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from bench.soak import COLUMNS, KINDS, NOT_THE_FIRST, Result, _show, column, main, plan
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.timeline.incident import Fallback, Incident, Phase
from evertrain.embedded.network.fabric import Fabric, NotAllowed


def test_a_seed_names_the_faults_and_a_few_are_enough_for_each_kind() -> None:
    drawn = plan(1, len(KINDS))
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert drawn == plan(1, len(KINDS)) != plan(2, len(KINDS))
    assert all(fault.rank in (2, 3) for fault in drawn if fault.kind in NOT_THE_FIRST)


@pytest.mark.parametrize("seed", range(20))
def test_something_comes_to_a_dump(seed: int) -> None:
    assert any(fault.kind == "broken" and fault.rank in (2, 3) for fault in plan(seed, len(KINDS)))


def incident(
    decision: str = n.RETRY, outcome: str = n.RECOVERED, *, fallen: str = "", phase: str = "", why: str = "it is over"
) -> Incident:
    """`fallen` from another strategy, `phase` is its last one."""
    return Incident(
        "id", "uid", "job", "default", 1000, 1500, decision=decision, closed=True, ok=outcome != n.FAILED,
        outcome=outcome, end=why, phases=(Phase(phase or "detect", 1000),),
        fallbacks=(Fallback(1200, fallen, decision, "no use"),) if fallen else (),
    )  # fmt: skip


def dumped(phase: str = n.PHASES[n.RESCHEDULING], fallen: str = n.RECOVER) -> Incident:
    return incident(n.DUMP, n.FELL_BACK, fallen=fallen, phase=phase)


@pytest.mark.parametrize(
    ("result", "good"),
    [
        (Result([incident()]), True),
        (Result([incident(outcome=n.FAILED)]), False),
        (Result([incident()], failure="rank 0, step 1"), False),
        (Result([incident()], repeated=1), False),
        (Result([incident(), dumped()], repeated=1), True),
        (Result([dumped()], repeated=2), False),
    ],
)
def test_a_step_may_be_done_again_only_after_a_last_checkpoint(result: Result, good: bool) -> None:
    assert result.ok is good


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (incident(), n.RECOVERED),
        (incident(n.IN_PLACE, fallen=n.RETRY), n.FELL_BACK),
        (dumped(), n.FELL_BACK),
        (dumped(fallen=""), n.RECOVERED),
        (incident(n.HOT_SWITCHES), n.RECOVERED),
        (incident(n.HOT_SWITCHES, n.CANCELLED), n.CANCELLED),
        (incident(n.IN_PLACE, n.FELL_BACK), n.FELL_BACK),  # the whole job was new before it was in place
        (incident(n.IN_PLACE, n.FAILED), n.FAILED),
    ],
)
def test_what_became_of_the_first_strategy_is_told_by_its_outcome(
    one: Incident, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert column(one) == told
    _show(Result([one], faults=1), seed=1)
    heading, row = capsys.readouterr().out.split("strategy ")[1].splitlines()[:2]
    assert re.split(r"  +", heading.strip()) == list(COLUMNS)
    assert row.split()[1:] == ["1" if name == told else "0" for name in COLUMNS]


EACH = [incident(), incident(n.IN_PLACE, fallen=n.RETRY), incident(n.RECOVER), dumped(), incident(n.HOT_SWITCHES)]


@pytest.mark.parametrize(
    ("instead", "missing"),
    [
        ({}, []),
        ({4: incident(n.HOT_SWITCHES, n.CANCELLED)}, [n.HOT_SWITCHES]),
        ({1: incident(n.IN_PLACE, n.FELL_BACK)}, [n.IN_PLACE]),
        ({2: incident(n.IN_PLACE), 3: dumped(phase=n.PHASES[n.FAULT_RETRY])}, [n.RECOVER, n.DUMP]),
        ({3: replace(dumped(), fallbacks=(Fallback(1200, n.DUMP, n.EXIT, "no checkpoint was written"),))}, [n.DUMP]),
    ],
)
def test_a_strategy_that_never_works_is_told_once_there_are_enough_faults(
    instead: dict[int, Incident], missing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    incidents = [instead.get(number, one) for number, one in enumerate(EACH)]
    result = Result(incidents, faults=len(KINDS))
    assert (result.missing, result.ok) == (missing, not missing)
    assert Result(incidents, faults=len(KINDS) - 1).ok, "too few for each kind"
    _show(result, seed=1)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NEVER")]
    assert told == ([f"NEVER SUCCEEDED: {', '.join(missing)}"] if missing else [])


def test_where_pods_can_have_no_networks_it_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refused(last: str) -> Fabric:
        raise NotAllowed("the kernel says no")

    monkeypatch.setattr(Fabric, "start", refused)
    monkeypatch.setattr(sys, "argv", ["soak", "--faults", "1"])
    assert main() == 1
    said = capsys.readouterr().err
    assert said.startswith("no cluster could be started: ") and "the kernel says no" in said
    assert said.count("\n") == 1, said
