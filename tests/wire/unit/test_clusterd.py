"""The messages of ClusterD's other services are the original's, byte for byte: held against a second reading."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.wire import config_pb2, fault_pb2, health_pb2, job_pb2, pubfault_pb2
from tests.wire.tables import fill, read

FAULT = """
Status: code:int32 info
ClientInfo: jobId role
SwitchFaultInfo: faultCode switchChipId switchPortId faultTime faultLevel
DeviceFaultInfo: deviceId deviceType faultCodes* faultLevel faultType* faultReason* switchFaultInfos*:SwitchFaultInfo\
 faultLevels*
NodeFaultInfo: nodeName nodeIP nodeSN faultLevel faultDevice*:DeviceFaultInfo
FaultMsgSignal: uuid jobId signalType nodeFaultInfo*:NodeFaultInfo
FaultQueryResult: code:int32 info faultSignal:FaultMsgSignal
"""
JOB = """
ClientInfo: role - clientId
Status: code:int32 info clientId
JobSummarySignal: uuid jobId jobName namespace frameWork jobStatus time cmIndex total HcclJson deleteTime sharedTorIp\
 masterAddr operator sid
JobSummarySignalList: jobSummarySignals*:JobSummarySignal ReportTime JobTotalNum:int32
"""
CONFIG = """
Status: code:int32 info
ClientInfo: jobId role
RankTableStream: jobId rankTable
"""
PUBFAULT = """
PubFaultInfo: nodeName nodeSN deviceIds*:int32
Fault: faultId faultType faultCode faultTime:int64 assertion faultLocation# influence*:PubFaultInfo description
PublicFaultRequest: id timestamp:int64 version resource faults*:Fault
RespStatus: code:int32 info
"""
FILES = [
    (fault_pb2, "fault", FAULT),
    (job_pb2, "job", JOB),
    (config_pb2, "config", CONFIG),
    (pubfault_pb2, "", PUBFAULT),
]
METHODS = """
/fault.Fault/Register fault.ClientInfo fault.Status
/fault.Fault/SubscribeFaultMsgSignal fault.ClientInfo > fault.FaultMsgSignal
/fault.Fault/GetFaultMsgSignal fault.ClientInfo fault.FaultQueryResult
/job.Job/Register job.ClientInfo job.Status
/job.Job/SubscribeJobSummarySignal job.ClientInfo > job.JobSummarySignal
/job.Job/SubscribeJobSummarySignalList job.ClientInfo > job.JobSummarySignalList
/config.Config/Register config.ClientInfo config.Status
/config.Config/SubscribeRankTable config.ClientInfo > config.RankTableStream
/PubFault/SendPublicFault PublicFaultRequest RespStatus
"""


@pytest.mark.parametrize(("module", "package", "table"), FILES, ids=["fault", "job", "config", "pubfault"])
def test_messages_are_the_same_bytes(module: Any, package: str, table: str) -> None:
    second = read(table, package)
    assert module.DESCRIPTOR.package == package
    assert set(second) == set(module.DESCRIPTOR.message_types_by_name)
    for name, cls in second.items():
        ours, theirs = fill(getattr(module, name)()), fill(cls())
        assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True), name
        assert getattr(module, name).FromString(theirs.SerializeToString()) == ours, name
        assert cls.FromString(ours.SerializeToString()) == theirs, name
        assert {field.name: field.number for field in ours.DESCRIPTOR.fields} == {
            field.name: field.number for field in cls.DESCRIPTOR.fields
        }, name
        assert not getattr(module, name)().SerializeToString(), "no field has a presence of its own"


def test_some_frames_by_hand() -> None:
    """So that not both readings are wrong in the same way: bytes put together from the wire format's rules."""
    assert job_pb2.ClientInfo(role="a", clientId="b").SerializeToString() == b"\x0a\x01a\x1a\x01b"
    faults = pubfault_pb2.Fault(faultTime=1, faultLocation={"k": "v"}, influence=[{"deviceIds": [0, 31]}])
    assert faults.SerializeToString() == b"\x20\x01\x32\x06\x0a\x01k\x12\x01v\x3a\x04\x1a\x02\x00\x1f"
    result = fault_pb2.FaultQueryResult(code=200, faultSignal={"signalType": "normal"})
    assert result.SerializeToString() == b"\x08\xc8\x01\x1a\x08\x1a\x06normal"
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert serving.SerializeToString() == b"\x08\x01"


def test_methods_have_the_names_and_messages_that_others_call_them_with() -> None:
    found = [
        " ".join(
            [
                f"/{service.full_name}/{method.name} {method.input_type.full_name}",
                *[">"] * method.server_streaming,
                method.output_type.full_name,
            ]
        )
        for module, _, _ in FILES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert found == METHODS.strip().splitlines()
