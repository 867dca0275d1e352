"""A line that can be cut: a TCP relay that, while it is cut, drops whatever comes and closes nothing."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._whole = asyncio.Event()
        self._whole.set()
        self._spoilt: set[asyncio.StreamWriter] = set()
        self.dropped = 0
        """Bytes."""
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()  # whoever connects while the line is cut gets no answer
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            pipe = asyncio.ensure_future(self._pipe(source, sink))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if not self._whole.is_set() or sink in self._spoilt:
                    self._spoilt.add(sink)  # a connection that has lost something is not whole again
                    self.dropped += len(data)
                    continue
                sink.write(data)
                await sink.drain()
        if self._whole.is_set():
            sink.close()
