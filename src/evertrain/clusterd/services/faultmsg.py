"""A job's faults, as those who subscribe to them hear of them. Pure, but for the uuid that the caller gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from evertrain.clusterd.model import HEALTHY, SUB_HEALTHY, UNHEALTHY, FaultDevice
from evertrain.wire import fault_pb2 as wire

FAULT, NORMAL = "fault", "normal"
SWITCH = "Switch"

_HEALTH = {
    "": HEALTHY,
    "NotHandleFault": HEALTHY,
    "NotHandle": HEALTHY,
    "NormalNPU": HEALTHY,
    "NormalNetwork": HEALTHY,
    "SubHealthFault": SUB_HEALTHY,
    "SubHealth": SUB_HEALTHY,
    "PreSeparate": SUB_HEALTHY,
    "PreSeparateNPU": SUB_HEALTHY,
    "PreSeparateFault": SUB_HEALTHY,
}
_ORDER = (HEALTHY, SUB_HEALTHY, UNHEALTHY)
_SEVERITY = (
    "", "NormalNetwork", "NormalNPU", "NotHandle", "NotHandleFault", "SubHealth", "SubHealthFault", "RestartRequest",
    "RestartBusiness", "FreeRestartNPU", "RestartNPU", "PreSeparate", "PreSeparateFault", "PreSeparateNPU",
    "ResetFault", "Separate", "SeparateFault", "SeparateNPU", "ManuallySeparateNPU",
)  # fmt: skip
_RANK = {level: place for place, level in enumerate(_SEVERITY)}


def health(level: str) -> str:
    """One that nobody knows counts as bad."""
    return _HEALTH.get(level, UNHEALTHY)


def severity(level: str) -> int:
    return _RANK.get(level, _RANK["RestartRequest"])


def signal(job: str, devices: Iterable[FaultDevice], uuid: str = "") -> wire.FaultMsgSignal:
    nodes = _nodes(devices)
    return wire.FaultMsgSignal(
        uuid=uuid, jobId=job, signalType=FAULT if nodes else NORMAL, nodeFaultInfo=nodes
    )  # fmt: skip


def _nodes(devices: Iterable[FaultDevice]) -> list[wire.NodeFaultInfo]:
    by_node: defaultdict[str, list[FaultDevice]] = defaultdict(list)
    for each in devices:
        by_node[each.node].append(each)
    nodes = [_node(name, faults) for name, faults in by_node.items()]
    return sorted(nodes, key=lambda node: (node.nodeIP, node.nodeName))


def _node(name: str, faults: list[FaultDevice]) -> wire.NodeFaultInfo:
    by_device: defaultdict[tuple[str, str], list[FaultDevice]] = defaultdict(list)
    for each in faults:
        by_device[each.device, each.type].append(each)
    devices = [_device(device, kind, by_device[device, kind]) for device, kind in sorted(by_device)]
    return wire.NodeFaultInfo(
        nodeName=name,
        nodeIP=faults[0].node_ip,
        nodeSN=faults[0].node_sn,
        faultLevel=_worst(device.faultLevel for device in devices),
        faultDevice=devices,
    )


def _device(device: str, kind: str, faults: list[FaultDevice]) -> wire.DeviceFaultInfo:
    levels: dict[str, str] = {}
    for each in faults:
        if each.code:
            levels[each.code] = max(levels.get(each.code, ""), each.level, key=severity)
    codes = sorted(levels)
    return wire.DeviceFaultInfo(
        deviceId=device,
        deviceType=kind,
        faultCodes=codes,
        faultLevel=_worst(health(each.level) for each in faults),
        faultType=sorted({each.kind for each in faults if each.kind}),
        faultLevels=[levels[code] for code in codes],
        switchFaultInfos=_switch(faults) if kind == SWITCH else [],
    )


def _switch(faults: list[FaultDevice]) -> list[wire.SwitchFaultInfo]:
    found = {(each.code, each.switch_chip, each.switch_port): each for each in faults}
    return [
        wire.SwitchFaultInfo(
            faultCode=each.code,
            switchChipId=each.switch_chip,
            switchPortId=each.switch_port,
            faultTime=each.time,
            faultLevel=each.level,
        )
        for _, each in sorted(found.items())
    ]


def _worst(healths: Iterable[str]) -> str:
    return max(healths, key=_ORDER.index, default=HEALTHY)
