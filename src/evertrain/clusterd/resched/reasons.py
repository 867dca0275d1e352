"""job-reschedule-reason: which pods of which job were replaced lately, and why. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

NAMESPACE, NAME, KEY = "mindx-dl", "job-reschedule-reason", "recent-reschedule-records"
MOST_RECORDS, MOST_TASKS = 10, 10
"""Of a job, and of a record."""
LARGEST = 950 * 1024
LATEST = 1 << 62
"""Seconds: no time is later."""

Task = tuple[str, str, str, str]
"""Reason, pod, node and rank of the pod."""


def read(text: str) -> dict[str, Any]:
    """By job. What nobody can read is as good as nothing."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {job: entry for job, entry in found.items() if _is_entry(entry)}


def last(found: dict[str, Any], job: str) -> float | None:
    """When pods of the job were replaced the last time."""
    records = found[job]["RescheduleRecords"] if job in found else []
    return float(records[0]["RescheduleTimeStamp"]) if records else None


def recorded(text: str, job: str, tasks: Sequence[Task], now: float, since: float) -> str | None:
    """The text with one record more; None if it has that one already, from `since` (when the pods were made) or later:
    then who wrote it was killed before the pods were gone."""
    found = read(text)
    listed = [
        {"RescheduleReason": reason, "PodName": pod, "NodeName": node, "NodeRankIndex": rank}
        for reason, pod, node, rank in tasks[:MOST_TASKS]
    ]
    entry = found.pop(job, {"JobID": job, "TotalRescheduleTimes": 0, "RescheduleRecords": []})
    records = entry["RescheduleRecords"]
    if records and records[0]["ReasonOfTask"] == listed and records[0]["RescheduleTimeStamp"] >= int(since):
        return None
    record = {
        "LogFileFormatTime": datetime.fromtimestamp(now, timezone.utc).strftime("I%m%d %H:%M:%S"),
        "RescheduleTimeStamp": int(now),
        "ReasonOfTask": listed,
    }
    entry["TotalRescheduleTimes"] = int(entry.get("TotalRescheduleTimes") or 0) + 1
    entry["RescheduleRecords"] = [record, *records][:MOST_RECORDS]
    found[job] = entry
    while len(result := json.dumps(found, separators=(",", ":"))) > LARGEST and len(found) > 1:
        del found[min(found, key=lambda each: last(found, each) or 0.0)]
    return result


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("TotalRescheduleTimes"), (int, type(None))):
        return False
    records = entry.get("RescheduleRecords")
    return isinstance(records, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("RescheduleTimeStamp"), int)
        and abs(each["RescheduleTimeStamp"]) <= LATEST
        and isinstance(each.get("ReasonOfTask"), list)
        for each in records
    )
