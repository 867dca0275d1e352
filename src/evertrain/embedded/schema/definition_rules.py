"""What makes a CustomResourceDefinition valid: its names, its versions, and that its schemas are structural."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.schema.defaulting import filled
from evertrain.embedded.schema.errors import FieldError, forbidden, invalid, required, unsupported
from evertrain.embedded.schema.jsonpath import JSONPath
from evertrain.embedded.schema.kinds import Resource
from evertrain.embedded.schema.names import label_1035_problem, subdomain_problem
from evertrain.embedded.schema.structure import INT_OR_STRING, OPEN
from evertrain.embedded.schema.validation import value_errors
from evertrain.kube.port import Object

_TYPES = ("array", "boolean", "integer", "number", "object", "string")
_COLUMN_TYPES = ("integer", "number", "string", "boolean", "date")
_LIST_TYPES = ("atomic", "map", "set")


def definition_errors(definition: Object) -> list[FieldError]:
    found: list[FieldError] = []
    spec = definition.get("spec") or {}
    names, group = spec.get("names") or {}, spec.get("group", "")
    if not group:
        found.append(required("spec.group"))
    elif subdomain_problem(group):
        found.append(invalid("spec.group", group, subdomain_problem(group)))
    elif "." not in group:
        found.append(invalid("spec.group", group, "should be a domain with at least one dot"))
    if not spec.get("scope"):
        found.append(required("spec.scope"))
    found.extend(_name_errors(names))
    wanted = f"{names.get('plural', '')}.{group}"
    name = definition.get("metadata", {}).get("name")
    if name != wanted:
        found.append(invalid("metadata.name", name, 'must be spec.names.plural+"."+spec.group'))
    versions = spec.get("versions") or []
    if not versions:
        found.append(required("spec.versions", "must have at least one version"))
    seen: set[str] = set()
    for index, version in enumerate(versions):
        path = f"spec.versions[{index}]"
        label = version.get("name", "")
        if not label or label_1035_problem(label):
            found.append(invalid(f"{path}.name", label, label_1035_problem(label) or "must not be empty"))
        if label in seen:
            found.append(invalid("spec.versions", label, "must contain unique version names"))
        seen.add(label)
        found.extend(_version_errors(path, version))
    if versions and sum(bool(version.get("storage")) for version in versions) != 1:
        found.append(invalid("spec.versions", "", "must have exactly one version marked as storage version"))
    if spec.get("preserveUnknownFields"):
        found.append(
            invalid("spec.preserveUnknownFields", True, "must be false in order to use defaults in the schema")
        )
    if (spec.get("conversion") or {}).get("strategy", "None") != "None":
        found.append(unsupported("spec.conversion.strategy", spec["conversion"]["strategy"], ["None"]))
    return found


def _name_errors(names: Object) -> list[FieldError]:
    found: list[FieldError] = []
    for field in ("plural", "singular", "kind", "listKind"):
        value = names.get(field)
        if not value:
            found.append(required(f"spec.names.{field}"))
        elif label_1035_problem(value.lower() if field in ("kind", "listKind") else value):
            found.append(invalid(f"spec.names.{field}", value, label_1035_problem(value.lower())))
    for field in ("shortNames", "categories"):
        for index, value in enumerate(names.get(field) or []):
            if label_1035_problem(value):
                found.append(invalid(f"spec.names.{field}[{index}]", value, label_1035_problem(value)))
    if names.get("kind") and names.get("kind") == names.get("listKind"):
        found.append(invalid("spec.names.listKind", names["listKind"], "kind and listKind may not be the same"))
    return found


def _version_errors(path: str, version: Object) -> list[FieldError]:
    found: list[FieldError] = []
    schema = (version.get("schema") or {}).get("openAPIV3Schema")
    if schema is None:
        found.append(required(f"{path}.schema.openAPIV3Schema", "schemas are required"))
    else:
        where = f"{path}.schema.openAPIV3Schema"
        if schema.get("type") != "object":
            found.append(invalid(f"{where}.type", schema.get("type", ""), "must be object at the root"))
        _structural(where, schema, found)
    for index, column in enumerate(version.get("additionalPrinterColumns") or []):
        where = f"{path}.additionalPrinterColumns[{index}]"
        if column.get("type") not in _COLUMN_TYPES:
            found.append(unsupported(f"{where}.type", column.get("type"), _COLUMN_TYPES))
        try:
            JSONPath.parse(column.get("jsonPath", ""))
        except ValueError as error:
            found.append(invalid(f"{where}.jsonPath", column.get("jsonPath"), str(error)))
    return found


def _structural(path: str, schema: Any, found: list[FieldError]) -> None:
    if not isinstance(schema, dict):
        found.append(invalid(path, schema, "must be an object"))
        return
    if len(found) > 20:
        return
    kind = schema.get("type")
    if schema.get("$ref"):
        found.append(forbidden(f"{path}.$ref", "$ref is not supported"))
    if schema.get(INT_OR_STRING):
        if kind:
            found.append(forbidden(f"{path}.type", "must be empty if x-kubernetes-int-or-string is true"))
    elif not kind and not schema.get(OPEN):
        found.append(required(f"{path}.type", "must not be empty for specified object fields"))
    elif kind and kind not in _TYPES:
        found.append(unsupported(f"{path}.type", kind, _TYPES))
    if kind == "array" and not isinstance(schema.get("items"), dict):
        found.append(required(f"{path}.items", "must be specified"))
    if not isinstance(schema.get("additionalProperties", True), dict | bool):
        found.append(
            invalid(f"{path}.additionalProperties", schema["additionalProperties"], "must be a schema, true or false")
        )
    if schema.get("default") is not None:
        found.extend(default_errors(f"{path}.default", schema))
    if schema.get("properties") and isinstance(schema.get("additionalProperties"), dict):
        found.append(
            forbidden(f"{path}.additionalProperties", "additionalProperties and properties are mutual exclusive")
        )
    listed = schema.get("x-kubernetes-list-type")
    if listed is not None and listed not in _LIST_TYPES:
        found.append(unsupported(f"{path}.x-kubernetes-list-type", listed, _LIST_TYPES))
    if listed == "map":
        keys = schema.get("x-kubernetes-list-map-keys")
        if not keys or not isinstance(keys, list):
            keys = []
            found.append(
                required(f"{path}.x-kubernetes-list-map-keys", "must not be empty if x-kubernetes-list-type is map")
            )
        items = schema.get("items")
        known = items.get("properties") if isinstance(items, dict) else None
        known = known if isinstance(known, dict) else {}
        for index, key in enumerate(keys):
            if not isinstance(key, str) or key not in known:
                field = f"{path}.x-kubernetes-list-map-keys[{index}]"
                found.append(invalid(field, key, "entries must all be names of item properties"))
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict):
        found.append(invalid(f"{path}.properties", properties, "must be an object"))
        properties = {}
    for name, part in properties.items():
        _structural(f"{path}.properties[{name}]", part, found)
    if isinstance(schema.get("additionalProperties"), dict):
        _structural(f"{path}.additionalProperties", schema["additionalProperties"], found)
    if isinstance(schema.get("items"), dict):
        _structural(f"{path}.items", schema["items"], found)


def default_errors(path: str, schema: Object) -> list[FieldError]:
    """A default that its own schema refuses would make every object of the kind invalid."""
    anything = Resource("", "", "", "", custom=True)
    return value_errors(anything, schema, filled(anything, schema, schema["default"]), path)


def definition_update_errors(definition: Object, old: Object) -> list[FieldError]:
    found: list[FieldError] = []
    spec, before = definition.get("spec") or {}, old.get("spec") or {}
    for field in ("group", "scope"):
        if spec.get(field) != before.get(field):
            found.append(invalid(f"spec.{field}", spec.get(field), "field is immutable"))
    for field in ("kind", "plural"):
        now = (spec.get("names") or {}).get(field)
        if now != (before.get("names") or {}).get(field):
            found.append(invalid(f"spec.names.{field}", now, "field is immutable"))
    served = {version.get("name") for version in spec.get("versions") or []}
    for stored in (old.get("status") or {}).get("storedVersions") or []:
        if stored not in served:
            found.append(
                invalid(
                    "status.storedVersions[0]",
                    stored,
                    "missing from spec.versions; "
                    + stored
                    + " was previously a storage version, and must remain in spec.versions until a storage migration "
                    "ensures no data remains persisted in "
                    + stored
                    + " and removes "
                    + stored
                    + " from status.storedVersions",
                )
            )
    return found
