"""Between the wire of ClusterD and what the manager works with. Pure."""

from __future__ import annotations

import logging
from typing import Any

from evertrain.taskd.manager import reports
from evertrain.taskd.manager.orders import Signal
from evertrain.taskd.manager.reports import Report
from evertrain.wire import recover_pb2

log = logging.getLogger(__name__)


def request(job: str, report: Report) -> tuple[str, Any]:
    """The method by which something is reported, and its message."""
    ranks = [
        recover_pb2.FaultRank(rankId=str(rank), faultType=str(kind)) for rank, kind in sorted(report.faults.items())
    ]
    status = recover_pb2.Status(code=report.code, info=report.message)
    match report.action:
        case reports.PROCESS_FAULT:
            return "ReportProcessFault", recover_pb2.ProcessFaultRequest(jobId=job, faultRanks=ranks)
        case reports.STOP_COMPLETE:
            stopped = recover_pb2.StopCompleteRequest(jobId=job, status=status, faultRanks=ranks)
            return "ReportStopComplete", stopped
        case reports.RECOVER_STRATEGY:
            offered = recover_pb2.RecoverStrategyRequest(jobId=job, faultRanks=ranks, strategies=report.strategies)
            return "ReportRecoverStrategy", offered
        case reports.RECOVER_STATUS:
            isolated = [rank.rankId for rank in ranks]
            result = recover_pb2.RecoverStatusRequest(
                jobId=job, status=status, strategy=report.strategy, isolateRankIds=isolated
            )
            return "ReportRecoverStatus", result
    raise ValueError(f"unknown report {report.action}")


def signal(message: recover_pb2.ProcessManageSignal) -> Signal | None:
    """None, with a word in the log, if it makes no sense."""
    try:
        return Signal(
            type=message.signalType,
            uuid=message.uuid,
            job=message.jobId,
            actions=tuple(message.actions),
            faults={int(fault.rankId): int(fault.faultType or "1") for fault in message.faultRanks},
            strategy=message.changeStrategy,
            timeout=message.timeout,
            nodes=tuple(int(node) for node in message.nodeRankIds),
            extra=message.extraParams,
        )
    except ValueError as error:
        log.error("a signal of ClusterD makes no sense (%s): %s", str(error), str(message)[:500])
        return None
