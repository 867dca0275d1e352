"""What is known of nodes, read once for each change of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evertrain.clusterd.faults.seen import Seen
from evertrain.faultcodes.levels import PRE_SEPARATE
from evertrain.wire import faultinfo
from evertrain.wire.faultinfo import BadInfo, ChipFault, DeviceInfo, NodeInfo, SwitchInfo

MOST_NODES = 16_000


@dataclass(frozen=True, slots=True)
class KubeNode:
    """A node as Kubernetes has it."""

    ready: bool
    ip: str = ""
    serial: str = ""
    """Its annotation product-serial-number."""


class NodeState:
    """What a node publishes, as it came and as it was read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device: DeviceInfo | None = None
        self.switch: SwitchInfo | None = None
        self.node: NodeInfo | None = None
        self.seen: Sequence[Seen] = ()
        """After the last look."""
        self._texts: dict[str, str] = {}
        self._first: dict[tuple[str, str], tuple[int, int]] = {}
        """By chip and code: the time that the node says, and when it came by our clock."""

    @property
    def empty(self) -> bool:
        return self.device is None and self.switch is None and self.node is None

    @property
    def troubled(self) -> bool:
        """Its picture depends on more than what it publishes: on jobs, and on time."""
        return bool(
            (self.device is not None and self.device.faults)
            or (self.switch is not None and (self.switch.faults or self.switch.status == PRE_SEPARATE))
            or (self.node is not None and (self.node.faults or self.node.status == PRE_SEPARATE))
        )

    def read_device(self, data: Mapping[str, str] | None) -> tuple[bool, list[str]]:
        """Whether anything is new, and what can't be used: what was known before stays in force then."""
        if data is None:
            self._texts.pop(faultinfo.DEVICE_INFO, None)
            self._texts.pop(faultinfo.SWITCH_INFO, None)
            changed = self.device is not None or self.switch is not None
            self.device = self.switch = None
            return changed, []
        changed, wrong = False, []
        text = data.get(faultinfo.DEVICE_INFO) or ""
        if text and self._texts.get(faultinfo.DEVICE_INFO) != text:
            self._texts[faultinfo.DEVICE_INFO] = text
            try:
                self.device, changed = faultinfo.decode_device(text), True
            except BadInfo as error:
                wrong.append(f"{faultinfo.DEVICE_PREFIX}{self.name} is ignored: {error}")
        text = data.get(faultinfo.SWITCH_INFO) or ""
        if self._texts.get(faultinfo.SWITCH_INFO, "") != text:
            self._texts[faultinfo.SWITCH_INFO] = text
            try:
                self.switch, changed = (faultinfo.decode_switch(text) if text else None), True
            except BadInfo as error:
                wrong.append(f"the switch in {faultinfo.DEVICE_PREFIX}{self.name} is ignored: {error}")
        return changed, wrong

    def read_node(self, data: Mapping[str, str] | None) -> tuple[bool, list[str]]:
        text = (data or {}).get(faultinfo.NODE_INFO) or ""
        if self._texts.get(faultinfo.NODE_INFO, "") == text:
            return False, []
        if data is not None and not text:
            return False, [f"{faultinfo.NODE_PREFIX}{self.name} is ignored: it is empty"]
        self._texts[faultinfo.NODE_INFO] = text
        try:
            self.node = faultinfo.decode_node(text) if text else None
        except BadInfo as error:
            return False, [f"{faultinfo.NODE_PREFIX}{self.name} is ignored: {error}"]
        return True, []

    def faults(self, now: int) -> list[ChipFault]:
        """Of its chips, with the times at which they came: one that names no time, or one to come, came when it was
        seen first."""
        found, first = [], {}
        for fault in self.device.faults if self.device is not None else ():
            key = (fault.chip, fault.code)
            said, came = self._first.get(key, (0, 0))
            if key not in self._first or said != fault.time_ms:
                said = fault.time_ms
                came = said if 0 < said <= now else now
            first[key] = (said, came)
            found.append(fault if came == fault.time_ms else replace(fault, time_ms=came))
        self._first = first
        return found

    def clock_set(self, by: int) -> None:
        """Faults are as old as they were."""
        self._first = {key: (said, came + by) for key, (said, came) in self._first.items()}
