"""What must be right about a request before its object is looked at as one of its kind. Pure."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.api.status import changed, conflict
from evertrain.embedded.schema import FieldError, Resource, bad_request, invalid_object
from evertrain.embedded.store import Record
from evertrain.kube.port import Object


def check_envelope(resource: Resource, namespace: str, name: str, item: Any) -> Object:
    """What must be right before the object can be looked at as one of its kind."""
    if not isinstance(item, dict):
        raise bad_request(f"the object provided is unrecognized: a {resource.kind} must be an object")
    item.setdefault("apiVersion", resource.api_version)
    item.setdefault("kind", resource.kind)
    if item["kind"] != resource.kind:
        raise bad_request(f'{item["kind"]} in version "{item["apiVersion"]}" cannot be handled as a {resource.kind}')
    if item["apiVersion"] != resource.api_version:
        raise bad_request(
            f"the API version in the data ({item['apiVersion']}) does not match the expected API version "
            f"({resource.api_version})"
        )
    metadata = item.setdefault("metadata", {})
    if metadata is None:
        metadata = item["metadata"] = {}
    if not isinstance(metadata, dict):
        raise bad_request(
            f'{resource.kind} in version "{resource.version}" cannot be handled: metadata must be an object'
        )
    for key in ("name", "namespace", "generateName", "uid", "resourceVersion"):
        if metadata.get(key) is None:
            metadata.pop(key, None)
        elif not isinstance(metadata[key], str):
            raise bad_request(
                f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
                f"metadata.{key} must be a string"
            )
    given = metadata.get("namespace", "")
    if resource.namespaced:
        if given and given != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        metadata["namespace"] = namespace
    elif given:
        raise bad_request(f"namespace may not be set: {resource.qualified} is not namespaced")
    if name and metadata.setdefault("name", name) != name:
        raise bad_request(f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})")
    return item


def check_preconditions(resource: Resource, record: Record, asked: Object) -> None:
    """`asked` may name a uid and a resourceVersion. Raises Refused (409) if the object has others."""
    metadata = record.object["metadata"]
    uid, version = asked.get("uid"), asked.get("resourceVersion")
    if uid and uid != metadata["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata['uid']}"
        raise conflict(resource, record.name, why)
    if version and version != metadata["resourceVersion"]:
        if not (isinstance(version, str) and version.isascii() and version.isdigit()):
            error = FieldError(
                "metadata.resourceVersion", "FieldValueInvalid", f'Invalid value: "{version}": must be a number'
            )
            raise invalid_object(resource.group, resource.kind, record.name, [error])
        raise changed(resource, record.name)


def bound(resource: Resource, pod: Object, node: str, annotations: Any, now: str) -> Object:
    """The pod (the caller's own, changed) on its node. Raises Refused if it can't go there (any more)."""
    name = pod["metadata"]["name"]
    if pod["metadata"].get("deletionTimestamp"):
        raise conflict(resource, name, f"pod {name} is being deleted, cannot be assigned to a host")
    if pod["spec"].get("nodeName"):
        raise conflict(resource, name, f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"')
    pod["spec"]["nodeName"] = node
    if annotations:
        if not isinstance(annotations, dict) or not all(isinstance(text, str) for text in annotations.values()):
            raise bad_request("annotations of a Binding must be a map of strings")
        pod["metadata"].setdefault("annotations", {}).update(annotations)
    before = pod.setdefault("status", {}).get("conditions") or ()
    scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now}
    pod["status"]["conditions"] = [item for item in before if item.get("type") != "PodScheduled"] + [scheduled]
    return pod
