"""The environment, command and arguments of a container. Pure.

References to ConfigMaps and Secrets are looked up through a function; what is missing is a ConfigError, in the words of
the kubelet.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evertrain.embedded import resources
from evertrain.kube.port import Object

Lookup = Callable[[str, str, str], Object | None]
"""Kind (ConfigMap or Secret), namespace, name → the object."""

_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")
_REFERENCE = re.compile(r"\$(\$|\([^)]*\))")


class ConfigError(Exception):
    """CreateContainerConfigError: the message for the user."""


@dataclass(frozen=True)
class Place:
    """Where a pod is."""

    node: str
    host_ip: str
    pod_ip: str
    allocatable: Mapping[str, Any]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` becomes its value if there is one and stays otherwise; `$$` stands for `$`."""

    def value(match: re.Match[str]) -> str:
        inner = match[1]
        if inner == "$":
            return "$"
        return variables.get(inner[1:-1], match[0])

    return _REFERENCE.sub(value, text)


def build(
    pod: Object, container: Mapping[str, Any], place: Place, lookup: Lookup, base: Mapping[str, str]
) -> dict[str, str]:
    """`base` is what every process here has; the container's own variables replace it."""
    namespace = pod["metadata"].get("namespace", "")
    found = dict(base)
    for source in container.get("envFrom") or []:
        prefix = source.get("prefix") or ""
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := source.get(field):
                for key, value in sorted(_all(kind, reference, namespace, lookup).items()):
                    if _NAME.fullmatch(prefix + key):
                        found[prefix + key] = value
    for variable in container.get("env") or []:
        given: str | None = expand(str(variable.get("value") or ""), found)
        if variable.get("valueFrom"):
            given = _referred(pod, container, variable["valueFrom"], place, lookup)
        if given is not None:
            found[variable["name"]] = given
    return found


def command(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """There is no image whose entry point could be used, so a command or at least arguments have to be there."""
    argv = [
        expand(str(word), variables) for word in [*(container.get("command") or []), *(container.get("args") or [])]
    ]
    if not argv or not argv[0]:
        raise ConfigError(
            f"container {container.get('name')} has no command: pods are processes of this machine here, images are "
            "not used, so the command can't be taken from the image"
        )
    return argv


def field(pod: Object, path: str, place: Place) -> str:
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    if match := _SUBSCRIPT.fullmatch(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    match path:
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(metadata.get(path.removeprefix("metadata."), ""))
        case "metadata.labels" | "metadata.annotations":
            entries = metadata.get(path.removeprefix("metadata.")) or {}
            return "\n".join(f"{key}={_quote(value)}" for key, value in sorted(entries.items()))
        case "spec.nodeName":
            return place.node
        case "spec.serviceAccountName":
            return str(spec.get("serviceAccountName") or "default")
        case "status.hostIP" | "status.hostIPs":
            return place.host_ip
        case "status.podIP" | "status.podIPs":
            return place.pod_ip
    raise ConfigError(f"unsupported fieldPath: {path}")


def resource(container: Mapping[str, Any], reference: Mapping[str, Any], place: Place) -> str:
    """`limits.cpu` and the like, in units of the divisor, rounded up. Without a limit it is what the node has."""
    path = str(reference.get("resource") or "")
    sort, _, name = path.partition(".")
    given = container.get("resources") or {}
    limits, requests = given.get("limits") or {}, given.get("requests") or {}
    if sort == "limits":
        quantity = limits.get(name, place.allocatable.get(name, "0"))
    elif sort == "requests":
        quantity = requests.get(name, limits.get(name, "0"))
    else:
        raise ConfigError(f"unsupported container resource : {path}")
    try:
        divisor = resources.thousandths(reference.get("divisor") or "1") or 1000
        return str(-(-resources.thousandths(quantity) // divisor))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def content(kind: str, item: Object) -> dict[str, bytes]:
    """The files of a ConfigMap or Secret."""
    data, binary = item.get("data") or {}, item.get("binaryData") or {}
    if kind == "Secret":
        binary = data
        data = item.get("stringData") or {}
    try:
        return {
            **{key: str(value).encode() for key, value in data.items()},
            **{key: base64.b64decode(value or "") for key, value in binary.items()},
        }
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{kind} {item['metadata']['name']}: {error}") from None


def container_named(pod: Object, name: str) -> Mapping[str, Any]:
    spec = pod.get("spec") or {}
    everyone: Sequence[Mapping[str, Any]] = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    for container in everyone:
        if container.get("name") == name:
            return container
    raise ConfigError(f"container {name} not found")


def _referred(
    pod: Object, container: Mapping[str, Any], source: Mapping[str, Any], place: Place, lookup: Lookup
) -> str | None:
    if reference := source.get("fieldRef"):
        return field(pod, str(reference.get("fieldPath") or ""), place)
    if reference := source.get("resourceFieldRef"):
        other = reference.get("containerName")
        return resource(container_named(pod, other) if other else container, reference, place)
    namespace = pod["metadata"].get("namespace", "")
    for kind, name in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if reference := source.get(name):
            key = str(reference.get("key") or "")
            found = _all(kind, reference, namespace, lookup)
            if key in found:
                return found[key]
            if reference.get("optional"):
                return None
            raise ConfigError(f"couldn't find key {key} in {kind} {namespace}/{reference.get('name')}")
    raise ConfigError("a variable with valueFrom names no source")


def _all(kind: str, reference: Mapping[str, Any], namespace: str, lookup: Lookup) -> dict[str, str]:
    name = str(reference.get("name") or "")
    item = lookup(kind, namespace, name)
    if item is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f'{kind.lower()} "{name}" not found')
    return {key: value.decode(errors="replace") for key, value in content(kind, item).items()}


def _quote(value: object) -> str:
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
