"""A job's recovery through the hub: real API server, real gRPC, the real machine; the training is the test."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from evertrain.clusterd.effects import Carrier
from evertrain.clusterd.keep import PREFIX
from evertrain.clusterd.pages import LABEL
from evertrain.kube.client import Client as KubeClient
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, POD, POD_GROUP, Kind, Object
from evertrain.wire import recover_pb2 as wire
from tests.clusterd.hub import PATIENCE, Client, eventually, find, hub_of, is_over, make_job, make_pod
from tests.operator.cluster import Cluster, cluster, until


async def labels(here: Cluster) -> dict[str, str]:
    found: dict[str, str] = (await here.kube.get(POD, "train-worker-0", "default"))["metadata"]["labels"]
    return found


async def test_a_step_is_run_again(tmp_path: Path):
    async with cluster(tmp_path) as here:
        job = await make_job(here)
        uid = job["metadata"]["uid"]
        async with hub_of(here) as running, Client(uid, running.port) as client:
            await client.begin()
            await client.reports_fault(r3="0")
            stop = await client.hears("stopTrain")
            assert list(stop.actions) == ["stop_train"] and stop.uuid and stop.jobId == uid
            assert [(each.rankId, each.faultType) for each in stop.faultRanks] == [("3", "0")]
            assert running.centre.heard == [(uid, {3: "0"})], "the fault centre hears of it, too"
            assert await find(here.kube, PREFIX + uid) is not None, "what goes on is kept"

            async def is_labelled() -> bool:
                return (await labels(here)).get("fault-type") == "retry-fault"

            await until(is_labelled, PATIENCE)
            await client.reports_stop()
            fault = await client.hears("globalFault")
            assert list(fault.actions) == ["on_global_rank"] and fault.uuid == stop.uuid
            await client.offers("retry", "recover", "dump", "exit")
            decision = await client.hears("changeStrategy")
            assert (decision.changeStrategy, list(decision.nodeRankIds)) == ("retry", ["1"])
            await client.reports_result("retry")
            await eventually(here.kube, PREFIX + uid, is_over)
            group = await here.kube.get(POD_GROUP, f"train-{uid}", "default")
            assert group["metadata"]["annotations"]["ProcessRecoverStatus"] == "retry-success"
            assert "fault-type" not in await labels(here)
            config = await find(here.kube, "reset-config-train")
            assert config is not None
            text = config["data"]["reset.json"]
            found = json.loads(text)
            assert found == {
                "RankList": [], "UpdateTime": found["UpdateTime"], "RetryTime": 3, "FaultFlushing": False,
                "GracefulExit": 0, "RestartFaultProcess": False,
            }  # fmt: skip
            assert config["data"]["checkCode"] == hashlib.sha256(text.encode()).hexdigest()
            assert config["data"]["restartType"] == "podReschedule", "what others wrote stays"
            assert {"opened", "decision", "closed"} <= set(running.notes.kinds)
            assert client.signals.empty() and not client.ended.is_set(), "the stream goes on"


async def test_who_is_not_registered_is_told_so(tmp_path: Path):
    async with cluster(tmp_path) as here:
        job = await make_job(here)
        plain = await make_job(here, "plain", strategies="")
        uid = job["metadata"]["uid"]
        async with hub_of(here) as running, Client(uid, running.port) as client:
            assert (await client.call("Register")).code == 408
            assert (await client.call("ReportStopComplete", wire.StopCompleteRequest(jobId=uid))).code == 400
            assert (await client.call("Init", wire.ClientInfo(jobId="nobody"))).code == 502
            assert (await client.call("Init", wire.ClientInfo(jobId=plain["metadata"]["uid"]))).code == 403
            assert (await client.call("Init")).code == 0
            # Deleted in between, with all that belongs to it.
            await here.kube.delete(ASCEND_JOB, "train", "default")
            async with Client(uid, running.port) as other:
                while (code := (await other.call("Register")).code) == 0:
                    pass
                assert code in (402, 408)


async def test_a_pod_is_replaced(tmp_path: Path):
    async with cluster(tmp_path) as here:
        job = await make_job(here, **{"fault-scheduling": "grace"})
        uid = job["metadata"]["uid"]
        async with hub_of(here) as running, Client(uid, running.port) as client:
            await client.begin()
            await client.reports_fault(r2="1")
            await client.hears("stopTrain")
            await client.reports_stop()
            fault = await client.hears("globalFault")
            assert list(fault.actions) == ["on_global_rank", "fault_nodes_exit"]
            assert [each.rankId for each in fault.faultRanks] == ["2", "3"] and list(fault.nodeRankIds) == ["1"]
            config = await find(here.kube, "reset-config-train")
            assert config is not None, "the agents of the pods are told before the training is"
            ranks = json.loads(config["data"]["reset.json"])["RankList"]
            assert [(each["RankId"], each["Status"]) for each in ranks] == [(2, "fault"), (3, "fault")]
            wanted = await asyncio.wait_for(running.replacements.wanted.get(), PATIENCE)
            old = await here.kube.get(POD, "train-worker-0", "default")
            assert wanted.uids == (old["metadata"]["uid"],) and not wanted.whole_job
            await client.offers("recover", "dump", "exit")
            assert (await client.hears("changeStrategy")).changeStrategy == "recover"
            await here.kube.delete(POD, "train-worker-0", "default", grace=0)
            await make_pod(here, job, "Worker")
            await eventually(
                here.kube, "reset-config-train", lambda item: not json.loads(item["data"]["reset.json"])["RankList"]
            )
            await client.reports_result("recover")

            async def successful() -> bool:
                group = await here.kube.get(POD_GROUP, f"train-{uid}", "default")
                return group["metadata"]["annotations"].get("ProcessRecoverStatus") == "recover-success"

            await until(successful, PATIENCE)


async def test_without_a_pod_group_and_a_reset_file(tmp_path: Path):
    async with cluster(tmp_path) as here:
        job = await make_job(here, gang=False, reset=False, chips=0)
        uid = job["metadata"]["uid"]
        async with hub_of(here) as running, Client(uid, running.port) as client:
            await client.begin()
            await client.reports_fault(r1="2")
            await client.hears("stopTrain")
            await client.reports_stop()
            await client.hears("globalFault")
            await client.offers("retry")
            assert (await client.hears("changeStrategy")).changeStrategy == "retry"
            await client.reports_result("retry")
            await eventually(here.kube, PREFIX + uid, is_over)
            item = await here.kube.get(ASCEND_JOB, "train", "default")
            assert item["metadata"]["annotations"]["ProcessRecoverStatus"] == "retry-success"


async def test_another_clusterd_goes_on_where_one_was_killed(tmp_path: Path):
    """At every step: what was acknowledged is not lost, what was decided stays decided."""
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with hub_of(here) as first, Client(uid, first.port) as client:
            await client.begin()
            await client.reports_fault(r3="0")
            stop = await client.hears("stopTrain")
            await client.reports_stop()
            await client.hears("globalFault")
        async with hub_of(here) as second, Client(uid, second.port) as client:
            # What has no strategy yet begins anew, with the same faults.
            await client.begin()
            again = await client.hears("stopTrain")
            assert again.uuid != stop.uuid and [each.rankId for each in again.faultRanks] == ["3"]
            await client.reports_stop()
            await client.hears("globalFault")
            await client.offers("retry", "exit")
            decision = await client.hears("changeStrategy")
        async with hub_of(here) as third, Client(uid, third.port) as client:
            await client.begin()
            repeated = await client.hears("changeStrategy")
            assert (repeated.uuid, repeated.changeStrategy) == (decision.uuid, "retry")
            await client.reports_result("retry")
            await eventually(here.kube, PREFIX + uid, is_over)
            group = await here.kube.get(POD_GROUP, f"train-{uid}", "default")
            assert group["metadata"]["annotations"]["ProcessRecoverStatus"] == "retry-success"


async def test_what_was_decided_but_not_done_is_done_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed after the state was kept and before anything was done about it."""

    async def killed(self: Carrier, job: object, effect: object) -> str:
        await asyncio.Event().wait()
        return ""

    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        with monkeypatch.context() as patched:
            patched.setattr(Carrier, "carry", killed)
            async with hub_of(here) as first, Client(uid, first.port) as client:
                await client.begin()
                await client.reports_fault(r3="0")
                assert "fault-type" not in await labels(here)
        async with hub_of(here) as second, Client(uid, second.port) as client:
            await client.begin()
            await client.hears("stopTrain")
            assert (await labels(here))["fault-type"] == "retry-fault"
            config = await find(here.kube, "reset-config-train")
            assert config is not None and json.loads(config["data"]["reset.json"])["FaultFlushing"]


async def test_a_recovery_that_can_not_be_read_does_not_leave_the_job_paused(tmp_path: Path):
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with hub_of(here) as first, Client(uid, first.port) as client:
            await client.begin()
            await client.reports_fault(r3="0")
            await client.hears("stopTrain")
        kept = await here.kube.get(CONFIG_MAP, PREFIX + uid, "default")
        record = {**json.loads(kept["data"]["state.json"]), "version": 2}
        await here.kube.patch(CONFIG_MAP, PREFIX + uid, "default", {"data": {"state.json": json.dumps(record)}})
        async with hub_of(here) as second, Client(uid, second.port) as client:
            order = await asyncio.wait_for(second.replacements.wanted.get(), PATIENCE)
            assert order.whole_job
            await client.begin()
            assert (await client.hears("changeStrategy")).changeStrategy == "exit"
            record = json.loads((await here.kube.get(CONFIG_MAP, PREFIX + uid, "default"))["data"]["state.json"])
            assert record["version"] == 1 and record["state"]["state"] == "FaultRetryState"


async def test_what_can_not_be_read_of_a_job_that_was_not_recovering_costs_nothing(tmp_path: Path):
    async with cluster(tmp_path) as here:
        job = await make_job(here)
        uid = job["metadata"]["uid"]
        metadata = {"name": PREFIX + uid, "namespace": "default", "labels": {LABEL: "true"}}
        text = json.dumps({"version": 2, "job": uid, "state": {"handled": ["something"]}})
        await here.kube.create(CONFIG_MAP, {"metadata": metadata, "data": {"state.json": text}})
        async with hub_of(here) as running, Client(uid, running.port) as client:
            assert running.hub.registrations == 0
            await client.begin()
            await client.reports_fault(r3="0")
            await client.hears("stopTrain")
            assert running.replacements.wanted.empty()


async def test_a_report_is_acknowledged_only_when_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with hub_of(here) as running, Client(uid, running.port) as client:
            await client.begin()
            allowed, tried = asyncio.Event(), asyncio.Event()
            create = KubeClient.create

            async def refusing(self: KubeClient, kind: Kind, item: Object) -> Object:
                if item["metadata"]["name"].startswith(PREFIX) and not allowed.is_set():
                    tried.set()
                    raise ConnectionError("the API server is away")
                return await create(self, kind, item)

            monkeypatch.setattr(KubeClient, "create", refusing)
            report = asyncio.ensure_future(client.reports_fault(r3="0"))
            await asyncio.wait_for(tried.wait(), PATIENCE)
            assert not report.done() and client.signals.empty()
            allowed.set()
            await report
            await client.hears("stopTrain")


async def test_a_job_that_is_deleted_takes_its_recovery_along(tmp_path: Path):
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with hub_of(here) as running, Client(uid, running.port) as client:
            await client.begin()
            await client.reports_fault(r3="0")
            await client.hears("stopTrain")
            await here.kube.delete(ASCEND_JOB, "train", "default")
            await asyncio.wait_for(client.ended.wait(), PATIENCE)
            await eventually(here.kube, PREFIX + uid, lambda item: item is None)
            assert not running.hub.registered(uid) and running.hub.jobs == {}
            summary = await eventually(
                here.kube, "job-summary-train", lambda item: item and item["data"]["operator"] == "delete"
            )
            assert summary is not None and summary["data"]["job_id"] == uid


async def test_a_second_listener_takes_the_place_of_the_first(tmp_path: Path):
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with (
            hub_of(here) as running,
            Client(uid, running.port) as first,
            Client(uid, running.port) as second,
        ):
            await first.begin()
            await second.begin()
            await asyncio.wait_for(first.ended.wait(), PATIENCE)
            await second.reports_fault(r3="0")
            await second.hears("stopTrain")
            assert first.signals.empty()


async def test_init_after_a_pause_is_not_refused(tmp_path: Path):
    """The label is on `pause` while a job is rescheduled. A ClusterD that was killed then left it so."""
    async with cluster(tmp_path) as here:
        job = await make_job(here)
        uid = job["metadata"]["uid"]
        patch = {"metadata": {"labels": {"process-recover-enable": "pause"}}}
        await here.kube.patch(POD_GROUP, f"train-{uid}", "default", patch)
        async with hub_of(here) as running, Client(uid, running.port) as client:
            await client.begin()
            group = await here.kube.get(POD_GROUP, f"train-{uid}", "default")
            assert group["metadata"]["labels"]["process-recover-enable"] == "on"


async def test_summaries_follow_the_jobs(tmp_path: Path):
    async with cluster(tmp_path) as here:
        stale = {"name": "job-summary-of-old", "namespace": "default", "labels": {"outside-job-info": "true"}}
        await here.kube.create(CONFIG_MAP, {"metadata": stale, "data": {"job_id": "long gone"}})
        job = await make_job(here)
        async with hub_of(here):
            found = await eventually(here.kube, "job-summary-train", bool)
            assert found is not None and found["data"]["job_status"] == "running"
            assert found["data"]["job_id"] == job["metadata"]["uid"]
            assert len(json.loads(found["data"]["hccl.json"])["server_list"]) == 2
            failed = {"status": {"phase": "Failed"}}
            await here.kube.patch(POD, "train-worker-0", "default", failed, status=True)
            await eventually(
                here.kube, "job-summary-train", lambda item: item["data"]["job_status"] == "failed" and
                item["data"].get("deleteTime"),
            )  # fmt: skip
            await eventually(here.kube, "job-summary-of-old", lambda item: item is None)
