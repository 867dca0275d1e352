"""The services for platforms over a real port: Fault, Job, Config, PubFault and TrainingDataTrace."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from evertrain import aio
from evertrain.clusterd.model import UNHEALTHY, FaultDevice, JobFaults
from evertrain.clusterd.services import job as job_service
from evertrain.clusterd.services.ports import Unavailable
from evertrain.wire import config_pb2, fault_pb2, job_pb2, profiling_pb2, pubfault_pb2
from tests.clusterd.services import JOB, Client, a_job, a_summary, client, failure, serving, soon

UNKNOWN = grpc.StatusCode.UNKNOWN
OTHER = "another-job"


def faults(job: str = JOB, *devices: str, level: str = "SeparateNPU") -> JobFaults:
    found = tuple(FaultDevice("node-0", "10.0.0.1", "SN", each, "NPU", "80E01801", level) for each in devices)
    return JobFaults(job, UNHEALTHY if devices else "Healthy", devices=found)


def devices(signal: fault_pb2.FaultMsgSignal) -> list[str]:
    return [device.deviceId for node in signal.nodeFaultInfo for device in node.faultDevice]


async def listening(stream: Any) -> Any:
    await soon(stream.initial_metadata())
    return stream


async def end_of(stream: Any) -> None:
    assert await soon(stream.read()) is grpc.aio.EOF
    assert await soon(stream.code()) == grpc.StatusCode.OK


# Fault.


async def test_faults_of_a_job_are_told_when_they_change() -> None:
    who = fault_pb2.ClientInfo(jobId=JOB, role="platform")
    async with serving() as up, client(up.address) as caller:
        early = caller.Fault.SubscribeFaultMsgSignal(who)
        code, text = await failure(early.read())
        assert code == UNKNOWN and "not registed" in text
        assert (await soon(caller.Fault.Register(who))).code == 200
        stream = await listening(caller.Fault.SubscribeFaultMsgSignal(who))
        up.hub.find_faults(faults(OTHER, "9"))
        up.hub.find_faults(faults(JOB, "1"))
        first = await soon(stream.read())
        assert (first.jobId, first.signalType, devices(first)) == (JOB, "fault", ["1"])
        node = first.nodeFaultInfo[0]
        assert (node.nodeName, node.nodeIP, node.nodeSN, node.faultLevel) == ("node-0", "10.0.0.1", "SN", "UnHealthy")
        assert list(node.faultDevice[0].faultCodes) == ["80E01801"]
        up.hub.find_faults(faults(JOB, "1", "2"))
        second = await soon(stream.read())
        assert devices(second) == ["1", "2"] and second.uuid != first.uuid
        up.hub.find_faults(faults(JOB))
        last = await soon(stream.read())
        assert (last.signalType, list(last.nodeFaultInfo)) == ("normal", [])


async def test_faults_that_are_there_already_are_told_first() -> None:
    who = fault_pb2.ClientInfo(jobId=JOB, role="platform")
    async with serving() as up, client(up.address) as caller:
        up.hub.find_faults(faults(JOB, "3"))
        await soon(caller.Fault.Register(who))
        stream = caller.Fault.SubscribeFaultMsgSignal(who)
        assert devices(await soon(stream.read())) == ["3"]


async def test_the_whole_cluster_is_one_message_for_each_job() -> None:
    who = fault_pb2.ClientInfo(role="platform")
    async with serving() as up, client(up.address) as caller:
        await soon(caller.Fault.Register(who))
        stream = await listening(caller.Fault.SubscribeFaultMsgSignal(who))
        up.hub.find_faults(faults(JOB, "1"))
        up.hub.find_faults(faults(OTHER, "2"))
        heard = [await soon(stream.read()) for _ in range(2)]
        assert [(each.jobId, devices(each)) for each in heard] == [(JOB, ["1"]), (OTHER, ["2"])]
        up.hub.find_faults(faults(JOB, "1"))  # nothing new
        up.hub.find_faults(faults("third-job"))  # which has never had a fault
        up.hub.find_faults(faults(OTHER))
        last = await soon(stream.read())
        assert (last.jobId, last.signalType) == (OTHER, "normal")


async def test_the_instances_of_a_service_are_one_message() -> None:
    who = fault_pb2.ClientInfo(jobId="mindie-1", role="controller")
    async with serving() as up, client(up.address) as caller:
        assert (await soon(caller.Fault.Register(who))).code == 402
        up.hub.services["mindie-1"] = (JOB, OTHER)
        assert (await soon(caller.Fault.Register(who))).code == 200
        stream = await listening(caller.Fault.SubscribeFaultMsgSignal(who))
        up.hub.find_faults(faults(JOB, "1"))
        assert devices(await soon(stream.read())) == ["1"]
        up.hub.find_faults(faults(OTHER, "2"))
        both = await soon(stream.read())
        assert (both.jobId, devices(both)) == ("mindie-1", ["1", "2"])
        up.hub.services["mindie-1"] = (OTHER,)
        up.hub.find_faults(faults(JOB))
        assert devices(await soon(stream.read())) == ["2"]
        assert up.hub.heard_of == {"mindie-1": 1}
        await soon(caller.Fault.Register(who))
        await end_of(stream)
        assert up.hub.heard_of == {"mindie-1": 0}


async def test_fault_registration() -> None:
    who = fault_pb2.ClientInfo(jobId=JOB, role="platform")
    async with serving() as up, client(up.address) as caller:
        nameless = caller.Fault.Register(fault_pb2.ClientInfo(jobId=JOB))
        assert await failure(nameless) == (UNKNOWN, "request is nil or role is empty")
        assert (await soon(caller.Fault.Register(fault_pb2.ClientInfo(jobId="nobody", role="x")))).code == 402
        await soon(caller.Fault.Register(who))
        old = await listening(caller.Fault.SubscribeFaultMsgSignal(who))
        await soon(caller.Fault.Register(who))
        await end_of(old)
        new = await listening(caller.Fault.SubscribeFaultMsgSignal(who))
        other_role = fault_pb2.ClientInfo(jobId=JOB, role="another")
        await soon(caller.Fault.Register(other_role))
        another = await listening(caller.Fault.SubscribeFaultMsgSignal(other_role))
        up.hub.find_faults(faults(JOB, "1"))
        for stream in (new, another):
            assert devices(await soon(stream.read())) == ["1"]
        new.cancel()
        async with aio.timeout(90):  # a registration ends with its stream
            while (await _refusal(caller, who)) is None:
                await asyncio.sleep(0.01)


async def _refusal(caller: Client, who: fault_pb2.ClientInfo) -> str | None:
    stream = caller.Fault.SubscribeFaultMsgSignal(who)
    try:
        await soon(stream.read())
    except grpc.aio.AioRpcError as error:
        return error.details()
    finally:
        stream.cancel()
    return None


async def test_faults_can_be_asked_for() -> None:
    async with serving() as up, client(up.address) as caller:

        async def ask(job: str) -> Any:
            return await soon(caller.Fault.GetFaultMsgSignal(fault_pb2.ClientInfo(jobId=job, role="x")))

        answer = await ask(JOB)
        assert answer.code == 200 and not answer.HasField("faultSignal")
        up.hub.jobs[OTHER] = a_job(OTHER)
        up.hub.find_faults(faults(JOB, "1"))
        up.hub.find_faults(faults(OTHER, "2"))
        answer = await ask(JOB)
        assert (answer.code, devices(answer.faultSignal), answer.faultSignal.jobId) == (200, ["1"], JOB)
        answer = await ask("")
        assert (answer.code, devices(answer.faultSignal), answer.faultSignal.jobId) == (200, ["1", "2"], "-1")
        for bad in ("1234567", "x" * 129, "作业作业作业作业"):
            answer = await ask(bad)
            assert answer.code == 409 and "jobId" in answer.info
        assert (await ask("12345678")).code == 200


async def test_too_many_questions_wait_and_more_are_refused() -> None:
    async with serving() as up, client(up.address) as caller:
        asked = [caller.Fault.GetFaultMsgSignal(fault_pb2.ClientInfo(jobId=JOB)) for _ in range(120)]
        codes = [answer.code for answer in await soon(asyncio.gather(*asked))]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 60, "ten at once, and those that wait no more than 5 s"


# Job.


async def test_jobs_are_told_as_they_come_and_go() -> None:
    async with serving() as up, client(up.address) as caller:
        up.hub.told["job-1"] = a_summary("job-1")
        status = await soon(caller.Job.Register(job_pb2.ClientInfo(role="CCAgent")))
        assert (status.code, status.info) == (200, "registration successful") and status.clientId
        who = job_pb2.ClientInfo(role="CCAgent", clientId=status.clientId)
        stream = await listening(caller.Job.SubscribeJobSummarySignal(who))
        first = await soon(stream.read())
        assert (first.jobId, first.jobName, first.operator) == ("job-1", "name-of-job-1", "add") and first.uuid
        up.hub.summarised.publish(a_summary("job-2", operator="delete"))
        second = await soon(stream.read())
        assert (second.jobId, second.operator) == ("job-2", "delete")


async def test_the_list_begins_with_all_jobs_in_batches() -> None:
    async with serving() as up, client(up.address) as caller:
        for number in range(5):
            up.hub.told[f"job-{number}"] = a_summary(f"job-{number}", chips=20_000)
        status = await soon(caller.Job.Register(job_pb2.ClientInfo(role="FdAgent")))
        who = job_pb2.ClientInfo(role="FdAgent", clientId=status.clientId)
        stream = await listening(caller.Job.SubscribeJobSummarySignalList(who))
        lists = [await soon(stream.read()) for _ in range(3)]
        assert [[each.jobId for each in one.jobSummarySignals] for one in lists] == [
            ["job-0", "job-1"],
            ["job-2", "job-3"],
            ["job-4"],
        ]
        assert {one.JobTotalNum for one in lists} == {5}
        assert len(lists[0].ReportTime) == 13
        up.hub.summarised.publish(a_summary("job-9"))
        assert [each.jobId for each in (await soon(stream.read())).jobSummarySignals] == ["job-9"]


async def test_lists_fit_into_messages() -> None:
    async with serving() as up, client(up.address) as caller:
        for number in range(5):
            up.hub.told[f"job-{number}"] = a_summary(f"job-{number}", chips=1, hccl="x" * (3 << 20))
        status = await soon(caller.Job.Register(job_pb2.ClientInfo(role="FdAgent")))
        stream = caller.Job.SubscribeJobSummarySignalList(
            job_pb2.ClientInfo(role="FdAgent", clientId=status.clientId)
        )  # fmt: skip
        heard: list[str] = []
        while len(heard) < 5:
            heard += [each.jobId for each in (await soon(stream.read())).jobSummarySignals]
        assert heard == [f"job-{number}" for number in range(5)]


async def test_who_may_subscribe_to_jobs() -> None:
    async with serving() as up, client(up.address) as caller:
        assert (await soon(caller.Job.Register(job_pb2.ClientInfo(role="nobody")))).code == 400
        status = await soon(caller.Job.Register(job_pb2.ClientInfo(role="CCAgent")))
        who = job_pb2.ClientInfo(role="CCAgent", clientId=status.clientId)
        stranger = caller.Job.SubscribeJobSummarySignal(job_pb2.ClientInfo(role="CCAgent", clientId="x"))
        assert await failure(stranger.read()) == (UNKNOWN, "invalid clientId: x, please register first")
        other = caller.Job.SubscribeJobSummarySignal(job_pb2.ClientInfo(role="FdAgent", clientId=status.clientId))
        assert (await failure(other.read()))[0] == UNKNOWN
        old = await listening(caller.Job.SubscribeJobSummarySignal(who))
        new = await listening(caller.Job.SubscribeJobSummarySignal(who))
        await end_of(old)
        up.hub.summarised.publish(a_summary("job-2"))
        assert (await soon(new.read())).jobId == "job-2"
        new.cancel()
        async with aio.timeout(90):  # and with its last stream the id is gone
            while len(up.hub.summarised):
                await asyncio.sleep(0.01)
        gone = caller.Job.SubscribeJobSummarySignal(who)
        assert "please register first" in (await failure(gone.read()))[1]


async def test_a_role_has_twenty_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_service, "SUBSCRIPTIONS", 1000)
    async with serving() as up, client(up.address) as caller:

        async def subscribe(role: str) -> Any:
            status = await soon(caller.Job.Register(job_pb2.ClientInfo(role=role)))
            return caller.Job.SubscribeJobSummarySignal(job_pb2.ClientInfo(role=role, clientId=status.clientId))

        streams = [await listening(await subscribe("CCAgent")) for _ in range(20)]
        code, text = await failure((await subscribe("CCAgent")).read())
        assert code == UNKNOWN and "20 streams" in text
        await listening(await subscribe("FdAgent"))
        streams[0].cancel()
        async with aio.timeout(90):
            while len(up.hub.summarised) > 20:
                await asyncio.sleep(0.01)
        await listening(await subscribe("CCAgent"))


async def test_subscriptions_to_jobs_are_limited_in_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_service.SUBSCRIPTIONS == 20
    monkeypatch.setattr(job_service, "SUBSCRIPTIONS", 2)
    async with serving() as up, client(up.address) as caller:
        status = await soon(caller.Job.Register(job_pb2.ClientInfo(role="CCAgent")))
        who = job_pb2.ClientInfo(role="CCAgent", clientId=status.clientId)
        streams: list[Any] = []
        while not (streams and streams[-1].done()):  # each takes the place of the one before
            streams.append(caller.Job.SubscribeJobSummarySignal(who))
            await soon(streams[-1].initial_metadata())
        assert "subscriptions a second" in str(await soon(streams[-1].details()))


# Config.


async def test_rank_tables_of_a_service() -> None:
    who = config_pb2.ClientInfo(jobId="mindie-1", role="controller")
    async with serving() as up, client(up.address) as caller:
        early = caller.Config.SubscribeRankTable(who)
        assert "not registed" in (await failure(early.read()))[1]
        assert (await soon(caller.Config.Register(who))).code == 0
        stream = caller.Config.SubscribeRankTable(who)
        assert await soon(stream.read()) == config_pb2.RankTableStream(jobId="mindie-1", rankTable="{}")
        up.hub.tables["mindie-1"].publish('{"version":"1.0"}')
        assert (await soon(stream.read())).rankTable == '{"version":"1.0"}'
        assert (await soon(caller.Config.Register(who))).code == 0
        await end_of(stream)


async def test_nobody_is_remembered_by_names_that_are_too_long() -> None:
    long, just = "x" * 257, "x" * 256
    async with serving() as up, client(up.address) as caller:
        up.hub.services[just] = (JOB,)
        for job, role in ((long, "controller"), (just, long)):
            status = await soon(caller.Config.Register(config_pb2.ClientInfo(jobId=job, role=role)))
            assert (status.code, "at most 256" in status.info) == (409, True)
            status = await soon(caller.Fault.Register(fault_pb2.ClientInfo(jobId=job, role=role)))
            assert status.code == (402 if job == long else 409)
            stream = caller.TrainingDataTrace.SubscribeDataTraceSwitch(
                profiling_pb2.ProfilingClientInfo(jobId=job, role=role)
            )
            assert "at most 256" in (await failure(stream.read()))[1]
        assert (await soon(caller.Config.Register(config_pb2.ClientInfo(jobId=just, role=just)))).code == 0
        assert (await soon(caller.Fault.Register(fault_pb2.ClientInfo(jobId=just, role=just)))).code == 200


# PubFault.


async def test_public_faults_are_handed_on_as_the_config_map_has_them() -> None:
    fault = pubfault_pb2.Fault(
        faultId="11937763019444715778",
        faultType="NPU",
        faultCode="000001001",
        faultTime=1736926605000,
        assertion="occur",
        faultLocation={"npuIp": "1.2.3.4"},
        influence=[pubfault_pb2.PubFaultInfo(nodeName="node-0", nodeSN="SN", deviceIds=[0, 1])],
        description="what it is",
    )
    request = pubfault_pb2.PublicFaultRequest(
        id="request-1", timestamp=1736926605001, version="1.0", resource="CCAE", faults=[fault]
    )
    async with serving() as up, client(up.address) as caller:
        status = await soon(caller.PubFault.SendPublicFault(request))
        assert (status.code, status.info) == (0, "public fault send successfully")
        assert up.hub.public == [
            {
                "id": "request-1",
                "timestamp": 1736926605001,
                "version": "1.0",
                "resource": "CCAE",
                "faults": [
                    {
                        "faultId": "11937763019444715778",
                        "faultType": "NPU",
                        "faultCode": "000001001",
                        "faultTime": 1736926605000,
                        "assertion": "occur",
                        "faultLocation": {"npuIp": "1.2.3.4"},
                        "influence": [{"nodeName": "node-0", "nodeSN": "SN", "deviceIds": [0, 1]}],
                        "description": "what it is",
                    }
                ],
            }
        ]
        up.hub.public_wrong = "version is not 1.0"
        status = await soon(caller.PubFault.SendPublicFault(request))
        assert (status.code, status.info) == (409, "check public fault info failed, error: version is not 1.0")


async def test_each_resource_has_its_own_limit() -> None:
    async with serving() as up, client(up.address) as caller:

        async def send(resource: str) -> int:
            request = pubfault_pb2.PublicFaultRequest(resource=resource)
            return int((await soon(caller.PubFault.SendPublicFault(request))).code)

        codes = [await send("CCAE") for _ in range(100)]
        assert set(codes) == {0}
        codes = await soon(asyncio.gather(*(send("CCAE") for _ in range(50))))
        assert 410 in codes
        assert await send("fd-online") == 0
        up.hub.public_wrong = "resource is not known"
        assert {await send("unknown") for _ in range(3)} == {409}


# TrainingDataTrace.


async def test_timings_are_switched_told_and_asked_for() -> None:
    async with serving() as up, client(up.address) as caller:
        trace = caller.TrainingDataTrace
        stream = await listening(trace.SubscribeDataTraceSwitch(profiling_pb2.ProfilingClientInfo(jobId=JOB)))
        question = profiling_pb2.DataStatusReq(jobNsName="default/train")
        assert (await soon(trace.GetTrainingDataTraceSwitch(question))).code == 404
        wanted = profiling_pb2.ProfilingSwitch(Step="on", FP="off")
        order = profiling_pb2.DataTypeReq(jobNsName="default/train", profilingSwitch=wanted)
        assert (await soon(trace.ModifyTrainingDataTraceSwitch(order))).code == 200
        full = profiling_pb2.ProfilingSwitch(
            CommunicationOperator="off", Step="on", SaveCheckpoint="off", FP="off", DataLoader="off"
        )
        assert (await soon(stream.read())).profilingSwitch == full
        answer = await soon(trace.GetTrainingDataTraceSwitch(question))
        assert (answer.code, answer.profilingSwitch) == (200, full)
        newer = await listening(trace.SubscribeDataTraceSwitch(profiling_pb2.ProfilingClientInfo(jobId=JOB)))
        await end_of(stream)
        await soon(trace.ModifyTrainingDataTraceSwitch(order))
        assert (await soon(newer.read())).code == 200


async def test_timings_that_cannot_be_switched() -> None:
    on = profiling_pb2.ProfilingSwitch(Step="on")
    async with serving() as up, client(up.address) as caller:
        trace = caller.TrainingDataTrace
        for name, switch, code in (
            ("train", on, 300),
            ("default/", on, 300),
            ("a/b/c", on, 300),
            ("default/train", None, 300),
            ("default/train", profiling_pb2.ProfilingSwitch(Step="maybe"), 300),
            ("default/nobody", on, 404),
        ):
            order = profiling_pb2.DataTypeReq(jobNsName=name, profilingSwitch=switch)
            answer = await soon(trace.ModifyTrainingDataTraceSwitch(order))
            assert answer.code == code and answer.message, name
        assert (await soon(trace.GetTrainingDataTraceSwitch(profiling_pb2.DataStatusReq(jobNsName="x")))).code == 300
        up.hub.trouble = Unavailable("the API server is away")
        order = profiling_pb2.DataTypeReq(jobNsName="default/train", profilingSwitch=on)
        assert (await soon(trace.ModifyTrainingDataTraceSwitch(order))).code == 500
        question = profiling_pb2.DataStatusReq(jobNsName="default/train")
        assert (await soon(trace.GetTrainingDataTraceSwitch(question))).code == 500
        assert up.hub.traces == {}
