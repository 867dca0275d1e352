"""Strategic merge patch: lists of objects merge by their key, and directives say what a merge can't.

`$patch: delete|replace` in an object, `$deleteFromPrimitiveList/FIELD` and `$setElementOrder/FIELD` beside a list,
`$retainKeys` in a union such as a volume.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from evertrain.embedded.schema.errors import bad_request
from evertrain.embedded.schema.kinds import Resource, Schema
from evertrain.embedded.schema.structure import ANYTHING, field_schema, item_schema
from evertrain.kube.port import Object

_DIRECTIVE = "$patch"
_RETAIN = "$retainKeys"
_DELETE = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"


def strategic_merge(resource: Resource, old: Object, patch: Object) -> Object:
    """A new object. Raises Refused (400) for directives that make no sense."""
    made = _object(resource, resource.schema, old, patch)
    return made if made is not None else {}


def _strategies(schema: Schema) -> list[str]:
    return str(schema.get("x-kubernetes-patch-strategy", "")).split(",")


def _object(resource: Resource, schema: Schema, old: Any, patch: Object) -> Object | None:
    """None if the patch deletes the object."""
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return dict(_plain({key: value for key, value in patch.items() if key != _DIRECTIVE}))
    if directive == "delete":
        return None
    if directive not in (None, "merge"):
        raise bad_request(f"Unknown patch type found: {directive}")
    made: Object = copy.deepcopy(old) if isinstance(old, dict) else {}
    if _RETAIN in patch:
        kept = patch[_RETAIN]
        if not isinstance(kept, list):
            raise bad_request("invalid patch format of retainKeys")
        for key in patch:
            if key not in kept and not key.startswith("$") and patch[key] is not None:
                raise bad_request("patch contains retainKeys that are not all present in the retainKeys list")
        made = {key: value for key, value in made.items() if key in kept}
    for key, value in patch.items():
        if key.startswith(_DELETE):
            _delete_values(made, key.removeprefix(_DELETE), value)
    orders = {key.removeprefix(_ORDER): value for key, value in patch.items() if key.startswith(_ORDER)}
    for key, value in patch.items():
        if key in (_DIRECTIVE, _RETAIN) or key.startswith((_DELETE, _ORDER)):
            continue
        of_field = field_schema(resource, schema, key) or ANYTHING
        if value is None:
            made.pop(key, None)
        elif isinstance(value, dict):
            if "replace" in _strategies(of_field):
                made[key] = _plain(value)
                continue
            merged = _object(resource, of_field, made.get(key), value)
            if merged is None:
                made.pop(key, None)
            else:
                made[key] = merged
        elif isinstance(value, list):
            made[key] = _list(resource, of_field, made.get(key), value, orders.pop(key, None))
        else:
            made[key] = value
    for key, order in orders.items():
        if isinstance(made.get(key), list):
            of_field = field_schema(resource, schema, key) or ANYTHING
            made[key] = _ordered(made[key], order, of_field.get("x-kubernetes-patch-merge-key"), made[key])
    return made


def _plain(value: Any) -> Any:
    """What a patch puts where nothing was: without nulls and directives."""
    if isinstance(value, dict):
        return {
            key: _plain(item)
            for key, item in value.items()
            if item is not None and key not in (_DIRECTIVE, _RETAIN) and not key.startswith((_DELETE, _ORDER))
        }
    if isinstance(value, list):
        kept = [item for item in value if not (isinstance(item, dict) and item.get(_DIRECTIVE) == "delete")]
        return [_plain(item) for item in kept if not _only_directive(item)]
    return value


def _only_directive(item: Any) -> bool:
    return isinstance(item, dict) and set(item) == {_DIRECTIVE}


def _delete_values(made: Object, field: str, values: Any) -> None:
    if not isinstance(values, list):
        raise bad_request(f"{_DELETE}{field} must be a list")
    if isinstance(made.get(field), list):
        made[field] = [item for item in made[field] if item not in values]


def _list(resource: Resource, schema: Schema, old: Any, patch: list[Any], order: Any) -> list[Any]:
    existing: list[Any] = old if isinstance(old, list) else []
    if "merge" not in _strategies(schema):
        return list(_plain(patch))
    if any(_only_directive(item) and item[_DIRECTIVE] == "replace" for item in patch):
        return list(_plain([item for item in patch if not _only_directive(item)]))
    key = schema.get("x-kubernetes-patch-merge-key")
    if key is None:
        made = list(existing)
        made.extend(item for item in patch if item not in existing)
        return _ordered(made, order, None, existing) if order is not None else made
    made = _merged(resource, schema, existing, patch, str(key))
    return _ordered(made, order, str(key), existing) if order is not None else made


def _merged(resource: Resource, schema: Schema, existing: list[Any], patch: list[Any], key: str) -> list[Any]:
    made = copy.deepcopy(existing)
    of_item = item_schema(resource, schema)
    for item in patch:
        if not isinstance(item, dict):
            raise bad_request(f"expected objects in a list that merges by {key}, found {json.dumps(item)[:100]}")
        if key not in item:
            raise bad_request(f"map: {json.dumps(item)[:200]} does not contain declared merge key: {key}")
        places = [at for at, other in enumerate(made) if isinstance(other, dict) and other.get(key) == item[key]]
        if item.get(_DIRECTIVE) == "delete":
            made = [other for at, other in enumerate(made) if at not in places]
        elif places:
            made[places[0]] = _object(resource, of_item, made[places[0]], item)
        else:
            merged = _object(resource, of_item, {}, item)
            if merged is not None:
                made.append(merged)
    return made


def _ordered(items: list[Any], order: Any, key: str | None, existing: list[Any]) -> list[Any]:
    """Items named in the order come in it; others keep their place after the one they followed on the server."""
    if not isinstance(order, list):
        raise bad_request(f"{_ORDER[:-1]} must be a list")

    def identity(item: Any) -> str:
        return json.dumps(item.get(key) if key and isinstance(item, dict) else item, sort_keys=True)

    wanted = [identity(item) for item in order]
    rank = {name: place for place, name in enumerate(wanted)}
    named = sorted((item for item in items if identity(item) in rank), key=lambda item: rank[identity(item)])
    server = {identity(item): place for place, item in enumerate(existing)}
    made: list[Any] = []
    rest = [item for item in items if identity(item) not in rank]
    while named or rest:
        if not named or (
            rest and server.get(identity(rest[0]), len(server)) < server.get(identity(named[0]), len(server))
        ):
            made.append(rest.pop(0))
        else:
            made.append(named.pop(0))
    return made
