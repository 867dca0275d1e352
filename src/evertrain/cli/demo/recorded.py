"""An incident of ClusterD's timeline, as a demo shows it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evertrain.clusterd.timeline.incident import Incident

PHASES = {
    "notice": "until ClusterD knows of it",
    "detect": "what else is wrong, and with whom",
    "client": "for the job's manager",
    "stop": "the survivors leave what they are doing, even in the middle of a collective",
    "confirm": "which ranks are at fault",
    "agree": "the training says what it can do, ClusterD decides",
    "prepare": "until what the strategy needs is there: routes around a broken link, or a free node",
    "retry": "the step is run again; state that is lost comes from a replica",
    "recover": "what is at fault is replaced; the new processes get their state from a replica",
    "rebuild": "groups with the new processes, whose state comes from a replica; all go on with the same step",
    "dump": "the survivors write a checkpoint of this step",
    "restart": "all are told to start again; they do, and load it",
    "start again": "pods are made anew, until all run; their processes go on from the last checkpoint",
    "shrink": "groups without the lost ranks",
    "smaller": "training goes on with fewer ranks",
    "grow": "the ranks that are back get their state, and all go on together",
    "pause": "training halts at the end of a step",
    "switch links": "all ranks build their groups over the other link",
    "stress test": "the chips are tested",
    "continue": "training goes on",
    "backup": "another pod starts on a healthy node; training goes on",
    "get ready": "its processes start and wait; training goes on, then halts at the end of a step",
    "delete pod": "the old pod goes",
    "migrate": "the new processes get their state from the others, and all go on",
}


def lines(incident: Incident, happened_ms: int | None = None) -> list[tuple[str, bool]]:
    """Each with whether it is the one that counts. `happened_ms`: when the fault was made, by the same clock."""
    found = [f"cause      {incident.cause}"]
    for fallback in incident.fallbacks:
        found.append(f"fallback   {' -> '.join(filter(None, (fallback.left, fallback.taken)))}: {fallback.reason}")
    if incident.decision:
        found.append(f"decision   {incident.decision}: {incident.reason}")
    durations, total = incident.durations, incident.total_ms
    if happened_ms is not None:
        notice = incident.opened_ms - happened_ms
        durations, total = [("notice", notice), *durations], total + notice
    for name, took in durations:
        found.append(f"{name:<12}{took:7} ms   {PHASES.get(name, '')}")
    total_line = f"{'total':<12}{total:7} ms   {incident.outcome}: {incident.end}"
    return [*((line, False) for line in found), (total_line, True)]
