"""What schedulers shall see of a node. Pure.

A node's lists of chips (available, unhealthy) are its own; they are changed only where the centre hides a fault, or
knows of one that the node doesn't. A chip that is no longer unhealthy is not available by that: the node says when.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from evertrain.clusterd.faults.result import Isolation
from evertrain.clusterd.faults.seen import Seen, number
from evertrain.faultcodes.levels import (
    HARMLESS,
    HEALTHY,
    PRE_SEPARATE,
    PRE_SEPARATE_CHIP,
    SWITCH_STATUS,
    UNHEALTHY,
    worst,
    worst_switch,
)
from evertrain.wire.faultinfo import CARD_NETWORK, DeviceInfo, NodeInfo, SwitchFault, SwitchInfo


def device_view(raw: DeviceInfo, seen: Sequence[Seen], used: Collection[str], network: Collection[str]) -> DeviceInfo:
    """`used`: numbers of chips that pods have. `network`: codes of the parameter plane."""
    faults = tuple(each.fault for each in seen if not each.hidden)
    if faults == raw.faults and not any(fault.level == PRE_SEPARATE_CHIP for fault in faults):
        return raw
    available, unhealthy, cut_off = list(raw.available), list(raw.unhealthy), list(raw.network_unhealthy)
    severe = {(each.fault.chip, _plane(each)) for each in seen if not each.hidden and _severe(each)}
    for each in seen:
        chip = each.fault.chip
        if each.hidden and (chip, _plane(each)) not in severe:
            _take(chip, cut_off if _plane(each) else unhealthy)
        elif not each.hidden and each.added and _severe(each):
            _take(chip, available)
            _put(chip, cut_off if _plane(each) else unhealthy)
    for each in seen:
        chip = each.fault.chip
        if each.hidden or each.fault.level != PRE_SEPARATE_CHIP or each.fault.code in network:
            continue
        _take(chip, available)
        if number(chip) not in used:
            _put(chip, unhealthy)
        elif not any(other.fault.chip == chip and not _plane(other) and not other.hidden and _severe(other)
                     and other.fault.level != PRE_SEPARATE_CHIP for other in seen):  # fmt: skip
            _take(chip, unhealthy)
    return replace(
        raw,
        available=tuple(available),
        unhealthy=tuple(unhealthy),
        network_unhealthy=tuple(cut_off),
        faults=faults,
    )


def switch_left(raw: SwitchInfo, left: Iterable[SwitchFault]) -> SwitchInfo:
    """`left`: the faults that are not hidden."""
    faults = tuple(left)
    if faults == raw.faults:
        return raw
    level = worst_switch(fault.level for fault in faults)
    return replace(raw, faults=faults, level=level, status=SWITCH_STATUS[level])


def switch_view(info: SwitchInfo, used: bool) -> SwitchInfo:
    """`used`: pods run on the node."""
    return replace(info, status=resolved(info.status, used)) if info.status == PRE_SEPARATE else info


def node_view(info: NodeInfo, used: bool) -> NodeInfo:
    return replace(info, status=resolved(info.status, used)) if info.status == PRE_SEPARATE else info


def resolved(status: str, used: bool) -> str:
    """A node to be kept away from is healthy for those who are there already."""
    if status != PRE_SEPARATE:
        return status
    return HEALTHY if used else UNHEALTHY


def isolation(node: NodeInfo, switch: SwitchInfo, seen: Iterable[Seen], bad: Iterable[str]) -> Isolation:
    """`node` and `switch` before it is said what they mean for pods that are there. `bad`: chips in the lists of those
    that are not healthy."""
    why = next((f"the {what} is {status}" for what, status in (("node", node.status), ("switch", switch.status))
                if status in (UNHEALTHY, PRE_SEPARATE)), "")  # fmt: skip
    levels: dict[str, list[str]] = {chip: [] for chip in bad}
    for each in seen:
        if not each.hidden and (each.fault.chip in levels or each.fault.level == PRE_SEPARATE_CHIP):
            levels.setdefault(each.fault.chip, []).append(each.fault.level)
    return Isolation(why, {chip: worst(of) for chip, of in sorted(levels.items())})


def _plane(each: Seen) -> bool:
    return each.fault.kind == CARD_NETWORK


def _severe(each: Seen) -> bool:
    return each.fault.level not in HARMLESS


def _take(chip: str, of: list[str]) -> None:
    if chip in of:
        of.remove(chip)


def _put(chip: str, into: list[str]) -> None:
    if chip not in into:
        into.append(chip)
