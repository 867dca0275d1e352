"""What can be wrong with a node, as its detectors tell, and how that is written as JSON. Pure.

Detectors, programs of others in the drop-in directory and `evertrain inject` all say the same: a chip, a part of the
node or a port of its switch has a fault with a code. How bad the code is, is decided later (`picture`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evertrain.faultcodes.levels import CHIP_LEVELS, NODE_LEVELS, NORMAL, SWITCH_LEVELS, switch_level

CHIP_CODE = re.compile(r"[0-9A-F]{8,9}")
NODE_CODE = re.compile(r"[0-9A-F]{8}")
SWITCH_CODE = re.compile(r"\[0x[0-9a-f]{8},([0-9]+|na),(cpu|npu|L2|na),na\]")
DEVICE_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
MOST_CHIPS = 1024
LONGEST_NOTE = 256
LARGEST = (1 << 31) - 1


class Malformed(ValueError):
    """The text says what is wrong, and with which field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    code: str
    since_ms: int
    until_ms: int | None = None
    """It is over by itself then: an event rather than a state."""
    level: str = ""
    """If it is not to be that of the code."""
    note: str = ""
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipFault(Fault):
    chip: int

    @property
    def key(self) -> tuple[str | int, ...]:
        return "chip", self.chip, self.code


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault(Fault):
    device: str
    """CPU, Memory, Storage, Network, GPU, Node…"""
    id: int = 0

    @property
    def key(self) -> tuple[str | int, ...]:
        return "node", self.device, self.id, self.code


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchFault(Fault):
    chip: int = 0
    port: int = 0

    @property
    def key(self) -> tuple[str | int, ...]:
        return "switch", self.chip, self.port, self.code


AnyFault = ChipFault | NodeFault | SwitchFault
Key = tuple[str | int, ...]

_FIELDS = {
    "chip": {"chip"},
    "node": {"device", "id"},
    "switch": {"chip", "port"},
}
_COMMON = {"kind", "code", "since", "until", "level", "note"}
KINDS = tuple(_FIELDS)


def code_of(kind: str, text: object) -> str:
    """The code as it is written in tables, or Malformed."""
    if not isinstance(text, str):
        raise Malformed("code is missing" if text is None else "code is not a text")
    text = text.strip()
    if kind == "switch":
        if not SWITCH_CODE.fullmatch(text):
            raise Malformed(f"code {text[:60]!r} is not of the form [0x08520003,na,npu,na]")
        return text
    code = text.upper().removeprefix("0X")
    pattern, digits = (CHIP_CODE, "8 or 9") if kind == "chip" else (NODE_CODE, "8")
    if not pattern.fullmatch(code):
        raise Malformed(f"code {text[:60]!r} is not {digits} hexadecimal digits")
    return code


def level_of(kind: str, text: object) -> str:
    if text in (None, ""):
        return ""
    level = switch_level(str(text)) if kind == "switch" else str(text)
    known = {"chip": CHIP_LEVELS, "node": NODE_LEVELS, "switch": SWITCH_LEVELS}[kind]
    if level not in known or level == NORMAL:
        raise Malformed(f"level {text!r} is none of {', '.join(each for each in known if each != NORMAL)}")
    return level


def decode(entry: Mapping[str, Any], now_ms: int) -> AnyFault:
    """One fault from its JSON object. Without `since` it begins now."""
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise Malformed(f"kind {kind!r} is none of {', '.join(KINDS)}")
    if unknown := set(entry) - _COMMON - _FIELDS[kind]:
        raise Malformed(f"unknown field {sorted(map(str, unknown))[0]!r} for kind {kind}")
    note = entry.get("note")
    note = "" if note is None else note
    if not isinstance(note, str):
        raise Malformed("note is not a text")
    until = entry.get("until")
    common: dict[str, Any] = {
        "code": code_of(kind, entry.get("code")),
        "since_ms": _number(entry, "since", now_ms, 1 << 62),
        "until_ms": None if until is None else _number(entry, "until", 0, 1 << 62),
        "level": level_of(kind, entry.get("level")),
        "note": "".join(c if c.isprintable() else " " for c in note[:LONGEST_NOTE]),
    }
    if kind == "chip":
        if "chip" not in entry:
            raise Malformed("chip is missing")
        return ChipFault(chip=_number(entry, "chip", 0, MOST_CHIPS - 1), **common)
    if kind == "switch":
        return SwitchFault(chip=_number(entry, "chip", 0), port=_number(entry, "port", 0), **common)
    device = entry.get("device", "Node")
    if not isinstance(device, str) or not DEVICE_TYPE.fullmatch(device):
        raise Malformed(f"device {device!r} is not a word such as CPU, Memory, Storage or Network")
    return NodeFault(device=device, id=_number(entry, "id", 0), **common)


def encode(fault: AnyFault) -> dict[str, Any]:
    """As `decode` reads it."""
    found: dict[str, Any] = {"kind": fault.key[0], "code": fault.code}
    match fault:
        case ChipFault():
            found["chip"] = fault.chip
        case NodeFault():
            found |= {"device": fault.device, "id": fault.id}
        case SwitchFault():
            found |= {"chip": fault.chip, "port": fault.port}
    found["since"] = fault.since_ms
    if fault.until_ms is not None:
        found["until"] = fault.until_ms
    return found | {name: text for name, text in (("level", fault.level), ("note", fault.note)) if text}


def _number(entry: Mapping[str, Any], name: str, default: int, largest: int = LARGEST) -> int:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise Malformed(f"{name} is not a whole number between 0 and {largest}")
    return value
