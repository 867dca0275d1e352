"""From what a user sent to what is stored."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from evertrain.embedded.schema.defaulting import defaulted, with_secret_data
from evertrain.embedded.schema.errors import FieldError, bad_request, invalid_object
from evertrain.embedded.schema.events import core_event, new_event
from evertrain.embedded.schema.kinds import Resource
from evertrain.embedded.schema.metadata import carry_over, immutable_errors, metadata_errors
from evertrain.embedded.schema.pruning import prune
from evertrain.embedded.schema.rules import rule_errors, update_errors
from evertrain.embedded.schema.validation import json_type, schema_errors
from evertrain.kube.port import Object

_ENVELOPE = frozenset({"apiVersion", "kind"})
STRICT, WARN, IGNORE = "Strict", "Warn", "Ignore"

_FREE_STATUS = frozenset({("", "Node"), ("coordination.k8s.io", "Lease")})
"""Kinds that may be created together with their status."""
_COUNTED = frozenset({("", "Pod"), ("apiextensions.k8s.io", "CustomResourceDefinition")})
"""Built-in kinds that count generations. Custom resources all do."""


@dataclass(frozen=True)
class Prepared:
    object: Object
    warnings: list[str] = field(default_factory=list)
    """Texts for the Warning header."""


def _checked_kind(resource: Resource, item: Object) -> None:
    if not isinstance(item, dict):
        raise bad_request("the object provided is unrecognized: it must be an object")
    kind, version = item.get("kind"), item.get("apiVersion")
    if kind not in (None, "", resource.kind):
        raise bad_request(
            f"{kind} in version {_quoted(version)} cannot be handled as a {resource.kind}: "
            f'no kind "{kind}" is registered at this address'
        )
    if version not in (None, "", resource.api_version):
        raise bad_request(
            f"the API version in the data ({version}) does not match the expected API version ({resource.api_version})"
        )
    if not isinstance(item.get("metadata", {}), dict | None):
        raise bad_request(
            f"{_unhandled(resource)}: json: cannot unmarshal {json_type(item['metadata'])} into Go struct field "
            f"{resource.kind}.metadata of type v1.ObjectMeta"
        )


def _unhandled(resource: Resource) -> str:
    return f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'


def _quoted(value: object) -> str:
    return f'"{value}"' if value else '""'


def _structured(
    resource: Resource,
    item: Object,
    field_validation: str,
    duplicates: Sequence[str],
    *,
    name: str = "",
    elsewhere: Container[str] = (),
) -> Prepared:
    """Unknown and repeated fields judged and removed, types checked, defaults set. Parts that are `elsewhere` are not
    missing; `name` is the object's if its metadata are among them."""
    if field_validation not in (STRICT, WARN, IGNORE, ""):
        raise bad_request(
            f'fieldValidation: Unsupported value: "{field_validation}": supported values: "Ignore", "Strict", "Warn"'
        )
    pruned, unknown = prune(resource, item)
    pruned |= {"apiVersion": resource.api_version, "kind": resource.kind}
    problems = [f'duplicate field "{path}"' for path in duplicates] + [f'unknown field "{path}"' for path in unknown]
    if problems and field_validation == STRICT:
        raise bad_request(f"{_unhandled(resource)}: strict decoding error: {', '.join(problems)}")
    warnings = [] if field_validation == IGNORE else problems
    if resource.warning:
        warnings = [*warnings, resource.warning]
    if resource.custom:
        pruned = defaulted(resource, pruned)
    errors = [
        error
        for error in schema_errors(resource, pruned)
        if error.reason != "FieldValueRequired" or error.field not in elsewhere
    ]
    mistyped = [error for error in errors if error.reason == "FieldValueTypeInvalid"]
    if mistyped and not resource.custom:
        raise bad_request(_mistyped(resource, mistyped[0]))
    in_metadata = [error for error in mistyped if error.field.startswith("metadata")]
    if in_metadata:
        raise bad_request(_mistyped(resource, in_metadata[0]))
    if not resource.custom:
        # Whoever reports a status says what there is to say; nobody is asked for more.
        errors = [e for e in errors if e.reason != "FieldValueRequired" or not e.field.startswith("status")]
    _refuse(resource, pruned, errors, name)
    return Prepared(pruned if resource.custom else defaulted(resource, pruned), warnings)


def _mistyped(resource: Resource, error: FieldError) -> str:
    """Built-in kinds are refused by the decoder already."""
    words = error.message.split(" in body must be of type ")
    wanted, _, have = words[-1].partition(": ")
    have = {"integer": "number", "boolean": "bool"}.get(have.strip('"'), have.strip('"'))
    return (
        f"{_unhandled(resource)}: json: cannot unmarshal {have} into Go struct field {resource.kind}.{error.field} of "
        f"type {wanted}"
    )


def _refuse(resource: Resource, item: Object, errors: list[FieldError], name: str = "") -> None:
    if errors:
        metadata = item.get("metadata") or {}
        name = name or str(metadata.get("name") or metadata.get("generateName") or "")
        raise invalid_object(resource.group, resource.kind, name, errors)


def prepare_create(
    resource: Resource, item: Object, *, field_validation: str = WARN, duplicates: Sequence[str] = ()
) -> Prepared:
    """Checks, prunes, defaults and validates a new object. The name (or generateName's result) and the namespace must
    be there already. The result has generation 1 where the kind counts generations, and no status where that is for
    the status subresource; uid, resourceVersion, creationTimestamp and addresses are the caller's."""
    _checked_kind(resource, item)
    ready = _structured(resource, with_secret_data(resource, item), field_validation, duplicates)
    made = ready.object
    metadata = made.setdefault("metadata", {})
    for name in ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"):
        metadata.pop(name, None)
    metadata.pop("generation", None)
    metadata.pop("selfLink", None)
    if _counts(resource):
        metadata["generation"] = 1
    if resource.has_status and (resource.group, resource.kind) not in _FREE_STATUS:
        made.pop("status", None)
    if (resource.group, resource.kind) == ("", "Pod"):
        made["status"] = {"phase": "Pending", "qosClass": _quality(made.get("spec", {}))}
    if (resource.group, resource.kind) == ("", "Namespace"):
        made.setdefault("spec", {})["finalizers"] = ["kubernetes"]
        made["status"] = {"phase": "Active"}
    if (resource.group, resource.kind) == ("", "Service"):
        made["status"] = {"loadBalancer": {}}
    _refuse(resource, made, metadata_errors(resource, made) + rule_errors(resource, made))
    return ready


def _counts(resource: Resource) -> bool:
    return resource.custom or (resource.group, resource.kind) in _COUNTED


def _quality(spec: Object) -> str:
    """The quality-of-service class, which kubectl describe shows."""
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    amounts = [container.get("resources") or {} for container in containers]
    basic = ("cpu", "memory")
    named = [
        {name for name in basic if name in (one.get(side) or {})} for one in amounts for side in ("limits", "requests")
    ]
    if not any(named):
        return "BestEffort"
    guaranteed = all(
        name in (one.get("limits") or {}) and one["limits"][name] == (one.get("requests") or {}).get(name)
        for one in amounts
        for name in basic
    )
    return "Guaranteed" if guaranteed else "Burstable"


def prepare_update(
    resource: Resource,
    item: Object,
    old: Object,
    *,
    subresource: str = "",
    field_validation: str = WARN,
    duplicates: Sequence[str] = (),
) -> Prepared:
    """The same for a new state of `old`: an update of the object takes no status, one of the `status` subresource
    takes nothing else. uid, creationTimestamp, deletionTimestamp and such come from `old`, generation grows with the
    spec. If the result equals `old` there is nothing to write."""
    _checked_kind(resource, item)
    item = dict(with_secret_data(resource, item))
    if subresource == "status":
        item = _only_status(resource, item, old)
    elif resource.has_status:
        item.pop("status", None)
        if "status" in old:
            item["status"] = old["status"]
    if (resource.group, resource.kind) == ("", "Service") and not subresource:
        _keep_address(item, old)
    # What stays as it is was checked when it came, and may be most of the object.
    same = {key for key in item if key in old and key not in _ENVELOPE and _identical(item[key], old[key])}
    if _judges_all(resource):
        same = set()
    changed = {key: value for key, value in item.items() if key not in same}
    name = old.get("metadata", {}).get("name", "")
    structured = _structured(resource, changed, field_validation, duplicates, name=name, elsewhere=same)
    parts = structured.object | {key: old[key] for key in same}
    made: Object = {key: parts[key] for key in dict.fromkeys((*old, *parts)) if key in parts}
    made["metadata"] = dict(made.get("metadata") or {})
    ready = Prepared(made, structured.warnings)
    carry_over(resource, made, old)
    errors = [] if "metadata" in same else metadata_errors(resource, made) + immutable_errors(made, old)
    if not subresource:
        errors += rule_errors(resource, made) + update_errors(resource, made, old)
    _refuse(resource, made, errors)
    if _counts(resource) and subresource != "status" and _content(resource, made) != _content(resource, old):
        made["metadata"]["generation"] = int(old.get("metadata", {}).get("generation") or 0) + 1
    return ready


def _judges_all(resource: Resource) -> bool:
    """Whether the schema says something about the object as a whole, which its changed parts can't answer."""
    return any(key in resource.schema for key in ("allOf", "anyOf", "oneOf", "not", "minProperties", "maxProperties"))


def _identical(one: Any, other: Any) -> bool:
    """Also in types: to Python true is 1."""
    return one is other or (one == other and msgspec.json.encode(one) == msgspec.json.encode(other))


def _only_status(resource: Resource, item: Object, old: Object) -> Object:
    made = {key: value for key, value in old.items() if key != "status"}
    if "status" in item:
        made["status"] = item["status"]
    metadata = made["metadata"] = dict(old.get("metadata") or {})
    sent = item.get("metadata") or {}
    for name in ("resourceVersion", "managedFields"):
        if name in sent:
            metadata[name] = sent[name]
    if not resource.custom:
        for name in ("labels", "annotations"):
            if name in sent:
                metadata[name] = sent[name]
    return made


def _keep_address(item: Object, old: Object) -> None:
    """A Service keeps its address when the update doesn't name one."""
    spec, before = item.get("spec"), old.get("spec") or {}
    if isinstance(spec, dict) and not spec.get("clusterIP") and spec.get("type") != "ExternalName":
        item["spec"] = spec | {name: before[name] for name in ("clusterIP", "clusterIPs") if name in before}


def _content(resource: Resource, item: Object) -> Object:
    """What a generation is a generation of."""
    skipped = {"metadata", "apiVersion", "kind"} | ({"status"} if resource.has_status else set())
    return {key: value for key, value in item.items() if key not in skipped}


def converted(item: Object, resource: Resource) -> Object:
    """A stored object as this version of its kind shows it, and a sent one as it is stored if `resource` is the one
    that is stored: only apiVersion differs, and the names of the fields of both kinds of Event."""
    if item.get("apiVersion") == resource.api_version:
        return item
    if resource.kind == "Event" and resource.group == "events.k8s.io":
        return new_event(item)
    if resource.kind == "Event" and resource.group == "" and not resource.custom:
        return core_event(item)
    return {**item, "apiVersion": resource.api_version, "kind": resource.kind}
