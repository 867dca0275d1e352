"""What ClusterD has to answer to whatever it is asked, by the tables of its reference and `docs/compatibility.md`.

An answer is a code, a piece of the text that a call fails with, or STREAM for a stream that is open. Nothing of
ClusterD is used to say so. Where the state of a job decides, which the asker does not know, several are right; for what
makes no sense exactly one is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from tests.clusterd.client import STREAM, Method

UNREADABLE = "grpc: error unmarshalling request"
NOT_REGISTERED = "not registed"
CLUSTER = ("", "-1")
ROLES = ("CCAgent", "DefaultUser1", "DefaultUser2", "FdAgent")
RESOURCES = ("CCAE", "fd-online", "pingmesh", "Netmind", "dpcStorage", "dtfsStorage")
LONGEST = 256
EARLIEST, LATEST = 1_735_689_600_000, 9_999_999_999_999
ID = re.compile(r"[a-zA-Z0-9\-_.]{8,128}")

Answer = int | str
Answers = set[Answer]


@dataclass(frozen=True)
class Known:
    """A job that runs and is registered, and the chips that it has on each node; no others are there."""

    job: str
    chips: Mapping[str, Collection[str]]


def documented(method: Method, content: bytes, known: Known) -> Answers:
    """All that may be answered."""
    try:
        request = method.request.FromString(content)
    except DecodeError:
        return {UNREADABLE}
    return RULES[method.path](request, known)


def _job_or(unknown: Answers, known: Answers) -> Callable[[Any, Known], Answers]:
    return lambda request, world: known if _job(request) == world.job else unknown


def _job(request: Any) -> str:
    return str(request.jobId if hasattr(request, "jobId") else request.jobID)


def _rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def _report(malformed: int, ranks: Callable[[Any], Collection[str]]) -> Callable[[Any, Known], Answers]:
    def rule(request: Any, known: Known) -> Answers:
        if _job(request) != known.job:
            return {400}
        return {0} if all(map(_rank, ranks(request))) else {malformed}

    return rule


def _fault_ranks(request: Any) -> list[str]:
    return [each.rankId for each in request.faultRanks]


def _switch_nics(request: Any, known: Known) -> Answers:
    sense = request.jobID == known.job and bool(request.nicOps)
    for node, each in request.nicOps.items():
        chips = known.chips.get(node, ())
        sense = sense and 0 < len(each.dev) == len(each.op)
        sense = sense and all(dev.removeprefix("device") in chips for dev in each.dev)
    return {0, 411, 413} if sense else {413}  # its pods may be elsewhere by now


def _stress_test(request: Any, known: Known) -> Answers:
    everywhere = list(request.allNodesOps)
    lists = [everywhere] if everywhere else [list(each.ops) for each in request.stressParam.values()]
    sense = request.jobID == known.job and bool(lists)
    sense = sense and all(ops and set(ops) <= {0, 1} and len(set(ops)) == len(ops) for ops in lists)
    if not request.allNodesOps:
        sense = sense and set(request.stressParam) <= set(known.chips)
    return {0, 411, 413} if sense else {413}


def _too_long(request: Any) -> bool:
    return max(len(request.jobId), len(request.role)) > LONGEST


def _fault_register(request: Any, known: Known) -> Answers:
    if not request.role:
        return {"request is nil or role is empty"}
    if request.jobId not in (known.job, *CLUSTER):
        return {402}
    return {409} if _too_long(request) else {200}


def _fault_query(request: Any, known: Known) -> Answers:
    job = request.jobId
    chinese = any("\u4e00" <= letter <= "\u9fff" for letter in job)
    return {409, 429} if job and (chinese or not 8 <= len(job) <= 128) else {200, 429}


def _public_fault(request: Any, known: Known) -> Answers:
    if request.resource not in RESOURCES:
        return {409}
    sense = ID.fullmatch(request.id) and EARLIEST <= request.timestamp <= LATEST and request.version == "1.0"
    sense = sense and 1 <= len(request.faults) <= 100
    sense = sense and any(
        ID.fullmatch(fault.faultId)
        and EARLIEST <= fault.faultTime <= LATEST
        and fault.faultType in ("NPU", "Node", "Network", "Storage")
        and len(fault.faultCode) == 9
        and fault.assertion in ("occur", "recover", "once")
        and 1 <= len(fault.influence) <= 1000
        for fault in request.faults
    )
    return {0, 409, 410} if sense else {409, 410}


def _traced(request: Any) -> bool:
    return re.fullmatch(r"[^/]+/[^/]+", request.jobNsName) is not None


def _set_trace(request: Any, known: Known) -> Answers:
    names = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")
    values = {getattr(request.profilingSwitch, name) for name in names}
    sense = _traced(request) and request.HasField("profilingSwitch") and values <= {"on", "off", ""}
    return {200, 300, 404, 500} if sense else {300}


RULES: dict[str, Callable[[Any, Known], Answers]] = {
    "/Recover/Init": _job_or({502}, {0}),
    "/Recover/Register": _job_or({408}, {0}),
    "/Recover/HealthCheck": lambda request, known: {0},
    "/Recover/SubscribeProcessManageSignal": _job_or({NOT_REGISTERED}, {STREAM}),
    "/Recover/ReportStopComplete": _report(409, _fault_ranks),
    "/Recover/ReportRecoverStrategy": _report(409, _fault_ranks),
    "/Recover/ReportRecoverStatus": _report(409, lambda request: request.isolateRankIds),
    "/Recover/ReportProcessFault": _report(409, _fault_ranks),
    "/Recover/ReplySwitchNicResult": _report(413, lambda request: ()),
    "/Recover/ReplyStressTestResult": _report(413, lambda request: request.stressResult),
    "/Recover/SwitchNicTrack": _switch_nics,
    "/Recover/StressTest": _stress_test,
    "/Recover/SubscribeNotifySwitch": _job_or({NOT_REGISTERED}, {STREAM}),
    "/Recover/SubscribeNotifyExecStressTest": _job_or({NOT_REGISTERED}, {STREAM}),
    "/Recover/SubscribeSwitchNicSignal": _job_or({NOT_REGISTERED}, {STREAM, "is not swtiching nic"}),
    "/Recover/SubscribeStressTestResponse": _job_or({NOT_REGISTERED}, {STREAM, "is not stress test"}),
    "/fault.Fault/Register": _fault_register,
    "/fault.Fault/SubscribeFaultMsgSignal": lambda request, known: (
        {STREAM, NOT_REGISTERED} if request.jobId in (known.job, *CLUSTER) else {NOT_REGISTERED}
    ),
    "/fault.Fault/GetFaultMsgSignal": _fault_query,
    "/job.Job/Register": lambda request, known: {200} if request.role in ROLES else {400},
    "/job.Job/SubscribeJobSummarySignal": lambda request, known: {"please register first"},
    "/job.Job/SubscribeJobSummarySignalList": lambda request, known: {"please register first"},
    "/config.Config/Register": lambda request, known: {409} if _too_long(request) else {0},
    "/config.Config/SubscribeRankTable": lambda request, known: {STREAM, NOT_REGISTERED},
    "/PubFault/SendPublicFault": _public_fault,
    "/TrainingDataTrace/ModifyTrainingDataTraceSwitch": _set_trace,
    "/TrainingDataTrace/GetTrainingDataTraceSwitch": lambda request, known: (
        {200, 300, 404, 500} if _traced(request) else {300}
    ),
    "/TrainingDataTrace/SubscribeDataTraceSwitch": lambda request, known: (
        {f"at most {LONGEST}"} if _too_long(request) else {STREAM}
    ),
}


def is_right(answer: Answer, right: Answers) -> bool:
    """Of a text, only what it says in essence counts."""
    if isinstance(answer, int):
        return answer in right
    return any(isinstance(each, str) and each in answer for each in right)
