"""The TrainingDataTrace service: which timings the processes of a job write down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.ports import TracePort, Unavailable
from evertrain.clusterd.services.registry import Registry
from evertrain.clusterd.services.replies import MOST_JOBS, too_long
from evertrain.clusterd.services.streams import fail, pour
from evertrain.wire import profiling_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["TrainingDataTrace"]
SWITCHES = tuple(field.name for field in wire.ProfilingSwitch.DESCRIPTOR.fields)
ON, OFF = "on", "off"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class Code(IntEnum):
    OK = 200
    BAD = 300
    MISSING = 404
    FAILED = 500


class TrainingDataTrace:
    def __init__(self, hub: TracePort, security: Security) -> None:
        self._hub, self._security = hub, security
        self._registry: Registry[tuple[str, str]] = Registry(MOST_JOBS)

    async def ModifyTrainingDataTraceSwitch(self, request: wire.DataTypeReq, context: Any) -> wire.DataTypeRes:
        await self._security.admit(context)
        try:
            job = job_name(request.jobNsName)
            wanted = switches(request)
        except ValueError as error:
            return wire.DataTypeRes(code=Code.BAD, message=str(error))
        try:
            if not await self._hub.set_trace(*job, wanted):
                return wire.DataTypeRes(code=Code.MISSING, message=f"there is no job {request.jobNsName}")
        except Unavailable as error:
            return wire.DataTypeRes(code=Code.FAILED, message=str(error))
        return wire.DataTypeRes(code=Code.OK, message="success")

    async def GetTrainingDataTraceSwitch(self, request: wire.DataStatusReq, context: Any) -> wire.DataStatusRes:
        await self._security.admit(context)
        try:
            job = job_name(request.jobNsName)
        except ValueError as error:
            return wire.DataStatusRes(code=Code.BAD, message=str(error))
        try:
            found = await self._hub.trace(*job)
        except Unavailable as error:
            return wire.DataStatusRes(code=Code.FAILED, message=str(error))
        if found is None:
            return wire.DataStatusRes(code=Code.MISSING, message=f"nothing is set for {request.jobNsName}")
        return _status(found)

    async def SubscribeDataTraceSwitch(self, request: wire.ProfilingClientInfo, context: Any) -> None:
        """One stream for each job and role; the one before ends."""
        key = (request.jobId, request.role)
        await self._security.admit(context, request.jobId)
        if wrong := too_long(*key):
            return await fail(context, wrong.info)
        if key not in self._registry and not self._registry.register(key):
            return await fail(context, f"there are {MOST_JOBS} subscribers already")
        changes = self._hub.trace_changes(request.jobId)
        self._registry.enter(key, changes)
        try:
            await pour(context, changes, _status)
        finally:
            self._registry.leave(key, changes)


def job_name(text: str) -> tuple[str, str]:
    """Of `namespace/name`."""
    namespace, slash, name = text.partition("/")
    if not (slash and _NAME.fullmatch(namespace) and _NAME.fullmatch(name)):
        raise ValueError(f"jobNsName has to be namespace/name, not {text[:300]!r}")
    return namespace, name


def switches(request: wire.DataTypeReq) -> dict[str, str]:
    """What is not said is off."""
    if not request.HasField("profilingSwitch"):
        raise ValueError("profilingSwitch is missing")
    found = {name: getattr(request.profilingSwitch, name) or OFF for name in SWITCHES}
    for name, value in found.items():
        if value not in (ON, OFF):
            raise ValueError(f"{name} has to be on or off, not {value[:64]!r}")
    return found


def _status(found: Mapping[str, str]) -> wire.DataStatusRes:
    known = {name: found.get(name, OFF) for name in SWITCHES}
    return wire.DataStatusRes(code=Code.OK, message="success", profilingSwitch=wire.ProfilingSwitch(**known))
