"""Whether a message about public faults is one. Pure.

The message is JSON as in a ConfigMap. A fault in it that breaks a rule is left out; a message with no good fault, or
whose own fields break a rule, is refused with what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from evertrain.faultcodes.table import Codes

OCCUR, RECOVER, ONCE = "occur", "recover", "once"
TYPES = ("NPU", "Node", "Network", "Storage")
VERSION = "1.0"
EARLIEST_MS = 1_735_689_600_000
"""2025-01-01T00:00:00Z."""
LATEST_MS = 9_999_999_999_999
"""13 digits."""
MOST_FAULTS, MOST_PLACES, MOST_INFLUENCES, MOST_DEVICES = 100, 10, 1000, 32
_ID = re.compile(r"[a-zA-Z0-9\-_.]{8,128}")
_NODE = re.compile(r"[a-z0-9]([a-z0-9\-.]{0,251}[a-z0-9])?")
_DESCRIPTION = re.compile(r"[\S ]{0,512}")

NodeOf = Callable[[str], str | None]
"""The name of the node with a serial number."""


class Refused(ValueError):
    """What is wrong with a message or a fault in it."""


@dataclass(frozen=True, slots=True)
class Influence:
    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PublicFault:
    id: str
    type: str
    code: str
    time_ms: int
    assertion: str
    influences: tuple[Influence, ...]


@dataclass(frozen=True, slots=True)
class Message:
    resource: str
    faults: tuple[PublicFault, ...]
    left_out: tuple[str, ...] = ()
    """What is wrong with the faults that were left out."""


def check(message: object, codes: Codes, node_of: NodeOf) -> Message:
    """Raises Refused."""
    found = _mapping(message, "the message")
    _id(found.get("id"), "id")
    _time(found.get("timestamp"), "timestamp")
    if found.get("version") != VERSION:
        raise Refused(f"version must be {VERSION}")
    resource = found.get("resource")
    if not isinstance(resource, str) or resource not in codes.resources:
        raise Refused("resource is not one of those that are configured")
    faults = found.get("faults")
    if not isinstance(faults, list) or not 1 <= len(faults) <= MOST_FAULTS:
        raise Refused(f"faults must be a list of 1 to {MOST_FAULTS}")
    good: list[PublicFault] = []
    wrong: list[str] = []
    for number, fault in enumerate(faults):
        try:
            good.append(_fault(fault, codes, node_of))
        except Refused as error:
            wrong.append(f"fault {number}: {error}")
    if not good:
        raise Refused(f"no fault is valid: {wrong[0]}")
    return Message(resource, tuple(good), tuple(wrong))


def _fault(value: object, codes: Codes, node_of: NodeOf) -> PublicFault:
    fault = _mapping(value, "a fault")
    type_, code, assertion = fault.get("faultType"), fault.get("faultCode"), fault.get("assertion")
    if type_ not in TYPES:
        raise Refused(f"faultType must be one of {', '.join(TYPES)}")
    if not isinstance(code, str) or len(code) != 9 or codes.public_level(code) is None:
        raise Refused("faultCode is not one of those that are configured")
    if assertion not in (OCCUR, RECOVER, ONCE):
        raise Refused("assertion must be occur, recover or once")
    _location(fault.get("faultLocation"))
    description = fault.get("description", "")
    if description is not None and (not isinstance(description, str) or not _DESCRIPTION.fullmatch(description)):
        raise Refused("description must be up to 512 characters, no white space but blanks")
    influences = fault.get("influence")
    if not isinstance(influences, list) or not 1 <= len(influences) <= MOST_INFLUENCES:
        raise Refused(f"influence must be a list of 1 to {MOST_INFLUENCES}")
    return PublicFault(
        id=_id(fault.get("faultId"), "faultId"),
        type=str(type_),
        code=code,
        time_ms=_time(fault.get("faultTime"), "faultTime"),
        assertion=str(assertion),
        influences=tuple(_influence(each, node_of) for each in influences),
    )


def _influence(value: object, node_of: NodeOf) -> Influence:
    influence = _mapping(value, "an influence")
    name, serial = influence.get("nodeName"), influence.get("nodeSN")
    if isinstance(name, str) and name:
        if not _NODE.fullmatch(name):
            raise Refused("nodeName is no name of a node")
        node = name
    else:
        found = node_of(serial) if isinstance(serial, str) and serial else None
        if found is None:
            raise Refused("neither nodeName nor nodeSN names a node")
        node = found
    devices = influence.get("deviceIds")
    if not isinstance(devices, list) or not 1 <= len(devices) <= MOST_DEVICES:
        raise Refused(f"deviceIds must be a list of 1 to {MOST_DEVICES}")
    if not all(type(each) is int and 0 <= each < MOST_DEVICES for each in devices) or len(set(devices)) != len(devices):
        raise Refused(f"deviceIds must be different numbers from 0 to {MOST_DEVICES - 1}")
    return Influence(node, tuple(devices))


def _location(value: object) -> None:
    if value is None:
        return
    location = _mapping(value, "faultLocation")
    if len(location) > MOST_PLACES:
        raise Refused(f"faultLocation must have no more than {MOST_PLACES} entries")
    for key, each in location.items():
        if not isinstance(key, str) or not isinstance(each, str) or len(key) > 16 or len(each) > 128:
            raise Refused("faultLocation must have keys of up to 16 and values of up to 128 characters")


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise Refused(f"{what} must be an object")
    return value


def _id(value: object, what: str) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise Refused(f"{what} must be 8 to 128 letters, digits, dashes, underscores or dots")
    return value


def _time(value: object, what: str) -> int:
    if type(value) is not int or not EARLIEST_MS <= value <= LATEST_MS:
        raise Refused(f"{what} must be in milliseconds, 13 digits, from 2025 on")
    return value
