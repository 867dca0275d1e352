"""Incidents in one sentence for the person at the terminal. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from typing import Any

_SHOWN_PHASES = ("detect", "decide", "stop", "dump", "start", "rebuild", "repair", "resume")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_words(code: int | None) -> str:
    """An exit code as `subprocess` has it, in words."""
    if code is None:
        return "ended"
    return f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def fault_sentence(fault: Mapping[str, Any]) -> str:
    """`rank 1 was killed by SIGKILL at step 12`."""
    code, detail = fault.get("exit_code"), _first_line(str(fault.get("detail", "")))
    kind = fault.get("kind", "")
    if kind in ("rejoin", "hot-switch"):
        what = "is back" if kind == "rejoin" else "has a new process ready"
        return f"rank {fault.get('rank', '?')} {what}"
    if kind == "exit":
        what = ("was " if (code or 0) < 0 else "") + exit_words(code)
        if (code or 0) >= 0 and "; " in detail:
            what += f" ({detail.partition('; ')[2]})"
        elif code == 0 and detail:
            what = detail
    else:
        what = {
            "stopped": "was stopped",
            "hang": f"hung ({detail})",
            "unresponsive": f"did not react ({detail})",
            "exception": f"raised {detail}" if detail else "raised an exception",
            "script": "called Evertrain in a way that can't work",  # the job's last words are the details
            "uce": "lost its state to a memory error",
            "hccl": f"failed in a collective ({detail})" if detail else "failed in a collective",
            "link": "lost its link to another rank",
            "disconnected": "lost its link to the controller",
            "start": f"failed to start ({detail})" if detail else "failed to start",
            "repair": f"got no good copy of the state ({detail})",
        }.get(kind, f"failed ({kind}: {detail})")
    step = fault.get("step", -1)
    if kind in ("agent", "controller") and detail:
        return detail
    return f"rank {fault.get('rank', '?')} {what}" + (f" at step {step}" if isinstance(step, int) and step >= 0 else "")


def incident_line(record: Mapping[str, Any], warm_ranks: Collection[int] = ()) -> str:
    """The whole incident in one line."""
    faults = record.get("faults") or [{}]
    # Survivors often notice first that a link broke; what broke it is the news.
    first = next((fault for fault in faults if fault.get("kind") not in ("link", "disconnected")), faults[0])
    line = fault_sentence(first)
    if len(faults) > 1:
        line += f" and {len(faults) - 1} more fault{'s' if len(faults) > 2 else ''}"
    outcome, decision = record.get("outcome"), record.get("decision")
    if outcome == "ended":
        return f"{line}; the job ends"
    if outcome == "restarted" and record.get("step", -1) < 0:
        return f"{line}; all processes are restarted"
    step = record.get("step", -1)
    failed_at = first.get("step", -1)
    if decision == "retry" and isinstance(failed_at, int) and 0 <= failed_at < step:
        line += "; the others had completed the step, and it took their state"
    else:
        line += f"; {_cure(str(decision), record.get('restarted') or [], warm_ranks)}"
    if step >= 0:
        line += f" and resumed at step {step}"
    line += f" after {_duration(record.get('total_ms', 0.0))}"
    phases = record.get("phases_ms") or {}
    parts = [f"{name} {phases[name]:.0f}" for name in _SHOWN_PHASES if phases.get(name, 0) >= 0.5]
    if parts:
        line += f" ({', '.join(parts)})"
    lost = record.get("steps_lost", 0)
    return line + (f"; {lost} step{'' if lost == 1 else 's'} lost" if step >= 0 else "")


def waiting_line(record: Mapping[str, Any]) -> str:
    """A node is lost: what the person who can bring it back has to know."""
    ranks = record.get("ranks") or []
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    seconds = record.get("seconds", 0.0)
    what = f"waiting up to {seconds:g} s for it" if seconds else "the others go on without it"
    return f"node {record.get('node', '?')} is lost ({who}); {what}; start it again with the same command"


def news_line(record: Mapping[str, Any]) -> str:
    """What is said at once about an event that is no incident; empty for most."""
    match record.get("event"):
        case "warning":
            return f"warning: {record.get('detail') or record.get('message') or record}"
        case "waiting":
            return waiting_line(record)
        case "node" if record.get("present"):
            return f"node {record.get('node', '?')} is back"
        case "paused":
            return f"paused at step {record.get('step')} for up to {record.get('seconds', 0.0):g} s"
        case "continued":
            return f"the pause is over: {record.get('reason', '')}"
    return ""


def saved_line(step: int, path: str, directory: str | None) -> str:
    """What is left of a job that was ended by a signal. `step` is negative if there is no checkpoint."""
    if step >= 0:
        return f"checkpoint of step {step} in {directory or path}; the same command goes on from it"
    if directory:
        return f"nothing saved in {directory}: no rank had completed a step"
    return "nothing saved: no checkpoint directory was given (--ft-checkpoint-dir)"


def _cure(decision: str, restarted: list[int], warm_ranks: Collection[int]) -> str:
    if decision == "retry":
        return "the step was run again"
    if decision == "hot-switch":
        return "its process was exchanged"
    if decision == "elastic-training":
        return "the others went on without it" if restarted else "all went on together"
    if decision == "restart":
        return "all processes were restarted"
    warm = all(rank in warm_ranks for rank in restarted)
    if len(restarted) > 1:
        return f"ranks {', '.join(map(str, restarted))} were replaced"
    return "replaced by a warm spare" if warm and restarted else "replaced by a new process"


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.1f} s"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""
