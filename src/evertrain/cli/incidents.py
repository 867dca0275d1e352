"""Incidents of a job on a cluster, as ClusterD keeps them: where they are read, and how they look as text."""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain.cli.columns import columns
from evertrain.cli.running import CommandError, UsageError

if TYPE_CHECKING:
    from evertrain.clusterd.timeline.incident import Fault, Incident
    from evertrain.kube.port import Kube

_JOB_PREFIX = re.compile(r"(?:acjobs?|ascendjobs?)(?:\.[a-z.]+)?/(?=[^/]*$)")
_JOB_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_TYPES = {"0": "memory", "1": "other", "2": "network"}
_SHOWN_FAULTS = 8


def job_meant(text: str, *, certainly: bool = False) -> str | None:
    """The name of the job that is meant; None: it is a file. A file that is there is meant, unless it says `acjob/`."""
    if prefix := _JOB_PREFIX.match(text):
        return text[prefix.end() :]
    if certainly:
        return text
    return text if _JOB_NAME.fullmatch(text) and not Path(text).exists() else None


async def of_cluster(name: str, arguments: argparse.Namespace) -> list[Incident]:
    """What ClusterD has published about the job."""
    from evertrain.cli import connection
    from evertrain.kube.port import ASCEND_JOB, NotFound

    try:
        kube = connection.connect(connection.choose_kubeconfig(arguments.kubeconfig, arguments.data_dir))
    except UsageError as error:
        raise UsageError(f"there is no file {name}; and to show a job: {error}") from None
    namespace = arguments.namespace or kube.namespace
    try:
        try:
            job = await kube.get(ASCEND_JOB, name, namespace)
        except NotFound:
            raise CommandError(
                f"there is no job {name} in namespace {namespace} (-n names another; for jobs that are gone: --db"
                " FILE with ClusterD's database)"
            ) from None
        return await published(kube, name, namespace, job["metadata"]["uid"])
    finally:
        await kube.close()


async def published(kube: Kube, name: str, namespace: str, uid: str) -> list[Incident]:
    """Those of the job with this uid, which may be none."""
    from evertrain.clusterd.timeline.history import CONFIG_MAP_PREFIX, Unreadable, decoded
    from evertrain.kube.port import CONFIG_MAP, NotFound

    try:
        found = await kube.get(CONFIG_MAP, CONFIG_MAP_PREFIX + name, namespace)
    except NotFound:
        return []
    try:
        return list(decoded(found.get("data"), uid))
    except Unreadable as error:
        raise CommandError(f"ConfigMap {CONFIG_MAP_PREFIX}{name} is not readable: {error}") from None


def of_database(path: Path, job: str, namespace: str) -> list[Incident]:
    from evertrain.clusterd.timeline.store import Damaged, Store

    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    try:
        store = Store(path, read_only=True)
        try:
            return store.incidents(job, namespace)
        finally:
            store.close()
    except (Damaged, sqlite3.Error) as error:
        raise CommandError(f"{path} is not readable as a timeline: {error}") from None


def as_json(incidents: Sequence[Incident]) -> str:
    return json.dumps([each.record() for each in incidents], indent=2)


def render(incidents: Sequence[Incident], *, jobs: bool = False) -> str:
    """One line for each, and below what it was about; with the job's name where there may be several."""
    if not incidents:
        return "No incidents."
    header = ["incident", *(["job"] if jobs else []), "time", "faults", "decision", "total ms", "outcome"]
    rows = [header]
    for incident in incidents:
        rows.append(
            [
                _short(incident.id),
                *([f"{incident.namespace}/{incident.name}"] if jobs else []),
                _time(incident.opened_ms),
                _ranks(incident),
                incident.decision or "-",
                str(incident.total_ms),
                incident.outcome or "open",
            ]
        )
    lines = columns(rows, left={"incident", "job", "time", "faults", "decision", "outcome"})
    for incident in incidents:
        lines += ["", *_details(incident)]
    return "\n".join(lines)


def _details(incident: Incident) -> list[str]:
    name = _short(incident.id)
    edge = " " * len(name) + "  "
    lines = [f"{name}  {_line(incident.cause) or 'an incident'}"]
    lines += [f"{edge}- {_fault(fault)}" for fault in incident.faults[:_SHOWN_FAULTS]]
    if (more := incident.more_faults + max(0, len(incident.faults) - _SHOWN_FAULTS)) > 0:
        lines.append(f"{edge}- and {more} more")
    for each in incident.fallbacks:
        path = " -> ".join(part for part in (each.left, each.taken) if part)
        lines.append(f"{edge}fallback after {each.at_ms - incident.opened_ms} ms: {path}: {_line(each.reason)}")
    if incident.decision or incident.reason:
        lines.append(f"{edge}decision: {incident.decision}: {_line(incident.reason)}")
    parts = " + ".join(f"{phase} {duration}" for phase, duration in incident.durations)
    lines.append(f"{edge}phases: {parts} = {incident.total_ms} ms{'' if incident.closed else ' so far'}")
    for remark in incident.remarks:
        lines.append(f"{edge}after {remark.at_ms - incident.opened_ms} ms: {_line(remark.text)}")
    if incident.closed:
        lines.append(f"{edge}{incident.outcome}" + (f": {_line(incident.end)}" if incident.end else ""))
    return lines


def _fault(fault: Fault) -> str:
    parts = [
        f"rank {fault.rank}" if fault.rank >= 0 else "",
        f"{_TYPES.get(fault.type, fault.type)} fault" if fault.type else "",
        f"code {fault.code}" if fault.code else "",
        f"level {fault.level}" if fault.level else "",
        f"node {fault.node}" if fault.node else "",
        f"device {fault.device}" if fault.device else "",
    ]
    return ", ".join(part for part in parts if part) + (f": {_line(fault.text)}" if fault.text else "")


def _ranks(incident: Incident) -> str:
    """Ranks and types, the first few: the lines below have the rest."""
    known = list(dict.fromkeys(fault.rank for fault in incident.faults if fault.rank >= 0))
    types = list(dict.fromkeys(_TYPES.get(fault.type, fault.type) for fault in incident.faults if fault.type))
    more = len(known) > 4 or incident.more_faults
    ranks = ",".join(str(rank) for rank in known[:4]) + (",..." if more else "")
    return " ".join(part for part in (f"rank {ranks}" if ranks else "", "/".join(types)) if part) or "-"


def _short(name: str) -> str:
    """Recovery ids are long; what is before the first dash is when they were made."""
    return name.partition("-")[0] or name


def _time(ms: int) -> str:
    from evertrain.clusterd.timeline.incident import wall_time

    return wall_time(ms).replace("T", " ").removesuffix("Z")


def _line(text: str) -> str:
    """In one line, and without what a terminal would obey."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
