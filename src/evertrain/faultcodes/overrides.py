"""What an administrator says about fault codes, in the original's files. Pure.

Each function takes the text as it stands in a ConfigMap or file and gives the table with it, and what was wrong. A
file that can't be used changes nothing: what is shipped is in force then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from evertrain.faultcodes.levels import (
    CHIP_LEVELS,
    FREE_RESTART,
    MANUAL,
    NODE_LEVELS,
    NOT_HANDLE,
    PRE_SEPARATE_CHIP,
    PRE_SEPARATE_NODE,
    RESTART,
    RESTART_BUSINESS,
    RESTART_REQUEST,
    SEPARATE_CHIP,
    SEPARATE_NODE,
    SUB_HEALTH,
    SWITCH_LEVELS,
    SWITCH_NOT_HANDLE,
    SWITCH_PRE_SEPARATE,
    SWITCH_SEPARATE,
)
from evertrain.faultcodes.table import PUBLIC_LEVELS, Codes, Duration, Frequency, levels_by_code, normal

CHIP_CONFIG = ("kube-system", "mindx-dl-fault-config")
"""Namespace and name of the ConfigMap."""
NODE_CONFIG = ("mindx-dl", "mindx-dl-node-fault-config")
CHIP_FILE, SWITCH_FILE, RULES_FILE = "faultCode.json", "SwitchFaultCode.json", "faultCustomization.json"
NODE_FILE = "NodeDConfiguration.json"

_CHIP_KEYS = {
    "NotHandleFaultCodes": NOT_HANDLE,
    "SubHealthFaultCodes": SUB_HEALTH,
    "RestartRequestCodes": RESTART_REQUEST,
    "RestartBusinessCodes": RESTART_BUSINESS,
    "FreeRestartNPUCodes": FREE_RESTART,
    "RestartNPUCodes": RESTART,
    "PreSeparateNPUCodes": PRE_SEPARATE_CHIP,
    "SeparateNPUCodes": SEPARATE_CHIP,
}
_NETWORK_KEYS = {
    "NotHandleFaultNetworkCodes": NOT_HANDLE,
    "SubHealthFaultNetworkCodes": SUB_HEALTH,
    "PreSeparateNPUNetworkCodes": PRE_SEPARATE_CHIP,
    "SeparateNPUNetworkCodes": SEPARATE_CHIP,
}
_SWITCH_KEYS = {
    "NotHandleFaultCodes": SWITCH_NOT_HANDLE,
    "SubHealthFaultCodes": SUB_HEALTH,
    "RestartRequestFaultCodes": RESTART_REQUEST,
    "PreSeparateFaultCodes": SWITCH_PRE_SEPARATE,
    "ResetFaultCodes": SWITCH_SEPARATE,
    "SeparateFaultCodes": SWITCH_SEPARATE,
}
_NODE_KEYS = {
    "NotHandleFaultCodes": NOT_HANDLE,
    "PreSeparateFaultCodes": PRE_SEPARATE_NODE,
    "SeparateFaultCodes": SEPARATE_NODE,
}
_PUBLIC_KEYS = {
    "NotHandleFaultCodes": NOT_HANDLE,
    "SubHealthFaultCodes": SUB_HEALTH,
    "PreSeparateNPUCodes": PRE_SEPARATE_CHIP,
    "SeparateNPUCodes": SEPARATE_CHIP,
}
_SWITCH_CODE = re.compile(r"\[0x[0-9a-fA-F]{8},[^,\[\]]+,(cpu|npu|L2|na),na\]")
_NODE_CODE = re.compile(r"[0-9a-fA-F]{8}")
LONGEST_SWITCH_CODE = 50


class _Rule(msgspec.Struct, frozen=True):
    EventId: list[str] = []
    FaultHandling: str = ""


class _Frequency(_Rule, frozen=True):
    TimeWindow: int = 0
    Times: int = 0
    ReleaseTimeWindow: int | None = None


class _Duration(_Rule, frozen=True):
    FaultTimeout: int = 0
    RecoverTimeout: int = 0


class _Rules(msgspec.Struct, frozen=True):
    FaultFrequency: list[_Frequency] = []
    FaultDuration: list[_Duration] = []


def with_config(codes: Codes, data: Mapping[str, str]) -> tuple[Codes, list[str]]:
    """With the ConfigMap of chips and switches, over `codes`, which are what is shipped."""
    wrong: list[str] = []
    for key, override in ((CHIP_FILE, chips), (SWITCH_FILE, switches), (RULES_FILE, rules)):
        if data.get(key):
            codes, more = override(codes, data[key])
            wrong += more
    return codes, wrong


def chips(codes: Codes, text: str) -> tuple[Codes, list[str]]:
    lists, wrong = _lists(text, CHIP_FILE)
    if lists is None:
        return codes, wrong
    own = _by_level(lists, _CHIP_KEYS)
    network = _by_level(lists, _NETWORK_KEYS)
    both = {level: [*own.get(level, ()), *network.get(level, ())] for level in {*own, *network}}
    chip = levels_by_code({level: map(normal, each) for level, each in both.items()}, CHIP_LEVELS)
    named = frozenset(normal(code) for each in network.values() for code in each)
    return replace(codes, chip=chip, network=codes.network | named), wrong


def switches(codes: Codes, text: str) -> tuple[Codes, list[str]]:
    lists, wrong = _lists(text, SWITCH_FILE)
    if lists is None:
        return codes, wrong
    found = _by_level(lists, _SWITCH_KEYS)
    good: dict[str, list[str]] = {}
    for level, each in found.items():
        for code in each:
            code = code.replace(" ", "")
            if len(code) <= LONGEST_SWITCH_CODE and _SWITCH_CODE.fullmatch(code):
                good.setdefault(level, []).append(code)
            else:
                wrong.append(f"{SWITCH_FILE}: {code[:LONGEST_SWITCH_CODE]!r} is no code of a switch")
    return replace(codes, switch=levels_by_code(good, SWITCH_LEVELS)), wrong


def nodes(codes: Codes, text: str) -> tuple[Codes, list[str]]:
    """A code with two levels makes the whole file worthless, as does one of another form."""
    found = _decoded(text)
    inner = found.get("FaultTypeCode") if isinstance(found, dict) else None
    lists = _strings(inner)
    if lists is None:
        return codes, [f"{NODE_FILE} can't be used: it has no lists of codes under FaultTypeCode"]
    by_level = _by_level(lists, _NODE_KEYS)
    all_codes = [normal(code) for each in by_level.values() for code in each]
    if len(set(all_codes)) != len(all_codes):
        return codes, [f"{NODE_FILE} can't be used: a code is in it twice"]
    bad = [code for code in all_codes if not _NODE_CODE.fullmatch(code)]
    if bad:
        return codes, [f"{NODE_FILE} can't be used: {bad[0][:20]!r} is no code of a node"]
    node = levels_by_code({level: map(normal, each) for level, each in by_level.items()}, NODE_LEVELS)
    return replace(codes, node=node), []


def public(codes: Codes, text: str) -> tuple[Codes, list[str]]:
    """publicCustomization.json."""
    found = _decoded(text)
    lists = _strings(found.get("publicFaultCode")) if isinstance(found, dict) else None
    names = found.get("publicFaultResource") if isinstance(found, dict) else None
    if lists is None or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return codes, ["the configuration of public faults can't be used: it lacks its lists"]
    by_level = _by_level(lists, _PUBLIC_KEYS)
    wrong = [f"public fault code {code[:20]!r} has not 9 characters" for each in by_level.values() for code in each
             if len(code) != 9]  # fmt: skip
    good = {level: [code for code in each if len(code) == 9] for level, each in by_level.items()}
    return replace(codes, public=levels_by_code(good, PUBLIC_LEVELS), resources=frozenset(names)), wrong


def rules(codes: Codes, text: str) -> tuple[Codes, list[str]]:
    """The rules by which faults become worse. One that breaks its ranges is left out."""
    try:
        found = msgspec.json.decode(text, type=_Rules)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return codes, [f"{RULES_FILE} can't be used: {error}"]
    wrong: list[str] = []
    frequency: list[Frequency] = []
    for rule in found.FaultFrequency:
        manual = rule.FaultHandling == MANUAL
        why = _why_not(rule, CHIP_LEVELS) or next((text for good, text in (
            (60 <= rule.TimeWindow <= 864_000, "TimeWindow must be 60 to 864000"),
            (1 <= rule.Times <= 100, "Times must be 1 to 100"),
            (manual if rule.ReleaseTimeWindow is None else rule.ReleaseTimeWindow >= 60,
             "ReleaseTimeWindow must be 60 or more"),
        ) if not good), "")  # fmt: skip
        if why:
            wrong.append(f"{RULES_FILE}: a rule of FaultFrequency is left out: {why}")
        else:
            named = frozenset(map(normal, rule.EventId))
            frequency.append(Frequency(named, rule.TimeWindow, rule.Times, rule.FaultHandling, rule.ReleaseTimeWindow))
    duration: list[Duration] = []
    for stay in found.FaultDuration:
        why = _why_not(stay, [level for level in CHIP_LEVELS if level != MANUAL]) or next((text for good, text in (
            (0 <= stay.FaultTimeout <= 600, "FaultTimeout must be 0 to 600"),
            (0 <= stay.RecoverTimeout <= 86_400, "RecoverTimeout must be 0 to 86400"),
        ) if not good), "")  # fmt: skip
        if why:
            wrong.append(f"{RULES_FILE}: a rule of FaultDuration is left out: {why}")
        else:
            named = frozenset(map(normal, stay.EventId))
            duration.append(Duration(named, stay.FaultTimeout, stay.RecoverTimeout, stay.FaultHandling))
    return replace(codes, frequency=tuple(frequency), duration=tuple(duration)), wrong


def _why_not(rule: _Rule, levels: Iterable[str]) -> str:
    if not rule.EventId:
        return "EventId is empty"
    return "" if rule.FaultHandling in levels else f"FaultHandling {rule.FaultHandling[:40]!r} is no level for it"


def _lists(text: str, file: str) -> tuple[dict[str, list[str]] | None, list[str]]:
    lists = _strings(_decoded(text))
    return lists, ([] if lists is not None else [f"{file} can't be used: it is no object with lists of codes"])


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _strings(value: object) -> dict[str, list[str]] | None:
    if not isinstance(value, dict):
        return None
    lists = {key: each or [] for key, each in value.items()}
    good = all(isinstance(each, list) and all(isinstance(code, str) for code in each) for each in lists.values())
    return lists if good else None


def _by_level(lists: Mapping[str, list[str]], keys: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, level in keys.items():
        if lists.get(key):
            found.setdefault(level, []).extend(lists[key])
    return found
