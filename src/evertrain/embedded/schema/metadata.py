"""Rules for metadata, which are the same for all kinds."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.schema.errors import FieldError, Refused, forbidden, invalid, required
from evertrain.embedded.schema.kinds import Resource
from evertrain.embedded.schema.names import (
    label_1035_problem,
    label_problem,
    label_value_problem,
    qualified_name_problem,
    subdomain_problem,
)
from evertrain.kube.port import Object

MAX_ANNOTATIONS = 256 * 1024
KEPT = ("uid", "creationTimestamp", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
"""Fields that only the server writes: an update has those of the old object, whatever was sent."""


def _name_problem(resource: Resource, name: str) -> str:
    if "/" in name or "%" in name or name in (".", ".."):
        return f"may not be '{name}'" if name in (".", "..") else f"may not contain '{'/' if '/' in name else '%'}'"
    if (resource.group, resource.kind) == ("", "Namespace"):
        return label_problem(name)
    if (resource.group, resource.kind) == ("", "Service"):
        return label_1035_problem(name)
    return subdomain_problem(name)


def metadata_errors(resource: Resource, item: Object) -> list[FieldError]:
    found: list[FieldError] = []
    metadata = item.get("metadata") or {}
    name = metadata.get("name")
    if not name:
        found.append(required("metadata.name", "name or generateName is required"))
    else:
        problem = _name_problem(resource, name)
        if problem:
            found.append(invalid("metadata.name", name, problem))
    namespace: str = metadata.get("namespace") or ""
    if resource.namespaced and not namespace:
        found.append(required("metadata.namespace"))
    elif resource.namespaced and label_problem(namespace):
        found.append(invalid("metadata.namespace", namespace, label_problem(namespace)))
    elif not resource.namespaced and namespace:
        found.append(forbidden("metadata.namespace", "not allowed on this type"))
    found.extend(label_errors("metadata.labels", metadata.get("labels")))
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        problem = qualified_name_problem(key.lower())
        if problem:
            found.append(invalid("metadata.annotations", key, problem))
    if sum(len(key) + len(value.encode()) for key, value in annotations.items()) > MAX_ANNOTATIONS:
        found.append(
            FieldError(
                "metadata.annotations",
                "FieldValueTooLong",
                f"Too long: may not be more than {MAX_ANNOTATIONS} bytes",
            )
        )
    found.extend(_owner_errors(metadata.get("ownerReferences") or []))
    for index, finalizer in enumerate(metadata.get("finalizers") or []):
        problem = qualified_name_problem(finalizer)
        if problem:
            found.append(invalid(f"metadata.finalizers[{index}]", finalizer, problem))
    return found


def label_errors(path: str, labels: Any) -> list[FieldError]:
    found: list[FieldError] = []
    for key, value in (labels or {}).items():
        problem = qualified_name_problem(key)
        if problem:
            found.append(invalid(path, key, problem))
        problem = label_value_problem(value)
        if problem:
            found.append(invalid(path, value, problem))
    return found


def _owner_errors(owners: list[Object]) -> list[FieldError]:
    found: list[FieldError] = []
    controllers = [owner for owner in owners if owner.get("controller")]
    for index, owner in enumerate(owners):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                found.append(
                    invalid(f"metadata.ownerReferences[{index}].{field}", owner.get(field, ""), "must not be empty")
                )
    if len(controllers) > 1:
        one, other = controllers[0], controllers[1]
        found.append(
            invalid(
                "metadata.ownerReferences",
                owners,
                'Only one reference can have Controller set to true. Found "true" in references for '
                f"{one.get('kind')}/{one.get('name')} and {other.get('kind')}/{other.get('name')}",
            )
        )
    return found


def carry_over(resource: Resource, item: Object, old: Object) -> None:
    """What an update can't change, from the old object into the new one."""
    metadata, before = item.setdefault("metadata", {}), old.get("metadata", {})
    uid = metadata.get("uid")
    if uid and before.get("uid") and uid != before["uid"]:
        raise Refused(
            409,
            "Conflict",
            f'Operation cannot be fulfilled on {resource.qualified} "{before.get("name")}": Precondition failed: UID '
            f"in precondition: {uid}, UID in object meta: {before['uid']}",
            {"name": before.get("name", ""), "group": resource.group, "kind": resource.plural, "uid": before["uid"]},
        )
    for field in KEPT:
        if field in before:
            metadata[field] = before[field]
        else:
            metadata.pop(field, None)


def immutable_errors(item: Object, old: Object) -> list[FieldError]:
    found: list[FieldError] = []
    metadata, before = item.get("metadata", {}), old.get("metadata", {})
    for field in ("name", "namespace"):
        if metadata.get(field) != before.get(field):
            found.append(invalid(f"metadata.{field}", metadata.get(field), "field is immutable"))
    if before.get("deletionTimestamp"):
        added = [name for name in metadata.get("finalizers") or [] if name not in (before.get("finalizers") or [])]
        if added:
            found.append(
                forbidden(
                    "metadata.finalizers",
                    "no new finalizers can be added if the object is being deleted, found new finalizers "
                    + str(added).replace("'", '"').replace(", ", " "),
                )
            )
    return found
