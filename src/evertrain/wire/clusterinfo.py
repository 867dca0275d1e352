"""What ClusterD says to schedulers about the health of nodes: the ConfigMaps cluster-info-*. Read here.

    cluster-info-device-<n>   chips: which are unhealthy, and why
    cluster-info-switch-<n>   the switch of a node
    cluster-info-node-cm      everything else of a node

Each has one text under its own name, and several of a kind share the nodes between them. A text that nobody can read,
or a node in it, is as good as absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from evertrain.faultcodes import levels
from evertrain.wire.faultinfo import (
    DEVICE_PREFIX,
    NODE_PREFIX,
    SWITCH_PREFIX,
    VENDOR,
    BadInfo,
    chip_type,
    decode_faults,
    names,
)

NAMESPACE = "mindx-dl"
LABELS = {"mx-consumer-volcano": "true"}
DEVICES, SWITCHES, NODES = "cluster-info-device-", "cluster-info-switch-", "cluster-info-node-cm"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Health:
    """Of a node. One of which nothing is said is well."""

    status: str = levels.HEALTHY
    """Of the node itself."""
    switch: str = levels.HEALTHY
    unhealthy: frozenset[str] = frozenset()
    """Chips, by names such as Ascend910-4: no pod may use them."""
    closed: frozenset[str] = frozenset()
    """Chips that no other pod may get; who has them keeps them."""
    sub_healthy: frozenset[str] = frozenset()
    """Chips that work, but not as they should."""
    leaving: bool = False
    """The node, or its switch, is to be left alone once it is free: no new pods."""

    @property
    def lost(self) -> bool:
        return levels.UNHEALTHY in (self.status, self.switch)

    @property
    def is_sub_healthy(self) -> bool:
        return bool(self.sub_healthy) or levels.SUB_HEALTHY in (self.status, self.switch)


WELL = Health()


class _Devices(msgspec.Struct, frozen=True):
    DeviceList: dict[str, str] | None = None


class _Switch(msgspec.Struct, frozen=True):
    FaultLevel: str = ""
    NodeStatus: str = ""


class _Part(msgspec.Struct, frozen=True):
    FaultLevel: str = ""


class _Node(msgspec.Struct, frozen=True):
    FaultDevList: list[_Part] | None = None
    NodeStatus: str = ""


_nodes = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Reports:
    """All of them, kept current. Each is read once when it changes."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Health]] = {}
        self.health: dict[str, Health] = {}
        """By node, if anything is wrong with it."""

    def update(self, name: str, text: str) -> set[str]:
        """The ConfigMap by that name says this now, empty if it is gone. The nodes whose health is another for it."""
        before = self._parts.get(name, {})
        now = self._parts[name] = _nodes_of(name, text)
        if not now:
            del self._parts[name]
        changed = set()
        for node in {*before, *now}:
            if before.get(node) == now.get(node):
                continue
            health = _together([part[node] for part in self._parts.values() if node in part])
            if health != self.health.get(node, WELL):
                changed.add(node)
            if health == WELL:
                self.health.pop(node, None)
            else:
                self.health[node] = health
        return changed


def read(texts: Mapping[str, str]) -> dict[str, Health]:
    """By the name of the ConfigMap its text; the health of the nodes with which anything is wrong."""
    reports = Reports()
    for name, text in texts.items():
        reports.update(name, text)
    return reports.health


def _nodes_of(name: str, text: str) -> dict[str, Health]:
    found: dict[str, Health] = {}
    for key, raw in _entries(text):
        if name.startswith(DEVICES) and key.startswith(DEVICE_PREFIX):
            found[key.removeprefix(DEVICE_PREFIX)] = _devices(raw)
        elif name.startswith(SWITCHES) and key.startswith(SWITCH_PREFIX):
            found[key.removeprefix(SWITCH_PREFIX)] = _switch(raw)
        elif name == NODES and key.startswith(NODE_PREFIX):
            found[key.removeprefix(NODE_PREFIX)] = _node(raw)
    return {node: health for node, health in found.items() if health != WELL}


def _together(parts: list[Health]) -> Health:
    if len(parts) == 1:
        return parts[0]
    return Health(
        status=next((part.status for part in parts if part.status != levels.HEALTHY), levels.HEALTHY),
        switch=next((part.switch for part in parts if part.switch != levels.HEALTHY), levels.HEALTHY),
        unhealthy=frozenset().union(*(part.unhealthy for part in parts)),
        closed=frozenset().union(*(part.closed for part in parts)),
        sub_healthy=frozenset().union(*(part.sub_healthy for part in parts)),
        leaving=any(part.leaving for part in parts),
    )


def _entries(text: str) -> Iterable[tuple[str, msgspec.Raw]]:
    try:
        return _nodes.decode(text).items() if text else ()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ()


def _decoded(raw: msgspec.Raw, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _devices(raw: msgspec.Raw) -> Health:
    lists = getattr(_decoded(raw, _Devices), "DeviceList", None) or {}
    prefix = VENDOR + chip_type(lists)
    try:
        faults = decode_faults(lists.get(f"{prefix}-Fault", ""))
    except BadInfo:
        faults = ()
    reserved = {fault.chip for fault in faults if fault.level == levels.PRE_SEPARATE_CHIP}
    network = names(lists.get(f"{prefix}-NetworkUnhealthy", ""))
    recovering = names(lists.get(f"{prefix}-Recovering", ""))
    return Health(
        unhealthy=frozenset(names(lists.get(f"{prefix}-Unhealthy", ""))),
        closed=frozenset({*reserved, *network, *recovering}),
        sub_healthy=frozenset(fault.chip for fault in faults if fault.level == levels.SUB_HEALTH),
    )


def _switch(raw: msgspec.Raw) -> Health:
    switch = _decoded(raw, _Switch) or _Switch()
    if levels.PRE_SEPARATE in (levels.switch_level(switch.FaultLevel), switch.NodeStatus):
        return Health(leaving=True)
    return Health(switch=switch.NodeStatus or levels.HEALTHY)


def _node(raw: msgspec.Raw) -> Health:
    """One that is only to be left alone is called healthy while its chips are used, else unhealthy. To us that is the
    same: pods without chips may stay as well."""
    node = _decoded(raw, _Node) or _Node()
    found = levels.worst_node(part.FaultLevel for part in node.FaultDevList or ())
    if found == levels.PRE_SEPARATE_NODE or node.NodeStatus == levels.PRE_SEPARATE:
        return Health(leaving=True)
    return Health(node.NodeStatus or levels.HEALTHY)
