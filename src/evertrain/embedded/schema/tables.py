"""Lists as `kubectl get` shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from evertrain.embedded.schema.ages import age
from evertrain.embedded.schema.columns import CELLS
from evertrain.embedded.schema.jsonpath import JSONPath
from evertrain.embedded.schema.kinds import Column, Resource
from evertrain.kube.port import Object


@lru_cache(maxsize=512)
def _path(text: str) -> JSONPath | None:
    try:
        return JSONPath.parse(text)
    except ValueError:
        return None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict | list) else str(value)


def _cell(column: Column, item: Object, now: datetime) -> Any:
    if not column.path:
        return item.get("metadata", {}).get("name", "")
    path = _path(column.path)
    found = path.find(item) if path else []
    if not found:
        return None
    if column.type == "date":
        return age(found[0], now)
    if column.type == "string":
        # Several values, as of a wildcard, stand in one cell.
        return ",".join(_text(value) for value in found)
    if column.type in ("integer", "number") and (isinstance(found[0], bool) or not isinstance(found[0], int | float)):
        return None
    return found[0]


def _cells(resource: Resource, item: Object, now: datetime) -> list[Any]:
    known = CELLS.get((resource.group, resource.kind)) if not resource.custom else None
    if known is not None:
        return known(item, now)
    return [_cell(column, item, now) for column in resource.columns]


def _definition(column: Column) -> Object:
    return {
        "name": column.name,
        # Ages are computed here, so that the column holds text.
        "type": "string" if column.type == "date" and not column.path else column.type,
        "format": column.format,
        "description": column.description,
        "priority": column.priority,
    }


def _partial(item: Object) -> Object:
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": item.get("metadata", {}),
    }


def table(
    resource: Resource,
    items: Sequence[Object],
    *,
    now: datetime,
    metadata: Object | None = None,
    include: str = "Metadata",
    version: str = "v1",
) -> Object:
    """A meta.k8s.io/v1 Table. `metadata` is that of the list; `include` is the query parameter includeObject: None,
    Metadata or Object."""
    rows: list[Object] = []
    for item in items:
        row: Object = {"cells": _cells(resource, item, now)}
        if include == "Object":
            row["object"] = {**item, "apiVersion": resource.api_version, "kind": resource.kind}
        elif include != "None":
            row["object"] = _partial(item)
        if (resource.group, resource.kind) == ("", "Pod"):
            phase = (item.get("status") or {}).get("phase")
            if phase in ("Succeeded", "Failed"):
                row["conditions"] = [
                    {
                        "type": "Completed",
                        "status": "True",
                        "reason": phase,
                        "message": "The pod has completed successfully."
                        if phase == "Succeeded"
                        else "The pod failed to complete.",
                    }
                ]
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": f"meta.k8s.io/{version}",
        "metadata": metadata or {},
        "columnDefinitions": [_definition(column) for column in resource.columns],
        "rows": rows,
    }
