"""The agent for MindSpore in a launcher that offers msrun's four callbacks, with real processes behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.taskd import frames
from evertrain.taskd.frames import Body
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from tests.ports import free_ports
from tests.taskd.msrun import Launcher
from tests.taskd.native import build
from tests.taskd.orders import deliver
from tests.taskd.pods import alive, faults

AGENT = """
from taskd.api.taskd_agent_api import init_taskd_agent, register_func, start_taskd_agent

if not init_taskd_agent({"Framework": "MindSpore"}):
    sys.exit(9)
for name, function in callbacks.items():
    register_func(name, function)
start_taskd_agent()
"""


class Pod:
    """Node 1 of a job, under a manager that follows a script."""

    def __init__(self, folder: Path, code: str = AGENT, **environment: str) -> None:
        manager_port, proxy_port = free_ports(2)
        self.manager = Node(Position("Mgr", "0"), listen=f"127.0.0.2:{manager_port}")
        self.launcher = Launcher(
            folder,
            code,
            node=1,
            POD_IP="127.0.0.3",
            MS_SCHED_HOST="127.0.0.2",
            TASKD_MANAGER_PORT=str(manager_port),
            TASKD_PROXY_PORT=str(proxy_port),
            **environment,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Pod]:
        await self.manager.start()
        try:
            async with self.launcher.running():
                assert (await self.hear()).msg_type == "REGISTER"
                started = await self.hear()
                assert (started.code, started.message) == (201, "1")
                yield self
        finally:
            await self.manager.close()

    async def hear(self) -> Body:
        while True:
            try:
                async with aio.timeout(90):
                    message = await self.manager.received.get()
            except TimeoutError:
                raise AssertionError(self.launcher.said()) from None
            body = frames.decode(message.body)
            if body.msg_type != "KEEP_ALIVE":
                return body

    async def order(self, code: int, message: str = "") -> None:
        await deliver(self.manager, Position("Agent", "1"), frames.body("ACTION", code, message))


async def test_from_start_to_success_with_a_process_replaced(tmp_path: Path) -> None:
    async with Pod(tmp_path).running() as pod:
        await pod.order(210, "1")
        first = await pod.launcher.pids(2, 3)
        os.kill(first[3], signal.SIGKILL)
        assert faults(await pod.hear())[:2] == (202, [3]), "a global rank"
        await pod.order(209, '["3"]')
        new, kind = await pod.launcher.life(3, 2)
        assert kind == "worker" and alive(first[2])
        os.kill(new, signal.SIGKILL)
        assert faults(await pod.hear())[:2] == (202, [3]), "again"
        await pod.order(209, '["3"]')
        new, _ = await pod.launcher.life(3, 3)
        for pid in (first[2], new):
            os.kill(pid, signal.SIGUSR1)
        end = await pod.hear()
        assert (end.msg_type, end.code, end.message) == ("STATUS", 203, "0")
        assert await pod.launcher.ended() == 0


async def test_all_start_again_and_then_exit_on_order(tmp_path: Path) -> None:
    async with Pod(tmp_path).running() as pod:
        await pod.order(210, "1")
        first = await pod.launcher.pids(2, 3)
        await pod.order(210, "1")  # a second start is none
        await pod.order(213, '["2", "7"]')
        assert faults(await pod.hear())[:2] == (202, [2])
        await pod.order(208, "0")
        second = await pod.launcher.pids(2, 3, count=2)
        assert not any(alive(pid) for pid in first.values())
        os.kill(second[2], signal.SIGKILL)
        assert faults(await pod.hear()) == (202, [2], 0), "it is known to be a fault of after that restart"
        await pod.order(209, '["2"]')
        assert (await pod.launcher.life(2, 3))[1] == "worker"
        await pod.order(208, "0")
        assert (await pod.launcher.life(2, 4))[1] == "pod", "not what the replacement before was told"
        second = await pod.launcher.pids(2, count=4) | await pod.launcher.pids(3, count=3)
        await pod.order(203)
        assert faults(await pod.hear())[:2] == (202, [])
        assert await pod.launcher.ended() == 1
        assert not any(alive(pid) for pid in second.values())


BROKEN_MEMORY = """
import os, signal, sys
from tests.taskd.dying import fault

signal.signal(signal.SIGUSR2, lambda *_: fault(signal.SIGBUS, 4, 0x7F0000001000))
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {os.environ['RESTART_FAULT_PROCESS_TYPE']}\\n")
while True:
    signal.pause()
"""


async def test_what_a_process_died_of_is_reported(tmp_path: Path) -> None:
    """msrun only knows that it has vanished."""
    library = await asyncio.to_thread(build, tmp_path / "library")
    async with Pod(tmp_path, LD_PRELOAD=str(library), TEST_CHILD=BROKEN_MEMORY).running() as pod:
        await pod.order(210, "1")
        first = await pod.launcher.pids(2, 3)
        os.kill(first[3], signal.SIGUSR2)
        told = await pod.hear()
        assert faults(told)[:2] == (202, [3])
        assert frames.fault_types(told.extension) == {3: 0}, "an uncorrectable memory error"
        os.kill(first[2], signal.SIGKILL)
        told = await pod.hear()
        assert faults(told)[:2] == (202, [2, 3])
        assert frames.fault_types(told.extension) == {}
        said = pod.launcher.said()
        assert f"rank 3 (process {first[3]}) failed: killed by SIGBUS (uncorrectable memory error" in said
        assert f"rank 2 (process {first[2]}) failed: it is gone" in said


async def test_orders_that_come_at_once_leave_one_process_for_a_rank(tmp_path: Path) -> None:
    async with Pod(tmp_path).running() as pod:
        await pod.order(210, "1")
        await pod.launcher.pids(2, 3)
        await asyncio.gather(*(pod.order(209, '["3"]') for _ in range(3)))
        await pod.launcher.looked()
        await pod.order(213, '["3"]')
        assert faults(await pod.hear())[:2] == (202, [3])
        lives = [int(line.split()[0]) for line in (tmp_path / "rank3").read_text().splitlines()]
        assert not [pid for pid in lives if alive(pid)]


async def test_a_launcher_that_can_not_start_processes_ends_the_others(tmp_path: Path) -> None:
    async with Pod(tmp_path).running() as pod:
        await pod.order(210, "1")
        first = await pod.launcher.pids(2, 3)
        (tmp_path / "refuse-start").touch()
        await pod.order(209, '["3"]')
        assert faults(await pod.hear())[:2] == (202, [])
        assert await pod.launcher.ended() == 1
        assert not any(alive(pid) for pid in first.values())
        assert "could not start its processes: OSError('no log file can be made')" in pod.launcher.said()


@pytest.mark.matrix
async def test_a_launcher_that_answers_nothing_is_asked_again_and_its_processes_end(tmp_path: Path) -> None:
    async with Pod(tmp_path).running() as pod:
        await pod.order(210, "1")
        first = await pod.launcher.pids(2, 3)
        await pod.launcher.looked()
        (tmp_path / "refuse-monitor").touch()
        await pod.launcher.says("can't say how its processes are")
        await asyncio.sleep(1.2)  # some more questions, about which nothing is said
        (tmp_path / "refuse-monitor").unlink()
        os.kill(first[2], signal.SIGKILL)
        assert faults(await pod.hear())[:2] == (202, [2])
        (tmp_path / "refuse-kill").touch()
        await pod.order(203)
        assert faults(await pod.hear())[:2] == (202, [])
        assert await pod.launcher.ended() == 1
        assert not alive(first[3])
        said = pod.launcher.said()
        assert said.count("can't say how its processes are") == 1 and "msrun could not kill" in said


SCHEDULER = """
waiting = "import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
subprocess.Popen([sys.executable, "-c", waiting, f"{folder}/all-ended"])
"""


async def test_a_launcher_stays_for_its_scheduler(tmp_path: Path) -> None:
    """Processes of other nodes end with its help."""
    async with Pod(tmp_path, SCHEDULER + AGENT).running() as pod:
        await pod.order(210, "1")
        for pid in (await pod.launcher.pids(2, 3)).values():
            os.kill(pid, signal.SIGUSR1)
        end = await pod.hear()
        assert (end.code, end.message) == (203, "0")
        ended = asyncio.ensure_future(pod.launcher.ended())
        done, _ = await asyncio.wait({ended}, timeout=0.5)
        assert not done
        (tmp_path / "all-ended").touch()
        assert await ended == 0
