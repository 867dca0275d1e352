"""From the faults of a node to what is published about it: the chips, the switch, the node. Pure.

A chip is taken out of the list of free ones by what its worst fault demands; a fault of its network only puts it on the
list of those whose network is bad.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from evertrain.faultcodes.levels import (
    CHIP_LEVELS,
    HARMLESS,
    MANUAL,
    NODE_STATUS,
    NORMAL,
    NOT_HANDLE,
    PRE_SEPARATE_CHIP,
    SWITCH_SEPARATE,
    SWITCH_STATUS,
    severity,
    worst,
    worst_node,
    worst_switch,
)
from evertrain.faultcodes.rules import Upgrade
from evertrain.faultcodes.table import Codes
from evertrain.noded.faults import AnyFault, ChipFault, NodeFault, SwitchFault
from evertrain.wire import faultinfo

BASE_DEVICES = "baseDeviceInfos"
"""Annotation on a node: its chips by name, as the device plugin writes it."""
SUPER_POD, SERVER_INDEX = "superPodID", "serverIndex"
"""Annotations on a node of a super pod: which one, and its place there; of the device plugin, too."""


L2_DOWN, L2_PORTS = "[0x08520003,na,L2,na]", 16
"""From a chip of the switch of a node to those above; a chip that has lost all of them is cut off."""


@dataclass(frozen=True, slots=True)
class Chips:
    """The chips of a node."""

    type: str = ""
    """Empty if it has none."""
    numbers: tuple[int, ...] = ()
    super_pod: int = faultinfo.NO_SUPER_POD
    server_index: int = faultinfo.NO_SUPER_POD

    def name(self, number: int) -> str:
        return f"{self.type}-{number}"


def chips_of(annotations: Mapping[str, str], capacity: Mapping[str, object]) -> Chips:
    """From a node's annotations and its capacity."""
    for type_ in faultinfo.CHIP_TYPES:
        count = str(capacity.get(faultinfo.VENDOR + type_, "0"))
        if not count.isdecimal() or not int(count):
            continue
        listed = re.findall(rf'"{type_}-(\d{{1,4}})"\s*:', annotations.get(BASE_DEVICES) or "")
        numbers = {int(number) for number in listed} or set(range(min(int(count), 1024)))
        places = [_place(annotations.get(key) or "") for key in (SUPER_POD, SERVER_INDEX)]
        return Chips(type_, tuple(sorted(numbers)), *places)
    return Chips()


def _place(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else faultinfo.NO_SUPER_POD


def used_chips(type_: str, pods: Iterable[Mapping[str, str]]) -> frozenset[int]:
    """By the annotations of the pods that run on the node."""
    found: set[int] = set()
    for given in pods:
        text = given.get(faultinfo.VENDOR + type_) or given.get("huawei.com/AscendReal") or ""
        found.update(int(number) for number in re.findall(r"-(\d{1,4})(?:,|$)", text))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Judged:
    """A fault with what it means now."""

    fault: AnyFault
    level: str


def judge(faults: Iterable[AnyFault], codes: Codes) -> list[Judged]:
    """Codes of nodes and switches that nobody has listed are left out."""
    found = []
    for fault in faults:
        match fault:
            case ChipFault():
                level = fault.level or codes.chip_level(fault.code)
            case NodeFault():
                level = fault.level or codes.node_level(fault.code) or ""
            case SwitchFault():
                level = fault.level or codes.switch_level(fault.code) or ""
        if level:
            found.append(Judged(fault, level))
    return found


def device_info(
    chips: Chips,
    used: Collection[int],
    judged: Iterable[Judged],
    upgrades: Mapping[int, Iterable[Upgrade]],
    manual: Collection[int],
    codes: Codes,
) -> faultinfo.DeviceInfo:
    """Without its time. Faults of chips that the node doesn't have are left out.

    `manual` are the chips that are kept away until somebody clears them.
    """
    found: dict[int, dict[str, tuple[str, int]]] = {number: {} for number in chips.numbers}
    for each in judged:
        if isinstance(each.fault, ChipFault) and each.fault.chip in found:
            found[each.fault.chip][each.fault.code] = (each.level, each.fault.since_ms)
    faults: list[faultinfo.ChipFault] = []
    unhealthy, network_unhealthy = [], []
    for number, levels in found.items():
        for upgrade in upgrades.get(number, ()):
            if upgrade.level != MANUAL:  # a fault that has gone stays for as long as its rule says
                level, since = levels.get(upgrade.code, (upgrade.level, upgrade.time_ms))
                levels[upgrade.code] = (worst([level, upgrade.level]), since)
        card = {code: pair for code, pair in levels.items() if not codes.is_network(code)}
        network = {code: pair for code, pair in levels.items() if codes.is_network(code)}
        if number in manual:
            # One of its faults says so; a chip that has none any more has an entry without a code.
            code = max(card, key=lambda code: severity(card[code][0]), default=MANUAL)
            card[code] = (MANUAL, card[code][1] if code in card else 0)
        name = chips.name(number)
        for kind, them in ((faultinfo.CARD, card), (faultinfo.CARD_NETWORK, network)):
            for code in sorted(them, key=lambda code: (-severity(them[code][0]), code)):
                faults.append(faultinfo.ChipFault(name, code, *them[code], kind))
        if _is_out(worst(level for level, _ in card.values()), number in used):
            unhealthy.append(number)
        if worst(level for level, _ in network.values()) not in (NORMAL, NOT_HANDLE):
            network_unhealthy.append(number)
    free = [number for number in chips.numbers if number not in unhealthy and number not in used]
    return faultinfo.DeviceInfo(
        type=chips.type,
        available=tuple(map(chips.name, free)),
        unhealthy=tuple(map(chips.name, unhealthy)),
        network_unhealthy=tuple(map(chips.name, network_unhealthy)),
        faults=tuple(faults),
        super_pod=chips.super_pod,
        server_index=chips.server_index,
    )


def _is_out(level: str, in_use: bool) -> bool:
    """May the chip not be used any more?"""
    if level == PRE_SEPARATE_CHIP:
        return not in_use
    return level in CHIP_LEVELS and level not in HARMLESS


def switch_info(judged: Iterable[Judged]) -> faultinfo.SwitchInfo:
    """Without its time."""
    faults = tuple(
        faultinfo.SwitchFault(
            code=each.fault.code,
            level=each.level,
            time_ms=each.fault.since_ms,
            chip=each.fault.chip,
            port=each.fault.port,
            raised=each.fault.since_ms // 1000,
        )
        for each in judged
        if isinstance(each.fault, SwitchFault)
    )
    ports: dict[int, set[int]] = {}
    for fault in faults:
        if fault.code == L2_DOWN:
            ports.setdefault(fault.chip, set()).add(fault.port)
    cut_off = any(len(down) >= L2_PORTS for down in ports.values())
    level = worst_switch([*(fault.level for fault in faults), *([SWITCH_SEPARATE] if cut_off else [])])
    return faultinfo.SwitchInfo(faults, level, SWITCH_STATUS[level])


def node_info(judged: Iterable[Judged]) -> faultinfo.NodeInfo:
    """Each part of the node once, with all its codes and the worst of their levels."""
    parts: dict[tuple[str, int], dict[str, str]] = {}
    for each in judged:
        if isinstance(each.fault, NodeFault):
            parts.setdefault((each.fault.device, each.fault.id), {})[each.fault.code] = each.level
    faults = tuple(
        faultinfo.NodeFault(device, number, tuple(sorted(found)), worst_node(found.values()))
        for (device, number), found in sorted(parts.items())
    )
    return faultinfo.NodeInfo(faults, NODE_STATUS[worst_node(fault.level for fault in faults)])
