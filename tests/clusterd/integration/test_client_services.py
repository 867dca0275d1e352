"""A client that knows ClusterD from its reference alone: the services beside recovery, on a real cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from evertrain.kube.port import CONFIG_MAP, NotFound
from evertrain.wire.faultinfo import ChipFault
from tests.clusterd.client import Client, methods
from tests.clusterd.running import Running, Training, running
from tests.operator.cluster import until


def fault(code: str, level: str, chip: int = 0) -> ChipFault:
    return ChipFault(f"Ascend910-{chip}", code, level, int(time.time() * 1000))


async def refusal(client: Client, method: str, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call(method, **fields)
    return caught.value.code(), str(caught.value.details())


# Faults.


async def test_faults_of_a_job_are_heard_and_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client = clusterd.client(training.uid)
        me = {"jobId": training.uid, "role": "platform"}
        unknown = grpc.StatusCode.UNKNOWN
        assert await refusal(client, "Fault/Register", jobId=training.uid) == (
            unknown,
            "request is nil or role is empty",
        )
        nobody = await client.call("Fault/Register", jobId="nobody-there", role="x")
        assert nobody.code == 402, "without the error that would hide it"
        assert (await client.call("Fault/Register", **me)).code in (0, 200)
        faults = client.stream("Fault/SubscribeFaultMsgSignal", **me)
        await clusterd.devices("bert-node-1", fault("81078603", "SubHealthFault", 1))
        signal = await faults.next()
        while signal is not None and signal.signalType == "normal":
            signal = await faults.next()
        assert signal is not None and (signal.signalType, signal.jobId) == ("fault", training.uid) and signal.uuid
        (node,) = signal.nodeFaultInfo
        assert (node.nodeName, node.faultLevel) == ("bert-node-1", "SubHealthy")
        (device,) = node.faultDevice
        assert (device.deviceId, device.deviceType, list(device.faultCodes)) == ("1", "NPU", ["81078603"])
        assert (device.faultLevel, list(device.faultLevels)) == ("SubHealthy", ["SubHealthFault"])
        asked = await client.call("Fault/GetFaultMsgSignal", **me)
        assert asked.code == 200 and asked.faultSignal.nodeFaultInfo == signal.nodeFaultInfo
        everywhere = await client.call("Fault/GetFaultMsgSignal", jobId="", role="platform")
        assert everywhere.code == 200 and everywhere.faultSignal.jobId == "-1"
        await clusterd.devices("bert-node-1")
        signal = await faults.next()
        assert signal is not None and (signal.signalType, len(signal.nodeFaultInfo)) == ("normal", 0)
        for wrong in ("short", "x" * 129):
            assert (await client.call("Fault/GetFaultMsgSignal", jobId=wrong, role="x")).code == 409


async def test_who_registers_again_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client = clusterd.client(training.uid)
        me = {"jobId": training.uid, "role": "platform"}
        await client.call("Fault/Register", **me)
        first = client.stream("Fault/SubscribeFaultMsgSignal", **me)
        await clusterd.devices("bert-node-1", fault("81078603", "SubHealthFault", 1))
        signal = await first.next()
        assert signal is not None
        await client.call("Fault/Register", **me)
        while signal is not None:
            signal = await first.next()  # what was on its way, then the end


# Jobs.


async def test_jobs_are_listed_and_followed(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client = clusterd.client("")
        assert (await client.call("Job/Register", role="somebody")).code == 400
        registered = await client.call("Job/Register", role="CCAgent")
        assert (registered.code, registered.info) == (200, "registration successful") and registered.clientId
        me = {"role": "CCAgent", "clientId": registered.clientId}
        listed = client.stream("Job/SubscribeJobSummarySignalList", **me)
        first = await listed.next()
        assert first is not None and first.JobTotalNum == 1 and first.ReportTime.isdecimal()
        (summary,) = first.jobSummarySignals
        assert (summary.jobId, summary.jobName, summary.namespace) == (training.uid, "bert", "default")
        assert (summary.frameWork, summary.jobStatus, summary.operator) == ("pytorch", "running", "add")
        table = json.loads(summary.HcclJson)
        assert [server["server_id"] for server in table["server_list"]] and summary.cmIndex == "0"
        await clusterd.train("gpt")
        while True:
            news = await listed.next()
            assert news is not None and len(news.jobSummarySignals) == 1
            if news.jobSummarySignals[0].jobName == "gpt":
                break
        stranger = client.stream("Job/SubscribeJobSummarySignal", role="CCAgent", clientId="nobody")
        code, text = await stranger.error()
        assert code == grpc.StatusCode.UNKNOWN and "please register first" in text


# Public faults.


def message(assertion: str = "occur", **changes: Any) -> dict[str, Any]:
    now = int(time.time() * 1000)
    one = {
        "faultId": "fault-0001",
        "faultType": "Storage",
        "faultCode": changes.pop("code", "310001001"),
        "faultTime": now,
        "assertion": assertion,
        "influence": [{"nodeName": "bert-node-1", "deviceIds": [0]}],
    }
    return {
        "id": "message-0001",
        "timestamp": now,
        "version": "1.0",
        "resource": "CCAE",
        "faults": [one],
        **changes,
    }


async def test_public_faults_reach_the_job(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client = clusterd.client(training.uid)
        me = {"jobId": training.uid, "role": "platform"}
        await client.call("Fault/Register", **me)
        faults = client.stream("Fault/SubscribeFaultMsgSignal", **me)
        code = await known_code(clusterd)
        reply = await client.call("PubFault/SendPublicFault", **message(code=code))
        assert (reply.code, reply.info) == (0, "public fault send successfully")
        signal = await faults.next()
        while signal is not None and signal.signalType == "normal":
            signal = await faults.next()
        assert signal is not None and signal.nodeFaultInfo[0].nodeName == "bert-node-1"
        assert code in signal.nodeFaultInfo[0].faultDevice[0].faultCodes

        for wrong in ({"id": "x"}, {"version": "2.0"}, {"timestamp": 5}, {"faults": []}):
            reply = await client.call("PubFault/SendPublicFault", **{**message(code=code), **wrong})
            assert reply.code == 409 and reply.info.startswith("check public fault info failed, error: "), wrong
        reply = await client.call("PubFault/SendPublicFault", **message(code=code, resource="nobody"))
        assert reply.code == 409, "not 410: nobody was too fast"


async def known_code(clusterd: Running) -> str:
    """One that makes a node sub-healthy."""
    from evertrain.faultcodes.table import shipped

    codes = shipped()
    return next(code for code in _public(codes) if code[1] == "1")


def _public(codes: Any) -> list[str]:
    found = getattr(codes, "public", None)
    return sorted(found if found is not None else [])


# Timings that a job writes.


async def test_switches_of_timings(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training: Training = await clusterd.train()
        client = clusterd.client(training.uid)
        on = methods()["TrainingDataTrace/ModifyTrainingDataTraceSwitch"].request(
            profilingSwitch={"Step": "on", "FP": "off"}
        )
        modify = "TrainingDataTrace/ModifyTrainingDataTraceSwitch"
        get = "TrainingDataTrace/GetTrainingDataTraceSwitch"
        assert (await client.call(modify, jobNsName="bert", profilingSwitch=on.profilingSwitch)).code == 300
        assert (await client.call(get, jobNsName="default/bert")).code == 404
        assert (await client.call(modify, jobNsName="default/bert", profilingSwitch=on.profilingSwitch)).code == 200
        switches = client.stream("TrainingDataTrace/SubscribeDataTraceSwitch", jobId=training.uid, role="taskd")

        async def written() -> bool:
            try:
                item = await training.kube.get(CONFIG_MAP, "data-trace-bert", "default")
            except NotFound:
                return False
            return bool(json.loads(item["data"]["profilingSwitch"])["Step"] == "on")

        await until(written)
        found = await client.call(get, jobNsName="default/bert")
        assert found.code == 200 and (found.profilingSwitch.Step, found.profilingSwitch.FP) == ("on", "off")
        told = await switches.next()
        assert told is not None and told.profilingSwitch.Step == "on"
        item = await training.kube.get(CONFIG_MAP, "data-trace-bert", "default")
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("AscendJob", training.uid), "the next job of that name begins without"


async def test_rank_tables_of_inference_can_be_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        client = clusterd.client("service-1")
        assert (await client.call("Config/Register", jobId="service-1", role="controller")).code in (0, 200)
