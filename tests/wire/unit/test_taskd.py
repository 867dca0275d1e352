"""Our messages are the original's, byte for byte: held against a second reading of its tables."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.wire import profiling_pb2, recover_pb2, tasknet_pb2
from tests.wire.tables import fill, read

TASKNET = """
Position: role serverRank processRank
RegisterReq: uuid pos:Position
PathDiscoveryReq: uuid proxyPos:Position path*:Position
MessageHeader: uuid mtype sync:bool src:Position dst:Position createTime:int64
Message: header:MessageHeader body
Ack: uuid code:uint32 src:Position
"""
RECOVER = """
Status: code:int32 info
ClientInfo: jobId role
FaultRank: rankId faultType
ProcessManageSignal: uuid jobId signalType actions* faultRanks*:FaultRank changeStrategy\
 timeout:int64 nodeRankIds* extraParams
StopCompleteRequest: jobId status:Status faultRanks*:FaultRank
RecoverStrategyRequest: jobId faultRanks*:FaultRank strategies*
RecoverStatusRequest: jobId status:Status strategy isolateRankIds*
ProcessFaultRequest: jobId faultRanks*:FaultRank
SwitchNicResponse: jobID msg
SwitchNicRequest: jobID
DeviceList: dev* op*:bool
SwitchNics: jobID nicOps#:DeviceList
SwitchRankList: rankID* op*:bool jobId
SwitchResult: jobId result:bool
StressOpList: ops*:int64
StressTestParam: jobID stressParam#:StressOpList allNodesOps*:int64
StressTestRequest: jobID
StressTestResponse: jobID msg
StressTestRankParams: stressParam#:StressOpList jobId
StressTestOpResult: code result
StressTestRankResult: rankResult#:StressTestOpResult
StressTestResult: jobId stressResult#:StressTestRankResult
"""
PROFILING = """
ProfilingSwitch: CommunicationOperator Step SaveCheckpoint FP DataLoader
DataTypeReq: jobNsName profilingSwitch:ProfilingSwitch
DataTypeRes: message code:int32
DataStatusReq: jobNsName
DataStatusRes: message profilingSwitch:ProfilingSwitch code:int32
ProfilingClientInfo: jobId role
"""
# Requests and responses, `>` a stream of responses, `<>` of both.
METHODS = {
    path: [tuple(line.split()) if len(line.split()) == 4 else (*line.split()[:2], "", line.split()[2])
           for line in table.strip().splitlines()]
    for path, table in {
        "/TaskNet/": """
Register RegisterReq Ack
PathDiscovery PathDiscoveryReq Ack
TransferMessage Message Ack
InitServerDownStream Ack <> Message
""",
        "/Recover/": """
Init ClientInfo Status
Register ClientInfo Status
SubscribeProcessManageSignal ClientInfo > ProcessManageSignal
ReportStopComplete StopCompleteRequest Status
ReportRecoverStrategy RecoverStrategyRequest Status
ReportRecoverStatus RecoverStatusRequest Status
ReportProcessFault ProcessFaultRequest Status
SwitchNicTrack SwitchNics Status
SubscribeSwitchNicSignal SwitchNicRequest > SwitchNicResponse
SubscribeNotifySwitch ClientInfo > SwitchRankList
ReplySwitchNicResult SwitchResult Status
HealthCheck ClientInfo Status
StressTest StressTestParam Status
SubscribeStressTestResponse StressTestRequest > StressTestResponse
SubscribeNotifyExecStressTest ClientInfo > StressTestRankParams
ReplyStressTestResult StressTestResult Status
""",
        "/TrainingDataTrace/": """
ModifyTrainingDataTraceSwitch DataTypeReq DataTypeRes
GetTrainingDataTraceSwitch DataStatusReq DataStatusRes
SubscribeDataTraceSwitch ProfilingClientInfo > DataStatusRes
""",
    }.items()
}  # fmt: skip
FILES = [(tasknet_pb2, TASKNET), (recover_pb2, RECOVER), (profiling_pb2, PROFILING)]


@pytest.mark.parametrize(("module", "table"), FILES, ids=lambda each: getattr(each, "__name__", ""))
def test_messages_are_the_same_bytes(module: Any, table: str) -> None:
    second = read(table)
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
    ack = tasknet_pb2.Ack(uuid="u", code=5001, src=tasknet_pb2.Position(role="Mgr", serverRank="0", processRank="-1"))
    assert ack.SerializeToString() == b"\x0a\x01u\x10\x89\x27\x1a\x0c\x0a\x03Mgr\x12\x010\x1a\x02-1"
    signal = recover_pb2.ProcessManageSignal(signalType="stopTrain", timeout=33, nodeRankIds=["1"])
    assert signal.SerializeToString() == b"\x1a\x09stopTrain\x38\x21\x42\x011"


def test_methods_have_the_names_and_messages_that_others_call_them_with() -> None:
    found = {}
    for module, _ in FILES:
        for service in module.DESCRIPTOR.services_by_name.values():
            found[f"/{service.full_name}/"] = {
                (
                    method.name,
                    method.input_type.full_name,
                    "<" * method.client_streaming + ">" * method.server_streaming,
                    method.output_type.full_name,
                )
                for method in service.methods
            }
    assert found == {path: set(methods) for path, methods in METHODS.items()}
