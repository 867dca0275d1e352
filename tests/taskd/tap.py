"""What is said in a job, by whom and in which order: ClusterD's side as the scripted one tells it, TaskNet on its wire.

The tap listens where the proxies look for the manager and passes everything on to where the manager really is.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from evertrain import aio
from evertrain.taskd.net.server import SERVICE
from evertrain.wire import service
from evertrain.wire.tasknet_pb2 import Ack, Message, PathDiscoveryReq, RegisterReq

_FAILED = re.compile(r" says STATUS 202 \[\d")
SHOWN = {
    203: ("SignalType", "Actions"),
    204: ("globalRankIDs", "globalOps", "switchNicUUID"),
    205: ("StressTestRankOPStr", "stressTestUUID"),
}
"""By code: what there is in the extension that says more than the code, in the order of the line."""


class Story:
    """Lines, in the order in which things were said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def tell(self, line: str) -> None:
        self.lines.append(line)
        self._changed.set()

    async def until(self, line: str, limit: float = 300, times: int = 1) -> None:
        """Until something has been said, this often."""
        async with aio.timeout(limit):
            while self.lines.count(line) < times:
                self._changed.clear()
                await self._changed.wait()

    def of(self, who: str, first: int | None = None) -> list[str]:
        """What was said by, to or about somebody: 'Agent 1', 'ClusterD'.

        A confirmation stands behind its order: it goes another way than what is said, which may be faster.
        `first`: only of so many lines.
        """
        found: list[str] = []
        for line in (line for line in self.lines[:first] if who in line):
            order = f"Mgr orders {line} ".replace(" confirms ", ": ")
            behind = [at for at, each in enumerate(found, 1) if f"{each} ".startswith(order)]
            found.insert(next((at for at in behind if line not in found[at : at + 1]), len(found)), line)
        return found

    def agent(self, node: int, first: int | None = None) -> list[str]:
        """As `of`, without its reports of processes that have failed: they come when it finds out."""
        return [line for line in self.of(f"Agent {node}", first) if not _FAILED.search(line)]

    def assert_order(self, *expected: str) -> None:
        """All of it was said in this order; other things may have been said in between."""
        left = iter(self.lines)
        for line in expected:
            assert line in left, f"{line!r} is missing, or comes too early, in\n" + "\n".join(self.lines)


class Tap:
    def __init__(self, story: Story) -> None:
        self._story = story
        self._codes: dict[str, tuple[str, int]] = {}
        """By the uuid of a message: whom it is for, and its code."""
        self._operations: dict[str, str] = {}
        """By the uuid of a link failover or stress test: `#1` for the first one, `#2` for the next."""
        self._server: Any = None
        self._channel: Any = None
        self._manager: Any = None
        self.messages: list[Message] = []
        """All but signs of life, each once."""
        self.alive: Counter[str] = Counter()
        """Signs of life by member."""

    async def start(self, listen: str, manager: str) -> None:
        self._channel = grpc.aio.insecure_channel(manager, options=[("grpc.max_reconnect_backoff_ms", 200)])
        self._manager = service.stub(self._channel, SERVICE)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((service.handlers(SERVICE, self),))
        self._server.add_insecure_port(listen)
        await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
            await self._channel.close()

    # What proxies call.

    async def Register(self, request: RegisterReq, context: Any) -> Ack:
        answer = await self._pass_on("Register", request, context)
        self._story.tell(f"{_name(request.pos)} registers")
        return answer

    async def PathDiscovery(self, request: PathDiscoveryReq, context: Any) -> Ack:
        answer = await self._pass_on("PathDiscovery", request, context)
        self._story.tell(f"the path to {_name(request.path[0])} leads over {_name(request.proxyPos)}")
        return answer

    async def TransferMessage(self, request: Message, context: Any) -> Ack:
        self._note(request)
        return await self._pass_on("TransferMessage", request, context)

    async def InitServerDownStream(self, acks: AsyncIterator[Ack], context: Any) -> AsyncIterator[Message]:
        metadata = tuple(context.invocation_metadata() or ())
        who = dict(metadata)
        stream = self._manager.InitServerDownStream(
            metadata=[(key, value) for key, value in metadata if key in ("role", "serverrank", "processrank")]
        )
        up = asyncio.ensure_future(self._pass_acks(acks, stream))
        try:
            await stream.initial_metadata()
            await context.send_initial_metadata(())
            self._story.tell(f"{who['role']} {who['serverrank']} listens")
            async for message in stream:
                self._note(message)
                yield message
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        finally:
            up.cancel()
            stream.cancel()

    async def _pass_acks(self, acks: AsyncIterator[Ack], stream: Any) -> None:
        async for ack in acks:
            who, code = self._codes.get(ack.uuid, ("nobody", 0))
            self._story.tell(f"{who} confirms {code}" + (f": {ack.code}" if ack.code else ""))
            await stream.write(ack)

    async def _pass_on(self, method: str, request: Any, context: Any) -> Any:
        try:
            return await getattr(self._manager, method)(request, timeout=context.time_remaining(), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())

    # What is kept.

    def _note(self, message: Message) -> None:
        """Once, also if it is sent again. Signs of life are not worth a line."""
        header, body = message.header, json.loads(message.body)
        if body["msg_type"] == "KEEP_ALIVE":
            self.alive[_name(header.src)] += 1
            return
        if header.uuid in self._codes:
            return
        self.messages.append(message)
        src, dst = _name(header.src), _name(header.dst)
        self._codes[header.uuid] = (dst, body["code"])
        said = " ".join(filter(None, (str(body["code"]), _words(body), *self._extension(body))))
        self._story.tell(f"{src} orders {dst}: {said}" if src == "Mgr" else f"{src} says {body['msg_type']} {said}")

    def _extension(self, body: dict[str, Any]) -> list[str]:
        """A result has only the uuid, which has to be that of the order."""
        found = body["extension"] or {}
        given = {key: found[key] for key in SHOWN.get(body["code"], ()) if key in found}
        return [self._operation(text) if key.endswith("UUID") else text for key, text in given.items()]

    def _operation(self, uuid: str) -> str:
        return self._operations.setdefault(uuid, f"#{len(self._operations) + 1}")


def _words(body: dict[str, Any]) -> str:
    """The message, of a report of faults only the ranks."""
    if body["code"] == 202:
        return str(json.loads(body["message"])["fault_ranks"])
    return str(body["message"])


def _name(position: Any) -> str:
    if position.role == "Mgr":
        return "Mgr"
    ranks = [position.serverRank] + ([position.processRank] if position.role == "Worker" else [])
    return f"{position.role} {'/'.join(ranks)}"
