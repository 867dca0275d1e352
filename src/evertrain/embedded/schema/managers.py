"""Who manages which fields: the managedFields of an object, read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evertrain.embedded.schema import fieldsets
from evertrain.embedded.schema.fieldsets import Fields
from evertrain.embedded.schema.kinds import Resource
from evertrain.kube.port import Object

APPLY, UPDATE = "Apply", "Update"
MAX_UPDATERS = 10
"""More managers by update than this are put together, oldest first, so that objects don't grow for ever."""

_SERVER_FIELDS: Fields = frozenset(
    {
        ("f:apiVersion",),
        ("f:kind",),
        ("f:metadata",),
        *(
            ("f:metadata", f"f:{name}")
            for name in (
                "name",
                "namespace",
                "creationTimestamp",
                "selfLink",
                "uid",
                "clusterName",
                "generation",
                "managedFields",
                "resourceVersion",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
            )
        ),
    }
)


@dataclass(frozen=True)
class Manager:
    """Who, by which kind of request."""

    name: str
    operation: str
    api_version: str = ""
    subresource: str = ""

    def same(self, other: Manager) -> bool:
        """A manager that applies is the same in all versions."""
        mine = (self.name, self.operation, self.subresource)
        return mine == (other.name, other.operation, other.subresource) and (
            self.operation == APPLY or self.api_version == other.api_version
        )


@dataclass(frozen=True)
class Managed:
    manager: Manager
    fields: Fields
    time: str = ""
    raw: Object | None = field(default=None, compare=False, repr=False)
    """The same fields as they were read, so that they needn't be written anew."""

    def with_fields(self, fields: Fields, time: str | None = None) -> Managed:
        raw = self.raw if fields == self.fields else None
        return Managed(self.manager, fields, self.time if time is None else time, raw)

    def entry(self) -> Object:
        made: Object = {
            "manager": self.manager.name,
            "operation": self.manager.operation,
            "apiVersion": self.manager.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": fieldsets.encode(self.fields) if self.raw is None else self.raw,
        }
        if self.manager.subresource:
            made["subresource"] = self.manager.subresource
        if not self.time:
            del made["time"]
        return made


def stamp(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def read(item: Object | None) -> list[Managed]:
    """Of an object; entries that can't be read are left out."""
    listed: Any = ((item or {}).get("metadata") or {}).get("managedFields")
    found: list[Managed] = []
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or entry.get("operation") not in (APPLY, UPDATE):
            continue
        manager = Manager(
            str(entry.get("manager", "")),
            entry["operation"],
            str(entry.get("apiVersion", "")),
            str(entry.get("subresource", "")),
        )
        raw = entry.get("fieldsV1")
        fields = fieldsets.decode(raw)
        found.append(Managed(manager, fields, str(entry.get("time", "")), raw if isinstance(raw, dict) else None))
    return found


def written(item: Object, entries: list[Managed]) -> Object:
    """The object with these entries (those without fields are left out)."""
    metadata = {key: value for key, value in (item.get("metadata") or {}).items() if key != "managedFields"}
    listed = [entry.entry() for entry in sorted(entries, key=_order) if entry.fields]
    if listed:
        metadata["managedFields"] = listed
    return {**item, "metadata": metadata}


def _order(entry: Managed) -> tuple[bool, str, str, str, str]:
    manager = entry.manager
    return (manager.operation != APPLY, entry.time, manager.name, manager.api_version, manager.subresource)


def capped(entries: list[Managed]) -> list[Managed]:
    updates = sorted((entry for entry in entries if entry.manager.operation == UPDATE), key=_order)
    if len(updates) <= MAX_UPDATERS:
        return entries
    old = updates[: len(updates) - MAX_UPDATERS + 1]
    together = Managed(
        Manager("ancient-changes", UPDATE, old[-1].manager.api_version),
        frozenset().union(*(entry.fields for entry in old)),
        old[-1].time,
    )
    return [entry for entry in entries if entry not in old] + [together]


def of_interest(resource: Resource, fields: Fields, subresource: str) -> Fields:
    """Without what only the server writes, and without what this request can't change."""
    kept = fields - _SERVER_FIELDS
    if subresource == "status":
        if resource.custom:
            return frozenset(path for path in kept if path[0] == "f:status")
        return frozenset(path for path in kept if path[0] in ("f:status", "f:metadata"))
    if resource.has_status:
        return frozenset(path for path in kept if path[0] != "f:status")
    return kept
