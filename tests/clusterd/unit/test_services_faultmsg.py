"""A job's faults as messages: grouped, sorted, and with the worst level of each."""

from __future__ import annotations

import random

import pytest

from evertrain.clusterd.model import FaultDevice
from evertrain.clusterd.services import faultmsg


def fault(node: int, device: str, code: str, level: str, kind: str = "NPU", **more: str) -> FaultDevice:
    return FaultDevice(f"node-{node}", f"10.0.0.{node}", f"SN{node}", device, kind, code, level, **more)


def test_nothing_is_normal() -> None:
    message = faultmsg.signal("job", [], "u")
    assert (message.uuid, message.jobId, message.signalType, len(message.nodeFaultInfo)) == ("u", "job", "normal", 0)


def test_faults_are_grouped_and_sorted_whatever_their_order() -> None:
    faults = [
        fault(2, "0", "B", "NotHandleFault"),
        fault(1, "3", "B", "RestartRequest"),
        fault(1, "3", "A", "SubHealthFault"),
        fault(1, "3", "B", "SeparateNPU"),
        fault(1, "3", "B", "NotHandleFault"),
        fault(1, "-1", "", "SeparateNPU", "Node"),
        fault(1, "1", "C", "PreSeparateNPU"),
    ]
    first = faultmsg.signal("job", faults)
    for seed in range(20):
        random.Random(seed).shuffle(faults)
        assert faultmsg.signal("job", faults) == first
    assert first.signalType == "fault"
    assert [(node.nodeName, node.nodeIP, node.nodeSN, node.faultLevel) for node in first.nodeFaultInfo] == [
        ("node-1", "10.0.0.1", "SN1", "UnHealthy"),
        ("node-2", "10.0.0.2", "SN2", "Healthy"),
    ]
    assert [
        (each.deviceId, each.deviceType, list(each.faultCodes), list(each.faultLevels), each.faultLevel)
        for each in first.nodeFaultInfo[0].faultDevice
    ] == [
        ("-1", "Node", [], [], "UnHealthy"),
        ("1", "NPU", ["C"], ["PreSeparateNPU"], "SubHealthy"),
        ("3", "NPU", ["A", "B"], ["SubHealthFault", "SeparateNPU"], "UnHealthy"),
    ]


def test_the_kinds_of_a_chips_faults_are_told_once_each() -> None:
    kinds = ("CardUnhealthy", "PublicFault", "CardUnhealthy")
    faults = [
        FaultDevice("n", "", "", "0", "NPU", code, "SeparateNPU", kind=kind)
        for code, kind in zip("ABC", kinds, strict=True)
    ]
    [device] = faultmsg.signal("job", faults).nodeFaultInfo[0].faultDevice
    assert list(device.faultType) == ["CardUnhealthy", "PublicFault"] and list(device.faultReason) == []


def test_faults_of_a_switch_say_where() -> None:
    faults = [
        fault(1, "-1", "X", "Separate", "Switch", switch_chip="0", switch_port=port, time="170") for port in ("9", "2")
    ]
    device = faultmsg.signal("job", faults).nodeFaultInfo[0].faultDevice[0]
    assert list(device.faultCodes) == ["X"]
    assert [
        (each.faultCode, each.switchChipId, each.switchPortId, each.faultTime, each.faultLevel)
        for each in device.switchFaultInfos
    ] == [("X", "0", "2", "170", "Separate"), ("X", "0", "9", "170", "Separate")]


@pytest.mark.parametrize(
    ("level", "health"),
    [
        ("NotHandleFault", "Healthy"),
        ("NotHandle", "Healthy"),
        ("SubHealthFault", "SubHealthy"),
        ("SubHealth", "SubHealthy"),
        ("PreSeparate", "SubHealthy"),
        ("PreSeparateNPU", "SubHealthy"),
        ("PreSeparateFault", "SubHealthy"),
        ("RestartRequest", "UnHealthy"),
        ("RestartBusiness", "UnHealthy"),
        ("RestartNPU", "UnHealthy"),
        ("FreeRestartNPU", "UnHealthy"),
        ("SeparateNPU", "UnHealthy"),
        ("ManuallySeparateNPU", "UnHealthy"),
        ("SeparateFault", "UnHealthy"),
        ("Separate", "UnHealthy"),
        ("SomethingNew", "UnHealthy"),
    ],
)
def test_levels_as_health(level: str, health: str) -> None:
    assert faultmsg.health(level) == health
