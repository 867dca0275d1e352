"""The runtime process of a node, seen from the cluster (see `runtime`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evertrain.embedded.sideprocess import SideProcess

RUNTIME = "evertrain.embedded.node.runtime.main"
_ADVICE = (
    "a private mount namespace is needed and this kernel does not allow it ({reason}). Run the cluster as root, or "
    "allow user namespaces: `sysctl kernel.unprivileged_userns_clone=1` on Debian, `sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu, `--cap-add SYS_ADMIN --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined` for Docker"
)


class Link:
    """The line to the init process of one container."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """None at the end."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """The init process ends everything when it sees this."""
        self._writer.close()


class Engine:
    def __init__(self, folder: Path, isolate: bool = True, users: int = -1) -> None:
        """`users`: descriptor of the user namespace that owns the pods' networks, if they have any."""
        self._folder = folder
        self._isolate = isolate
        self._users = users
        self._process = SideProcess(RUNTIME, "the node's runtime process")
        self._starting = asyncio.Lock()
        self._links: set[Link] = set()
        self.no_mounts = ""
        """Why volumes can't be mounted; empty if they can."""
        self.no_pids = ""
        """Why containers have no process ids of their own; empty if they have."""

    @property
    def runs(self) -> bool:
        return self._process.runs

    async def ready(self) -> None:
        """It runs, and so it is known what the kernel allows. Raises Lost."""
        async with self._starting:
            if self._process.runs:
                return
            trial = self._folder / "trial"
            trial.mkdir(parents=True, exist_ok=True)
            passed = [self._users] if self._users >= 0 else []
            hello, _ = await self._process.start(
                str(trial) if self._isolate else "", str(self._users), descriptors=passed
            )
            self.no_mounts = _ADVICE.format(reason=hello["mounts"]) if hello["mounts"] else ""
            self.no_pids = str(hello["pids"])

    async def request(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Starts the process if it doesn't run. OSError if the order can't be carried out, Lost if it is gone."""
        await self.ready()
        await self._process.ask(order, descriptors)

    async def spawn(self, network: int = -1) -> Link:
        """An init process that waits to be told what to run, in that network namespace if one is given."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                await self.request({"do": "spawn"}, [theirs.fileno(), *([network] if network >= 0 else [])])
            link = Link(*await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            ours.close()
            raise
        self._links.add(link)
        return link

    def forget(self, link: Link) -> None:
        link.close()
        self._links.discard(link)

    def kill(self) -> None:
        """All processes of the node die at once."""
        self._process.kill()
        for link in self._links:
            link.close()
        self._links.clear()
        with contextlib.suppress(OSError):
            (self._folder / "trial").rmdir()
