"""The client of ClusterD for jobs without a manager, against a ClusterD that follows a script."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from evertrain.taskd import legacy
from evertrain.taskd.manager import reports
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.net.background import Background, shared
from evertrain.wire.recover_pb2 import ClientInfo, Status
from taskd.python.toolkit.recover_module import recover_manager
from taskd.python.toolkit.recover_module.recover_manager import DLRecoverManager
from tests.taskd.cluster import ScriptedClusterD


@pytest.fixture(scope="module")
def loop() -> Background:
    """The one that the client uses; it stays as long as its process."""
    return shared()


class Cluster:
    def __init__(self, loop: Background) -> None:
        self.loop, self.script = loop, ScriptedClusterD()

    def expect(self, method: str) -> Any:
        return self.loop.run(self.script.expect(method))

    def subscribed(self) -> None:
        self.loop.run(self.script.subscribed.wait(), 90)

    def say(self, kind: str, *actions: str, **fields: Any) -> None:
        async def speak() -> None:
            self.script.say(kind, *actions, **fields)

        self.loop.run(speak())


@pytest.fixture
def cluster(loop: Background, no_leftovers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(loop)
    loop.run(cluster.script.start())
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    monkeypatch.setenv("MINDX_SERVER_IP", "127.0.0.1")
    monkeypatch.setenv("MINDX_SERVER_PORT", str(cluster.script.port))
    try:
        yield cluster
    finally:
        if DLRecoverManager._only is not None:
            DLRecoverManager._only.close()
        loop.run(cluster.script.stop())


def manager(cluster: Cluster) -> DLRecoverManager:
    return DLRecoverManager(ClientInfo(jobId="job-1", role="master agent"), f"127.0.0.1:{cluster.script.port}")


def test_there_is_one_for_each_process(cluster: Cluster) -> None:
    assert manager(cluster) is manager(cluster)
    assert manager(cluster).register(ClientInfo(jobId="job-1", role="somebody")).code == 0
    assert cluster.expect("Register").role == "somebody"


def test_clusterd_is_waited_for_until_it_is_ready(cluster: Cluster) -> None:
    cluster.script.init_code = 501
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(manager(cluster).init_clusterd()))
    waiting.start()
    cluster.expect("Init")
    cluster.expect("Init")
    cluster.script.init_code = 0
    waiting.join(30)
    assert answers == [True]


def test_a_job_without_process_level_recovery(cluster: Cluster) -> None:
    cluster.script.init_code = 403
    assert manager(cluster).init_clusterd() is False


def test_the_four_reports(cluster: Cluster) -> None:
    assert recover_manager.report_process_fault({3: 1}) == 0
    fault = cluster.expect("ReportProcessFault")
    assert (fault.jobId, [(each.rankId, each.faultType) for each in fault.faultRanks]) == ("job-1", [("3", "1")])
    assert recover_manager.report_stop_complete(0, "stopped", {3: 1}) == 0
    stopped = cluster.expect("ReportStopComplete")
    assert (stopped.status.code, stopped.status.info, stopped.faultRanks[0].rankId) == (0, "stopped", "3")
    assert recover_manager.report_recover_strategy({3: 1}, ["recover", "exit"]) == 0
    assert list(cluster.expect("ReportRecoverStrategy").strategies) == ["recover", "exit"]
    assert recover_manager.report_recover_status(405, "again", {3: 1}, "retry") == 0
    result = cluster.expect("ReportRecoverStatus")
    assert (result.status.code, result.strategy) == (405, "retry")


def test_a_refused_report_is_sent_again_after_a_registration(cluster: Cluster) -> None:
    cluster.script.answers["ReportProcessFault"] = [Status(code=400, info="not registered")]
    assert recover_manager.report_process_fault({3: 1}) == 0
    for method in ("ReportProcessFault", "Init", "Register", "ReportProcessFault"):
        cluster.expect(method)
    cluster.script.answers["ReportProcessFault"] = [Status(code=400), Status(code=401, info="not now")]
    assert recover_manager.report_process_fault({3: 1}) == 401
    cluster.script.answers["ReportProcessFault"] = [Status(code=400)]
    cluster.script.answers["Register"] = [Status(code=402, info="no such job")]
    assert recover_manager.report_process_fault({3: 1}) == 400


def test_an_unreachable_clusterd_is_an_exception(cluster: Cluster) -> None:
    client = manager(cluster)
    cluster.loop.run(cluster.script.stop())
    with pytest.raises(Exception, match="UNAVAILABLE"):
        recover_manager.report_process_fault({3: 1})
    cluster.loop.run(cluster.script.start())
    assert client.init_clusterd()


def test_signals_are_followed_until_the_job_is_to_end(cluster: Cluster) -> None:
    client = manager(cluster)
    woken = threading.Event()
    client.on_kill = woken.set
    follower = threading.Thread(target=client.start_subscribe, args=("ms",))
    follower.start()
    cluster.subscribed()
    cluster.say("keep-alive")
    cluster.say("killMaster", job="another job")
    cluster.say("stopTrain")
    cluster.say("killMaster")
    assert woken.wait(90) and client.killed.is_set()
    client.close()
    follower.join(30)
    assert not follower.is_alive()


def test_the_last_reports_are_sent_before_the_end(cluster: Cluster) -> None:
    client = manager(cluster)
    follower = threading.Thread(target=client.start_subscribe)
    follower.start()
    cluster.subscribed()
    for rank in range(20):
        client._reported(Report(reports.PROCESS_FAULT, {rank: 1}))
    client.close()
    follower.join(30)
    for method in ("Init", "Register"):
        cluster.expect(method)
    assert [cluster.expect("ReportProcessFault").faultRanks[0].rankId for _ in range(20)] == list(map(str, range(20)))


def test_the_controller_starts_although_clusterd_is_away(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"WORLD_SIZE": "2", "POD_IP": "127.0.0.1", "TTP_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_AGENT_START", "")  # which the client sets
    monkeypatch.setattr(legacy, "INIT_LIMIT", 0.2)
    cluster.loop.run(cluster.script.stop())
    recover_manager.init_grpc_process("ms")
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    cluster.loop.run(cluster.script.start())
