"""How every test of a recovery ends: the same bits, no step lost, processes kept, and a timeline that adds up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from tests.taskd.e2e.test_chain import STEPS, assert_same_end
from tests.taskd.jobs import Result

ALL = (0, 1, 2, 3)
HALTS = ("stop", "pause", "get ready")
"""Phases at whose end training halts."""


def assert_whole(
    result: Result, incidents: Sequence[dict[str, Any]], *, kept: Sequence[int] = ALL, again_from: int = STEPS + 1
) -> None:
    """The weights of a run without faults; steps from `again_from` may have been done twice; ranks in `kept`, and no
    others, have had one process all along. How each incident went is another matter, but it is over and told without
    a gap."""
    assert_same_end(result, again_from)
    assert_kept_processes(result, *kept)
    for incident in incidents:
        assert_adds_up(incident)
        assert_halted(result, incident)


def assert_told(
    incident: dict[str, Any], decision: str, ranks: set[int], outcome: str = "recovered", *, all_phases: bool = True
) -> None:
    """One that has ended well, with a reason, and with phases that add up."""
    assert (incident["decision"], incident["outcome"], incident["ok"]) == (decision, outcome, True), incident
    assert incident["reason"], incident
    assert ranks <= {fault["rank"] for fault in incident["faults"]}, incident
    assert_adds_up(incident)
    names = [phase["phase"] for phase in incident["phases"]]
    assert "stop" in names or not all_phases, names


def assert_adds_up(incident: dict[str, Any]) -> None:
    assert incident["closed"] and incident["cause"] and incident["end"], incident
    assert sum(phase["ms"] for phase in incident["phases"]) == incident["total_ms"] > 0, incident
    assert incident["phases"][0]["phase"] == "detect", incident


def assert_halted(result: Result, incident: dict[str, Any]) -> None:
    """No step was done while training halts by the phases: from when it has been stopped or paused until the last
    phase, in which it goes on. Phases alone add up whatever they tell; the ranks note the times of their steps
    themselves, by a clock that on one machine is that of ClusterD."""
    opened = datetime.strptime(incident["opened"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    began, halted = round(opened.timestamp() * 1000), False
    assert result.times and began > min(result.times), "steps before the fault"
    for phase in incident["phases"][:-1]:
        ended = began + phase["ms"]
        if halted and phase["phase"] not in (*HALTS, "smaller"):
            done = [at for at in result.times if began < at < ended]
            assert not done, f"{phase} lasted from {began} to {ended}, and steps were done at {done}: {incident}"
        halted = halted or phase["phase"] in HALTS
        began = ended


def assert_kept_processes(result: Result, *ranks: int) -> None:
    """These have had one process from the beginning to the end, in which all callbacks ran; the others have not."""
    for rank in ALL:
        began = processes(result, rank)
        assert (len(began) == 1) == (rank in ranks), f"rank {rank}: {began}"
    for rank in ranks:
        events = result.events[rank]
        assert {pid for _, pid in events} == set(processes(result, rank)), f"rank {rank}: {events}"


def processes(result: Result, rank: int) -> list[int]:
    """Ids, each as the process itself has said it when it began, in all pods."""
    said = re.compile(rf"^rank {rank} is process (\d+)$", re.MULTILINE)
    return [int(pid) for output in result.outputs for pid in said.findall(output)]
