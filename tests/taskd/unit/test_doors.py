"""The names under which frameworks and older scripts import the rest of TaskD."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from evertrain.taskd import legacy
from evertrain.taskd.agent import api
from evertrain.taskd.agent.msrun_plugin import MSRunPlugin
from evertrain.taskd.manager.orders import Signal
from taskd.api import taskd_agent_api, taskd_manager_api, taskd_worker_api
from taskd.python.framework.agent.ms_mgr import msrun_plugin
from taskd.python.framework.common import type as shapes
from taskd.python.toolkit import fault_checker, recover_module
from taskd.python.toolkit.recover_module import recover_manager


def test_names() -> None:
    assert msrun_plugin.MSRunPlugin is MSRunPlugin
    assert recover_module.DLRecoverManager is recover_manager.DLRecoverManager is legacy.DLRecoverManager
    assert recover_module.recover_pb2.ClientInfo(jobId="j", role="r").jobId == "j"
    assert {shapes.CONFIG_UPSTREAMIP_KEY: shapes.LOCAL_HOST} == {"UpstreamAddr": "127.0.0.1"}


def test_the_modules_show_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taskd_manager_api.taskd_manager is None and taskd_worker_api.taskd_worker is None
    monkeypatch.setattr(api, "taskd_agent", "an agent")
    assert (taskd_agent_api.taskd_agent, taskd_agent_api.framework) == ("an agent", "")
    assert not hasattr(taskd_agent_api, "something")


def test_shapes() -> None:
    assert dataclasses.asdict(shapes.AgentReportInfo()) == {"fault_ranks": [], "restart_times": -1}
    where = shapes.Position(role="Agent", server_rank="1", process_rank="-1")
    config = shapes.NetworkConfig(pos=where, upstream_addr="127.0.0.1:9602", listen_addr="")
    assert dataclasses.asdict(config) == {
        "pos": {"role": "Agent", "server_rank": "1", "process_rank": "-1"},
        "upstream_addr": "127.0.0.1:9602",
        "listen_addr": "",
        "enable_tls": False,
        "tls_conf": None,
    }


def test_a_launcher_without_all_callbacks_does_not_start() -> None:
    plugin = MSRunPlugin()
    plugin.register_callbacks("MONITOR", dict)
    with pytest.raises(RuntimeError, match="hasn't fully registered all callbacks: KILL_WORKER"):
        plugin.start()


@pytest.mark.parametrize("missing", ["MINDX_TASK_ID", "MINDX_SERVER_IP"])
def test_the_client_needs_to_know_its_job_and_clusterd(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    monkeypatch.setenv("MINDX_SERVER_IP", "127.0.0.1")
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=missing):
        legacy.from_environment()


def test_a_signal_is_what_the_controller_can_do() -> None:
    client = object.__new__(legacy.DLRecoverManager)
    client._job, client._orders = "job-1", asyncio.Queue()
    client.killed, client.on_kill = threading.Event(), lambda: None

    def passed_on(kind: str, *actions: str, job: str = "job-1", **fields: Any) -> list[tuple[str, str, str]]:
        client._signal(Signal(kind, job=job, actions=actions, **fields))
        orders = [client._orders.get_nowait() for _ in range(client._orders.qsize())]
        return [(order.action, order.strategy, order.params) for order in orders]

    assert passed_on("keep-alive", "stop_train") == passed_on("stopTrain") == []
    assert passed_on("stopTrain", "stop_train", job="another") == []
    assert passed_on("stopTrain", "stop_train", "stop_train") == [("stop_train", "", "")]
    changed = [("change_strategy", "recover", "")]
    assert passed_on("changeStrategy", "change_strategy", strategy="recover", extra="recover-in-place") == changed
    scaled = [("change_strategy", "downgrade", "{}")]
    assert passed_on("changeStrategy", "change_strategy", strategy="downgrade", extra="{}") == scaled
    assert not client.killed.is_set()
    assert passed_on("killMaster") == [("destroy_controller", "", "")] and client.killed.is_set()


def test_processes_are_ended_gently_or_at_once() -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    gentle = "print(flush=True); import signal; signal.pause()"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in (gentle, stubborn)]
    try:
        for each in both:
            assert each.stdout is not None and each.stdout.readline()
        assert fault_checker.grace_exit_pids({0: both[0].pid})
        assert both[0].wait() == -signal.SIGTERM
        assert not fault_checker.grace_exit_pids([both[1].pid], 0.1)
        fault_checker.force_exit_pids([both[1].pid])
        assert both[1].wait() == -signal.SIGKILL
    finally:
        for each in both:
            each.kill()
            each.communicate()
