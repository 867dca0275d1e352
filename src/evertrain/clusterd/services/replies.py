"""The reference's answers, in its words. Pure."""

from __future__ import annotations

from enum import IntEnum

from evertrain.clusterd.recover.events import ProcessFault, Status, StopComplete, Strategies
from evertrain.clusterd.services.ports import Reply, Report


class Code(IntEnum):
    """Of answers. Those that only clients send, or that never leave the machine, are not among them."""

    OK = 0
    SUCCESS = 200
    """Of the Fault and Job services."""
    NOT_REGISTERED = 400
    NO_JOB = 402
    SWITCHED_OFF = 403
    """The job has no process-level recovery."""
    NOT_INITED = 408
    BAD_REQUEST = 409
    RESOURCE_LIMITED = 410
    ORDER_RUNNING = 411
    BAD_ORDER = 413
    LIMITED = 429
    TOO_MANY = 500
    GROUP_FAILED = 502
    """The PodGroup could not be read or written, or the job not be resolved."""


MOST_JOBS = 10_000
"""That are registered, with Recover and with Fault."""
LONGEST_NAME = 256
"""Characters of a job's id, a service's name or a role."""

_REPORTS: dict[type[Report], str] = {
    StopComplete: "ReportStopComplete",
    Strategies: "ReportRecoverStrategy",
    Status: "ReportRecoverStatus",
}


def inited(job: str) -> Reply:
    return Reply(Code.OK, f"job(uid={job}) init success")


def not_inited(job: str) -> Reply:
    return Reply(Code.NOT_INITED, f"jobId={job} not inited")


def switched_off(job: str) -> Reply:
    return Reply(Code.SWITCHED_OFF, f"job(uid={job}) has neither process-recover-enable=on nor a hot switch")


def unresolved(job: str, why: str) -> Reply:
    return Reply(Code.GROUP_FAILED, f"jobId={job}: {why}")


def no_job(job: str) -> Reply:
    return Reply(Code.NO_JOB, f"jobId={job} not exist")


def too_many(job: str) -> Reply:
    return Reply(Code.TOO_MANY, f"jobId={job} out of max serve jobs {MOST_JOBS}")


def too_long(*names: str) -> Reply | None:
    """Who registers with one of these would be remembered with it."""
    longest = max(map(len, names))
    if longest <= LONGEST_NAME:
        return None
    return Reply(Code.BAD_REQUEST, f"jobId or role is too long: {longest} characters, at most {LONGEST_NAME}")


def registered() -> Reply:
    return Reply(Code.OK, "register success")


def not_registered(job: str) -> Reply:
    return Reply(Code.NOT_REGISTERED, f"jobId={job} not registed")


def received(job: str, uuid: str, report: Report) -> Reply:
    """`uuid` is that of the recovery that the report went to."""
    if isinstance(report, ProcessFault):
        return Reply(Code.OK, "receive ReportProcessFault")
    name = _REPORTS.get(type(report))
    if name is None:
        return Reply(Code.OK, "reply success")
    return Reply(Code.OK, f"jobId={job}, uuid={uuid}, receive {name}")


def healthy(job: str) -> Reply:
    return Reply(Code.OK, f"jobId={job}, receive HeathCheck")
