"""What `evertrain inject` may ask for: faults of a node's chips, of itself and its switch, and public ones. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from evertrain.faultcodes.table import Codes
from evertrain.kube.port import Object
from evertrain.noded.faults import AnyFault, ChipFault, Key, Malformed, NodeFault, SwitchFault, code_of
from evertrain.noded.picture import Chips

LINK_DOWN, SUB_HEALTHY = "81078603", "81AD8605"
"""A chip's link to the parameter plane is down; a chip works, but not as it should."""
PUBLIC_LABEL = {"mc-consumer-publicfault": "true"}
PUBLIC_KEY = "PublicFault"
PUBLIC_PREFIX = "injected-public-"
PUBLIC_TYPES = ("NPU", "Node", "Network", "Storage")
OCCUR, RECOVER, ONCE = "occur", "recover", "once"
MARK = "evertrain.dev/injected-public"
"""Label of public faults that were injected here."""


def explain(kind: str, code: str, level: str, codes: Codes) -> str:
    """What a code means on this cluster; Malformed if a fault with it would not be reported."""
    code = code_of(kind, code)
    if level:
        return f"level {level}, as given"
    if kind == "chip":
        found = f"level {codes.chip_level(code)}"
        if code not in codes.chip:
            found += ", as every code that is in no list"
        for stay in codes.duration:
            if code in stay.codes:
                found += f"; {stay.level} if it stays for {stay.timeout_s} s"
        for often in codes.frequency:
            if code in often.codes:
                found += f"; {often.level} if it comes {often.times} times in {often.window_s / 3600:g} h"
        return found
    listed = codes.node_level(code) if kind == "node" else codes.switch_level(code)
    if not listed:
        raise Malformed(f"code {code} is in no list of {kind} faults, and such faults are not reported; give a --level")
    return f"level {listed}"


def chips_meant(wanted: Sequence[int] | None, chips: Chips) -> tuple[int, ...]:
    """All if none is named."""
    if not chips.numbers:
        raise Malformed("the node has no chips")
    for number in wanted or ():
        if number not in chips.numbers:
            raise Malformed(f"the node has no chip {number}; its chips are {spans(chips.numbers)}")
    return tuple(wanted or chips.numbers)


def spans(numbers: Iterable[int]) -> str:
    """0-7,9"""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def with_faults(there: Iterable[AnyFault], new: Iterable[AnyFault]) -> list[AnyFault]:
    """One that is there already stays since when it is, with what is new about it."""
    found = {fault.key: fault for fault in there}
    for fault in new:
        old = found.get(fault.key)
        found[fault.key] = replace(fault, since_ms=old.since_ms) if old is not None else fault
    return list(found.values())


def without(there: Iterable[AnyFault], keys: Iterable[Key]) -> list[AnyFault]:
    gone = set(keys)
    return [fault for fault in there if fault.key not in gone]


def describe(fault: AnyFault) -> str:
    match fault:
        case ChipFault():
            return f"chip {fault.chip}"
        case NodeFault():
            return f"{fault.device} {fault.id}"
        case SwitchFault():
            return f"chip {fault.chip} port {fault.port}"


@dataclass(frozen=True, slots=True)
class PublicFault:
    """A fault that somebody outside of the cluster's nodes tells of."""

    id: str
    code: str
    node: str
    chips: tuple[int, ...]
    resource: str
    type: str
    time_ms: int
    assertion: str = OCCUR
    description: str = ""


def public_type(code: str) -> str:
    """By its first digit."""
    return {"0": "NPU", "1": "Node", "2": "Network", "3": "Storage"}.get(code[:1], "NPU")


def public_config_map(fault: PublicFault, namespace: str, now_ms: int) -> Object:
    body = {
        "id": f"{fault.id}-{now_ms}",
        "timestamp": now_ms,
        "version": "1.0",
        "resource": fault.resource,
        "faults": [
            {
                "faultId": fault.id,
                "faultType": fault.type,
                "faultCode": fault.code,
                "faultTime": fault.time_ms,
                "assertion": fault.assertion,
                "faultLocation": {},
                "influence": [{"nodeName": fault.node, "deviceIds": list(fault.chips)}],
                "description": fault.description,
            }
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": PUBLIC_PREFIX + fault.id.lower(),
            "namespace": namespace,
            "labels": {**PUBLIC_LABEL, MARK: "true"},
        },
        "data": {PUBLIC_KEY: json.dumps(body)},
    }


def read_public(item: Mapping[str, object]) -> PublicFault | None:
    """One that we made; None if it is something else."""
    try:
        body = json.loads(item["data"][PUBLIC_KEY])  # type: ignore[index]
        fault = body["faults"][0]
        place = fault["influence"][0]
        return PublicFault(
            id=str(fault["faultId"]),
            code=str(fault["faultCode"]),
            node=str(place["nodeName"]),
            chips=tuple(int(number) for number in place["deviceIds"]),
            resource=str(body["resource"]),
            type=str(fault["faultType"]),
            time_ms=int(fault["faultTime"]),
            assertion=str(fault["assertion"]),
            description=str(fault.get("description") or ""),
        )
    except (KeyError, IndexError, TypeError, ValueError):
        return None
