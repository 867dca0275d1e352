"""The Recover service over a real port: what a job's manager and a platform say, hear and are told when it can't be."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from evertrain.clusterd.recover.events import (
    NicsSwitched,
    NotifyNics,
    NotifyStress,
    ProcessFault,
    Signal,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    StressTested,
    SwitchNics,
)
from evertrain.clusterd.services import recover
from evertrain.clusterd.services.ports import Unavailable
from evertrain.clusterd.services.publisher import Everyone
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import Signal as Heard
from evertrain.taskd.net.security import Security as JobSecurity
from evertrain.wire import recover_pb2 as wire
from tests.clusterd.services import JOB, Client, MemoryHub, a_job, client, failure, serving, soon

UNKNOWN = grpc.StatusCode.UNKNOWN
WHO = wire.ClientInfo(jobId=JOB, role="taskd")


def said(status: wire.Status) -> tuple[int, str]:
    return status.code, status.info


async def registered(caller: Client) -> None:
    await soon(caller.Recover.Init(WHO))
    await soon(caller.Recover.Register(WHO))


async def listening(stream: Any) -> Any:
    await soon(stream.initial_metadata())
    return stream


async def end_of(stream: Any) -> None:
    """It ends, without an error."""
    assert await soon(stream.read()) is grpc.aio.EOF
    assert await soon(stream.code()) == grpc.StatusCode.OK


async def test_init_and_register() -> None:
    async with serving() as up, client(up.address) as caller:
        assert said(await soon(caller.Recover.Register(WHO))) == (408, f"jobId={JOB} not inited")
        assert said(await soon(caller.Recover.Init(WHO))) == (0, f"job(uid={JOB}) init success")
        for _ in range(2):
            assert said(await soon(caller.Recover.Register(WHO))) == (0, "register success")
        stranger = wire.ClientInfo(jobId="nobody")
        assert (await soon(caller.Recover.Init(stranger))).code == 502
        assert said(await soon(caller.Recover.HealthCheck(stranger))) == (0, "jobId=nobody, receive HeathCheck")


async def test_every_report_arrives_as_it_was_meant() -> None:
    faults = [wire.FaultRank(rankId="3", faultType="0"), wire.FaultRank(rankId="1", faultType="whatever")]
    failed = wire.Status(code=405, info="why")
    result = wire.StressTestResult(jobId=JOB)
    result.stressResult["2"].rankResult["0"].code = "2"
    result.stressResult["2"].rankResult["0"].result = "hot"
    calls: list[tuple[str, Any, Any, str]] = [
        (
            "ReportStopComplete",
            wire.StopCompleteRequest(jobId=JOB, status=failed, faultRanks=faults),
            StopComplete(405, {3: "0", 1: "1"}),
            f"jobId={JOB}, uuid=uuid-1, receive ReportStopComplete",
        ),
        (
            "ReportRecoverStrategy",
            wire.RecoverStrategyRequest(jobId=JOB, strategies=["retry", "dump"], faultRanks=faults[:1]),
            Strategies(("retry", "dump"), {3: "0"}),
            f"jobId={JOB}, uuid=uuid-1, receive ReportRecoverStrategy",
        ),
        (
            "ReportRecoverStatus",
            wire.RecoverStatusRequest(jobId=JOB, status=failed, strategy="downgrade", isolateRankIds=["4", "5"]),
            Status(405, "downgrade", (4, 5), "why"),
            f"jobId={JOB}, uuid=uuid-1, receive ReportRecoverStatus",
        ),
        (
            "ReportProcessFault",
            wire.ProcessFaultRequest(jobId=JOB, faultRanks=faults),
            ProcessFault({3: "0", 1: "1"}),
            "receive ReportProcessFault",
        ),
        ("ReplySwitchNicResult", wire.SwitchResult(jobId=JOB, result=True), NicsSwitched(True), "reply success"),
        ("ReplyStressTestResult", result, StressTested({2: {"0": ("2", "hot")}}), "reply success"),
    ]
    async with serving() as up, client(up.address) as caller:
        for method, message, _, _ in calls:
            assert said(await soon(getattr(caller.Recover, method)(message))) == (400, f"jobId={JOB} not registed")
        await registered(caller)
        for method, message, report, answer in calls:
            assert said(await soon(getattr(caller.Recover, method)(message))) == (0, answer)
            assert up.hub.reports[-1] == (JOB, report)


@pytest.mark.parametrize("text", ["", "-1", "two", "1.0", "٣", "9" * 10, "1 "])
async def test_a_rank_that_is_none_is_refused(text: str) -> None:
    bad = [wire.FaultRank(rankId=text)]
    result = wire.StressTestResult(jobId=JOB)
    result.stressResult[text].rankResult["0"].code = "0"
    async with serving() as up, client(up.address) as caller:
        early = caller.Recover.ReportProcessFault(wire.ProcessFaultRequest(jobId=JOB, faultRanks=bad))
        assert (await soon(early)).code == 400
        await registered(caller)
        for code, call, message in (
            (409, "ReportStopComplete", wire.StopCompleteRequest(jobId=JOB, faultRanks=bad)),
            (409, "ReportRecoverStrategy", wire.RecoverStrategyRequest(jobId=JOB, faultRanks=bad)),
            (409, "ReportRecoverStatus", wire.RecoverStatusRequest(jobId=JOB, isolateRankIds=[text])),
            (409, "ReportProcessFault", wire.ProcessFaultRequest(jobId=JOB, faultRanks=bad)),
            (413, "ReplyStressTestResult", result),
        ):
            status = await soon(getattr(caller.Recover, call)(message))
            assert status.code == code and "is not a rank" in status.info, call
        assert up.hub.reports == []


async def test_a_hub_that_cannot_now_is_asked_again_later() -> None:
    """A code would make the caller give the report up."""
    async with serving() as up, client(up.address) as caller:
        await registered(caller)
        up.hub.trouble = Unavailable("the API server is away")
        report = caller.Recover.ReportProcessFault(wire.ProcessFaultRequest(jobId=JOB))
        assert await failure(report) == (grpc.StatusCode.UNAVAILABLE, "the API server is away")
        up.hub.trouble = None
        assert (await soon(caller.Recover.ReportProcessFault(wire.ProcessFaultRequest(jobId=JOB)))).code == 0


async def test_a_bug_is_told_to_the_log_and_not_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as up, client(up.address) as caller:
        up.hub.trouble = RuntimeError("the secret of all secrets")
        code, text = await failure(caller.Recover.Init(WHO))
        assert code == grpc.StatusCode.INTERNAL and "secret" not in text
        assert "/Recover/Init failed" in caplog.text and "the secret of all secrets" in caplog.text
        up.hub.trouble = None
        assert (await soon(caller.Recover.Init(WHO))).code == 0


async def test_signals_come_in_order_with_every_field() -> None:
    async with serving() as up, client(up.address) as caller:
        unknown = caller.Recover.SubscribeProcessManageSignal(WHO)
        assert await failure(unknown.read()) == (UNKNOWN, f"jobId={JOB} not registed")
        await registered(caller)
        stream = await listening(caller.Recover.SubscribeProcessManageSignal(WHO))
        up.hub.said.publish(JOB, Signal("stopTrain", "u1", ("stop_train",), {10: "1", 9: "2"}))
        up.hub.said.publish(JOB, Signal("changeStrategy", "u2", ("a", "b"), {}, "recover", 33, (1, 0), "extra"))
        ranks = [wire.FaultRank(rankId="9", faultType="2"), wire.FaultRank(rankId="10", faultType="1")]
        assert await soon(stream.read()) == wire.ProcessManageSignal(
            uuid="u1", jobId=JOB, signalType="stopTrain", actions=["stop_train"], faultRanks=ranks
        )
        assert await soon(stream.read()) == wire.ProcessManageSignal(
            uuid="u2",
            jobId=JOB,
            signalType="changeStrategy",
            actions=["a", "b"],
            changeStrategy="recover",
            timeout=33,
            nodeRankIds=["1", "0"],
            extraParams="extra",
        )


async def test_keep_alive_comes_between_signals() -> None:
    async with serving(keep_alive=0.05) as up, client(up.address) as caller:
        await registered(caller)
        stream = await listening(caller.Recover.SubscribeProcessManageSignal(WHO))
        for _ in range(3):
            assert await soon(stream.read()) == wire.ProcessManageSignal(jobId=JOB, signalType="keep-alive")
        sent = [f"u{number}" for number in range(200)]
        heard: list[str] = []

        async def say() -> None:
            for uuid in sent:
                up.hub.said.publish(JOB, Signal("stopTrain", uuid))
                await asyncio.sleep(0.002)

        speaking = asyncio.ensure_future(say())
        while len(heard) < len(sent):
            message = await soon(stream.read())
            if message.signalType != "keep-alive":
                heard.append(message.uuid)
        await speaking
        assert heard == sent
    assert recover.KEEP_ALIVE == 5.0


async def test_the_newest_subscriber_wins() -> None:
    async with serving() as up, client(up.address) as old, client(up.address) as new:
        await registered(old)
        first = await listening(old.Recover.SubscribeProcessManageSignal(WHO))
        second = await listening(new.Recover.SubscribeProcessManageSignal(WHO))
        await end_of(first)
        up.hub.said.publish(JOB, Signal("stopTrain", "u1"))
        assert (await soon(second.read())).uuid == "u1"
        assert up.hub.left.empty(), "somebody listens all the time"
        second.cancel()
        assert await soon(up.hub.left.get()) == JOB
        third = await listening(old.Recover.SubscribeProcessManageSignal(WHO))
        up.hub.said.end(JOB)
        await end_of(third)


async def test_the_hub_hears_when_a_subscriber_is_gone_with_its_connection() -> None:
    async with serving() as up:
        async with client(up.address) as caller:
            await registered(caller)
            await listening(caller.Recover.SubscribeProcessManageSignal(WHO))
            assert JOB in up.hub.said
        assert await soon(up.hub.left.get()) == JOB


async def test_a_subscriber_that_does_not_read_loses_its_stream_and_nobody_else_anything() -> None:
    async with serving() as up, client(up.address) as deaf, client(up.address) as other:
        await registered(deaf)
        stream = await listening(deaf.Recover.SubscribeProcessManageSignal(WHO))
        while JOB in up.hub.said:  # more than gRPC's own buffers and ours hold
            up.hub.said.publish(JOB, Signal("stopTrain", "x" * 10_000))
            await asyncio.sleep(0)
        assert await soon(up.hub.left.get()) == JOB
        assert (await soon(other.Recover.HealthCheck(WHO))).code == 0
        again = await listening(other.Recover.SubscribeProcessManageSignal(WHO))
        up.hub.said.publish(JOB, Signal("stopTrain", "u1"))
        assert (await soon(again.read())).uuid == "u1"

        async def all_of_it() -> None:
            while await stream.read() is not grpc.aio.EOF:
                pass

        assert (await failure(all_of_it()))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


# Link failover and stress test.


def nics(**nodes: tuple[list[str], list[bool]]) -> wire.SwitchNics:
    message = wire.SwitchNics(jobID=JOB)
    for node, (devices, ops) in nodes.items():
        entry = message.nicOps[node.replace("_", "-")]
        entry.dev.extend(devices)
        entry.op.extend(ops)
    return message


async def test_link_failover_from_order_to_answer() -> None:
    async with serving() as up, client(up.address) as platform, client(up.address) as manager:
        early = manager.Recover.SubscribeNotifySwitch(WHO)
        reason = f"jobId={JOB} not registed, please wait agent register"
        assert await failure(early.read()) == (UNKNOWN, reason)
        which = wire.SwitchNicRequest(jobID=JOB)
        assert await failure(platform.Recover.SubscribeSwitchNicSignal(which).read()) == (
            UNKNOWN,
            f"jobId={JOB} not registed",
        )
        await registered(manager)
        assert await failure(platform.Recover.SubscribeSwitchNicSignal(which).read()) == (
            UNKNOWN,
            f"jobId={JOB} is not swtiching nic",
        )
        orders = await listening(manager.Recover.SubscribeNotifySwitch(WHO))
        status = await soon(platform.Recover.SwitchNicTrack(nics(node_1=(["1", "0"], [True, False]))))
        assert said(status) == (0, "switching operation was successfully distributed")
        assert up.hub.orders == [(JOB, SwitchNics({2: False, 3: True}))]
        up.hub.nics.publish(JOB, NotifyNics({2: False, 3: True}))
        assert await soon(orders.read()) == wire.SwitchRankList(rankID=["2", "3"], op=[False, True], jobId=JOB)
        answers = [await listening(platform.Recover.SubscribeSwitchNicSignal(which)) for _ in range(2)]
        up.hub.answering[JOB, "nic"].publish("switch nic finish")
        for answer in answers:
            assert await soon(answer.read()) == wire.SwitchNicResponse(jobID=JOB, msg="switch nic finish")
            await end_of(answer)
        up.hub.busy = True
        status = await soon(platform.Recover.SwitchNicTrack(nics(node_0=(["0"], [True]))))
        assert said(status) == (411, f"jobId={JOB} nic is swtiching, or job recovering")


LEAF = [0, 8, 2, 10, 4, 12, 6, 14]


@pytest.mark.parametrize("name", ["{}", "device{}"], ids=["numbers", "as-written"])
@pytest.mark.parametrize("devices", [[0, 8], [0], LEAF], ids=["two-ports", "one-port", "leaf"])
@pytest.mark.parametrize("backup", [True, False], ids=["there", "back"])
async def test_the_six_examples_of_the_document(devices: list[int], backup: bool, name: str) -> None:
    """A device is its number, as in rank tables; the document writes `device0`, and so may a platform."""
    async with serving() as up, client(up.address) as platform, client(up.address) as manager:
        up.hub.jobs[JOB] = a_job(nodes=1, chips=16)
        await registered(manager)
        order = nics(node_0=([name.format(device) for device in devices], [backup] * len(devices)))
        status = await soon(platform.Recover.SwitchNicTrack(order))
        assert said(status) == (0, "switching operation was successfully distributed")
        assert up.hub.orders == [(JOB, SwitchNics(dict.fromkeys(sorted(devices), backup)))]


async def test_stress_test_from_order_to_answer() -> None:
    async with serving() as up, client(up.address) as platform, client(up.address) as manager:
        early = manager.Recover.SubscribeNotifyExecStressTest(WHO)
        assert (await failure(early.read()))[0] == UNKNOWN
        await registered(manager)
        which = wire.StressTestRequest(jobID=JOB)
        idle = platform.Recover.SubscribeStressTestResponse(which)
        assert await failure(idle.read()) == (UNKNOWN, f"jobId={JOB} is not stress test")
        tests = await listening(manager.Recover.SubscribeNotifyExecStressTest(WHO))
        message = wire.StressTestParam(jobID=JOB)
        message.stressParam["node-0"].ops.extend([0, 1])
        status = await soon(platform.Recover.StressTest(message))
        assert said(status) == (0, "stress test operation was successfully distributed")
        assert up.hub.orders == [(JOB, StressTest({0: (0, 1), 1: (0, 1)}))]
        up.hub.stress.publish(JOB, NotifyStress({0: (0, 1), 1: (0,)}))
        expected = wire.StressTestRankParams(jobId=JOB)
        expected.stressParam["0"].ops.extend([0, 1])
        expected.stressParam["1"].ops.extend([0])
        assert await soon(tests.read()) == expected
        up.hub.answering[JOB, "stress"] = Everyone()
        answer = await listening(platform.Recover.SubscribeStressTestResponse(which))
        up.hub.answering[JOB, "stress"].publish("stress test finish, result:{}")
        assert (await soon(answer.read())).msg == "stress test finish, result:{}"
        await end_of(answer)
        up.hub.busy = True
        status = await soon(platform.Recover.StressTest(message))
        assert said(status) == (411, f"jobId={JOB} om is running, or job recovering")


async def test_orders_that_make_no_sense_are_refused_in_the_references_words() -> None:
    hub = MemoryHub()
    hub.jobs["resting"] = a_job("resting", status="pending")
    async with serving(hub=hub) as up, client(up.address) as caller:
        status = await soon(caller.Recover.SwitchNicTrack(wire.SwitchNics(jobID="nobody")))
        assert said(status) == (413, "job:nobody not exist")
        status = await soon(caller.Recover.SwitchNicTrack(nics(node_0=(["0"], [True]))))
        assert said(status) == (413, f"job:{JOB} is not registered")
        await registered(caller)
        status = await soon(caller.Recover.SwitchNicTrack(nics(node_0=(["7"], [True]))))
        assert said(status) == (413, "device:7 not exist in node:node-0")
        status = await soon(caller.Recover.StressTest(wire.StressTestParam(jobID=JOB, allNodesOps=[2])))
        assert said(status) == (413, "op:2 not exist in support operation:[0 1]")
        assert hub.orders == []


async def test_an_answer_that_does_not_come_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recover.ANSWER_LIMIT == 900
    monkeypatch.setattr(recover, "ANSWER_LIMIT", 0.05)
    async with serving() as up, client(up.address) as caller:
        await registered(caller)
        up.hub.answering[JOB, "nic"] = Everyone()
        answer = caller.Recover.SubscribeSwitchNicSignal(wire.SwitchNicRequest(jobID=JOB))
        assert (await soon(answer.read())).msg == "report switch nic result timeout, please check manually"
        await end_of(answer)
        assert len(up.hub.answering[JOB, "nic"]) == 0


async def test_the_manager_of_taskd_follows_it() -> None:
    heard: asyncio.Queue[Heard] = asyncio.Queue()
    led: asyncio.Queue[bool] = asyncio.Queue()
    async with serving() as up:
        manager = ClusterD(
            up.address, JOB, security=JobSecurity(), signal=heard.put_nowait, leads=led.put_nowait
        )  # fmt: skip
        await manager.start()
        try:
            assert await soon(led.get()) is True
            up.hub.said.publish(JOB, Signal("stopTrain", "u1", ("stop_train",), {1: "1"}))
            assert (await soon(heard.get())).uuid == "u1"
        finally:
            await manager.close()
        assert await soon(up.hub.left.get()) == JOB
