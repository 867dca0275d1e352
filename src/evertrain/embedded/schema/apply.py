"""Server-side apply, and who manages which field.

Everybody who applies owns the fields that they gave. What they leave out next time goes away, unless others own it
too; a field that somebody else owns can't be changed without force. All other writes own what they change.
"""

from __future__ import annotations

import copy
import json
from datetime import datetime
from typing import Any

from evertrain.embedded.schema import fieldsets
from evertrain.embedded.schema.decoding import check_size
from evertrain.embedded.schema.defaulting import with_canonical_values
from evertrain.embedded.schema.errors import FieldError, Refused, bad_request, invalid_object
from evertrain.embedded.schema.fieldsets import Fields, Path, fields_of, values_of
from evertrain.embedded.schema.kinds import Resource, Schema
from evertrain.embedded.schema.managers import (
    APPLY,
    UPDATE,
    Managed,
    Manager,
    capped,
    of_interest,
    read,
    stamp,
    written,
)
from evertrain.embedded.schema.pruning import prune
from evertrain.embedded.schema.structure import ANYTHING, field_schema, is_atomic, is_set, item_schema, map_keys
from evertrain.embedded.schema.validation import schema_errors
from evertrain.kube.port import Object

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_UNTRACKED = frozenset({"Event", "Lease"})
"""Written often and never applied by several: their managedFields would cost more than they tell."""


def applied(
    resource: Resource,
    old: Object | None,
    patch: Object,
    *,
    manager: str,
    now: datetime,
    force: bool = False,
    subresource: str = "",
) -> Object:
    """The object after `manager` applied `patch`, with its managedFields; to be prepared and stored like any other
    write. `old` is None if there is none yet. Raises Refused: 409 with a cause for every field that others manage."""
    patch = _checked(resource, old, patch, manager)
    live: Object = old or {}
    me = Manager(manager, APPLY, resource.api_version, subresource)
    entries = read(old)
    if old is not None and not entries:
        everything = of_interest(resource, fields_of(resource, old), subresource)
        entries = [Managed(Manager("before-first-apply", UPDATE, resource.api_version), everything, stamp(now))]
    before = [entry for entry in entries if entry.manager.same(me)]
    others = [entry for entry in entries if not entry.manager.same(me)]
    mine = of_interest(resource, fields_of(resource, patch), subresource)
    merged = _merge(resource, resource.schema, live, patch)
    for entry in before:
        kept = mine.union(fieldsets.empty_places(resource, patch), *(other.fields for other in others))
        merged = removed(resource, merged, entry.fields - mine, kept)
    changed, gone = compare(resource, live, merged)
    conflicts = [(entry, entry.fields & changed) for entry in others if entry.fields & changed]
    if conflicts and not force:
        _judge(resource, live, patch, manager, conflicts)
    left = [entry.with_fields(entry.fields - changed - gone) for entry in others]
    at = stamp(now)
    if before and before[0].fields == mine and left == others and not changed and not gone:
        at = before[0].time
    made = written(merged, [*left, Managed(me, mine, at)])
    if manager == "kubectl" and LAST_APPLIED in ((live.get("metadata") or {}).get("annotations") or {}):
        annotations = made["metadata"].get("annotations") or {}
        made["metadata"]["annotations"] = {**annotations, LAST_APPLIED: _last_applied(patch)}
    check_size(made)
    return made


def _checked(resource: Resource, old: Object | None, patch: Any, manager: str) -> Object:
    """What was sent, without nulls. Raises Refused if it can't be applied, with all that is wrong with it."""
    if not isinstance(patch, dict):
        raise bad_request("error decoding YAML: the object to apply must be an object")
    metadata = patch.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    if not manager:
        problem = FieldError("fieldManager", "FieldValueRequired", "Required value: is required for apply patch")
        raise invalid_object("meta.k8s.io", "PatchOptions", "", [problem])
    if metadata.get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    for field, wanted in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if patch.get(field) != wanted:
            raise bad_request(f"the object to apply must have {field} {wanted}, not {patch.get(field)}")
    name = ((old or {}).get("metadata") or {}).get("name") or metadata.get("name") or ""
    namespace = ((old or {}).get("metadata") or {}).get("namespace") or metadata.get("namespace") or ""
    described = f"{namespace}/{name}; {resource.api_version}, Kind={resource.kind}"
    patch, unknown = prune(resource, patch)
    problems = [f".{path}: field not declared in schema" for path in unknown]
    if not resource.custom:
        patch = with_canonical_values(resource, patch)
    for error in schema_errors(resource, patch):
        if error.reason == "FieldValueTypeInvalid":
            words = error.message.rpartition(" in body must be of type ")[2].replace(": ", ", got ")
            problems.append(f".{error.field}: expected {words}")
    problems.extend(
        f"{where}: duplicate entries for key {key}" for where, key in _repeated(resource, resource.schema, patch, "")
    )
    if problems:
        listed = problems[0] if len(problems) == 1 else "errors:\n  " + "\n  ".join(problems)
        raise bad_request(f"failed to create typed patch object ({described}): {listed}")
    return dict(patch)


def _repeated(resource: Resource, schema: Schema, value: Any, path: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _repeated(resource, field_schema(resource, schema, key) or ANYTHING, item, f"{path}.{key}")
    elif isinstance(value, list) and map_keys(schema):
        seen: set[str] = set()
        for item in value:
            element = fieldsets.item_element(resource, schema, item) or ""
            if element and element in seen:
                found.append((path, fieldsets.shown((element,))))
            seen.add(element)
            found += _repeated(
                resource,
                item_schema(resource, schema),
                item,
                f"{path}{fieldsets.shown((element,))}" if element else path,
            )
    return found


def _merge(resource: Resource, schema: Schema, live: Any, patch: Any) -> Any:
    if is_atomic(schema, patch) or type(live) is not type(patch) or not isinstance(patch, dict | list):
        return copy.deepcopy(patch)
    if isinstance(patch, dict):
        made = dict(live)
        for key, value in patch.items():
            of_field = field_schema(resource, schema, key) or ANYTHING
            made[key] = _merge(resource, of_field, live.get(key), value)
        return made
    if is_set(schema):
        return [*live, *(item for item in patch if item not in live)]
    return _merge_items(resource, schema, live, patch)


def _merge_items(resource: Resource, schema: Schema, live: list[Any], patch: list[Any]) -> list[Any]:
    """In the order of the patch; items of others keep their place behind the one that they followed."""
    of_item = item_schema(resource, schema)
    given = {fieldsets.item_element(resource, schema, item): item for item in patch}
    if None in given:
        return copy.deepcopy(patch)
    there = {fieldsets.item_element(resource, schema, item): item for item in live}
    order = list(given)
    made: list[Any] = []
    done = 0
    for element, item in there.items():
        if element not in given:
            made.append(copy.deepcopy(item))
            continue
        while done <= order.index(element):
            name = order[done]
            made.append(_merge(resource, of_item, there.get(name), given[name]))
            done += 1
    for name in order[done:]:
        made.append(_merge(resource, of_item, there.get(name), given[name]))
    return made


def removed(resource: Resource, item: Object, fields: Fields, kept: Fields) -> Object:
    """The object without these fields, except those that are kept or that hold something which is."""
    held = {path[:length] for path in kept for length in range(1, len(path) + 1)}
    doomed = {path for path in fields if path not in held}
    if not doomed:
        return item
    made: Object = _without(resource, resource.schema, item, (), doomed, held)
    return made


def _without(resource: Resource, schema: Schema, value: Any, path: Path, doomed: set[Path], held: set[Path]) -> Any:
    if is_atomic(schema, value) or not isinstance(value, dict | list):
        return value
    if isinstance(value, dict):
        made: Object = {}
        for key, item in value.items():
            below = (*path, f"f:{key}")
            if below in doomed:
                continue
            left = _without(resource, field_schema(resource, schema, key) or ANYTHING, item, below, doomed, held)
            # An object or a list that only held what is gone goes too.
            if left in ({}, []) and item not in ({}, []) and below not in held:
                continue
            made[key] = left
        return made
    items: list[Any] = []
    for item in value:
        element = fieldsets.item_element(resource, schema, item)
        below = (*path, element or "")
        if element and below in doomed:
            continue
        left = _without(resource, item_schema(resource, schema), item, below, doomed, held)
        if isinstance(left, dict):
            # An item that stays keeps its name.
            left = {**{key: item[key] for key in map_keys(schema) if key in item}, **left}
        items.append(left)
    return items


def compare(resource: Resource, old: Object, new: Object) -> tuple[Fields, Fields]:
    """Fields that are new or different, and fields that are gone."""
    if not old:
        return fields_of(resource, new), frozenset()
    then, now = values_of(resource, old), values_of(resource, new)
    changed = frozenset(path for path, value in now.items() if then.get(path) != value)
    return changed, frozenset(then.keys() - now.keys())


def _judge(
    resource: Resource, live: Object, patch: Object, manager: str, conflicts: list[tuple[Managed, Fields]]
) -> None:
    """Raises Refused, unless the fields are those that kubectl itself applied before, from the client's side."""
    allowed: Fields = frozenset()
    if manager == "kubectl":
        text = ((live.get("metadata") or {}).get("annotations") or {}).get(LAST_APPLIED)
        try:
            last = json.loads(text) if text else None
        except (ValueError, RecursionError):
            last = None
        if isinstance(last, dict):
            # Only where the object still is what kubectl made it: later changes by others are conflicts.
            then, now = values_of(resource, last), values_of(resource, live)
            allowed = frozenset(path for path, value in then.items() if now.get(path) == value)
    found = [(entry, path) for entry, fields in conflicts for path in sorted(fields - allowed)]
    if not found:
        return
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f"conflict with {_described(entry)}",
            "field": fieldsets.shown(path),
        }
        for entry, path in found
    ]
    if len(found) == 1:
        words = f"Apply failed with 1 conflict: conflict with {_described(found[0][0])}: {fieldsets.shown(found[0][1])}"
    else:
        lines: list[str] = []
        for entry, _ in conflicts:
            paths = [path for other, path in found if other is entry]
            if paths:
                lines.append(f"conflicts with {_described(entry)}:")
                lines.extend(f"- {fieldsets.shown(path)}" for path in paths)
        words = f"Apply failed with {len(found)} conflicts: " + "\n".join(lines)
    raise Refused(409, "Conflict", words, {"causes": causes})


def _described(entry: Managed) -> str:
    manager = entry.manager
    words = json.dumps(manager.name)
    if manager.subresource:
        words += f" with subresource {json.dumps(manager.subresource)}"
    if manager.operation == UPDATE:
        words += f" using {manager.api_version}" + (f" at {entry.time}" if entry.time else "")
    return words


def _last_applied(patch: Object) -> str:
    """kubectl's own annotation, so that a later `kubectl apply` from the client's side knows what was applied."""
    plain = copy.deepcopy(patch)
    annotations = (plain.get("metadata") or {}).get("annotations")
    if isinstance(annotations, dict):
        annotations.pop(LAST_APPLIED, None)
    return fieldsets.compact(plain) + "\n"


def tracked(
    resource: Resource, old: Object | None, new: Object, *, manager: str, now: datetime, subresource: str = ""
) -> Object:
    """A (prepared) object with the managedFields after a create, update or patch by `manager`."""
    if resource.kind in _UNTRACKED and not resource.custom:
        return new
    sent = (new.get("metadata") or {}).get("managedFields")
    entries = [] if sent == [{}] else read(new if not subresource else None) or read(old)
    changed, gone = compare(resource, old or {}, new)
    # A write that changes nothing but who manages what leaves the fields to whom it says.
    mine = of_interest(resource, changed, subresource)
    if not changed and not gone and read(new) == read(old):
        return written(new, read(old))
    me = Manager(manager, UPDATE, resource.api_version, subresource)
    made: list[Managed] = []
    found = False
    for entry in entries:
        if entry.manager.same(me):
            found = True
            fields = (entry.fields - gone) | mine
            made.append(entry.with_fields(fields, stamp(now) if mine or fields != entry.fields else None))
        else:
            made.append(entry.with_fields(entry.fields - changed - gone))
    if not found and mine:
        made.append(Managed(me, mine, stamp(now)))
    return written(new, capped(made))
