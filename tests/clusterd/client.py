"""A client of ClusterD that knows it from the tables of its reference alone.

Messages are written down here once more, compiled when they are needed and kept in a pool of their own: nothing of our
own protos or of the code made from them is used, so a wrong number or name there can't hide.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from evertrain import aio

STREAM = "a stream"
PATIENCE = 120.0
"""Seconds for what should come at once. The machine may be busy."""

PROTOS = {
    "recover": """
        message Status { int32 code = 1; string info = 2; }
        message ClientInfo { string jobId = 1; string role = 2; }
        message FaultRank { string rankId = 1; string faultType = 2; }
        message ProcessManageSignal {
            string uuid = 1; string jobId = 2; string signalType = 3; repeated string actions = 4;
            repeated FaultRank faultRanks = 5; string changeStrategy = 6; int64 timeout = 7;
            repeated string nodeRankIds = 8; string extraParams = 9;
        }
        message StopCompleteRequest { string jobId = 1; Status status = 2; repeated FaultRank faultRanks = 3; }
        message RecoverStrategyRequest { string jobId = 1; repeated FaultRank faultRanks = 2;
            repeated string strategies = 3; }
        message RecoverStatusRequest { string jobId = 1; Status status = 2; string strategy = 3;
            repeated string isolateRankIds = 4; }
        message ProcessFaultRequest { string jobId = 1; repeated FaultRank faultRanks = 2; }
        message SwitchNicResponse { string jobID = 1; string msg = 2; }
        message SwitchNicRequest { string jobID = 1; }
        message SwitchNics { string jobID = 1; map<string, DeviceList> nicOps = 2; }
        message DeviceList { repeated string dev = 1; repeated bool op = 2; }
        message SwitchRankList { repeated string rankID = 1; repeated bool op = 2; string jobId = 3; }
        message SwitchResult { string jobId = 1; bool result = 2; }
        message StressOpList { repeated int64 ops = 1; }
        message StressTestParam { string jobID = 1; map<string, StressOpList> stressParam = 2;
            repeated int64 allNodesOps = 3; }
        message StressTestRequest { string jobID = 1; }
        message StressTestResponse { string jobID = 1; string msg = 2; }
        message StressTestRankParams { map<string, StressOpList> stressParam = 1; string jobId = 2; }
        message StressTestResult { string jobId = 1; map<string, StressTestRankResult> stressResult = 2; }
        message StressTestRankResult { map<string, StressTestOpResult> rankResult = 1; }
        message StressTestOpResult { string code = 1; string result = 2; }
        service Recover {
            rpc Init(ClientInfo) returns (Status);
            rpc Register(ClientInfo) returns (Status);
            rpc SubscribeProcessManageSignal(ClientInfo) returns (stream ProcessManageSignal);
            rpc ReportStopComplete(StopCompleteRequest) returns (Status);
            rpc ReportRecoverStrategy(RecoverStrategyRequest) returns (Status);
            rpc ReportRecoverStatus(RecoverStatusRequest) returns (Status);
            rpc ReportProcessFault(ProcessFaultRequest) returns (Status);
            rpc SwitchNicTrack(SwitchNics) returns (Status);
            rpc SubscribeSwitchNicSignal(SwitchNicRequest) returns (stream SwitchNicResponse);
            rpc SubscribeNotifySwitch(ClientInfo) returns (stream SwitchRankList);
            rpc ReplySwitchNicResult(SwitchResult) returns (Status);
            rpc HealthCheck(ClientInfo) returns (Status);
            rpc StressTest(StressTestParam) returns (Status);
            rpc SubscribeStressTestResponse(StressTestRequest) returns (stream StressTestResponse);
            rpc SubscribeNotifyExecStressTest(ClientInfo) returns (stream StressTestRankParams);
            rpc ReplyStressTestResult(StressTestResult) returns (Status);
        }
    """,
    "fault": """
        package fault;
        message Status { int32 code = 1; string info = 2; }
        message ClientInfo { string jobId = 1; string role = 2; }
        message FaultQueryResult { int32 code = 1; string info = 2; FaultMsgSignal faultSignal = 3; }
        message FaultMsgSignal { string uuid = 1; string jobId = 2; string signalType = 3;
            repeated NodeFaultInfo nodeFaultInfo = 4; }
        message NodeFaultInfo { string nodeName = 1; string nodeIP = 2; string nodeSN = 3; string faultLevel = 4;
            repeated DeviceFaultInfo faultDevice = 5; }
        message DeviceFaultInfo { string deviceId = 1; string deviceType = 2; repeated string faultCodes = 3;
            string faultLevel = 4; repeated string faultType = 5; repeated string faultReason = 6;
            repeated SwitchFaultInfo switchFaultInfos = 7; repeated string faultLevels = 8; }
        message SwitchFaultInfo { string faultCode = 1; string switchChipId = 2; string switchPortId = 3;
            string faultTime = 4; string faultLevel = 5; }
        service Fault {
            rpc Register(ClientInfo) returns (Status);
            rpc SubscribeFaultMsgSignal(ClientInfo) returns (stream FaultMsgSignal);
            rpc GetFaultMsgSignal(ClientInfo) returns (FaultQueryResult);
        }
    """,
    "job": """
        package job;
        message ClientInfo { string role = 1; string clientId = 3; }
        message Status { int32 code = 1; string info = 2; string clientId = 3; }
        message JobSummarySignal { string uuid = 1; string jobId = 2; string jobName = 3; string namespace = 4;
            string frameWork = 5; string jobStatus = 6; string time = 7; string cmIndex = 8; string total = 9;
            string HcclJson = 10; string deleteTime = 11; string sharedTorIp = 12; string masterAddr = 13;
            string operator = 14; string sid = 15; }
        message JobSummarySignalList { repeated JobSummarySignal jobSummarySignals = 1; string ReportTime = 2;
            int32 JobTotalNum = 3; }
        service Job {
            rpc Register(ClientInfo) returns (Status);
            rpc SubscribeJobSummarySignal(ClientInfo) returns (stream JobSummarySignal);
            rpc SubscribeJobSummarySignalList(ClientInfo) returns (stream JobSummarySignalList);
        }
    """,
    "config": """
        package config;
        message ClientInfo { string jobId = 1; string role = 2; }
        message Status { int32 code = 1; string info = 2; }
        message RankTableStream { string jobId = 1; string rankTable = 2; }
        service Config {
            rpc Register(ClientInfo) returns (Status);
            rpc SubscribeRankTable(ClientInfo) returns (stream RankTableStream);
        }
    """,
    "pubfault": """
        message RespStatus { int32 code = 1; string info = 2; }
        message PublicFaultRequest { string id = 1; int64 timestamp = 2; string version = 3; string resource = 4;
            repeated Fault faults = 5; }
        message Fault { string faultId = 1; string faultType = 2; string faultCode = 3; int64 faultTime = 4;
            string assertion = 5; map<string, string> faultLocation = 6; repeated PubFaultInfo influence = 7;
            string description = 8; }
        message PubFaultInfo { string nodeName = 1; string nodeSN = 2; repeated int32 deviceIds = 3; }
        service PubFault { rpc SendPublicFault(PublicFaultRequest) returns (RespStatus); }
    """,
    "profiling": """
        message ProfilingSwitch { string CommunicationOperator = 1; string Step = 2; string SaveCheckpoint = 3;
            string FP = 4; string DataLoader = 5; }
        message DataTypeReq { string jobNsName = 1; ProfilingSwitch profilingSwitch = 2; }
        message DataTypeRes { string message = 1; int32 code = 2; }
        message DataStatusReq { string jobNsName = 1; }
        message DataStatusRes { string message = 1; ProfilingSwitch profilingSwitch = 2; int32 code = 3; }
        message ProfilingClientInfo { string jobId = 1; string role = 2; }
        service TrainingDataTrace {
            rpc ModifyTrainingDataTraceSwitch(DataTypeReq) returns (DataTypeRes);
            rpc GetTrainingDataTraceSwitch(DataStatusReq) returns (DataStatusRes);
            rpc SubscribeDataTraceSwitch(ProfilingClientInfo) returns (stream DataStatusRes);
        }
    """,
}


@dataclass(frozen=True)
class Method:
    path: str
    request: Any
    response: Any
    is_stream: bool


@functools.cache
def methods() -> dict[str, Method]:
    """By `Service/Method`."""
    from grpc_tools import protoc

    found: dict[str, Method] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PROTOS.items():
            Path(folder, f"{name}.proto").write_text(f'syntax = "proto3";\n{text}')
        out = Path(folder, "all.bin")
        files = [f"{name}.proto" for name in PROTOS]
        assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={out}", *files]) == 0
        described = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in described.file:
        pool.Add(file)
    for file in described.file:
        for service in pool.FindFileByName(file.name).services_by_name.values():
            for method in service.methods:
                found[f"{service.name}/{method.name}"] = Method(
                    f"/{service.full_name}/{method.name}",
                    message_factory.GetMessageClass(method.input_type),
                    message_factory.GetMessageClass(method.output_type),
                    bool(method.server_streaming),
                )
    return found


@dataclass(frozen=True)
class Signal:
    """A ProcessManageSignal; what is empty is as if it were not there, as on the wire."""

    type: str
    actions: tuple[str, ...] = ()
    strategy: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    timeout: int = 0
    extra: str = ""
    uuid: str = field(default="", compare=False)


def faults_of(ranks: Mapping[int, int] | None) -> list[dict[str, str]]:
    return [{"rankId": str(rank), "faultType": str(kind)} for rank, kind in (ranks or {}).items()]


class Stream:
    """What comes on a server stream, one at a time."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def there(self) -> None:
        """What is said from now on is heard."""
        async with aio.timeout(PATIENCE):
            await self._call.initial_metadata()

    async def next(self, seconds: float = PATIENCE) -> Any:
        """The next message; None if the stream has ended. Raises grpc.aio.AioRpcError."""
        async with aio.timeout(seconds):
            found = await self._call.read()
        return None if found is grpc.aio.EOF else found

    async def error(self, seconds: float = PATIENCE) -> tuple[grpc.StatusCode, str]:
        """How it ends, when it ends without a message."""
        try:
            found = await self.next(seconds)
        except grpc.aio.AioRpcError as error:
            return error.code(), str(error.details())
        assert found is None, f"a message instead of an error: {found}"
        return await self._call.code(), str(await self._call.details())

    def cancel(self) -> None:
        self._call.cancel()


class Signals(Stream):
    """SubscribeProcessManageSignal, without its keep-alives."""

    def __init__(self, call: Any, job: str) -> None:
        super().__init__(call)
        self._job = job
        self.transcript: list[Signal] = []
        self.keep_alives = 0

    async def next(self, seconds: float = PATIENCE) -> Signal | None:
        async with aio.timeout(seconds):
            while True:
                found = await super().next(seconds)
                if found is None:
                    return None
                assert found.jobId == self._job
                if found.signalType == "keep-alive":
                    said = self.transcript[-1].uuid if self.transcript else ""
                    assert found.uuid == said and not (found.actions or found.faultRanks or found.changeStrategy)
                    self.keep_alives += 1
                    continue
                signal = Signal(
                    found.signalType,
                    tuple(found.actions),
                    found.changeStrategy,
                    {each.rankId: each.faultType for each in found.faultRanks},
                    tuple(sorted(found.nodeRankIds, key=int)),
                    found.timeout,
                    found.extraParams,
                    found.uuid,
                )
                self.transcript.append(signal)
                return signal


class Client:
    """One connection that speaks for one job."""

    def __init__(
        self,
        address: str,
        job: str,
        *,
        role: str = "taskd",
        token: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.job = job
        self.role = role
        self._metadata = (("x-job-token", token),) if token else ()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            named = [("grpc.ssl_target_name_override", "server")]
            self._channel = grpc.aio.secure_channel(address, credentials, options=named)

    async def close(self) -> None:
        await self._channel.close()

    async def call(self, method: str, **fields: Any) -> Any:
        known = methods()[method]
        assert not known.is_stream
        send = self._channel.unary_unary(
            known.path,
            request_serializer=known.request.SerializeToString,
            response_deserializer=known.response.FromString,
        )
        return await send(known.request(**fields), timeout=PATIENCE, metadata=self._metadata)

    async def send(self, method: Method, content: bytes) -> Any:
        """Whatever it is, and the answer. Of a stream None, when it is there: who listened before may hear no more."""
        if not method.is_stream:
            answer = await self._channel.unary_unary(method.path)(content, metadata=self._metadata)
            return method.response.FromString(answer)
        stream = self._channel.unary_stream(method.path)(content, metadata=self._metadata)
        await stream.initial_metadata()
        if stream.done():
            await stream.read()
        stream.cancel()
        return None

    async def answer(self, method: Method, content: bytes) -> int | str:
        """To whatever it is: its code, or what it fails with; STREAM if it is a stream that is there."""
        try:
            said = await self.send(method, content)
        except grpc.aio.AioRpcError as error:
            return str(error.details() or "")
        return STREAM if said is None else int(said.code)

    def stream(self, method: str, **fields: Any) -> Stream:
        return Stream(self._open(method, fields))

    def _open(self, method: str, fields: Mapping[str, Any]) -> Any:
        known = methods()[method]
        assert known.is_stream
        send = self._channel.unary_stream(
            known.path,
            request_serializer=known.request.SerializeToString,
            response_deserializer=known.response.FromString,
        )
        return send(known.request(**fields), metadata=self._metadata)

    async def _status(self, method: str, **fields: Any) -> tuple[int, str]:
        found = await self.call(f"Recover/{method}", **fields)
        return found.code, found.info

    def _me(self) -> dict[str, str]:
        return {"jobId": self.job, "role": self.role}

    async def init(self) -> tuple[int, str]:
        return await self._status("Init", **self._me())

    async def register(self) -> tuple[int, str]:
        return await self._status("Register", **self._me())

    async def health(self) -> tuple[int, str]:
        return await self._status("HealthCheck", **self._me())

    def signals(self) -> Signals:
        return Signals(self._open("Recover/SubscribeProcessManageSignal", self._me()), self.job)

    async def join(self) -> Signals:
        """Init, Register, Subscribe, as every client does."""
        assert (await self.init())[0] == 0
        assert (await self.register())[0] == 0
        signals = self.signals()
        await signals.there()
        return signals

    async def fault(self, ranks: Mapping[int, int]) -> tuple[int, str]:
        return await self._status("ReportProcessFault", jobId=self.job, faultRanks=faults_of(ranks))

    async def stopped(self, code: int = 0, ranks: Mapping[int, int] | None = None) -> tuple[int, str]:
        return await self._status(
            "ReportStopComplete", jobId=self.job, status={"code": code}, faultRanks=faults_of(ranks)
        )

    async def can(self, *strategies: str, ranks: Mapping[int, int] | None = None) -> tuple[int, str]:
        return await self._status(
            "ReportRecoverStrategy", jobId=self.job, strategies=strategies, faultRanks=faults_of(ranks)
        )

    async def went(self, strategy: str, code: int = 0, isolate: Iterable[int] = ()) -> tuple[int, str]:
        return await self._status(
            "ReportRecoverStatus",
            jobId=self.job,
            status={"code": code},
            strategy=strategy,
            isolateRankIds=[str(rank) for rank in isolate],
        )

    async def switch_nics(self, ops: Mapping[str, Mapping[str, bool]]) -> tuple[int, str]:
        """By node and device."""
        nics = {node: {"dev": list(each), "op": list(each.values())} for node, each in ops.items()}
        return await self._status("SwitchNicTrack", jobID=self.job, nicOps=_messages("DeviceList", nics))

    async def nics_switched(self, result: bool) -> tuple[int, str]:
        return await self._status("ReplySwitchNicResult", jobId=self.job, result=result)

    async def stress_test(
        self, ops: Mapping[str, Iterable[int]] | None = None, everywhere: Iterable[int] = ()
    ) -> tuple[int, str]:
        lists = {node: {"ops": list(each)} for node, each in (ops or {}).items()}
        return await self._status(
            "StressTest", jobID=self.job, stressParam=_messages("StressOpList", lists), allNodesOps=list(everywhere)
        )

    async def stress_tested(self, results: Mapping[int, Mapping[int, str]]) -> tuple[int, str]:
        """The code by rank and operation."""
        made = {
            str(rank): {
                "rankResult": _messages("StressTestOpResult", {str(op): {"code": code} for op, code in each.items()})
            }
            for rank, each in results.items()
        }
        return await self._status(
            "ReplyStressTestResult", jobId=self.job, stressResult=_messages("StressTestRankResult", made)
        )


def _messages(name: str, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    pool = methods()["Recover/Init"].request.DESCRIPTOR.file.pool
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    return {key: kind(**fields) for key, fields in values.items()}


@contextlib.asynccontextmanager
async def client(address: str, job: str, **options: Any) -> AsyncIterator[Client]:
    made = Client(address, job, **options)
    try:
        yield made
    finally:
        await made.close()
