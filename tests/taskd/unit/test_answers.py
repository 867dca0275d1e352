"""The functions of `taskd.api`: what they refuse, and that the reason is in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evertrain.taskd import log, proxy, proxy_api
from evertrain.taskd.agent import api as agent_api
from evertrain.taskd.agent import common, mindspore
from evertrain.taskd.manager import api as manager_api
from evertrain.taskd.manager.orders import End
from evertrain.taskd.manager.shell import Manager
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from evertrain.taskd.worker import api as worker_api
from evertrain.taskd.worker.worker import Worker
from taskd.api import (
    destroy_taskd_proxy,
    destroy_taskd_worker,
    init_taskd_agent,
    init_taskd_manager,
    init_taskd_proxy,
    init_taskd_worker,
    register_func,
    start_taskd_agent,
    start_taskd_manager,
    start_taskd_worker,
)
from tests.ports import free_port

MANAGER = {"job_id": "job-1", "node_nums": 2, "proc_per_node": 8}


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    log.stop()
    monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / "logs"))
    for module, name in ((agent_api, "taskd_agent"), (manager_api, "taskd_manager"), (worker_api, "taskd_worker")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(agent_api, "framework", "")
    for name in ("RANK", "MS_NODE_RANK", "POD_IP", "TASKD_PROXY_IP", "LOCAL_PROXY_ENABLE", "TASKD_CRASH_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    yield tmp_path / "logs"
    log.stop()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a rank that is no number": (lambda: init_taskd_worker("0"), "rank_id: a number from 0 is needed, not '0'"),  # type: ignore[arg-type]
    "a limit below 0": (lambda: init_taskd_worker(0, -1), "upper_limit_of_disk_in_mb"),
    "no framework": (lambda: init_taskd_worker(0, framework=[]), "framework []: pt or ms is needed"),  # type: ignore[arg-type]
    "a worker without init": (start_taskd_worker, "Worker is not initialized. Please call init_worker first."),
    "no worker to destroy": (destroy_taskd_worker, "Worker is not initialized. Please call init_worker first."),
    "an agent for nothing": (init_taskd_agent, "Framework None: PyTorch or MindSpore is needed"),
    "an agent for something": (lambda: init_taskd_agent({"Framework": "TensorFlow"}), "Framework 'TensorFlow'"),
    "no agent of torchrun": (lambda: init_taskd_agent({"Framework": "PyTorch"}), "needs torchrun's agent"),
    "a node that is no number": (
        lambda: init_taskd_agent({"Framework": "MindSpore", "ServerRank": "one"}),
        "ServerRank one is not a digit",
    ),
    "a proxy that is no address": (
        lambda: init_taskd_agent({"Framework": "MindSpore", "UpstreamAddr": "proxy"}),
        "invalid IP address: proxy",
    ),
    "a proxy that is no port": (
        lambda: init_taskd_agent({"Framework": "MindSpore", "UpstreamPort": "nine"}),
        "invalid port: nine",
    ),
    "an agent without init": (start_taskd_agent, "taskd_agent is None"),
    "callbacks for nobody": (lambda: register_func("MONITOR", dict), "taskd_agent is None"),
    "a manager at a name": (lambda: init_taskd_proxy({"UpstreamAddr": "master-0"}), "invalid IP address: master-0"),
    "a manager nowhere": (lambda: init_taskd_proxy({"UpstreamAddr": ""}), "address is empty"),
    "a manager at no port": (lambda: init_taskd_proxy({"UpstreamPort": "0"}), "invalid port: 0"),
    "a proxy at no port": (lambda: init_taskd_proxy({"ListenPort": "65536"}), "invalid port: 65536"),
    "a proxy of no node": (lambda: init_taskd_proxy({"ServerRank": "-1"}), "ServerRank -1 is not a digit"),
    "something else than torchrun's agent": (
        lambda: init_taskd_agent({"Framework": "PyTorch"}, "agent"),
        "needs torchrun's agent as the second argument, not 'agent'",
    ),
    "a proxy without configuration": (lambda: init_taskd_proxy(None), "a dict is needed as configuration, not None"),  # type: ignore[arg-type]
    "an agent without one": (lambda: init_taskd_agent("x"), "a dict is needed as configuration, not 'x'"),  # type: ignore[arg-type]
    "a manager without one": (lambda: init_taskd_manager([1]), "a dict is needed as configuration, not [1]"),  # type: ignore[arg-type]
    "no manager": (start_taskd_manager, "Manager is not initialized. Please call init_manager first."),
    "a manager of nothing": (lambda: init_taskd_manager({}), "node_nums: a number from 1 is needed"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_has_its_reason_in_the_log(kind: str, logs: Path) -> None:
    call, reason = REFUSED[kind]
    assert not call()
    assert reason in (logs / "taskd.log").read_text()


@pytest.mark.parametrize(("ok", "text"), [(True, "[INFO]"), (False, "failed to start taskd manager")])
def test_why_the_manager_has_ended(logs: Path, monkeypatch: pytest.MonkeyPatch, ok: bool, text: str) -> None:
    async def run(manager: Manager) -> End:
        return End("the first pod ends", ok=ok)

    monkeypatch.setattr(Manager, "run", run)
    assert init_taskd_manager(dict(MANAGER))
    assert start_taskd_manager() is ok
    (line,) = (each for each in (logs / "taskd.log").read_text().splitlines() if "the first pod ends" in each)
    assert text in line and ("[ERROR]" in line) is not ok


@pytest.mark.parametrize("variable", ["RANK", "MS_NODE_RANK"])
def test_a_default_rank_has_to_be_a_number(variable: str, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "first")
    kind = "PyTorch" if variable == "RANK" else "MindSpore"
    assert init_taskd_agent({"Framework": kind}, object()) is False
    assert "default_rank first is not a digit" in (logs / "taskd.log").read_text()


@pytest.mark.parametrize(
    "call",
    [
        lambda: init_taskd_manager(dict(MANAGER)),
        lambda: init_taskd_worker(9),
        lambda: init_taskd_agent({"Framework": "MindSpore"}),
        lambda: init_taskd_proxy({}),
        destroy_taskd_proxy,
    ],
)
def test_a_log_that_is_refused_is_a_reason_too(
    call: Callable[[], bool], logs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs.symlink_to(tmp_path)
    assert call() is False
    assert "taskd log path should not be a soft link" in caplog.text


# The worker.


def test_a_worker_may_be_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_PROXY_PORT", str(free_port()))
    assert init_taskd_worker(9)
    assert start_taskd_worker() and start_taskd_worker()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("taskd-worker") == 1
    assert destroy_taskd_worker() and not start_taskd_worker()
    assert "taskd-worker" not in [thread.name for thread in threading.enumerate()]


def test_a_worker_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_PROXY_PORT", str(free_port()))
    assert init_taskd_worker(9) and start_taskd_worker()
    assert init_taskd_worker(9)
    assert "taskd-worker" not in [thread.name for thread in threading.enumerate()]
    assert start_taskd_worker() and destroy_taskd_worker()


def test_a_worker_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    def broken(self: Worker) -> None:
        raise OSError("no threads left")

    assert init_taskd_worker(9)
    monkeypatch.setattr(Worker, "start", broken)
    monkeypatch.setattr(Worker, "close", broken)
    assert start_taskd_worker() is False and destroy_taskd_worker() is False
    text = (logs / "taskd-worker-9.log").read_text()
    assert "start taskd worker failed: no threads left" in text and "destroy taskd worker failed" in text


# The proxy.


def test_a_pod_has_one_proxy(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    """That of the agent, too."""
    monkeypatch.setenv("TASKD_PROXY_PORT", str(free_port()))
    monkeypatch.setenv("TASKD_MANAGER_PORT", str(free_port()))
    monkeypatch.setenv("MS_NODE_RANK", "4")
    try:
        assert init_taskd_agent({"Framework": "MindSpore"})
        first = proxy.Proxy.current
        assert first is not None and first.own.server == "4"
        assert init_taskd_proxy({"ListenPort": os.environ["TASKD_PROXY_PORT"]})
        assert init_taskd_agent({"Framework": "MindSpore", "ServerRank": 0})
        assert proxy.Proxy.current is first
        assert (logs / "agent-0.log").exists(), "0 is a rank, and not the environment's"
    finally:
        assert destroy_taskd_proxy()
    assert proxy.Proxy.current is None and destroy_taskd_proxy()


async def test_the_proxy_of_an_agent_has_a_log_of_its_own(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    """That of torchrun and that of msrun."""
    manager = Node(Position("Mgr", "0"), listen="127.0.0.1:0")
    await manager.start()
    monkeypatch.setenv("TASKD_PROXY_PORT", str(free_port()))
    monkeypatch.setenv("TASKD_MANAGER_PORT", str(manager.port))
    log.open_part("agent-4")
    started = await asyncio.to_thread(common.start_proxy, "4", "127.0.0.1")
    try:
        assert await asyncio.to_thread(started.wait_joined, 20)
        logging.getLogger(common.__name__).info("something of the agent")
    finally:
        await asyncio.to_thread(started.close)
        await manager.close()
    text = (logs / f"taskd-proxy-4-{started.own.process}.log").read_text()
    assert f"path join success, role=Proxy, srvRank=4, processRank={started.own.process}" in text
    assert "of the agent" not in text and "of the agent" in (logs / "agent-4.log").read_text()


def test_an_agent_may_be_at_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(agent_api, "MsAgent", lambda rank, upstream: made.append((rank, upstream)))
    monkeypatch.setattr(proxy.Proxy, "current", object())
    for address in ("::1", "[::1]"):
        assert init_taskd_agent({"Framework": "MindSpore", "UpstreamAddr": address, "UpstreamPort": "9702"})
    assert made == [("0", "[::1]:9702")] * 2
    assert mindspore.MsAgent is not agent_api.MsAgent


def test_a_sidecar_that_encrypts_is_beside_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(proxy_api, "Proxy", lambda *where, security: made.append(where))
    config = {"UpstreamAddr": "10.0.0.1", "ListenAddr": "::1", "UpstreamPort": "1601", "ServerRank": "2"}
    proxy_api._prepared(config)
    monkeypatch.setenv("LOCAL_PROXY_ENABLE", "on")
    proxy_api._prepared(config)
    assert made == [("2", "[::1]:9602", "10.0.0.1:1601"), ("2", "[::1]:9602", "127.0.0.1:1601")]


def test_the_sidecar_is_asked_by_the_proxies_of_agents_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []

    class Made(proxy.Proxy):
        def __init__(self, *where: str, security: Security) -> None:
            self.own = Position("Proxy", where[0], "1")
            made.append(where)

        def start(self) -> int:
            return 0

    monkeypatch.setattr(common, "Proxy", Made)
    for on in ("", "on"):
        monkeypatch.setenv("LOCAL_PROXY_ENABLE", on)
        common.start_proxy("2", "10.0.0.1")
    assert made == [("2", "127.0.0.1:9602", "10.0.0.1:9601"), ("2", "127.0.0.1:9602", "127.0.0.1:9601")]


def test_a_proxy_that_is_closed_before_it_joins_is_not_there(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    monkeypatch.setattr("evertrain.taskd.proxy_api._LOOK", 0.05)
    config = {"ListenPort": str(free_port()), "UpstreamPort": str(free_port()), "ServerRank": "3"}
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(init_taskd_proxy(config)))
    thread.start()
    for _ in range(1000):
        if proxy.Proxy.current is not None:
            break
        thread.join(0.01)
    else:
        pytest.fail("no proxy")
    stamp = proxy.Proxy.current.own.process
    assert destroy_taskd_proxy()
    thread.join(10)
    assert answers == [False]
    assert "closed before it had joined" in (logs / f"taskd-proxy-3-{stamp}.log").read_text()


def test_a_proxy_that_can_not_be_closed_says_so(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    class Broken:
        def close(self) -> None:
            raise OSError("it hangs")

    monkeypatch.setattr(proxy.Proxy, "current", Broken())
    assert destroy_taskd_proxy() is False
    assert "destroy taskd proxy failed: it hangs" in (logs / "taskd.log").read_text()


def test_an_address_that_is_taken(logs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert init_taskd_proxy({"ListenPort": str(taken.getsockname()[1])}) is False
    assert "init taskd proxy failed" in (logs / "taskd.log").read_text() and proxy.Proxy.current is None
