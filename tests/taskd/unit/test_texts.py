"""Lines of the log that operators of MindCluster look for."""

from __future__ import annotations

import ast
import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import evertrain.taskd
from evertrain import aio
from evertrain.taskd import frames, log
from evertrain.taskd.agent import common
from evertrain.taskd.codes import ACTION, Code
from evertrain.taskd.manager import clusterd
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import NicReply, StressReply, ToController, ToWorker
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.manager.shell import Config, Manager
from evertrain.taskd.native import library
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security

SOUGHT = """\
the libtaskd.so has not been loaded
libtaskd.so loaded successfully
libtaskd.so loaded failed: %s
libtaskd.so is symlink
taskd_agent is None
start taskd agent
init message manager success
message manager is ready
New fault process detected, fault_rank: %s
no additional fault process, fault_rank: %s
agent report fault rank timeout, exiting...
receive %d command, start to %s
agent receive duplicate message, msg: %s
agent send message failed, result: %d
do action %s finish,  data=%s
do action %s err, err=%s
controller_send_to_backend send message failed, res: 1
mindio not found, process-rescheduling checkpoint-saving DO NOT work!
init network success, role=%s
path join success, role=%s
rebuild net, role=%s
recv register req, role=%s
mgr send message success
mgr resend message more times than limit %d
cannot decide witch to send, according to receiver %s
controller callback is nil
manager init success!
init clusterd connect meet max retry time
worker %d register manager success, begin recv msg
all rank switch success
all stress test finish: %s
successfully init taskd manager
failed to init taskd manager with ret code:f1
successfully start taskd manager
failed to start taskd manager with ret code:f1
failed to start manager, error:%s
Successfully register controller callback
Manager is not initialized. Please call init_manager first.
Worker is not initialized. Please call init_worker first.
Successfully register callback func
taskd log path should not be a soft link
""".splitlines()
"""As the original's documents and its users' scripts have them, with the places of what differs."""


@functools.cache
def said() -> tuple[str, ...]:
    return tuple(_strings())


def _strings() -> Iterator[str]:
    """What TaskD's sources can say: every string in them, those in several pieces put together."""
    for file in Path(evertrain.taskd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(each.value) for each in node.values if isinstance(each, ast.Constant))


@pytest.mark.parametrize("text", SOUGHT)
def test_it_is_there(text: str) -> None:
    assert any(each.startswith(text) for each in said())


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    log.stop()  # tests before may have opened files
    caplog.set_level("INFO", logger="evertrain.taskd")


async def test_the_network_is_there(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(Position("Proxy", "3", "1794825081"), listen="127.0.0.1:0")
    await node.start()
    await node.close()
    assert "init network success, role=Proxy, srvRank=3, processRank=1794825081" in caplog.messages


async def test_what_workers_were_ordered_is_done(caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = Manager(Config("job-1", 1, 1))
    results = {"0": {"0": ("0", "OK")}}
    manager._carry_out([NicReply("job-1", True), NicReply("job-1", False, "no worker"), StressReply("job-1", results)])
    assert caplog.messages == [
        "all rank switch success",
        "link failover failed: no worker",
        f"all stress test finish: {results}",
    ]


async def test_nobody_is_there_to_be_told(caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = Manager(Config("job-1", 1, 1))
    body = frames.body(ACTION, Code.SWITCH_NIC)
    manager._carry_out([ToWorker(7, body), ToController("restart_controller")])
    assert caplog.messages == [
        "cannot decide witch to send, according to receiver Worker7: 204",
        "controller callback is nil: restart_controller is for nobody",
    ]


def test_a_report_of_the_controller_comes_when_the_manager_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = Manager(Config("job-1", 1, 1))
    manager._loop = aio.new_event_loop()
    manager._loop.close()
    manager._reported_in_thread(Report("process_fault", {3: 1}))
    (told,) = caplog.messages
    assert told.startswith("controller_send_to_backend send message failed, res: 1: ") and "process_fault" in told


def test_what_an_agent_is_ordered_and_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    for code, message in ((208, "7"), (203, ""), (299, "x")):
        common.tell_order(frames.body(ACTION, code, message))
    common.tell_unchanged({3, 2})
    assert caplog.messages == [
        "receive 208 command, start to restart all workers: 7",
        "receive 203 command, start to exit: ",
        "receive 299 command, start to do nothing, as nobody knows it: x",
        "no additional fault process, fault_rank: [2, 3]",
    ]


async def test_clusterd_stays_away(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and the attempts go on."""
    monkeypatch.setattr(clusterd, "_MANY", 3)
    monkeypatch.setattr(clusterd, "_pauses", lambda: iter([0.0] * 10))
    link, tries, enough = ClusterD("127.0.0.1:1", "job-1", security=Security()), 0, asyncio.Event()

    async def in_vain() -> None:
        nonlocal tries
        tries += 1
        if tries == 6:
            enough.set()
            await asyncio.Event().wait()
        raise ConnectionError("it is away")

    task = asyncio.ensure_future(link._again_and_again(in_vain))
    await asyncio.wait_for(enough.wait(), 90)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert caplog.messages[1:] == ["init clusterd connect meet max retry time 3: it is away: trying on"]


def test_the_library_is_missing_where_crashes_are_to_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(library.VARIABLE, str(tmp_path))
    caplog.set_level("INFO", logger="taskd")
    library.step_setter(tmp_path / "libtaskd.so")(5)
    failed, missing = caplog.messages
    assert failed.startswith("libtaskd.so loaded failed: ")
    assert missing == "the libtaskd.so has not been loaded: a crash is reported by its signal's name alone"
    caplog.clear()
    monkeypatch.delenv(library.VARIABLE)
    library.step_setter(tmp_path / "libtaskd.so")
    assert not caplog.messages, "nobody has asked for it"
