"""What is in the ConfigMaps of a node. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from evertrain.faultcodes.rules import Upgrade
from evertrain.kube.times import parse_time
from evertrain.wire import faultinfo
from evertrain.wire.faultinfo import BadInfo, DeviceInfo, NodeInfo, SwitchInfo

STATE = "evertrain.dev/noded-state"
"""Annotation on the device-info: what the rules have counted, for the next noded."""


@dataclass(frozen=True, slots=True)
class DeviceContent:
    info: DeviceInfo
    switch: SwitchInfo | None = None
    """None if nothing is wrong with it."""
    manual: tuple[str, ...] = ()
    upgrades: str = ""
    state: str = field(default="", compare=False)

    def render(self, there: Mapping[str, str], now: float) -> dict[str, str | None]:
        found: dict[str, str | None] = {
            faultinfo.DEVICE_INFO: faultinfo.encode_device(replace(self.info, update_time=int(now))),
            faultinfo.SWITCH_INFO: self._switch(int(now)),
            faultinfo.UPGRADE_REASON: self.upgrades,
        }
        # Left out if it is the same: somebody may be editing it at this moment.
        if (
            faultinfo.MANUALLY_SEPARATE not in there
            or faultinfo.names(there[faultinfo.MANUALLY_SEPARATE]) != self.manual
        ):
            found[faultinfo.MANUALLY_SEPARATE] = ",".join(self.manual)
        return found

    def annotations(self) -> dict[str, str]:
        return {STATE: self.state} if self.state else {}

    def age(self, data: Mapping[str, str], now: float) -> float | None:
        text = data.get(faultinfo.DEVICE_INFO) or ""
        try:
            written = faultinfo.decode_device(text).update_time
            switch = data.get(faultinfo.SWITCH_INFO)
            switch_written = faultinfo.decode_switch(switch).update_time if switch else 0
        except BadInfo:
            return None
        same = (
            text == faultinfo.encode_device(replace(self.info, update_time=written))
            and switch == self._switch(switch_written)
            and faultinfo.names(data.get(faultinfo.MANUALLY_SEPARATE) or "") == self.manual
            and (data.get(faultinfo.UPGRADE_REASON) or "") == self.upgrades
        )
        return now - written if same else None

    def _switch(self, seconds: int) -> str | None:
        return None if self.switch is None else faultinfo.encode_switch(replace(self.switch, update_time=seconds))


@dataclass(frozen=True, slots=True)
class NodeContent:
    info: NodeInfo

    def render(self, there: Mapping[str, str], now: float) -> dict[str, str | None]:
        moment = datetime.datetime.fromtimestamp(int(now), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {faultinfo.NODE_INFO: faultinfo.encode_node(self.info), faultinfo.UPDATE_TIME: moment}

    def annotations(self) -> dict[str, str]:
        return {}

    def age(self, data: Mapping[str, str], now: float) -> float | None:
        if data.get(faultinfo.NODE_INFO) != faultinfo.encode_node(self.info):
            return None
        try:
            return now - parse_time(data[faultinfo.UPDATE_TIME]).timestamp()
        except (KeyError, ValueError):
            return None


class _Reason(msgspec.Struct, frozen=True):
    upgrade_time: int
    fault_code: str
    fault_level: str
    upgrade_type: str


def upgrade_reasons(upgrades: Mapping[str, Collection[Upgrade]]) -> str:
    """UpgradeFaultReason: why chips, by name, are worse than their faults. Empty if none is."""
    reasons = {
        chip: [_Reason(each.time_ms, each.code, each.level, each.kind) for each in them]
        for chip, them in upgrades.items()
        if them
    }
    return faultinfo.go_json(reasons) if reasons else ""
