"""What makes a Pod valid beyond its schema."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from evertrain.embedded.schema.errors import FieldError, duplicate, forbidden, invalid, required, shown
from evertrain.embedded.schema.metadata import label_errors
from evertrain.embedded.schema.names import label_problem, qualified_name_problem
from evertrain.embedded.schema.quantity import parse_quantity
from evertrain.kube.port import Object

_MAY_CHANGE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)
PORT_PROBLEM = "must be between 1 and 65535, inclusive"


def not_found(path: str, value: Any) -> FieldError:
    return FieldError(path, "FieldValueNotFound", f"Not found: {shown(value)}")


def unique_names(path: str, items: list[Object], check: Callable[[str], str]) -> list[FieldError]:
    found: list[FieldError] = []
    seen: set[str] = set()
    for index, item in enumerate(items):
        name = item.get("name", "")
        if not name:
            found.append(required(f"{path}[{index}].name"))
        elif check(name):
            found.append(invalid(f"{path}[{index}].name", name, check(name)))
        elif name in seen:
            found.append(duplicate(f"{path}[{index}].name", name))
        seen.add(name)
    return found


def pod_errors(pod: Object) -> list[FieldError]:
    return spec_errors("spec", pod.get("spec") or {})


def spec_errors(path: str, spec: Object) -> list[FieldError]:
    """Of a pod's spec; also good for the template of a job."""
    found: list[FieldError] = []
    volumes = spec.get("volumes") or []
    found.extend(unique_names(f"{path}.volumes", volumes, label_problem))
    for index, volume in enumerate(volumes):
        sources = [field for field in volume if field != "name"]
        if len(sources) > 1:
            where = f"{path}.volumes[{index}].{sources[1]}"
            found.append(forbidden(where, "may not specify more than 1 volume type"))
    containers = spec.get("containers") or []
    if not containers:
        found.append(required(f"{path}.containers"))
    known = {volume.get("name") for volume in volumes}
    for field in ("initContainers", "containers"):
        listed = spec.get(field) or []
        found.extend(unique_names(f"{path}.{field}", listed, label_problem))
        for index, container in enumerate(listed):
            found.extend(_container_errors(f"{path}.{field}[{index}]", container, known))
    both = {item.get("name") for item in spec.get("initContainers") or []}
    for index, container in enumerate(containers):
        if container.get("name") in both:
            found.append(duplicate(f"{path}.containers[{index}].name", container.get("name")))
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        field = f"{path}.terminationGracePeriodSeconds"
        found.append(invalid(field, spec["terminationGracePeriodSeconds"], "must be greater than or equal to 0"))
    if spec.get("activeDeadlineSeconds", 1) < 1:
        field = f"{path}.activeDeadlineSeconds"
        found.append(invalid(field, spec["activeDeadlineSeconds"], "must be between 1 and 2147483647, inclusive"))
    if spec.get("hostname") and label_problem(spec["hostname"]):
        found.append(invalid(f"{path}.hostname", spec["hostname"], label_problem(spec["hostname"])))
    found.extend(label_errors(f"{path}.nodeSelector", spec.get("nodeSelector")))
    for index, toleration in enumerate(spec.get("tolerations") or []):
        found.extend(_toleration_errors(f"{path}.tolerations[{index}]", toleration))
    return found


def _toleration_errors(path: str, toleration: Object) -> list[FieldError]:
    found: list[FieldError] = []
    operator = toleration.get("operator") or "Equal"
    if not toleration.get("key") and operator != "Exists":
        found.append(
            invalid(
                f"{path}.operator",
                operator,
                'operator must be Exists when `key` is empty, which means "match all values and all keys"',
            )
        )
    if operator == "Exists" and toleration.get("value"):
        found.append(invalid(f"{path}.operator", toleration, "value must be empty when `operator` is 'Exists'"))
    if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
        found.append(
            invalid(
                f"{path}.effect",
                toleration.get("effect", ""),
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            )
        )
    return found


def _container_errors(path: str, container: Object, volumes: set[Any]) -> list[FieldError]:
    found: list[FieldError] = []
    image = container.get("image", "")
    if not image:
        found.append(required(f"{path}.image"))
    elif image != image.strip():
        found.append(invalid(f"{path}.image", image, "must not have leading or trailing whitespace"))
    names: set[str] = set()
    for index, port in enumerate(container.get("ports") or []):
        where = f"{path}.ports[{index}]"
        if not 1 <= port.get("containerPort", 0) <= 65535:
            found.append(invalid(f"{where}.containerPort", port.get("containerPort"), PORT_PROBLEM))
        if port.get("hostPort") and not 1 <= port["hostPort"] <= 65535:
            found.append(invalid(f"{where}.hostPort", port["hostPort"], PORT_PROBLEM))
        if port.get("name") and port["name"] in names:
            found.append(duplicate(f"{where}.name", port["name"]))
        names.add(port.get("name", ""))
    for index, variable in enumerate(container.get("env") or []):
        where = f"{path}.env[{index}]"
        name = variable.get("name", "")
        if not name:
            found.append(required(f"{where}.name"))
        elif "=" in name:
            found.append(
                invalid(
                    f"{where}.name",
                    name,
                    "a valid environment variable name must consist only of printable ASCII characters other than '='",
                )
            )
        chosen = variable.get("valueFrom")
        if chosen is not None and variable.get("value"):
            found.append(invalid(f"{where}.valueFrom", "", "may not be specified when `value` is not empty"))
        elif chosen is not None and len(chosen) != 1:
            words = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"
            found.append(
                invalid(
                    f"{where}.valueFrom",
                    "",
                    words if not chosen else "may not have more than one field specified at a time",
                )
            )
    mounts: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts") or []):
        where = f"{path}.volumeMounts[{index}]"
        if not mount.get("name"):
            found.append(required(f"{where}.name"))
        elif mount["name"] not in volumes:
            found.append(not_found(f"{where}.name", mount["name"]))
        if not mount.get("mountPath"):
            found.append(required(f"{where}.mountPath"))
        elif mount["mountPath"] in mounts:
            found.append(invalid(f"{where}.mountPath", mount["mountPath"], "must be unique"))
        mounts.add(mount.get("mountPath", ""))
    found.extend(_resource_errors(f"{path}.resources", container.get("resources") or {}))
    return found


def _extended(name: str) -> bool:
    return "/" in name and not name.partition("/")[0].endswith("kubernetes.io")


def _resource_errors(path: str, resources: Object) -> list[FieldError]:
    found: list[FieldError] = []
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for field, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            where = f"{path}.{field}[{name}]" if "." in name or "/" in name else f"{path}.{field}.{name}"
            if qualified_name_problem(name):
                found.append(invalid(f"{path}.{field}", name, qualified_name_problem(name)))
            elif (
                "/" not in name
                and name not in ("cpu", "memory", "ephemeral-storage", "storage")
                and not name.startswith("hugepages-")
            ):
                found.append(invalid(where, name, "must be a standard resource type or fully qualified"))
            if parse_quantity(amount) < 0:
                found.append(invalid(where, amount, "must be greater than or equal to 0"))
            elif _extended(name) and parse_quantity(amount) % 1:
                found.append(invalid(where, amount, "must be an integer"))
    for name, amount in requests.items():
        limit = limits.get(name)
        if limit is None:
            if _extended(name):
                found.append(required(f"{path}.limits", "Limit must be set for non overcommitable resources"))
        elif _extended(name) and parse_quantity(amount) != parse_quantity(limit):
            found.append(invalid(f"{path}.requests", amount, f"must be equal to {name} limit of {limit}"))
        elif parse_quantity(amount) > parse_quantity(limit):
            found.append(invalid(f"{path}.requests", amount, f"must be less than or equal to {name} limit of {limit}"))
    return found


def pod_update_errors(pod: Object, old: Object) -> list[FieldError]:
    """Of a running pod hardly anything can change."""
    if pod.get("spec") == old.get("spec"):
        return []
    spec, before = copy.deepcopy(pod.get("spec") or {}), copy.deepcopy(old.get("spec") or {})
    found: list[FieldError] = []
    for field in ("containers", "initContainers"):
        now, then = spec.get(field) or [], before.get(field) or []
        if len(now) != len(then):
            return [forbidden(f"spec.{field}", "pod updates may not add or remove containers")]
        for one, other in zip(now, then, strict=True):
            one["image"] = other.get("image")
            # What the image's tag implied at first stays.
            one["imagePullPolicy"] = other.get("imagePullPolicy")
    if any(toleration not in (spec.get("tolerations") or []) for toleration in before.get("tolerations") or []):
        found.append(
            forbidden("spec.tolerations", "existing toleration can not be modified except its tolerationSeconds")
        )
    for side in (spec, before):
        for field in ("tolerations", "activeDeadlineSeconds", "schedulingGates"):
            side.pop(field, None)
    if spec != before:
        changed = sorted(key for key in {*spec, *before} if spec.get(key) != before.get(key))
        found.append(forbidden("spec", f"{_MAY_CHANGE}\n(changed: {', '.join(changed)})"))
    return found
