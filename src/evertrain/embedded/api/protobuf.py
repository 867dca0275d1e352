"""Bodies in Kubernetes' protobuf form, for the few kinds that kubectl 1.32 and later sends in it (`create namespace`,
`create configmap`, `drain`, …). Everything else, and every answer, is JSON. Pure.

Only the numbers of the fields are Kubernetes'; the reader is the wire format and nothing more.
"""

from __future__ import annotations

import base64
from datetime import datetime, timezone
from typing import Any

from evertrain.embedded.schema import bad_request
from evertrain.kube.port import Object

MEDIA = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_MAX_DEPTH = 20

_MESSAGES: dict[str, dict[int, tuple[str, str]]] = {
    "Unknown": {1: ("typeMeta", "TypeMeta"), 2: ("raw", "raw")},
    "TypeMeta": {1: ("apiVersion", "string"), 2: ("kind", "string")},
    "ObjectMeta": {
        1: ("name", "string"),
        2: ("generateName", "string"),
        3: ("namespace", "string"),
        5: ("uid", "string"),
        6: ("resourceVersion", "string"),
        7: ("generation", "int"),
        8: ("creationTimestamp", "time"),
        9: ("deletionTimestamp", "time"),
        10: ("deletionGracePeriodSeconds", "int?"),
        11: ("labels", "map string"),
        12: ("annotations", "map string"),
        13: ("ownerReferences", "list OwnerReference"),
        14: ("finalizers", "list string"),
    },
    "OwnerReference": {
        1: ("kind", "string"),
        3: ("name", "string"),
        4: ("uid", "string"),
        5: ("apiVersion", "string"),
        6: ("controller", "bool?"),
        7: ("blockOwnerDeletion", "bool?"),
    },
    "ConfigMap": {
        1: ("metadata", "ObjectMeta"),
        2: ("data", "map string"),
        3: ("binaryData", "map bytes"),
        4: ("immutable", "bool?"),
    },
    "Secret": {
        1: ("metadata", "ObjectMeta"),
        2: ("data", "map bytes"),
        3: ("type", "string"),
        4: ("stringData", "map string"),
        5: ("immutable", "bool?"),
    },
    "Namespace": {1: ("metadata", "ObjectMeta"), 2: ("spec", "NamespaceSpec"), 3: ("status", "NamespaceStatus")},
    "NamespaceSpec": {1: ("finalizers", "list string")},
    "NamespaceStatus": {1: ("phase", "string")},
    "Service": {1: ("metadata", "ObjectMeta"), 2: ("spec", "ServiceSpec")},
    "ServiceSpec": {
        1: ("ports", "list ServicePort"),
        2: ("selector", "map string"),
        3: ("clusterIP", "string"),
        4: ("type", "string"),
        5: ("externalIPs", "list string"),
        7: ("sessionAffinity", "string"),
        8: ("loadBalancerIP", "string"),
        9: ("loadBalancerSourceRanges", "list string"),
        10: ("externalName", "string"),
        11: ("externalTrafficPolicy", "string"),
        12: ("healthCheckNodePort", "int"),
        13: ("publishNotReadyAddresses", "bool"),
        17: ("ipFamilyPolicy", "string"),
        18: ("clusterIPs", "list string"),
        19: ("ipFamilies", "list string"),
        20: ("allocateLoadBalancerNodePorts", "bool?"),
        21: ("loadBalancerClass", "string"),
        22: ("internalTrafficPolicy", "string"),
        23: ("trafficDistribution", "string"),
    },
    "ServicePort": {
        1: ("name", "string"),
        2: ("protocol", "string"),
        3: ("port", "int"),
        4: ("targetPort", "int or string"),
        5: ("nodePort", "int"),
        6: ("appProtocol", "string"),
    },
    "IntOrString": {1: ("type", "int"), 2: ("intVal", "int"), 3: ("strVal", "string")},
    "Eviction": {1: ("metadata", "ObjectMeta"), 2: ("deleteOptions", "DeleteOptions")},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", "int?"),
        2: ("preconditions", "Preconditions"),
        3: ("orphanDependents", "bool?"),
        4: ("propagationPolicy", "string"),
        5: ("dryRun", "list string"),
    },
    "Preconditions": {1: ("uid", "string"), 2: ("resourceVersion", "string")},
    "Binding": {1: ("metadata", "ObjectMeta"), 2: ("target", "ObjectReference")},
    "ObjectReference": {
        1: ("kind", "string"),
        2: ("namespace", "string"),
        3: ("name", "string"),
        4: ("uid", "string"),
        5: ("apiVersion", "string"),
    },
    "PriorityClass": {
        1: ("metadata", "ObjectMeta"),
        2: ("value", "int?"),
        3: ("globalDefault", "bool"),
        4: ("description", "string"),
        5: ("preemptionPolicy", "string"),
    },
    "map string": {1: ("key", "string"), 2: ("value", "string")},
    "map bytes": {1: ("key", "string"), 2: ("value", "raw")},
    "Time": {1: ("seconds", "int"), 2: ("nanos", "int")},
}
READABLE = frozenset(
    {"ConfigMap", "Secret", "Namespace", "Service", "Eviction", "DeleteOptions", "Binding", "PriorityClass"}
)


class NotReadable(Exception):
    """A kind that is only taken as JSON: 415."""


def read_protobuf(body: bytes) -> Object:
    """Raises Refused (400), NotReadable."""
    if not body.startswith(_MAGIC):
        raise bad_request("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")
    try:
        envelope = _message(body[len(_MAGIC) :], "Unknown", 0)
        meta = envelope.get("typeMeta") or {}
        kind = meta.get("kind", "")
        if kind not in READABLE:
            raise NotReadable(kind)
        return {**meta, **_message(envelope.get("raw", b""), kind, 0)}
    except (ValueError, IndexError, OverflowError):
        raise bad_request("the protobuf message can't be read") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _message(data: bytes, name: str, depth: int) -> Object:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    fields = _MESSAGES[name]
    result: Object = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value: Any
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                value, at = data[at : at + 8], at + 8
            case 2:
                length, at = _varint(data, at)
                value, at = data[at : at + length], at + length
            case 5:
                value, at = data[at : at + 4], at + 4
            case _:
                raise ValueError("unknown wire type")
        if at > len(data):
            raise ValueError("cut off")
        if tag >> 3 in fields:
            key, kind = fields[tag >> 3]
            if isinstance(value, int) != (kind.rstrip("?") in ("int", "bool")):
                raise ValueError(f"wrong wire type of {key}")
            _put(result, key, kind, value, depth)
    return result


def _put(result: Object, key: str, kind: str, value: Any, depth: int) -> None:
    """Go writes empty values where JSON leaves the field out; those with a question mark may be meant."""
    if kind.startswith("list "):
        result.setdefault(key, []).append(_value(kind[5:], value, depth))
    elif kind.startswith("map "):
        entry = _message_of_map(value, kind[4:])
        result.setdefault(key, {})[entry[0]] = entry[1]
    else:
        read = _value(kind, value, depth)
        if kind.endswith("?") or kind == "int or string" or read not in ("", 0, False, None, b""):
            result[key] = read


def _value(kind: str, value: Any, depth: int) -> Any:
    match kind.rstrip("?"):
        case "int":
            return value - (1 << 64) if value >= 1 << 63 else value
        case "bool":
            return bool(value)
        case "string":
            return value.decode()
        case "bytes":
            return base64.b64encode(value).decode()
        case "raw":
            return value
        case "time":
            seconds = _message(value, "Time", depth + 1).get("seconds")
            return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds else None
        case "int or string":
            read = _message(value, "IntOrString", depth + 1)
            return read.get("strVal", "") if read.get("type") else read.get("intVal", 0)
    return _message(value, kind, depth + 1)


def _message_of_map(data: bytes, kind: str) -> tuple[str, Any]:
    entry = _message(data, f"map {kind}", 0)
    value = entry.get("value", "" if kind == "string" else b"")
    return entry.get("key", ""), value if kind == "string" else base64.b64encode(value).decode()
