"""Objects as text for people without kubectl: tables as the server makes them, and descriptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import yaml

from evertrain.kube.times import parse_time

Object = dict[str, Any]
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def table(answer: Object, *, wide: bool = False, namespaces: bool = False, header: bool = True) -> str:
    """A `meta.k8s.io/v1` Table as kubectl prints it."""
    columns = answer.get("columnDefinitions") or []
    shown = [index for index, column in enumerate(columns) if wide or not column.get("priority")]
    rows = [[str(columns[index]["name"]).upper() for index in shown]]
    for row in answer.get("rows") or []:
        cells = row.get("cells") or []
        rows.append([_cell(cells[index]) if index < len(cells) else "" for index in shown])
    if namespaces:
        names = ["NAMESPACE", *(_metadata(row.get("object")).get("namespace", "") for row in answer.get("rows") or [])]
        rows = [[name, *row] for name, row in zip(names, rows, strict=True)]
    return aligned(rows if header else rows[1:])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_yaml(item: Object) -> str:
    return str(yaml.safe_dump(_tidy(item), sort_keys=False, default_flow_style=False, allow_unicode=True, width=10000))


def as_json(item: Object) -> str:
    return json.dumps(_tidy(item), indent=4, ensure_ascii=False) + "\n"


def describe(item: Object, events: Sequence[Object], now: datetime) -> str:
    metadata = _metadata(item)
    owners = [f"{owner.get('kind')}/{owner.get('name')}" for owner in metadata.get("ownerReferences") or []]
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != _APPLIED}
    fields: list[tuple[str, list[str]]] = [
        ("Name", [str(metadata.get("name", ""))]),
        ("Namespace", [str(metadata["namespace"])] if metadata.get("namespace") else []),
        ("Kind", [f"{item.get('kind')} ({item.get('apiVersion')})"]),
        ("Labels", [f"{key}={value}" for key, value in sorted((metadata.get("labels") or {}).items())]),
        ("Annotations", [f"{key}: {value}" for key, value in sorted(annotations.items())]),
        ("Created", [str(metadata.get("creationTimestamp", ""))]),
        ("Deleted", [str(metadata["deletionTimestamp"])] if metadata.get("deletionTimestamp") else []),
        ("Controlled by", owners),
    ]
    lines = [
        f"{name + ':':<15}{value}" if not i else f"{'':<15}{value}" for name, vs in fields for i, value in enumerate(vs)
    ]
    rest = {key: value for key, value in item.items() if key not in ("apiVersion", "kind", "metadata")}
    for key, value in rest.items():
        lines.append(f"{key[:1].upper()}{key[1:]}:")
        text = yaml.safe_dump(value, sort_keys=False, default_flow_style=False, allow_unicode=True, width=10000)
        lines += [f"  {line}" for line in text.rstrip("\n").removesuffix("\n...").splitlines()]
    lines.append("Events:" if events else "Events:        <none>")
    if events:
        rows = [["TYPE", "REASON", "AGE", "FROM", "MESSAGE"]]
        for event in sorted(events, key=_seen):
            source = (event.get("source") or {}).get("component") or event.get("reportingComponent") or ""
            count = event.get("count") or 1
            times = f" (x{count})" if count > 1 else ""
            message = " ".join(str(event.get("message", "")).split())
            rows.append(
                [
                    str(event.get("type", "")),
                    str(event.get("reason", "")),
                    age(_seen(event), now) + times,
                    source,
                    message,
                ]
            )
        lines += [f"  {line}" for line in aligned(rows).splitlines()]
    return "\n".join(lines) + "\n"


def age(timestamp: str, now: datetime) -> str:
    """How long ago, in the two largest units, as kubectl has it."""
    try:
        seconds = max(int((now - parse_time(timestamp)).total_seconds()), 0)
    except (ValueError, TypeError):
        return "<unknown>"
    for unit, length, finer, finer_length in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= 2 * length or (unit == "d" and seconds >= length):
            whole, rest = divmod(seconds, length)
            return f"{whole}{unit}" + (f"{rest // finer_length}{finer}" if whole < 8 and rest // finer_length else "")
    return f"{seconds}s"


def last_condition(item: Object) -> Object:
    conditions = (item.get("status") or {}).get("conditions") or [{}]
    found = conditions[-1]
    return found if isinstance(found, dict) else {}


def condition_line(condition: Object) -> str:
    return f"{condition.get('type', '')} ({condition.get('reason', '')}): {condition.get('message', '')}"


def _metadata(item: Object | None) -> Object:
    found = (item or {}).get("metadata")
    return found if isinstance(found, dict) else {}


def _seen(event: Object) -> str:
    series = event.get("series") or {}
    for found in (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime")):
        if found:
            return str(found)
    return str(_metadata(event).get("creationTimestamp", ""))


def _cell(value: Any) -> str:
    if value is None:
        return "<none>"
    return str(value).lower() if isinstance(value, bool) else str(value).partition("\n")[0]


def _tidy(item: Object) -> Object:
    """Without what only programs read."""
    if isinstance(item.get("items"), list):
        return item | {"items": [_tidy(child) for child in item["items"]]}
    metadata = {key: value for key, value in _metadata(item).items() if key != "managedFields"}
    return item | {"metadata": metadata} if "metadata" in item else item
