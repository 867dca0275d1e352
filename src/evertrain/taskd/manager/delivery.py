"""Orders on their way: for each member in their order, each until it has arrived or is given up."""

from __future__ import annotations

import asyncio
import logging
import uuid as uuids
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable

from evertrain.taskd.codes import AckCode
from evertrain.taskd.frames import Body
from evertrain.taskd.net.routing import Position

log = logging.getLogger(__name__)

TRIES, BETWEEN = 5, 3.0
"""How often an order is sent, and the seconds in between."""
AT_ONCE = 128
"""Orders to agents, and to workers, that wait to be confirmed. Sent to 10 000 at once, most would be too late."""
MOST = 20_000
"""Orders that wait for one member: more than any burst of signals. One that takes none for so long is not there."""


class Delivery:
    """`send` takes (who, text, uuid) and returns 0 if it has arrived; `lost` hears of an order that did not, and
    `arrived` of one that did."""

    def __init__(
        self,
        send: Callable[[Position, str, str], Awaitable[int]],
        lost: Callable[[Position, Body], None],
        arrived: Callable[[Position, Body], None] = lambda who, body: None,
    ) -> None:
        self._send, self._lost, self._arrived = send, lost, arrived
        self._waiting: dict[Position, deque[Body]] = {}
        self._tasks: dict[Position, asyncio.Task[None]] = {}
        self._gates = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(AT_ONCE))
        """By role: what workers have to do never holds up an agent."""

    def put(self, who: Position, body: Body) -> None:
        waiting = self._waiting.setdefault(who, deque())
        if len(waiting) >= MOST:
            log.error("order %d to %s is dropped: %d others wait already", body.code, who, MOST)
            return self._lost(who, body)
        waiting.append(body)
        if who not in self._tasks:
            self._tasks[who] = asyncio.ensure_future(self._empty(who, waiting))

    def forget(self, who: Position) -> None:
        """Another has taken the place of `who`; what waits was not meant for it."""
        self._waiting.pop(who, None)
        task = self._tasks.pop(who, None)
        if task is not None:
            task.cancel()

    async def flush(self, seconds: float) -> None:
        """Until all has arrived or is given up, but no longer than this."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for who in list(self._tasks):
            self.forget(who)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _empty(self, who: Position, waiting: deque[Body]) -> None:
        while waiting:
            body = waiting.popleft()
            try:
                (self._arrived if await self._deliver(who, body) else self._lost)(who, body)
            except Exception as error:  # an order that can't be sent must not hold up the next
                log.error("order to %s: %s: %s", who, type(error).__name__, str(error))
        if self._waiting.get(who) is waiting:
            del self._waiting[who], self._tasks[who]

    async def _deliver(self, who: Position, body: Body) -> bool:
        uuid, text = str(uuids.uuid4()), body.encode()
        for left in reversed(range(TRIES)):
            async with self._gates[who.role]:
                code = await self._send(who, text, uuid)
            if code == AckCode.OK:
                log.info("mgr send message success: %d to %s", body.code, who)
                return True
            log.warning("order %d to %s: %s", body.code, who, code)
            if left:
                await asyncio.sleep(BETWEEN)
        log.error("mgr resend message more times than limit %d: %d to %s", TRIES, body.code, who)
        return False
