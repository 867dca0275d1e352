"""An agent or a worker in the tree, for threads: what it sends and what has come for it."""

from __future__ import annotations

import asyncio
import logging
import queue
import uuid as uuids
from collections.abc import Callable, Mapping

from evertrain.taskd import frames
from evertrain.taskd.codes import AGENT, MANAGER, AckCode
from evertrain.taskd.frames import Body
from evertrain.taskd.net.background import Background, shared
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security

log = logging.getLogger(__name__)

TO_MANAGER = Position(MANAGER, "0")
_TRIES, _PAUSE = 3, 1.0
_RECEIVED_LIMIT = 1000


class Member:
    """`start`, then `send` and `received`, then `close`; from any thread."""

    def __init__(
        self,
        own: Position,
        upstream: str,
        *,
        security: Security | None = None,
        background: Background | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """`notify` is called in the loop's thread when something has been put into `received`."""
        self._background = background or shared()
        self._node = Node(own, upstream=upstream, security=security)
        self._notify = notify
        self._seen = frames.Seen()
        self._task: asyncio.Task[None] | None = None
        self.received: queue.Queue[Body] = queue.Queue(_RECEIVED_LIMIT)
        """Bodies for us, each once, in the order of arrival."""

    def start(self) -> None:
        """Begin to join. Returns at once."""
        self._background.run(self._start())

    async def _start(self) -> None:
        await self._node.start()
        self._task = asyncio.ensure_future(self._receive())

    async def _receive(self) -> None:
        while True:
            message = await self._node.received.get()
            if self._seen.again(message.header.uuid):
                log.info("agent receive duplicate message, msg: %s", message.header.uuid)
                continue
            try:
                self.received.put_nowait(frames.decode(message.body))
                self._notify()
            except frames.BadFrame as error:
                log.warning("%s: message %s: %s", self._node.own, message.header.uuid, str(error))
            except queue.Full:
                log.error("%s: nobody reads the messages; %s is lost", self._node.own, message.header.uuid)

    def wait_joined(self, timeout: float | None = None) -> bool:
        return self._background.run(self._node.wait_joined(timeout))

    def send(self, msg_type: str, code: int, message: str = "", extension: Mapping[str, str] | None = None) -> bool:
        """To the manager, until it has it; a few tries. Blocks meanwhile."""
        return self._background.run(self.deliver(frames.body(msg_type, code, message, extension)))

    async def deliver(self, body: Body, tries: int = _TRIES) -> bool:
        """As `send`, in the loop."""
        uuid, mtype = str(uuids.uuid4()), "DEFAULT" if self._node.own.role == AGENT else "default"
        for left in reversed(range(tries)):
            code = await self._node.send(TO_MANAGER, body.encode(), mtype=mtype, uuid=uuid)
            if code == AckCode.OK:
                return True
            log.log(
                logging.WARNING if not left and tries > 1 else logging.DEBUG,
                "agent send message failed, result: %d",
                code,
            )
            if left and (code != AckCode.SERVER_ERROR or not await self._node.wait_joined(_PAUSE)):
                await asyncio.sleep(_PAUSE)
        return False

    def close(self) -> None:
        self._background.run(self._close())

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._node.close()
