"""Between the messages of Recover and what the machine says and hears. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from evertrain.clusterd.model import MEMORY, NETWORK, OTHER
from evertrain.clusterd.recover.events import (
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    ProcessFault,
    Signal,
    Status,
    StopComplete,
    Strategies,
    StressTested,
)
from evertrain.wire import recover_pb2 as wire

KEEP_ALIVE = "keep-alive"
_DIGITS = 9


class Malformed(ValueError):
    """A field makes no sense; the text says which."""


def rank(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise Malformed(f"rank:{text[:64]!r} is not a rank")
    return int(text)


def faults(ranks: Iterable[wire.FaultRank]) -> dict[int, str]:
    """Of a rank that is named twice the fault counts that can't be retried."""
    found: dict[int, str] = {}
    for each in ranks:
        number = rank(each.rankId)
        kind = each.faultType if each.faultType in (MEMORY, NETWORK) else OTHER
        found[number] = kind if found.get(number, kind) == kind else OTHER
    return found


def process_fault(message: wire.ProcessFaultRequest) -> ProcessFault:
    return ProcessFault(faults(message.faultRanks))


def stop_complete(message: wire.StopCompleteRequest) -> StopComplete:
    return StopComplete(message.status.code, faults(message.faultRanks))


def strategies(message: wire.RecoverStrategyRequest) -> Strategies:
    return Strategies(tuple(message.strategies), faults(message.faultRanks))


def status(message: wire.RecoverStatusRequest) -> Status:
    isolate = tuple(rank(each) for each in message.isolateRankIds)
    return Status(message.status.code, message.strategy, isolate, message.status.info)


def nics_switched(message: wire.SwitchResult) -> NicsSwitched:
    return NicsSwitched(message.result)


def stress_tested(message: wire.StressTestResult) -> StressTested:
    return StressTested(
        {
            rank(number): {op: (each.code, each.result) for op, each in results.rankResult.items()}
            for number, results in message.stressResult.items()
        }
    )


def signal(job: str, value: Signal) -> wire.ProcessManageSignal:
    return wire.ProcessManageSignal(
        uuid=value.uuid,
        jobId=job,
        signalType=value.type,
        actions=value.actions,
        faultRanks=[wire.FaultRank(rankId=str(each), faultType=kind) for each, kind in sorted(value.faults.items())],
        changeStrategy=value.strategy,
        timeout=value.timeout,
        nodeRankIds=[str(node) for node in value.nodes],
        extraParams=value.extra,
    )


def keep_alive(job: str, uuid: str = "") -> wire.ProcessManageSignal:
    """With the uuid of what was said last; empty before that."""
    return wire.ProcessManageSignal(uuid=uuid, jobId=job, signalType=KEEP_ALIVE)


def nic_order(job: str, value: NotifyNics) -> wire.SwitchRankList:
    ops = sorted(value.ops.items())
    return wire.SwitchRankList(rankID=[str(each) for each, _ in ops], op=[op for _, op in ops], jobId=job)


def stress_order(job: str, value: NotifyStress) -> wire.StressTestRankParams:
    message = wire.StressTestRankParams(jobId=job)
    for each, ops in value.ops.items():
        message.stressParam[str(each)].ops.extend(ops)
    return message
