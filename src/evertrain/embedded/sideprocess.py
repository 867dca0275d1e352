"""A process of ours that does for the cluster what it can't do itself: enter namespaces, mount, fork.

A small program on the standard library alone, which is asked over a socket of messages (JSON, descriptors attached) and
answers each with one. It ends with whoever started it.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evertrain import aio

PATIENCE = 30.0
LOOK = 1.0
MAX_MESSAGE = 65536
MAX_DESCRIPTORS = 4
ROOT = Path(__file__).resolve().parents[2]
"""Where the package lies."""
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(sys.argv[2:])"
_KEPT = ("LD_LIBRARY_PATH", "EVERTRAIN_")
"""How variables begin that it keeps."""

Answer = tuple[dict[str, Any], list[int]]
"""A message, and the descriptors that came with it."""


class Lost(Exception):
    """The process is gone, or does not answer any more."""


class SideProcess:
    def __init__(self, module: str, what: str, patience: float | None = PATIENCE) -> None:
        """`what` it is, for messages: "the node's runtime process". If it takes longer than `patience` to answer a
        question, it is ended."""
        self._module = module
        self._what = what
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._readable: asyncio.Event | None = None
        """While an answer is waited for."""

    @property
    def runs(self) -> bool:
        return self._process is not None

    async def start(self, *arguments: str, descriptors: Sequence[int] = ()) -> Answer:
        """Its first word. The descriptors are open in it, under the same numbers."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM.format(self._module), str(ROOT)]
        command += [str(theirs.fileno()), str(os.getpid()), *arguments]
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=kept,
            )
        finally:
            theirs.close()
        self._socket = ours
        try:
            return await self._receive(ours, PATIENCE)
        except BaseException:
            self.kill()
            raise

    async def ask(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> Answer:
        """One question after the other; each gets its answer, also if the one who asked doesn't wait for it any more.
        OSError if the order can't be carried out, Lost if nobody is there to do so."""
        held = [os.dup(each) for each in descriptors]
        asking = asyncio.create_task(self._exchange(order, held))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_drop)
            raise

    async def ended(self) -> None:
        """Until it doesn't run any more, whoever has ended it."""
        while self._process is not None and self._process.poll() is None:
            await asyncio.sleep(LOOK)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._socket is not None:
            if self._readable is not None:
                asyncio.get_running_loop().remove_reader(self._socket)
                self._readable.set()
            self._socket.close()
            self._socket = None

    async def _exchange(self, order: dict[str, Any], descriptors: Sequence[int]) -> Answer:
        try:
            async with self._lock:
                connection = self._socket
                if connection is None:
                    raise Lost(f"{self._what} has ended")
                attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                try:
                    connection.sendmsg([json.dumps(order).encode()], attached if descriptors else [])
                    answer, received = await self._receive(connection, self._patience)
                except OSError as error:
                    self.kill()
                    raise Lost(f"{self._what} has ended: {error}") from None
                except BaseException:
                    self.kill()  # nobody could tell any more which answer is whose
                    raise
        finally:
            for each in descriptors:
                os.close(each)
        if answer["error"]:
            raise OSError(answer.get("number") or 0, answer["error"])
        return answer, received

    async def _receive(self, connection: socket.socket, patience: float | None) -> Answer:
        loop = asyncio.get_running_loop()
        self._readable = readable = asyncio.Event()
        loop.add_reader(connection, readable.set)
        try:
            async with aio.timeout(patience):
                await readable.wait()
        except TimeoutError:
            raise Lost(f"{self._what} does not answer") from None
        finally:
            self._readable = None
            if self._socket is connection:
                loop.remove_reader(connection)
        if self._socket is not connection:
            raise Lost(f"{self._what} was ended")
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, _, _ = connection.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
        received = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
        if not data:
            raise Lost(f"{self._what} has ended")
        found: dict[str, Any] = json.loads(data)
        return found, list(received)


def _drop(asking: asyncio.Task[Answer]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        for each in asking.result()[1]:
            os.close(each)
