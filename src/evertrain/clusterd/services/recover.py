"""The Recover service: what a job's manager and ClusterD say to each other, and a platform's orders.

One stream of signals (and one each of orders) for a job: when a second client subscribes, the stream of the first ends
without an error, and the newest hears everything from then on. So a manager that comes back is never locked out by what
its predecessor left behind; two that live at the same time would take the stream from each other, each visibly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evertrain import aio
from evertrain.clusterd.recover.events import Signal
from evertrain.clusterd.services import orders, replies, translate
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.ports import About, RecoverPort, Reply, Report
from evertrain.clusterd.services.replies import Code
from evertrain.clusterd.services.streams import fail, pour, pour_alive, send
from evertrain.wire import recover_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Recover"]
KEEP_ALIVE = 5.0
"""Seconds between signals that say nothing but that ClusterD is there."""
ANSWER_LIMIT = 900.0
"""Seconds that a platform waits for the answer to its order."""
_LATE: dict[About, str] = {
    "nic": "report switch nic result timeout, please check manually",
    "stress": "report stress test result timeout, please check manually",
}
_IDLE: dict[About, str] = {"nic": "is not swtiching nic", "stress": "is not stress test"}


class Recover:
    def __init__(self, hub: RecoverPort, security: Security, *, keep_alive: float = KEEP_ALIVE) -> None:
        self._hub, self._security, self._keep_alive = hub, security, keep_alive

    async def Init(self, request: wire.ClientInfo, context: Any) -> wire.Status:
        await self._security.admit(context, request.jobId)
        return _status(await self._hub.init(request.jobId))

    async def Register(self, request: wire.ClientInfo, context: Any) -> wire.Status:
        await self._security.admit(context, request.jobId)
        return _status(await self._hub.register(request.jobId))

    async def HealthCheck(self, request: wire.ClientInfo, context: Any) -> wire.Status:
        await self._security.admit(context, request.jobId)
        return _status(replies.healthy(request.jobId))

    async def SubscribeProcessManageSignal(self, request: wire.ClientInfo, context: Any) -> None:
        job = request.jobId
        await self._security.admit(context, job)
        signals = await self._hub.signals(job)
        if signals is None:
            return await fail(context, replies.not_registered(job).info)
        uuid = ""

        def said(signal: Signal) -> wire.ProcessManageSignal:
            nonlocal uuid
            uuid = signal.uuid
            return translate.signal(job, signal)

        await pour_alive(context, signals, said, lambda: translate.keep_alive(job, uuid), self._keep_alive)

    # Reports.

    async def ReportStopComplete(self, request: wire.StopCompleteRequest, context: Any) -> wire.Status:
        return await self._report(request, context, translate.stop_complete)

    async def ReportRecoverStrategy(self, request: wire.RecoverStrategyRequest, context: Any) -> wire.Status:
        return await self._report(request, context, translate.strategies)

    async def ReportRecoverStatus(self, request: wire.RecoverStatusRequest, context: Any) -> wire.Status:
        return await self._report(request, context, translate.status)

    async def ReportProcessFault(self, request: wire.ProcessFaultRequest, context: Any) -> wire.Status:
        return await self._report(request, context, translate.process_fault)

    async def ReplySwitchNicResult(self, request: wire.SwitchResult, context: Any) -> wire.Status:
        return await self._report(request, context, translate.nics_switched, Code.BAD_ORDER)

    async def ReplyStressTestResult(self, request: wire.StressTestResult, context: Any) -> wire.Status:
        return await self._report(request, context, translate.stress_tested, Code.BAD_ORDER)

    async def _report(
        self, request: Any, context: Any, translated: Callable[[Any], Report], malformed: Code = Code.BAD_REQUEST
    ) -> wire.Status:
        await self._security.admit(context, request.jobId)
        try:
            report = translated(request)
        except translate.Malformed as error:
            if not self._hub.registered(request.jobId):
                return _status(replies.not_registered(request.jobId))
            return _status(Reply(malformed, f"jobId={request.jobId}: {error}"))
        return _status(await self._hub.report(request.jobId, report))

    # Orders of a platform, and what the manager hears of them.

    async def SwitchNicTrack(self, request: wire.SwitchNics, context: Any) -> wire.Status:
        name = request.jobID
        await self._security.admit(context, name)
        nodes = {node: (list(each.dev), list(each.op)) for node, each in request.nicOps.items()}
        try:
            order = orders.switch_nics(
                name, self._hub.job(name), self._hub.registered(name), nodes, self._hub.super_pod
            )
        except orders.Refused as error:
            return _status(Reply(Code.BAD_ORDER, str(error)))
        return _status(orders.NICS_ORDERED if await self._hub.order(name, order) else orders.nics_busy(name))

    async def StressTest(self, request: wire.StressTestParam, context: Any) -> wire.Status:
        name = request.jobID
        # Not for the job itself: by what it says of the result it would take nodes away from everybody.
        await self._security.admit(context)
        nodes = {node: list(each.ops) for node, each in request.stressParam.items()}
        try:
            order = orders.stress_test(
                name, self._hub.job(name), self._hub.registered(name), nodes, list(request.allNodesOps)
            )
        except orders.Refused as error:
            return _status(Reply(Code.BAD_ORDER, str(error)))
        return _status(orders.STRESS_ORDERED if await self._hub.order(name, order) else orders.stress_busy(name))

    async def SubscribeNotifySwitch(self, request: wire.ClientInfo, context: Any) -> None:
        job = request.jobId
        await self._security.admit(context, job)
        nics = await self._hub.nic_orders(job)
        if nics is None:
            return await fail(context, f"{replies.not_registered(job).info}, please wait agent register")
        await pour(context, nics, lambda order: translate.nic_order(job, order))

    async def SubscribeNotifyExecStressTest(self, request: wire.ClientInfo, context: Any) -> None:
        job = request.jobId
        await self._security.admit(context, job)
        tests = await self._hub.stress_orders(job)
        if tests is None:
            return await fail(context, f"{replies.not_registered(job).info}, please wait agent register")
        await pour(context, tests, lambda order: translate.stress_order(job, order))

    async def SubscribeSwitchNicSignal(self, request: wire.SwitchNicRequest, context: Any) -> None:
        await self._answer(request.jobID, "nic", wire.SwitchNicResponse, context)

    async def SubscribeStressTestResponse(self, request: wire.StressTestRequest, context: Any) -> None:
        await self._answer(request.jobID, "stress", wire.StressTestResponse, context)

    async def _answer(self, job: str, about: About, message: Callable[..., Any], context: Any) -> None:
        """One, and the stream is over."""
        await self._security.admit(context, job)
        if not self._hub.registered(job):
            return await fail(context, replies.not_registered(job).info)
        answers = self._hub.answers(job, about)
        if answers is None:
            return await fail(context, f"jobId={job} {_IDLE[about]}")
        try:
            await context.send_initial_metadata(())
            async with aio.timeout(ANSWER_LIMIT):
                text = await anext(answers)
        except StopAsyncIteration:
            return
        except TimeoutError:
            text = _LATE[about]
        finally:
            answers.close()
        await send(context, message(jobID=job, msg=text))


def _status(reply: Reply) -> wire.Status:
    return wire.Status(code=reply.code, info=reply.info)
