"""The runtime process of a node, seen from the cluster (see `runtime`)."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PATIENCE = 30.0
_KEPT = ("LD_LIBRARY_PATH", "EVERTRAIN_")
"""How variables begin that the runtime process keeps; its pods don't get them."""
ROOT = Path(__file__).resolve().parents[3]
"""Where the package lies."""
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from evertrain.embedded.node.runtime.main import main; main(sys.argv[2:])"
)
_ADVICE = (
    "a private mount namespace is needed and this kernel does not allow it ({reason}). Run the cluster as root, or "
    "allow user namespaces: `sysctl kernel.unprivileged_userns_clone=1` on Debian, `sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu, `--cap-add SYS_ADMIN --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined` for Docker"
)


class EngineLost(Exception):
    """The runtime process is gone."""


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
    def __init__(self, folder: Path, isolate: bool = True) -> None:
        self._folder = folder
        self._isolate = isolate
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._links: set[Link] = set()
        self.no_mounts = ""
        """Why volumes can't be mounted; empty if they can."""
        self.no_pids = ""
        """Why containers have no process ids of their own; empty if they have."""

    @property
    def runs(self) -> bool:
        return self._process is not None

    async def _start(self) -> socket.socket:
        trial = self._folder / "trial"
        trial.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(ROOT)]
        command += [str(theirs.fileno()), str(os.getpid()), str(trial) if self._isolate else ""]
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=kept
            )
        finally:
            theirs.close()
        self._socket = ours
        try:
            hello = await self._receive(ours)
        except BaseException:
            self.kill()
            raise
        self.no_mounts = _ADVICE.format(reason=hello["mounts"]) if hello["mounts"] else ""
        self.no_pids = str(hello["pids"])
        return ours

    async def _receive(self, connection: socket.socket) -> dict[str, Any]:
        try:
            async with asyncio.timeout(PATIENCE):
                data = await asyncio.get_running_loop().sock_recv(connection, 65536)
        except (OSError, TimeoutError) as error:
            raise EngineLost(f"the node's runtime process does not answer: {error!r}") from None
        if not data:
            raise EngineLost("the node's runtime process has ended")
        found: dict[str, Any] = json.loads(data)
        return found

    async def ready(self) -> None:
        """It runs, and so it is known what the kernel allows."""
        async with self._lock:
            if self._socket is None:
                await self._start()

    async def request(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Starts the process if it doesn't run. OSError if the order can't be carried out."""
        async with self._lock:
            connection = self._socket or await self._start()
            attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                connection.sendmsg([json.dumps(order).encode()], attached)
                answer = await self._receive(connection)
            except (OSError, EngineLost, asyncio.CancelledError):
                self.kill()  # whatever state it is in, the next one begins anew
                raise
        if answer["error"]:
            raise OSError(answer["error"])

    async def spawn(self) -> Link:
        """An init process that waits to be told what to run."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                await self.request({"do": "spawn"}, [theirs.fileno()])
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
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for link in self._links:
            link.close()
        self._links.clear()
        with contextlib.suppress(OSError):
            (self._folder / "trial").rmdir()
