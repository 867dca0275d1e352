"""The Config service: the rank table of all servers of a MindIE service, told when it changes.

Parts of a service call it by the service's name and not by the uid of their job: with tokens, each shows that of its
own job, and hears of the service of that name in its own namespace.
"""

from __future__ import annotations

from typing import Any

from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.ports import ConfigPort
from evertrain.clusterd.services.registry import Registry
from evertrain.clusterd.services.replies import MOST_JOBS, Code, registered, too_long, too_many
from evertrain.clusterd.services.streams import fail, pour
from evertrain.wire import config_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Config"]


class Config:
    def __init__(self, hub: ConfigPort, security: Security) -> None:
        self._hub, self._security = hub, security
        self._registry: Registry[tuple[str, str, str]] = Registry(MOST_JOBS)
        """By service, role and the job whose token was shown, if it was one."""

    async def Register(self, request: wire.ClientInfo, context: Any) -> wire.Status:
        member = await self._security.admit(context, request.jobId, self._hub.jobs_of(request.jobId))
        if wrong := too_long(request.jobId, request.role):
            return wire.Status(code=wrong.code, info=wrong.info)
        if not self._registry.register((request.jobId, request.role, member)):
            return wire.Status(code=Code.TOO_MANY, info=too_many(request.jobId).info)
        return wire.Status(code=Code.OK, info=registered().info)

    async def SubscribeRankTable(self, request: wire.ClientInfo, context: Any) -> None:
        job = request.jobId
        member = await self._security.admit(context, job, self._hub.jobs_of(job))
        key = (job, request.role, member)
        if key not in self._registry:
            return await fail(context, f"jobId={job}, role={request.role} not registed")
        tables = self._hub.rank_tables(job, member)
        self._registry.enter(key, tables)
        try:
            await pour(context, tables, lambda table: wire.RankTableStream(jobId=job, rankTable=table))
        finally:
            self._registry.leave(key, tables)
