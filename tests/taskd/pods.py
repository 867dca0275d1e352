"""Two pods of two processes: torchrun, changed by the documents' sed line, under a manager that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch.distributed

from evertrain import aio
from evertrain.taskd import frames
from evertrain.taskd.frames import Body
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from tests.ports import free_ports
from tests.taskd.orders import deliver

SED = "/import os/i import taskd.python.adaptor.patch"
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
rank, folder = os.environ["RANK"], Path(sys.argv[1])
kind, attempt = os.environ["RESTART_FAULT_PROCESS_TYPE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
seen = {"environment": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
        "name": __name__, "file": __file__, "warm": "torch" in sys.modules}
(folder / f"seen{rank}.{os.getpid()}").write_text(json.dumps(seen))
with open(folder / f"rank{rank}", "a") as file:
    file.write(f"{os.getpid()} {kind} {attempt}\\n")
print(f"rank {rank} is there", flush=True)
while True:
    signal.pause()
"""

MEETING = """
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
total = torch.ones(1)
dist.all_reduce(total)
assert total == 4
"""
"""Before a script: it goes on when all four processes have met."""


class Pods:
    c10d = False

    def __init__(self, folder: Path, *options: str, warm: tuple[int, int] = (0, 0), **environment: str) -> None:
        """`warm` spares for either pod."""
        self.folder, self.options = folder, options
        self.warm, self.environment = warm, environment
        self.master, self.manager_port, self.proxy_port = free_ports(3)
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        self.torchrun = folder / "run.py"
        self.torchrun.write_text(Path(torch.distributed.__file__).with_name("run.py").read_text())
        subprocess.run(["sed", "-i", SED, str(self.torchrun)], check=True)
        self.manager = Node(Position("Mgr", "0"), listen=f"127.0.0.2:{self.manager_port}")
        self.pods: dict[int, asyncio.subprocess.Process] = {}
        self.heard: dict[int, asyncio.Queue[Body]] = {0: asyncio.Queue(), 1: asyncio.Queue()}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Pods]:
        await self.manager.start()
        receiver = asyncio.ensure_future(self._receive())
        try:
            async with self.pods_only():
                for node in (0, 1):
                    assert (await self.hear(node)).msg_type == "REGISTER"
                    started = await self.hear(node)
                    assert (started.msg_type, started.code) == ("STATUS", 201)
                    self.first_restarts = started.message
                yield self
        finally:
            receiver.cancel()
            await self.manager.close()

    @contextlib.asynccontextmanager
    async def pods_only(self) -> AsyncIterator[Pods]:
        """For another manager than that of `running`."""
        try:
            for node in (0, 1):
                await self.start(node)
            yield self
        finally:
            for pod in self.pods.values():
                if pod.returncode is None:
                    os.killpg(pod.pid, signal.SIGKILL)
                    await pod.wait()

    def options_of(self, node: int) -> list[str]:
        """Of torchrun, that one pod has and the other has not."""
        return []

    async def start(self, node: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MINDX_TASK_ID": "job-1",
            "POD_IP": f"127.0.0.{2 + node}",
            "RANK": str(node),
            "MASTER_ADDR": "127.0.0.2",
            "TASKD_MANAGER_PORT": str(self.manager_port),
            "TASKD_PROXY_PORT": str(self.proxy_port),
            "TASKD_LOG_PATH": str(self.folder / f"log{node}"),
            "TASKD_WARM_SPARES": str(self.warm[node]),
            **self.environment,
        }
        meeting = ["--node_rank", str(node), "--master_addr", "127.0.0.2", "--master_port", str(self.master)]
        if self.c10d:
            meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.2:{self.master}", "--rdzv_id", "job-1"]
        command = [
            sys.executable, str(self.torchrun), "--nproc_per_node", "2", "--nnodes", "2", *meeting, *self.options,
            *self.options_of(node), str(self.script), str(self.folder),
        ]  # fmt: skip
        with open(self.folder / f"pod{node}.out", "ab") as output:
            self.pods[node] = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    async def _receive(self) -> None:
        while True:
            message = await self.manager.received.get()
            body = frames.decode(message.body)
            if body.msg_type != "KEEP_ALIVE":
                self.heard[int(message.header.src.serverRank)].put_nowait(body)

    async def hear(self, node: int, limit: float = 90) -> Body:
        try:
            async with aio.timeout(limit):
                return await self.heard[node].get()
        except TimeoutError:
            raise AssertionError(f"nothing from node {node}\n{self.output(node)}") from None

    async def order(self, node: int, code: int, message: str = "", **extension: str) -> None:
        body = frames.body("ACTION", code, message, extension or None)
        await deliver(self.manager, Position("Agent", str(node)), body)

    async def begin(self, restarts: str = "5") -> dict[int, int]:
        for node in (0, 1):
            await self.order(node, 210, restarts)
        return {rank: (await self.lives(rank, 1))[0] for rank in range(4)}

    async def lives(self, rank: int, count: int) -> tuple[int, str, str]:
        """The newest of `count` processes that a rank has had: id, what is new, attempt."""
        file = self.folder / f"rank{rank}"
        async with self._patience(f"rank {rank} did not live {count} times"):
            while True:
                lines = file.read_text().splitlines() if file.exists() else []
                if len(lines) >= count:
                    assert len(lines) == count, lines
                    pid, kind, attempt = lines[-1].split()
                    return int(pid), kind, attempt
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def _patience(self, lacking: str) -> AsyncIterator[None]:
        """A while. Then it is told what was lacking, and what the pods have said."""
        try:
            async with aio.timeout(90):
                yield
        except TimeoutError:
            said = "".join(f"\n== node {node}\n{self.output(node)}{self.log(node)}" for node in self.pods)
            raise AssertionError(f"{lacking}{said}") from None

    async def ends(self, node: int) -> int:
        async with self._patience(f"node {node} did not end"):
            return await self.pods[node].wait()

    def seen(self, rank: int, pid: int) -> dict[str, Any]:
        """What a process found in the beginning."""
        found: dict[str, Any] = json.loads((self.folder / f"seen{rank}.{pid}").read_text())
        return found

    def log(self, node: int) -> str:
        """Of the newest agent of this node, and of those before it."""
        return "".join(file.read_text() for file in sorted((self.folder / f"log{node}").glob("agent-*")))

    async def logged(self, node: int, text: str, count: int = 1) -> None:
        """When its log has this text in it."""
        async with self._patience(f"node {node} did not log {text!r}"):
            while self.log(node).count(text) < count:
                await asyncio.sleep(0.02)

    async def printed(self, node: int, text: str, count: int = 1) -> None:
        async with self._patience(f"node {node} did not print {text!r}"):
            while self.output(node).count(text) < count:
                await asyncio.sleep(0.02)

    def output(self, node: int) -> str:
        return (self.folder / f"pod{node}.out").read_text(errors="replace")


def faults(body: Body) -> tuple[int, list[int], int]:
    report = frames.fault_report(body.message)
    return body.code, report.fault_ranks, report.restart_times


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
