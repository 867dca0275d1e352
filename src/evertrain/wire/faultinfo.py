"""What nodes publish about their faults: DeviceInfoCfg, SwitchInfoCfg and NodeInfo, as text in ConfigMaps.

Writers and readers of the original are Go programs. Two of the objects carry a CheckCode: the SHA-256 of their inner
object as Go writes it, compact, with sorted maps, `<`, `>` and `&` escaped. A text whose CheckCode is missing or wrong
is refused; so is one that isn't of the right shape (`BadInfo`).

A chip's faults of one kind share an entry in the text; here each code is a fault of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from evertrain.faultcodes.levels import HEALTHY, MANUAL, worst

DEVICE_INFO, SWITCH_INFO, NODE_INFO, UPDATE_TIME = "DeviceInfoCfg", "SwitchInfoCfg", "NodeInfo", "updateTime"
MANUALLY_SEPARATE, UPGRADE_REASON, DESCRIPTION = "ManuallySeparateNPU", "UpgradeFaultReason", "Description"
"""Data keys of the ConfigMaps."""
DEVICE_PREFIX, NODE_PREFIX, SWITCH_PREFIX = "mindx-dl-deviceinfo-", "mindx-dl-nodeinfo-", "mindx-dl-switchinfo-"
DEVICE_NAMESPACE, NODE_NAMESPACE = "kube-system", "mindx-dl"
LABELS = {"mx-consumer-cim": "true"}

CARD, CARD_NETWORK, NODE_FAULT, PUBLIC = "CardUnhealthy", "CardNetworkUnhealthy", "NodeUnhealthy", "PublicFault"
"""Kinds of faults of a chip."""
VENDOR = "huawei.com/"
CHIP_TYPES = ("Ascend910", "Ascend310P", "Ascend310", "npu")
_LISTS = ("", "-Unhealthy", "-NetworkUnhealthy", "-Recovering", "-Fault")

NO_SUPER_POD = -2
"""SuperPodID and ServerIndex where there is none."""
LATEST = 9_999_999_999
"""Seconds. A time beyond it is none."""
LONGEST = 2 * 1024 * 1024
"""A ConfigMap holds no more than 1 MiB."""


T = TypeVar("T")


class BadInfo(ValueError):
    """Not a text that a node publishes."""


@dataclass(frozen=True, slots=True)
class ChipFault:
    chip: str
    """Its name, such as Ascend910-4."""
    code: str
    level: str
    time_ms: int = 0
    kind: str = CARD


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The chips of a node."""

    type: str = "Ascend910"
    available: tuple[str, ...] = ()
    unhealthy: tuple[str, ...] = ()
    network_unhealthy: tuple[str, ...] = ()
    recovering: tuple[str, ...] = ()
    faults: tuple[ChipFault, ...] = ()
    update_time: int = 0
    """In seconds."""
    super_pod: int = NO_SUPER_POD
    server_index: int = NO_SUPER_POD
    rack: int | None = None
    other: Mapping[str, str] = field(default_factory=dict)
    """Lists of other kinds, such as those of parts of chips, as they came."""


@dataclass(frozen=True, slots=True)
class SwitchFault:
    code: str
    """Such as [0x08520003,na,npu,na]."""
    level: str = ""
    """Of its own, as FaultTimeAndLevelMap says; empty if it doesn't."""
    time_ms: int = 0
    chip: int = 0
    port: int = 0
    event_type: int = 0
    peer_device: int = 0
    peer_port: int = 0
    severity: int = 0
    assertion: int = 0
    raised: int = 0
    """In seconds."""

    @property
    def key(self) -> str:
        return f"{self.code}_{self.chip}_{self.port}"


@dataclass(frozen=True, slots=True)
class SwitchInfo:
    """The switch of a node."""

    faults: tuple[SwitchFault, ...] = ()
    level: str = ""
    status: str = HEALTHY
    update_time: int = 0
    """In seconds."""


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A faulty part of a node that is no chip."""

    type: str
    """CPU, Storage, …"""
    id: int
    codes: tuple[str, ...]
    level: str


@dataclass(frozen=True, slots=True)
class NodeInfo:
    faults: tuple[NodeFault, ...] = ()
    status: str = HEALTHY


# The texts, field for field, in Go's order.

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _TimeAndLevel(msgspec.Struct, frozen=True):
    fault_time: Int64 = 0
    fault_level: str = ""


class _Entry(msgspec.Struct, frozen=True):
    fault_type: str = ""
    npu_name: str = ""
    large_model_fault_level: str = ""
    fault_level: str = ""
    fault_handling: str = ""
    fault_code: str = ""
    fault_time_and_level_map: dict[str, _TimeAndLevel] | None = None


class _Devices(msgspec.Struct, frozen=True):
    DeviceList: dict[str, str] | None = None
    UpdateTime: Int64 = 0


class _DeviceCfg(msgspec.Struct, frozen=True):
    DeviceInfo: msgspec.Raw = msgspec.Raw(b"{}")
    SuperPodID: Int64 = 0
    ServerIndex: Int64 = 0
    CheckCode: str = ""
    RackID: Int64 | None = None


class _SwitchEvent(msgspec.Struct, frozen=True):
    EventType: Int64 = 0
    AssembledFaultCode: str = ""
    PeerPortDevice: Int64 = 0
    PeerPortId: Int64 = 0
    SwitchChipId: Int64 = 0
    SwitchPortId: Int64 = 0
    Severity: Int64 = 0
    Assertion: Int64 = 0
    AlarmRaisedTime: Int64 = 0


class _SwitchCfg(msgspec.Struct, frozen=True):
    FaultCode: list[str] | None = None
    FaultLevel: str = ""
    UpdateTime: Int64 = 0
    NodeStatus: str = ""
    FaultTimeAndLevelMap: dict[str, _TimeAndLevel] | None = None


class _NodeDevice(msgspec.Struct, frozen=True):
    DeviceType: str = ""
    DeviceId: Int64 = 0
    FaultCode: list[str] | None = None
    FaultLevel: str = ""


class _Node(msgspec.Struct, frozen=True):
    FaultDevList: list[_NodeDevice] | None = None
    NodeStatus: str = ""


class _NodeCfg(msgspec.Struct, frozen=True):
    NodeInfo: msgspec.Raw = msgspec.Raw(b"{}")
    CheckCode: str = ""


_device_cfg = msgspec.json.Decoder(_DeviceCfg)
_devices = msgspec.json.Decoder(_Devices)
_entries = msgspec.json.Decoder(list[_Entry] | None)
_switch_cfg = msgspec.json.Decoder(_SwitchCfg)
_switch_event = msgspec.json.Decoder(_SwitchEvent)
_node_cfg = msgspec.json.Decoder(_NodeCfg)
_node = msgspec.json.Decoder(_Node)


def go_json(value: object) -> str:
    """Compact JSON as Go's encoding/json writes it: fields in the order given by their type, keys of maps sorted."""
    try:
        encoded = msgspec.json.encode(value, order="deterministic")
    except UnicodeEncodeError as error:  # half of a pair; Go would put a question mark in its place
        raise BadInfo(f"not valid Unicode: {error}") from error
    text = encoded.decode()
    for character in "<>&\u2028\u2029":
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def check_code(text: str | bytes) -> str:
    """Of an inner object in Go's JSON."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


# Chips.


def encode_device(info: DeviceInfo) -> str:
    """DeviceInfoCfg."""
    inner = go_json(_Devices(device_list(info), info.update_time))
    rack = "" if info.rack is None else f',"RackID":{info.rack}'
    return (
        f'{{"DeviceInfo":{inner},"SuperPodID":{info.super_pod},"ServerIndex":{info.server_index},'
        f'"CheckCode":"{check_code(inner)}"{rack}}}'
    )


def decode_device(text: str) -> DeviceInfo:
    cfg = _read(_device_cfg, text, DEVICE_INFO)
    devices = _checked(_devices, bytes(cfg.DeviceInfo), cfg.CheckCode, DEVICE_INFO)
    lists = dict(devices.DeviceList or {})
    type_ = chip_type(lists)
    mine = {suffix: lists.pop(f"{VENDOR}{type_}{suffix}", "") for suffix in _LISTS}
    return DeviceInfo(
        type=type_,
        available=names(mine[""]),
        unhealthy=names(mine["-Unhealthy"]),
        network_unhealthy=names(mine["-NetworkUnhealthy"]),
        recovering=names(mine["-Recovering"]),
        faults=decode_faults(mine["-Fault"]),
        update_time=devices.UpdateTime,
        super_pod=cfg.SuperPodID,
        server_index=cfg.ServerIndex,
        rack=cfg.RackID,
        other=lists,
    )


def device_list(info: DeviceInfo) -> dict[str, str]:
    """The lists under DeviceList, by key."""
    prefix = VENDOR + info.type
    return dict(info.other) | {
        prefix: ",".join(info.available),
        f"{prefix}-Fault": encode_faults(info.faults),
        f"{prefix}-NetworkUnhealthy": ",".join(info.network_unhealthy),
        f"{prefix}-Recovering": ",".join(info.recovering),
        f"{prefix}-Unhealthy": ",".join(info.unhealthy),
    }


def encode_faults(faults: Iterable[ChipFault]) -> str:
    """The list under …-Fault: the codes of a chip of one kind in one entry, with the worst of their levels."""
    entries: dict[tuple[str, str], list[ChipFault]] = {}
    for fault in faults:
        entries.setdefault((fault.chip, fault.kind), []).append(fault)
    return go_json([_entry(chip, kind, them) for (chip, kind), them in entries.items()])


def decode_faults(text: str) -> tuple[ChipFault, ...]:
    if not text:
        return ()
    faults = []
    for entry in _read(_entries, text, "the list of faults") or ():
        times = entry.fault_time_and_level_map or {}
        codes = names(entry.fault_code)
        if not codes and entry.fault_level == MANUAL:
            codes = (MANUAL,)
        for code in codes:
            known = times.get(code) or _TimeAndLevel()
            level = known.fault_level or entry.fault_level
            faults.append(ChipFault(entry.npu_name, code, level, known.fault_time, entry.fault_type))
    return tuple(faults)


def chip_type(lists: Iterable[str]) -> str:
    """Which kind of chip lists are about."""
    keys = set(lists)
    for type_ in CHIP_TYPES:
        if any(f"{VENDOR}{type_}{suffix}" in keys for suffix in _LISTS):
            return type_
    return CHIP_TYPES[0]


def names(text: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(name for name in (each.strip() for each in text.split(",")) if name) if text else ()


def _entry(chip: str, kind: str, faults: list[ChipFault]) -> _Entry:
    level = worst(fault.level for fault in faults)
    named = [fault for fault in faults if fault.code != MANUAL]
    times = {fault.code: _TimeAndLevel(fault.time_ms, fault.level) for fault in named}
    return _Entry(kind, chip, level, level, level, ",".join(times), times)


# Switches.


def encode_switch(info: SwitchInfo) -> str:
    """SwitchInfoCfg."""
    return go_json(switch_fields(info))


def switch_fields(info: SwitchInfo) -> _SwitchCfg:
    return _SwitchCfg(
        [go_json(_event(fault)) for fault in info.faults],
        info.level,
        info.update_time,
        info.status,
        {fault.key: _TimeAndLevel(fault.time_ms, fault.level) for fault in info.faults},
    )


def decode_switch(text: str) -> SwitchInfo:
    cfg = _read(_switch_cfg, text, SWITCH_INFO)
    times = cfg.FaultTimeAndLevelMap or {}
    faults = []
    for each in cfg.FaultCode or ():
        event = _read(_switch_event, each, "a fault of the switch")
        known = times.get(f"{event.AssembledFaultCode}_{event.SwitchChipId}_{event.SwitchPortId}") or _TimeAndLevel()
        faults.append(
            SwitchFault(
                code=event.AssembledFaultCode,
                level=known.fault_level,
                time_ms=known.fault_time or max(0, min(event.AlarmRaisedTime, LATEST)) * 1000,
                chip=event.SwitchChipId,
                port=event.SwitchPortId,
                event_type=event.EventType,
                peer_device=event.PeerPortDevice,
                peer_port=event.PeerPortId,
                severity=event.Severity,
                assertion=event.Assertion,
                raised=event.AlarmRaisedTime,
            )
        )
    return SwitchInfo(tuple(faults), cfg.FaultLevel, cfg.NodeStatus or HEALTHY, cfg.UpdateTime)


def _event(fault: SwitchFault) -> _SwitchEvent:
    return _SwitchEvent(
        fault.event_type,
        fault.code,
        fault.peer_device,
        fault.peer_port,
        fault.chip,
        fault.port,
        fault.severity,
        fault.assertion,
        fault.raised,
    )


# Other parts of nodes.


def encode_node(info: NodeInfo) -> str:
    """NodeInfo."""
    inner = go_json(node_fields(info))
    return f'{{"NodeInfo":{inner},"CheckCode":"{check_code(inner)}"}}'


def node_fields(info: NodeInfo) -> _Node:
    return _Node([_NodeDevice(each.type, each.id, list(each.codes), each.level) for each in info.faults], info.status)


def decode_node(text: str) -> NodeInfo:
    cfg = _read(_node_cfg, text, NODE_INFO)
    node = _checked(_node, bytes(cfg.NodeInfo), cfg.CheckCode, NODE_INFO)
    return NodeInfo(
        tuple(
            NodeFault(each.DeviceType, each.DeviceId, tuple(each.FaultCode or ()), each.FaultLevel)
            for each in node.FaultDevList or ()
        ),
        node.NodeStatus or HEALTHY,
    )


def _read(decoder: msgspec.json.Decoder[T], text: str | bytes, what: str) -> T:
    if len(text) > LONGEST:
        raise BadInfo(f"{what} is too long")
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadInfo(f"{what} can't be read: {error}") from error


def _checked(decoder: msgspec.json.Decoder[T], raw: bytes, code: str, what: str) -> T:
    """The inner object. Its text mostly is what Go would write; if not, it is judged by what Go would write."""
    if not code:
        raise BadInfo(f"{what} has no CheckCode")
    inner = _read(decoder, raw, what)
    if code != check_code(raw) and code != check_code(go_json(inner)):
        raise BadInfo(f"the CheckCode of {what} is wrong")
    return inner
