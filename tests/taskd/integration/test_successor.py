"""A manager that is killed is started again; what its agents then tell it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.taskd import frames
from evertrain.taskd.agent import common
from evertrain.taskd.frames import Body
from evertrain.taskd.native.crash import NORMAL_FAULT, Cause
from evertrain.taskd.net import background
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from tests.ports import free_port

MANAGER = """\
from taskd.api import init_taskd_manager, start_taskd_manager
init_taskd_manager({"job_id": "job-1", "node_nums": 1, "proc_per_node": 1})
start_taskd_manager()
"""


def until(true: Callable[[], object], limit: float = 90) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


class Manager:
    def __init__(self, folder: Path, *command: str) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "manager.py").write_text(MANAGER)
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TASKD_PROCESS_ENABLE": "off",
            "TASKD_MANAGER_PORT": str(self.port), "TASKD_LOG_PATH": str(folder / "log"),
        }  # fmt: skip
        self.process = subprocess.Popen(
            command or (sys.executable, "manager.py"), cwd=folder, env=environment, start_new_session=True
        )

    def all(self, name: str) -> list[int]:
        """Processes of this job whose command line ends so."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                command = (entry / "cmdline").read_bytes().rstrip(b"\0")
                if command.endswith(name.encode()) and os.readlink(entry / "cwd") == str(self.folder):
                    found.append(int(entry.name))
        return found

    def pid(self, *but: int) -> int:
        """Of the manager that listens."""

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return any(pid not in but for pid in self.all("manager.py"))
            return False

        until(listens)
        (pid,) = [pid for pid in self.all("manager.py") if pid not in but]
        return pid

    def gone(self) -> bool:
        return not self.all("manager.py") and not self.all("successor.py")


@contextlib.contextmanager
def running(folder: Path, *command: str) -> Iterator[Manager]:
    manager = Manager(folder, *command)
    try:
        yield manager
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(manager.process.pid, signal.SIGKILL)
        manager.process.wait()


def test_it_comes_back_until_it_ends_by_itself(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        first = manager.pid()
        os.kill(first, signal.SIGKILL)
        manager.process.wait()
        second = manager.pid(first)
        os.kill(second, signal.SIGKILL)
        third = manager.pid(first, second)
        os.kill(third, signal.SIGTERM)
        until(manager.gone)


def test_an_end_by_itself_has_no_successor(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        os.kill(manager.pid(), signal.SIGTERM)
        assert manager.process.wait(90) == 0
        assert manager.gone()


def test_a_pod_that_is_over_has_no_manager(tmp_path: Path) -> None:
    shell = f'"{sys.executable}" manager.py & wait'
    with running(tmp_path, "bash", "-c", shell) as manager:
        pid = manager.pid()
        os.kill(manager.process.pid, signal.SIGKILL)
        manager.process.wait()
        os.kill(pid, signal.SIGKILL)
        until(manager.gone)


def test_nor_has_one_that_ends_while_the_next_manager_is_waited_for(tmp_path: Path) -> None:
    shell = f'"{sys.executable}" manager.py & sleep 600'
    with running(tmp_path, "bash", "-c", shell) as manager:
        first = manager.pid()
        os.kill(first, signal.SIGKILL)
        os.kill(manager.pid(first), signal.SIGKILL)
        until(lambda: not manager.all("manager.py"))
        os.kill(manager.process.pid, signal.SIGKILL)
        manager.process.wait()
        until(manager.gone)


# --- what agents say to it -------------------------------------------------------------------------------------------


class Tree:
    """A manager that can be replaced, a proxy and an agent."""

    def __init__(self) -> None:
        self.port = free_port()

    async def manager(self) -> Node:
        node = Node(Position("Mgr", "0"), listen=f"127.0.0.1:{self.port}")
        await node.start()
        return node

    async def replace(self, old: Node, reporter: common.Reporter) -> Node:
        """The agent has missed it meanwhile: a process needs longer to start than there is between signs of life."""
        await old.close()
        async with aio.timeout(90):
            while reporter.heard:
                await asyncio.sleep(0.01)
        return await self.manager()


@contextlib.asynccontextmanager
async def tree(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Tree, Node, common.Reporter]]:
    monkeypatch.setattr(common, "ALIVE", 0.1)
    thread = background.Background()
    monkeypatch.setattr(background, "_shared", thread)
    made = Tree()
    manager = await made.manager()
    above = f"127.0.0.1:{made.port}"
    proxy = Node(Position("Proxy", "0", "1"), listen="127.0.0.1:0", upstream=above)
    await proxy.start()
    reporter = common.Reporter("0", f"127.0.0.1:{proxy.port}", lambda: None)
    await asyncio.to_thread(reporter.start)
    try:
        yield made, manager, reporter
    finally:
        await asyncio.to_thread(reporter.close)
        await asyncio.to_thread(thread.close)
        await proxy.close()


async def hear(manager: Node) -> Body:
    """The next word that is no sign of life."""
    async with aio.timeout(90):
        while True:
            body = frames.decode((await manager.received.get()).body)
            if body.msg_type != "KEEP_ALIVE":
                return body


async def test_an_agent_that_waits_for_its_start_says_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tree(monkeypatch) as (made, manager, reporter):
        await asyncio.to_thread(reporter.starts, 7)
        assert [(await hear(manager)).code for _ in range(2)] == [0, 201]
        manager = await made.replace(manager, reporter)
        assert await hear(manager) == frames.body("STATUS", 201, "7", {})
        await manager.close()


async def test_faults_are_told_to_a_manager_that_takes_over_and_those_that_are_mended_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tree(monkeypatch) as (made, manager, reporter):
        await asyncio.to_thread(reporter.starts, 7)
        reporter.stands(())
        manager = await made.replace(manager, reporter)
        await asyncio.to_thread(reporter.faults, [3, 2])
        assert frames.fault_report((first := await hear(manager)).message).fault_ranks == [2, 3]
        manager = await made.replace(manager, reporter)
        assert await hear(manager) == first
        reporter.stands([3])
        manager = await made.replace(manager, reporter)
        assert frames.fault_report((await hear(manager)).message).fault_ranks == [3]
        await manager.close()


async def test_faults_that_nobody_got_are_told_when_somebody_is_back_however_rarely_the_agent_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tree(monkeypatch) as (made, manager, reporter):
        await asyncio.to_thread(reporter.starts, 7)
        await asyncio.to_thread(reporter.starts_again, 7)
        reporter._every = 1000.0  # as if the job had 100 000 nodes; the sign that is on its way is the last one
        await until_it_sleeps(reporter)
        await manager.close()
        await asyncio.to_thread(reporter.faults, [3])
        manager = await made.manager()
        assert frames.fault_report((await hear(manager)).message).fault_ranks == [3]
        await manager.close()


async def until_it_sleeps(reporter: common.Reporter) -> None:
    sleeps = asyncio.Event()
    next_one = reporter._until_next

    async def watched() -> None:
        sleeps.set()
        await next_one()

    reporter._until_next = watched  # type: ignore[method-assign]
    async with aio.timeout(90):
        while not sleeps.is_set():
            await asyncio.sleep(0.01)


async def test_signs_of_life_say_what_has_failed_until_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a manager that was killed and is back between two of them: nobody has missed the one before."""
    async with tree(monkeypatch) as (_, manager, reporter):
        await asyncio.to_thread(reporter.starts, 7)
        for fault, replaced in (([3, 2], [3]), ([3], [])):
            cause = Cause(NORMAL_FAULT, "killed by SIGKILL", code=-9)
            await asyncio.to_thread(reporter.faults, fault, dict.fromkeys(fault, cause))
            sign = await sign_of(manager, sorted(fault))
            assert frames.process_ends(sign.extension) == dict.fromkeys(fault, frames.ProcessEnd(-9, cause.words))
            reporter.stands(replaced)
            await sign_of(manager, replaced)
        await asyncio.to_thread(reporter.faults, [3])
        await sign_of(manager, [3])
        reporter.starts_again(6)
        assert frames.fault_report((await sign_of(manager, [])).message).restart_times == 6
        await manager.close()


async def sign_of(manager: Node, ranks: list[int]) -> Body:
    async with aio.timeout(90):
        while True:
            body = frames.decode((await manager.received.get()).body)
            if body.msg_type == "KEEP_ALIVE" and frames.fault_report(body.message).fault_ranks == ranks:
                return body


async def test_a_sign_of_life_that_can_not_be_given_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tree(monkeypatch) as (_, manager, reporter):
        failed, sign = asyncio.Event(), reporter._sign

        def fail() -> Body:
            reporter._sign = sign  # type: ignore[method-assign]
            failed.set()
            raise RecursionError("too deep")

        reporter._sign = fail  # type: ignore[method-assign]
        async with aio.timeout(90):
            while not failed.is_set():
                await asyncio.sleep(0.01)
        for _ in range(manager.received.qsize()):
            manager.received.get_nowait()
        await sign_of(manager, [])
        await manager.close()


def test_an_agent_registers_until_the_manager_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    thread = background.Background()
    monkeypatch.setattr(background, "_shared", thread)
    reporter = common.Reporter("0", "127.0.0.1:1", lambda: None)
    monkeypatch.setattr(reporter.member, "start", lambda: None)
    monkeypatch.setattr(reporter.member, "wait_joined", lambda limit: True)
    monkeypatch.setattr(reporter.member, "send", lambda *_: answers.pop(0))
    try:
        reporter.start()
        assert not answers
        answers.append(False)
        monkeypatch.setattr(common, "JOIN_LIMIT", -1.0)
        with pytest.raises(ConnectionError, match="could not be told of this agent"):
            reporter.start()
    finally:
        reporter.close()
        thread.close()
