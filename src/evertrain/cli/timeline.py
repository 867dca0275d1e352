"""`evertrain timeline JOB|FILE`: the incidents of a run as a table, and the reasons below it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evertrain.cli import incidents, running
from evertrain.cli.columns import columns
from evertrain.cli.objects import cluster_options

_PHASES = ("detect", "decide", "stop", "dump", "start", "rebuild", "repair", "resume")
_ALWAYS_SHOWN = ("detect", "decide", "stop", "rebuild", "repair", "resume")


class TimelineError(Exception):
    """The file can't be shown; the message says why."""


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    as_json = arguments.json or arguments.output == "json"
    if arguments.db is None and arguments.target is None:
        parser.error("which run? Give a JOB, a FILE, or --db FILE")
    if arguments.db is not None or (job := incidents.job_meant(arguments.target, certainly=bool(arguments.namespace))):
        if arguments.all:
            parser.error("--all is for a FILE: of a job all incidents are shown")
        if arguments.db is not None:
            return _show_database(arguments, as_json)
        return running.run("timeline", lambda: _show_job(str(job), arguments, as_json))
    return _show_file(arguments, as_json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain timeline",
        description="Show the incidents of a run: what failed, what was done about it, and where the time went.",
        epilog="examples:\n"
        "  evertrain timeline my-job                 a job on the cluster, as ClusterD led it\n"
        "  evertrain timeline my-job -n team -o json\n"
        "  evertrain timeline run.jsonl              a run of `evertrain launch --ft-events run.jsonl`\n"
        "  evertrain timeline --db timeline.db       ClusterD's database: all jobs, also those that are gone\n"
        "  evertrain timeline --db timeline.db my-job\n\n"
        "A name for which there is a file means the file; acjob/NAME always means the job.\n"
        "which cluster: --kubeconfig, else $KUBECONFIG, else the embedded cluster that runs on --data-dir, else"
        " ~/.kube/config.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        metavar="JOB|FILE",
        nargs="?",
        help="an AscendJob; or the file given to --ft-events, - for standard input",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")
    parser.add_argument("--json", action="store_true", help="the same as -o json")
    parser.add_argument("--all", action="store_true", help="all runs that are in the file, not only the last one")
    parser.add_argument("-n", "--namespace", metavar="NAME", help="of the job; default: that of the kubeconfig")
    parser.add_argument("--db", type=Path, metavar="FILE", help="read ClusterD's database instead of asking a cluster")
    cluster_options(parser)
    return parser


async def _show_job(job: str, arguments: argparse.Namespace, as_json: bool) -> int:
    found = await incidents.of_cluster(job, arguments)
    print(incidents.as_json(found) if as_json else incidents.render(found))
    return 0


def _show_database(arguments: argparse.Namespace, as_json: bool) -> int:
    job = incidents.job_meant(arguments.target or "", certainly=True) or ""
    try:
        found = incidents.of_database(arguments.db, job, arguments.namespace or "")
    except running.CommandError as error:
        return running.complain("timeline", str(error), running.FAILED)
    return _print(incidents.as_json(found) if as_json else incidents.render(found, jobs=True))


def _print(*texts: str) -> int:
    try:
        for text in texts:
            print(text, flush=True)
    except BrokenPipeError:
        # The reader, `head` for example, has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_file(arguments: argparse.Namespace, as_json: bool) -> int:
    try:
        recorded = read(arguments.target)
        events = recorded if arguments.all else last_run(recorded)
    except TimelineError as error:
        print(f"evertrain timeline: {error}", file=sys.stderr)
        return 1
    if as_json:
        return _print(json.dumps([event for event in events if event["event"] == "incident"], indent=2))
    earlier = len(recorded) - len(events)
    return _print(
        render(events),
        *([f"({earlier} events of earlier runs are in the file: --all shows them)"] if earlier else []),
    )


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
    closed = [event for event in events if event["event"] == "incident"]
    open_ids = _open_incidents(events)
    lasting = [] if _has_ended(events) else ["no end is recorded: the run goes on, or it did not end by itself"]
    if not closed and not open_ids:
        return "\n".join(["No incidents.", *lasting])
    shown = [p for p in _PHASES if p in _ALWAYS_SHOWN or any(p in (i.get("phases_ms") or {}) for i in closed)]
    header = ["id", "time", "fault", "rank", "step", "decision", *shown, "total ms", "lost", "outcome"]
    rows = [header]
    for incident in closed:
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
    lines = columns(rows, left={"id", "time", "fault", "decision", "outcome"})
    lines.append("")
    for incident in closed:
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
