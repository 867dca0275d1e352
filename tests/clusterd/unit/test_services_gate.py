"""The gate passes on every byte, also of those that are quicker than it."""

from __future__ import annotations

import asyncio

from evertrain import aio
from evertrain.clusterd.services.gate import Gate, _Outer
from evertrain.clusterd.services.limits import Limits


class Caller(asyncio.Transport):
    """A connection from outside, of which the event loop reads whatever we say."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


async def test_what_comes_before_the_way_in_is_open_is_not_lost() -> None:
    gate = Gate(Limits())
    inside: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda reader, _: inside.put_nowait(reader), f"\0{gate.inside}")
    caller, outer = Caller(), _Outer(gate)
    try:
        outer.connection_made(caller)
        for word in (b"PRI ", b"* HTTP/2.0"):  # an event loop may have read more than once before it pauses
            outer.data_received(word)
        assert caller.is_paused
        async with aio.timeout(60):
            reader = await inside.get()
            assert await reader.readexactly(14) == b"PRI * HTTP/2.0"
            assert not caller.is_paused
            outer.data_received(b"more")
            assert await reader.readexactly(4) == b"more"
    finally:
        server.close()
        await gate.close()
