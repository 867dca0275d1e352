"""A launcher with msrun's four callbacks and real processes behind them; what drives it is put after `WORKERS`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from evertrain import aio

WORKERS = """
import os, signal, subprocess, sys

folder, node = sys.argv[1], int(os.environ["MS_NODE_RANK"])
workers = {0: None, 1: None}
CHILD = '''
import os, signal, sys
def end(*_):
    sys.exit(0)
def save(*_):
    open(sys.argv[1] + ".saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGUSR1, end)
signal.signal(signal.SIGTERM, save)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {os.environ.get('RESTART_FAULT_PROCESS_TYPE', 'none')}\\\\n")
while True:
    signal.pause()
'''
child = os.environ.get("TEST_CHILD", CHILD)

def refuses(what):
    return os.path.exists(f"{folder}/refuse-{what}")

def start(local_ranks):
    if refuses("start"):
        raise OSError("no log file can be made")
    for local in local_ranks:
        command = [sys.executable, "-c", child, f"{folder}/rank{2 * node + local}"]
        workers[local] = subprocess.Popen(command, preexec_fn=os.setsid)
    return 0

def kill(pids):
    if refuses("kill"):
        raise ProcessLookupError("which one?")
    for worker in workers.values():
        if worker is not None and (-1 in pids or worker.pid in pids) and worker.poll() is None:
            os.killpg(os.getpgid(worker.pid), signal.SIGKILL)
    return 0

def status(worker):
    # As msrun's own: an exit code that is not 0 is never seen, for the process is gone when it is known.
    code = worker.poll()
    return code if code in (None, 0) else 300

def monitor(pids):
    if refuses("monitor"):
        raise KeyError(pids[0])
    with open(f"{folder}/looks", "a") as file:
        file.write(".")
    return {
        local: {
            "pid": worker.pid if worker else None,
            "status": status(worker) if worker else 200,
            "global_rank": 2 * node + local,
        }
        for local, worker in workers.items()
    }

callbacks = {
    "KILL_WORKER": kill,
    "START_ALL_WORKER": lambda: start(map(int, os.environ.get("TEST_STARTED", "0 1").split())),
    "START_WORKER_LIST": start,
    "MONITOR": monitor,
}
"""


class Launcher:
    """A pod of two ranks, whose processes write their ids into files of their ranks."""

    def __init__(self, folder: Path, code: str, node: int, **environment: str) -> None:
        self.folder, self._code = folder, WORKERS + code
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MINDX_TASK_ID": "job-1",
            "MS_NODE_RANK": str(node),
            "MS_LOCAL_WORKER": "2",
            "TASKD_LOG_PATH": str(folder / "log"),
            **environment,
        }
        self._process: asyncio.subprocess.Process | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with open(self.folder / "out", "wb") as output:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", self._code, str(self.folder),
                env=self._environment, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            for file in self.folder.glob("rank*[0-9]"):
                for line in file.read_text().splitlines():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(line.split()[0]), signal.SIGKILL)

    def said(self) -> str:
        return (self.folder / "out").read_text()

    async def says(self, text: str) -> None:
        try:
            async with aio.timeout(90):
                while text not in self.said():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(self.said()) from None

    async def ended(self) -> int:
        assert self._process is not None
        try:
            async with aio.timeout(90):
                return await self._process.wait()
        except TimeoutError:
            raise AssertionError(self.said()) from None

    async def life(self, rank: int, count: int) -> tuple[int, str]:
        """Process id and restart type of a rank's last process, when it is the count-th."""
        file = self.folder / f"rank{rank}"
        try:
            async with aio.timeout(90):
                while len(lines := file.read_text().splitlines() if file.exists() else []) < count:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(self.said()) from None
        assert len(lines) == count, lines
        pid, kind = lines[-1].split()
        return int(pid), kind

    async def looked(self) -> None:
        """It has looked at everything once more, from beginning to end; who ends processes looks twice."""
        file = self.folder / "looks"
        before = file.stat().st_size
        async with aio.timeout(90):
            while file.stat().st_size < before + 3:
                await asyncio.sleep(0.02)

    async def pids(self, *ranks: int, count: int = 1) -> dict[int, int]:
        return {rank: (await self.life(rank, count))[0] for rank in ranks}
