"""What makes objects of the built-in kinds valid beyond their schema, when created and when changed."""

from __future__ import annotations

from collections.abc import Callable

from evertrain.embedded.schema.definition_rules import definition_errors, definition_update_errors
from evertrain.embedded.schema.errors import FieldError, duplicate, forbidden, invalid, required
from evertrain.embedded.schema.kinds import Resource
from evertrain.embedded.schema.metadata import label_errors
from evertrain.embedded.schema.names import config_key_problem, label_problem, qualified_name_problem
from evertrain.embedded.schema.pod_rules import PORT_PROBLEM, pod_errors, pod_update_errors, unique_names
from evertrain.kube.port import Object

MAX_DATA = 1024 * 1024
_IMMUTABLE = "field is immutable when `immutable` is set"


def rule_errors(resource: Resource, item: Object) -> list[FieldError]:
    rule = _RULES.get((resource.group, resource.kind)) if not resource.custom else None
    return rule(item) if rule else []


def update_errors(resource: Resource, item: Object, old: Object) -> list[FieldError]:
    rule = _UPDATE_RULES.get((resource.group, resource.kind)) if not resource.custom else None
    return rule(item, old) if rule else []


def _service(service: Object) -> list[FieldError]:
    found: list[FieldError] = []
    spec = service.get("spec") or {}
    ports = spec.get("ports") or []
    if spec.get("type") == "ExternalName":
        if not spec.get("externalName"):
            found.append(required("spec.externalName"))
    elif not ports and spec.get("clusterIP") != "None":
        found.append(required("spec.ports"))
    found.extend(label_errors("spec.selector", spec.get("selector")))
    if len(ports) > 1:
        found.extend(unique_names("spec.ports", ports, label_problem))
    seen: set[tuple[object, object]] = set()
    for index, port in enumerate(ports):
        where = f"spec.ports[{index}]"
        if not 1 <= port.get("port", 0) <= 65535:
            found.append(invalid(f"{where}.port", port.get("port", 0), PORT_PROBLEM))
        target = port.get("targetPort")
        if isinstance(target, int) and not 1 <= target <= 65535:
            found.append(invalid(f"{where}.targetPort", target, PORT_PROBLEM))
        key = (port.get("protocol", "TCP"), port.get("port"))
        if key in seen:
            found.append(duplicate(where, {"protocol": key[0], "port": key[1]}))
        seen.add(key)
    return found


def _service_update(service: Object, old: Object) -> list[FieldError]:
    spec, before = service.get("spec") or {}, old.get("spec") or {}
    now, then = spec.get("clusterIP"), before.get("clusterIP")
    if then and now != then and "ExternalName" not in (spec.get("type"), before.get("type")):
        return [invalid("spec.clusterIPs[0]", [now], "may not change once set")]
    return []


def _data_errors(item: Object, *fields: str) -> list[FieldError]:
    found: list[FieldError] = []
    size = 0
    seen: set[str] = set()
    for field in fields:
        for key, value in (item.get(field) or {}).items():
            problem = config_key_problem(key)
            if problem:
                found.append(invalid(f"{field}[{key}]", key, problem))
            if key in seen:
                found.append(invalid(f"{field}[{key}]", key, f"duplicate of key present in {fields[0]}"))
            seen.add(key)
            size += len(value.encode())
    if size > MAX_DATA:
        found.append(FieldError("", "FieldValueTooLong", f"Too long: may not be more than {MAX_DATA} bytes"))
    return found


def _frozen(item: Object, old: Object, *fields: str) -> list[FieldError]:
    if not old.get("immutable"):
        return []
    found = [] if item.get("immutable") else [forbidden("immutable", _IMMUTABLE)]
    found.extend(forbidden(field, _IMMUTABLE) for field in fields if (item.get(field) or {}) != (old.get(field) or {}))
    return found


def _config_map(item: Object) -> list[FieldError]:
    return _data_errors(item, "data", "binaryData")


def _config_map_update(item: Object, old: Object) -> list[FieldError]:
    return _frozen(item, old, "data", "binaryData")


def _secret(item: Object) -> list[FieldError]:
    return _data_errors(item, "data")


def _secret_update(item: Object, old: Object) -> list[FieldError]:
    found = _frozen(item, old, "data")
    if item.get("type") != old.get("type"):
        found.append(invalid("type", item.get("type"), "field is immutable"))
    return found


def _node(node: Object) -> list[FieldError]:
    found: list[FieldError] = []
    seen: set[tuple[object, object]] = set()
    for index, taint in enumerate((node.get("spec") or {}).get("taints") or []):
        where = f"spec.taints[{index}]"
        problem = qualified_name_problem(taint.get("key", ""))
        if problem:
            found.append(invalid(f"{where}.key", taint.get("key", ""), problem))
        if not taint.get("effect"):
            found.append(required(f"{where}.effect"))
        key = (taint.get("key"), taint.get("effect"))
        if key in seen:
            found.append(duplicate(where, taint))
        seen.add(key)
    return found


def _event(event: Object) -> list[FieldError]:
    about = event.get("involvedObject") or {}
    namespace = event.get("metadata", {}).get("namespace")
    if about.get("namespace") and about["namespace"] != namespace:
        return [invalid("involvedObject.namespace", about["namespace"], "does not match event.namespace")]
    if not about.get("namespace") and namespace != "default" and about:
        return [invalid("involvedObject.namespace", "", "does not match event.namespace")]
    return []


def _lease(lease: Object) -> list[FieldError]:
    found: list[FieldError] = []
    spec = lease.get("spec") or {}
    if "leaseDurationSeconds" in spec and spec["leaseDurationSeconds"] <= 0:
        found.append(invalid("spec.leaseDurationSeconds", spec["leaseDurationSeconds"], "must be greater than 0"))
    if spec.get("leaseTransitions", 0) < 0:
        found.append(invalid("spec.leaseTransitions", spec["leaseTransitions"], "must be greater than or equal to 0"))
    return found


def _priority_class(item: Object) -> list[FieldError]:
    system = item.get("metadata", {}).get("name", "").startswith("system-")
    if item.get("value", 0) > 10**9 and not system:
        return [forbidden("value", "maximum allowed value of a user defined priority is 1000000000")]
    return []


def _priority_class_update(item: Object, old: Object) -> list[FieldError]:
    if item.get("value") != old.get("value"):
        return [forbidden("value", "may not be changed in an update.")]
    return []


_RULES: dict[tuple[str, str], Callable[[Object], list[FieldError]]] = {
    ("", "Pod"): pod_errors,
    ("", "Service"): _service,
    ("", "ConfigMap"): _config_map,
    ("", "Secret"): _secret,
    ("", "Node"): _node,
    ("", "Event"): _event,
    ("coordination.k8s.io", "Lease"): _lease,
    ("scheduling.k8s.io", "PriorityClass"): _priority_class,
    ("apiextensions.k8s.io", "CustomResourceDefinition"): definition_errors,
}
_UPDATE_RULES: dict[tuple[str, str], Callable[[Object, Object], list[FieldError]]] = {
    ("", "Pod"): pod_update_errors,
    ("", "Service"): _service_update,
    ("", "ConfigMap"): _config_map_update,
    ("", "Secret"): _secret_update,
    ("scheduling.k8s.io", "PriorityClass"): _priority_class_update,
    ("apiextensions.k8s.io", "CustomResourceDefinition"): definition_update_errors,
}
