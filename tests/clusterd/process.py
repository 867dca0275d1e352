"""ClusterD as a process of its own, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.clusterd.hub import PATIENCE
from tests.operator.cluster import Cluster


class Process:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    async def port(self) -> int:
        """Where it serves, as soon as it does."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        match = re.fullmatch(r"clusterd serves on 127\.0\.0\.1:(\d+)\n", line.decode())
        assert match, f"{line!r}: {self.said()}"
        return int(match[1])

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return await self.code()

    async def code(self) -> int:
        return await asyncio.wait_for(self._process.wait(), PATIENCE)

    def said(self) -> str:
        return self._log.read_text()


@contextlib.asynccontextmanager
async def clusterd(here: Cluster, *options: str, name: str = "clusterd") -> AsyncIterator[Process]:
    log = here.folder / f"{name}.log"
    here.client()  # writes its kubeconfig
    kubeconfig = here.folder / f"kubeconfig-{here.server.port}"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "evertrain.clusterd", "-kubeconfig", str(kubeconfig), *options,
            stdout=asyncio.subprocess.PIPE, stderr=output,
        )  # fmt: skip
    try:
        yield Process(process, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
