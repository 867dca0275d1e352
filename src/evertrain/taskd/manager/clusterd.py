"""The manager's link to ClusterD: its signals and orders, our reports and replies. Comes back after every break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from evertrain import aio
from evertrain.taskd.manager import translate
from evertrain.taskd.manager.orders import NicReply, Signal, StressReply
from evertrain.taskd.manager.outbox import Outbox
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.net.routing import is_rank
from evertrain.taskd.net.security import Security
from evertrain.wire import profiling_pb2, recover_pb2, service

log = logging.getLogger(__name__)

RECOVER = recover_pb2.DESCRIPTOR.services_by_name["Recover"]
TRACE = profiling_pb2.DESCRIPTOR.services_by_name["TrainingDataTrace"]
ROLE = "taskd"
OK, SWITCHED_OFF = 0, 403
RECOVERY = frozenset({"ReportProcessFault", "ReportStopComplete", "ReportRecoverStrategy", "ReportRecoverStatus"})

_CALL = 60.0
"""Seconds for an answer. One that is late is waited for: the same report twice would be one too many."""
_HEALTH, _HEALTH_LIMIT = 5.0, 30.0
"""Seconds between questions whether ClusterD is there, and for the answer."""
_OPENING = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_MANY = 60
"""Attempts after which it is told that ClusterD stays away. An original manager gives up here."""
_SWITCHED_OFF_PAUSE = 30.0
"""Seconds before a ClusterD that does not lead this job is asked again: it may do so after its own restart."""
_REFUSALS = 20
"""How often a report is refused, by a ClusterD that does not know us or can't deal with it, before it is given up."""
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""Errors of a ClusterD that is not there, or of a line that broke: it is waited for, however long that takes."""
_STRANGERS = frozenset({400, 402, 408})
"""Answers of a ClusterD that does not know us (any more): not registered, no such job, not initialised."""
_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),  # a cut line says nothing by itself
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),  # a newer gRPC's name for it
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # that is how long a connection may take
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_http_proxy", 0),
]


class ClusterD:
    """Events come by the callbacks, in the loop: `signal`, `nics(ranks, ops, job)`, `stress(ops, job)`, `profile`.

    What has no callback is not subscribed to.
    """

    def __init__(
        self,
        address: str,
        job: str,
        *,
        security: Security,
        role: str = ROLE,
        name: str = "",
        signal: Callable[[Signal], None] | None = None,
        nics: Callable[[list[str], list[bool], str], None] | None = None,
        stress: Callable[[dict[int, list[int]], str], None] | None = None,
        profile: Callable[[dict[str, str]], None] | None = None,
        leads: Callable[[bool], None] = lambda led: None,
    ) -> None:
        """`leads` hears each time that ClusterD has taken the lead, all that went before being forgotten, or won't.

        `name` is what its certificate has to call it, if not by the address.
        """
        self._name = name
        self._address, self._job, self._role, self._security = address, job, role, security
        self._on_signal, self._on_nics, self._on_stress, self._on_profile = signal, nics, stress, profile
        self._leads = leads
        self.subscribed = asyncio.Event()
        """Signals would reach us now."""
        self.switched_off = False
        """ClusterD says that this job has no process-level recovery."""
        self.traced = False
        """It has told us once which timings to write: from then on nobody else does."""
        self._outbox = Outbox()
        self._open = asyncio.Event()
        """Reports may be sent. ClusterD forgets all that went before when it is subscribed to."""
        self._stream: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._channel: Any = None
        self._recover: Any = None
        self._trace: Any = None

    @property
    def _who(self) -> recover_pb2.ClientInfo:
        return recover_pb2.ClientInfo(jobId=self._job, role=self._role)

    async def open(self) -> None:
        """For single calls."""
        certificates = self._security.certificates
        if certificates is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        else:
            options = [*_OPTIONS, ("grpc.ssl_target_name_override", self._name)] if self._name else _OPTIONS
            self._channel = grpc.aio.secure_channel(self._address, certificates.client(), options=options)
        self._recover, self._trace = service.stub(self._channel, RECOVER), service.stub(self._channel, TRACE)

    async def start(self) -> None:
        """Subscribe, and keep it up."""
        if self._channel is None:
            await self.open()
        work: list[tuple[object, Callable[[], Coroutine[Any, Any, None]]]] = [
            (self._on_nics, self._nics),
            (self._on_stress, self._stress),
            (self._on_profile, self._profiling),
            (self._on_signal, self._signals),
        ]
        self._tasks = [asyncio.ensure_future(self._again_and_again(each)) for wanted, each in work if wanted]
        if self._on_signal is None:
            self._open.set()
        self._tasks.append(asyncio.ensure_future(self._outbox.run(self._deliver)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    # Reports.

    def report(self, report: Report) -> asyncio.Future[None]:
        """Sent in order, however long ClusterD is away. Done when ClusterD has it."""
        return self._outbox.put(*translate.request(self._job, report))

    def forget_reports(self) -> None:
        """Of a recovery: those that are not sent yet."""
        self._outbox.forget(RECOVERY)

    def reply_nics(self, reply: NicReply) -> None:
        self._outbox.put("ReplySwitchNicResult", recover_pb2.SwitchResult(jobId=reply.job, result=reply.result))

    def reply_stress(self, reply: StressReply) -> None:
        message = recover_pb2.StressTestResult(jobId=reply.job)
        for rank, results in reply.results.items():
            for op, (code, text) in results.items():
                entry = message.stressResult[rank].rankResult[op]
                entry.code, entry.result = code, text
        self._outbox.put("ReplyStressTestResult", message)

    async def flush(self, seconds: float) -> bool:
        """Until all reports are sent; False if that takes longer."""
        if await self._outbox.flush(seconds):
            return True
        log.warning("ClusterD at %s has not got the last reports within %g s", self._address, seconds)
        return False

    async def _deliver(self, method: str, message: Any) -> None:
        pauses, told, refusals = _pauses(), "", 0
        while refusals < _REFUSALS:
            await self._open.wait()
            try:
                status = await (self._call if self._on_signal else self.call)(method, message)
                if status.code not in _STRANGERS or self._on_signal is None or self.switched_off:
                    if status.code != OK:
                        log.error("%s: ClusterD answered %d %s", method, status.code, status.info)
                    return
                reason = f"ClusterD answered {status.code} {status.info}"
                refusals += 1
                self._begin_anew()
            except (grpc.aio.AioRpcError, ConnectionError) as error:
                reason = _reason(error)
                refusals += not (isinstance(error, grpc.aio.AioRpcError) and error.code() in _AWAY)
            if reason != told:
                told = reason
                log.warning("%s: %s; it is sent again when ClusterD is back", method, reason)
            await asyncio.sleep(next(pauses))
        log.error("%s: ClusterD does not take it; it is given up", method)

    def _begin_anew(self) -> None:
        """Register and subscribe again, and report then."""
        self._open.clear()
        if self._stream is not None:
            self._stream.cancel()

    async def call(self, method: str, message: Any) -> recover_pb2.Status:
        """Once, and once more after a registration if ClusterD doesn't know us any more. AioRpcError if it is away."""
        status = await self._call(method, message)
        if status.code != OK:
            log.warning("%s: ClusterD answered %d %s; registering again", method, status.code, status.info)
            try:
                await self._register()
            except ConnectionError as error:
                log.warning("%s: %s", method, str(error))
                return status
            status = await self._call(method, message)
        return status

    async def _call(self, method: str, message: Any, **options: Any) -> recover_pb2.Status:
        metadata = self._security.metadata()
        status = await getattr(self._recover, method)(message, timeout=_CALL, metadata=metadata, **options)
        if status is None:
            raise ConnectionError(f"{method}: what ClusterD answers is no answer")
        return status

    async def register(self, who: recover_pb2.ClientInfo | None = None) -> recover_pb2.Status:
        return await self._call("Register", who or self._who)

    async def init(self) -> bool:
        """Until ClusterD is ready for this job; False if it has nothing to say to it."""
        pauses, told = _pauses(), ""
        while True:
            try:
                status = await self._call("Init", self._who)
                if status.code in (OK, SWITCHED_OFF):
                    return status.code == OK
                reason = f"{status.code} {status.info}"
            except (grpc.aio.AioRpcError, ConnectionError) as error:
                reason = _reason(error)
            if reason != told:
                told = reason
                log.warning("ClusterD at %s is not ready for the job: %s", self._address, reason)
            await asyncio.sleep(next(pauses))

    # Subscriptions.

    async def _again_and_again(self, subscription: Callable[[], Coroutine[Any, Any, None]]) -> None:
        pauses, told, tries = _pauses(), "", 0
        while True:
            begun = asyncio.get_running_loop().time()
            reason = "the stream ended"
            try:
                await subscription()
            except grpc.aio.AioRpcError as error:
                reason = _reason(error)
                if error.code() == grpc.StatusCode.UNIMPLEMENTED and subscription != self._signals:
                    log.info("ClusterD at %s: %s", self._address, reason)
                    return
            except ConnectionError as error:
                reason = str(error)
            except asyncio.CancelledError:
                if aio.is_cancelled():
                    raise
                reason = "the stream was given up"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                log.error("ClusterD at %s: %s", self._address, traceback.format_exc())
            tries += 1
            if asyncio.get_running_loop().time() - begun > _LONGEST_PAUSE:
                pauses, told, tries = _pauses(), "", 0
            if tries == _MANY:
                log.error("init clusterd connect meet max retry time %d: %s: trying on", tries, reason)
            if reason != told:
                told = reason
                log.warning("ClusterD at %s: %s: connecting again", self._address, reason)
            await asyncio.sleep(_SWITCHED_OFF_PAUSE if self._is_off(subscription) else next(pauses))

    def _is_off(self, subscription: object) -> bool:
        return self.switched_off and subscription == self._signals

    async def _register(self) -> bool:
        """False if ClusterD has nothing to say to this job."""
        status = await self._call("Init", self._who, wait_for_ready=True)
        if status.code == SWITCHED_OFF:
            log.warning("ClusterD has no process-level recovery for this job: %s", status.info)
            self.switched_off = True
            return False
        if status.code == OK:
            status = await self._call("Register", self._who)
        if status.code != OK:
            raise ConnectionError(f"ClusterD does not take the job: {status.code} {status.info}")
        self.switched_off = False
        return True

    async def _signals(self) -> None:
        if not await self._register():
            self._leads(False)
            self._open.set()
            return
        stream = self._recover.SubscribeProcessManageSignal(self._who, metadata=self._security.metadata())
        health = asyncio.ensure_future(self._check_health(stream))
        self._stream = stream
        try:
            # Ours answers at once; an original ClusterD says nothing before its first signal.
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(_OPENING):
                    await stream.initial_metadata()
            self.subscribed.set()
            self._leads(True)
            self._open.set()
            await self._each(stream, self._take_signal)
        finally:
            self._stream = None
            self.subscribed.clear()
            self._open.clear()
            health.cancel()
            stream.cancel()
            await asyncio.wait({health})

    def _take_signal(self, message: Any) -> None:
        signal = translate.signal(message)
        if signal is not None and self._on_signal is not None:
            self._on_signal(signal)

    async def _check_health(self, stream: Any) -> None:
        while True:
            await asyncio.sleep(_HEALTH)
            try:
                metadata = self._security.metadata()
                await self._recover.HealthCheck(self._who, timeout=_HEALTH_LIMIT, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:  # it answers, and that is what matters
                    continue
                reason = _reason(error)
            except Exception as error:  # whatever it is, nobody would know any more whether ClusterD is there
                reason = f"{type(error).__name__}: {error}"
            else:
                continue
            log.warning("ClusterD does not answer: %s", reason)
            stream.cancel()
            return

    async def _each(self, stream: Any, take: Callable[[Any], None]) -> None:
        """Every message of a stream. One that makes no sense does not take those after it along."""
        try:
            async for message in stream:
                if message is None:
                    log.error("ClusterD at %s sent something that can't be decoded", self._address)
                    continue
                try:
                    take(message)
                except Exception:
                    what = str(message)[:500]
                    log.error("a word of ClusterD could not be dealt with: %s: %s", what, traceback.format_exc())
        finally:
            stream.cancel()

    async def _nics(self) -> None:
        stream = self._recover.SubscribeNotifySwitch(self._who, wait_for_ready=True, metadata=self._security.metadata())
        await self._each(stream, self._take_nics)

    def _take_nics(self, message: Any) -> None:
        if self._on_nics is not None:
            self._on_nics(list(message.rankID), list(message.op), message.jobId)

    async def _stress(self) -> None:
        metadata = self._security.metadata()
        stream = self._recover.SubscribeNotifyExecStressTest(self._who, wait_for_ready=True, metadata=metadata)
        await self._each(stream, self._take_stress)

    def _take_stress(self, message: Any) -> None:
        ops = {int(rank): list(each.ops) for rank, each in message.stressParam.items() if is_rank(rank)}
        if len(ops) < len(message.stressParam):
            log.error("a stress test of ClusterD names what is no rank: %s", str(message)[:500])
        if self._on_stress is not None:
            self._on_stress(ops, message.jobId)

    async def _profiling(self) -> None:
        who = profiling_pb2.ProfilingClientInfo(jobId=self._job, role=ROLE)
        stream = self._trace.SubscribeDataTraceSwitch(who, wait_for_ready=True, metadata=self._security.metadata())
        await self._each(stream, self._take_switch)

    def _take_switch(self, message: Any) -> None:
        if message.HasField("profilingSwitch") and self._on_profile is not None:
            self.traced = True
            self._on_profile({field.name: value for field, value in message.profilingSwitch.ListFields()})


def _pauses() -> Any:
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _reason(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    return f"{error.code().name.lower()}: {error.details()}"
