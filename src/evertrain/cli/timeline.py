"""`evertrain timeline FILE`: the incidents of a run as a table, and the reasons below it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_PHASES = ("detect", "decide", "stop", "dump", "start", "rebuild", "repair", "resume")
_ALWAYS_SHOWN = ("detect", "decide", "stop", "rebuild", "repair", "resume")


class TimelineError(Exception):
    """The file can't be shown; the message says why."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="evertrain timeline",
        description="Show the incidents of a run: what failed, what was done about it, and where the time went.",
    )
    parser.add_argument("file", metavar="FILE", help="the file given to --ft-events; - for standard input")
    parser.add_argument("--all", action="store_true", help="all runs that are in the file, not only the last one")
    parser.add_argument("--json", action="store_true", help="print the incidents as a JSON array")
    arguments = parser.parse_args(argv)
    try:
        recorded = read(arguments.file)
        events = recorded if arguments.all else last_run(recorded)
    except TimelineError as error:
        print(f"evertrain timeline: {error}", file=sys.stderr)
        return 1
    incidents = [event for event in events if event["event"] == "incident"]
    try:
        print(json.dumps(incidents, indent=2) if arguments.json else render(events), flush=True)
        if (earlier := len(recorded) - len(events)) and not arguments.json:
            print(f"({earlier} events of earlier runs are in the file: --all shows them)", flush=True)
    except BrokenPipeError:
        # The reader, `head` for example, has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read(path: str) -> list[dict[str, Any]]:
    try:
        if path == "-":
            return parse(sys.stdin, "standard input")
        with open(path, encoding="utf-8") as file:
            return parse(file, path)
    except OSError as error:
        raise TimelineError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TimelineError(f"{path} is not a text file") from None


def parse(lines: Iterable[str], name: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    broken = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if broken:
            raise TimelineError(f"{name}, line {broken}: not an event of a run")
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            # The last line may be cut off if the launcher was killed while writing; any other makes it another file.
            broken = number
    if broken and not events:
        raise TimelineError(f"{name}, line {broken}: not an event of a run")
    return events


def last_run(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    begins = [index for index, event in enumerate(events) if event["event"] == "launch"]
    return list(events[begins[-1] :] if begins else events)


def render(events: Sequence[dict[str, Any]]) -> str:
    incidents = [event for event in events if event["event"] == "incident"]
    open_ids = _open_incidents(events)
    lasting = [] if _has_ended(events) else ["no end is recorded: the run goes on, or it did not end by itself"]
    if not incidents and not open_ids:
        return "\n".join(["No incidents.", *lasting])
    shown = [p for p in _PHASES if p in _ALWAYS_SHOWN or any(p in (i.get("phases_ms") or {}) for i in incidents)]
    header = ["id", "time", "fault", "rank", "step", "decision", *shown, "total ms", "lost", "outcome"]
    rows = [header]
    for incident in incidents:
        phases = incident.get("phases_ms") or {}
        faults = incident.get("faults") or [{}]
        rows.append(
            [
                str(incident.get("id", "")),
                _clock(str(incident.get("opened", ""))),
                _distinct(fault.get("kind", "") for fault in faults),
                _distinct(fault.get("rank", "") for fault in faults),
                _step(faults[0].get("step", -1)),
                str(incident.get("decision", "")),
                *(f"{phases[phase]:.1f}" if phase in phases else "-" for phase in shown),
                f"{incident.get('total_ms', 0.0):.1f}",
                str(incident.get("steps_lost", 0)),
                str(incident.get("outcome", "")),
            ]
        )
    lines = _table(rows, left={"id", "time", "fault", "decision", "outcome"})
    lines.append("")
    for incident in incidents:
        lines += _reasons(incident)
    lines += [f"{name}  was still open when the file ended" for name in open_ids]
    return "\n".join(lines + lasting)


def _has_ended(events: Sequence[dict[str, Any]]) -> bool:
    """Did the last run come to its end? Ends of single ranks have the same name."""
    run = last_run(events)
    begun = bool(run) and run[0]["event"] == "launch"
    return not begun or any(event["event"] == "ended" and "rank" not in event for event in run)


def _open_incidents(events: Sequence[dict[str, Any]]) -> list[str]:
    """Incidents of which a beginning is there but no end."""
    names: dict[str, None] = {}
    for event in events:
        if event["event"] == "launch":
            names.clear()
        elif event["event"] == "incident":
            names.pop(str(event.get("id", "")), None)
        elif event.get("incident"):
            names[str(event["incident"])] = None
    return list(names)


def _table(rows: list[list[str]], left: set[str]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    header = rows[0]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in rows
    ]


def _reasons(incident: dict[str, Any]) -> list[str]:
    name = str(incident.get("id", ""))
    lines = [f"{name}  {incident.get('reason', '')}".rstrip()]
    for fault in incident.get("faults") or []:
        detail = " ".join(str(fault.get("detail", "")).split())
        what = f"rank {fault.get('rank', '?')}, {fault.get('kind', '')}"
        lines.append(f"{' ' * len(name)}  - {what}" + (f": {detail}" if detail else ""))
    return lines


def _clock(text: str) -> str:
    """Only the time of day of an ISO timestamp."""
    return text.partition("T")[2].removesuffix("Z") or text


def _distinct(values: Iterable[Any]) -> str:
    kept = list(dict.fromkeys(str(value) for value in values))
    return ",".join(kept) if len(kept) <= 4 else ",".join(kept[:4]) + ",..."


def _step(value: Any) -> str:
    return str(value) if isinstance(value, int) and value >= 0 else "-"
