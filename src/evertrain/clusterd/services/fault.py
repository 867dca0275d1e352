"""The Fault service: what is wrong with a job, or with all of them, told when it changes.

A client registers (job and role), then subscribes; when its stream ends, it registers again. The faults of a job are
told as a whole whenever they change, so a slow client misses states in between, never the newest.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any

from evertrain.clusterd.model import FaultDevice, JobFaults
from evertrain.clusterd.services import faultmsg
from evertrain.clusterd.services.access import WHOLE_CLUSTER, Security
from evertrain.clusterd.services.limits import Bucket
from evertrain.clusterd.services.ports import FaultPort
from evertrain.clusterd.services.registry import Registry
from evertrain.clusterd.services.replies import MOST_JOBS, Code, no_job, too_long, too_many
from evertrain.clusterd.services.streams import fail, pour
from evertrain.wire import fault_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Fault"]
QUERIES = 10
"""A second, and at once."""
LONGEST_WAIT = 5.0
"""Seconds; so no more than 50 queries wait."""
_SHORTEST_ID, _LONGEST_ID = 8, 128
_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


class Fault:
    def __init__(self, hub: FaultPort, security: Security) -> None:
        self._hub, self._security = hub, security
        self._registry: Registry[tuple[str, str, str]] = Registry(MOST_JOBS)
        """By job or service, role, and the job of that service whose token was shown, if it was one."""
        self._queries = Bucket(QUERIES, QUERIES)

    async def Register(self, request: wire.ClientInfo, context: Any) -> wire.Status:
        job = request.jobId or WHOLE_CLUSTER
        member = await self._security.admit(context, job, self._hub.jobs_of(job))
        if not request.role:
            await fail(context, "request is nil or role is empty")
        if job != WHOLE_CLUSTER and not self._hub.jobs_of(job):
            return wire.Status(code=Code.NO_JOB, info=no_job(job).info)
        if wrong := too_long(job, request.role):
            return wire.Status(code=wrong.code, info=wrong.info)
        if not self._registry.register((job, request.role, member)):
            return wire.Status(code=Code.TOO_MANY, info=too_many(job).info)
        return wire.Status(code=Code.SUCCESS, info="register success")

    async def SubscribeFaultMsgSignal(self, request: wire.ClientInfo, context: Any) -> None:
        job = request.jobId or WHOLE_CLUSTER
        member = await self._security.admit(context, job, self._hub.jobs_of(job))
        key = (job, request.role, member)
        if key not in self._registry:
            return await fail(context, f"jobId={job}, role={request.role} not registed")
        alone = tuple(self._hub.jobs_of(job)) == (job,)
        changes = self._hub.fault_changes((job,) if alone else None)
        self._registry.enter(key, changes)
        teller = _All() if job == WHOLE_CLUSTER else _One(job, member, self._hub)
        services = [job] if job != WHOLE_CLUSTER and not alone else []
        for service in services:
            self._hub.heard(service, 1)
        try:
            await pour(context, changes, teller.tell)
        finally:
            for service in services:
                self._hub.heard(service, -1)
            self._registry.leave(key, changes)

    async def GetFaultMsgSignal(self, request: wire.ClientInfo, context: Any) -> wire.FaultQueryResult:
        job = request.jobId
        member = await self._security.admit(context, job, self._hub.jobs_of(job))
        wait = self._queries.reserve(time.monotonic(), LONGEST_WAIT)
        if wait is None:
            return wire.FaultQueryResult(code=Code.LIMITED, info="rate limited, there are too many requests")
        await asyncio.sleep(wait)
        if job and not (_SHORTEST_ID <= len(job) <= _LONGEST_ID and not _CHINESE.search(job)):
            info = f"jobId is invalid: it needs {_SHORTEST_ID} to {_LONGEST_ID} characters, none of them Chinese"
            return wire.FaultQueryResult(code=Code.BAD_REQUEST, info=info)
        faults = self._hub.faults()
        jobs = faults if not job else self._hub.jobs_of(job, member)
        devices = _devices(faults[each] for each in jobs if each in faults)
        if job and not devices:
            return wire.FaultQueryResult(code=Code.SUCCESS, info=f"job {job} has no fault")
        signal = faultmsg.signal(job or WHOLE_CLUSTER, devices, str(uuid.uuid4()))
        return wire.FaultQueryResult(code=Code.SUCCESS, info="query success", faultSignal=signal)


class _All:
    """One message for each job."""

    def __init__(self) -> None:
        self._told: dict[str, bytes] = {}
        """What was said of jobs that have faults."""

    def tell(self, faults: JobFaults) -> wire.FaultMsgSignal | None:
        return self._changed(faults.job, faults.devices)

    def _changed(self, job: str, devices: tuple[FaultDevice, ...]) -> wire.FaultMsgSignal | None:
        message = faultmsg.signal(job, devices)
        content = message.SerializeToString(deterministic=True) if devices else b""
        if content == self._told.get(job, b""):
            return None
        if content:
            self._told[job] = content
        else:
            del self._told[job]
        message.uuid = str(uuid.uuid4())
        return message


class _One(_All):
    """Of a job, or of the jobs that are the instances of a service: in one message, with the id that was asked for."""

    def __init__(self, name: str, member: str, hub: FaultPort) -> None:
        super().__init__()
        self._name, self._member, self._hub = name, member, hub
        self._faults: dict[str, JobFaults] = {}

    def tell(self, faults: JobFaults) -> wire.FaultMsgSignal | None:
        if faults.job not in self._faults and faults.job not in self._hub.jobs_of(self._name, self._member):
            return None
        self._faults[faults.job] = faults
        return self._changed(self._name, _devices(self._faults.values()))


def _devices(faults: Any) -> tuple[FaultDevice, ...]:
    return tuple(dict.fromkeys(device for each in faults for device in each.devices))
