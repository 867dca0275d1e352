"""The Job service: which jobs there are and how they are, for platforms that show them.

Both streams begin with all jobs there are (the list variant in batches), so that a client that comes back has missed
nothing, and go on with each change.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.limits import Bucket
from evertrain.clusterd.services.ports import JobPort, Subscription, Summary
from evertrain.clusterd.services.replies import Code
from evertrain.clusterd.services.streams import fail, pour
from evertrain.wire import job_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Job"]
ROLES = frozenset({"CCAgent", "DefaultUser1", "DefaultUser2", "FdAgent"})
MOST_CLIENTS = 100_000
MOST_STREAMS = 20
"""Of one role."""
SUBSCRIPTIONS = 20
"""A second, and at once."""
UNUSED = 600.0
"""Seconds after which a registration that nobody has subscribed with may be forgotten, when there are too many."""
MOST_CHIPS = 40_000
"""Of the jobs in one list."""
MOST_BYTES = (4 << 20) - 4096
"""Of the jobs in one list, unless a single one has more: with the rest of the message less than clients take."""
FRAME = 6
"""Bytes around each job in a list: its tag and its length."""


@dataclass(slots=True)
class _Client:
    role: str
    since: float
    streams: dict[str, Subscription[Summary]] = field(default_factory=dict)
    """By method."""


class Job:
    def __init__(self, hub: JobPort, security: Security, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._hub, self._security, self._clock = hub, security, clock
        self._clients: dict[str, _Client] = {}
        self._streams: Counter[str] = Counter()
        self._subscriptions = Bucket(SUBSCRIPTIONS, SUBSCRIPTIONS)

    async def Register(self, request: wire.ClientInfo, context: Any) -> wire.Status:
        await self._security.admit(context)
        if request.role not in ROLES:
            return wire.Status(code=Code.NOT_REGISTERED, info=f"role {request.role[:64]} is not one of {sorted(ROLES)}")
        if len(self._clients) >= MOST_CLIENTS and not self._forget_unused():
            return wire.Status(code=Code.LIMITED, info=f"there are more than {MOST_CLIENTS} clients")
        client = str(uuid.uuid4())
        self._clients[client] = _Client(request.role, self._clock())
        return wire.Status(code=Code.SUCCESS, info="registration successful", clientId=client)

    def _forget_unused(self) -> bool:
        """Those that registered first are the first in the dictionary."""
        before = self._clock() - UNUSED
        for name, client in self._clients.items():
            if client.since > before:
                return False
            if not client.streams:
                del self._clients[name]
                return True
        return False

    async def SubscribeJobSummarySignal(self, request: wire.ClientInfo, context: Any) -> None:
        def all_jobs(summaries: list[Summary]) -> Iterator[wire.JobSummarySignal]:
            return map(_signal, summaries)

        await self._subscribe("signal", request, context, all_jobs, _signal)

    async def SubscribeJobSummarySignalList(self, request: wire.ClientInfo, context: Any) -> None:
        def all_jobs(summaries: list[Summary]) -> Iterator[wire.JobSummarySignalList]:
            return (_list(batch, len(summaries)) for batch in batches(summaries))

        def one(summary: Summary) -> wire.JobSummarySignalList:
            return _list([_signal(summary)], len(self._hub.summaries()))

        await self._subscribe("list", request, context, all_jobs, one)

    async def _subscribe(
        self,
        method: str,
        request: wire.ClientInfo,
        context: Any,
        first: Callable[[list[Summary]], Iterator[Any]],
        message: Callable[[Summary], Any],
    ) -> None:
        await self._security.admit(context)
        name = request.clientId
        client = self._clients.get(name)
        if client is None:
            return await fail(context, f"invalid clientId: {name[:64]}, please register first")
        if client.role != request.role:
            return await fail(context, f"role {request.role[:64]} is not the one that registered")
        if not self._subscriptions.take(self._clock()):
            return await fail(context, f"more than {SUBSCRIPTIONS} subscriptions a second")
        before = client.streams.pop(method, None)
        if before is not None:
            before.close()
            self._streams[client.role] -= 1
        if self._streams[client.role] >= MOST_STREAMS:
            return await fail(context, f"role {client.role} has {MOST_STREAMS} streams already")
        changes = self._hub.summary_changes()  # before the list is made, so that nothing is missed between
        client.streams[method] = changes
        self._streams[client.role] += 1
        try:
            await pour(context, changes, message, first(list(self._hub.summaries().values())))
        finally:
            if client.streams.get(method) is changes:
                del client.streams[method]
                self._streams[client.role] -= 1
                if not client.streams:
                    self._clients.pop(name, None)


def batches(summaries: Iterable[Summary]) -> Iterator[list[wire.JobSummarySignal]]:
    """Lists that fit into a message."""
    batch: list[wire.JobSummarySignal] = []
    chips = size = 0
    for summary in summaries:
        signal = _signal(summary)
        length = signal.ByteSize() + FRAME
        if batch and (chips + summary.chips > MOST_CHIPS or size + length > MOST_BYTES):
            yield batch
            batch, chips, size = [], 0, 0
        batch.append(signal)
        chips, size = chips + summary.chips, size + length
    if batch:
        yield batch


def _signal(summary: Summary) -> wire.JobSummarySignal:
    return wire.JobSummarySignal(uuid=str(uuid.uuid4()), **summary.signal())


def _list(signals: list[wire.JobSummarySignal], total: int) -> wire.JobSummarySignalList:
    return wire.JobSummarySignalList(
        jobSummarySignals=signals, ReportTime=str(time.time_ns() // 1_000_000), JobTotalNum=total
    )
