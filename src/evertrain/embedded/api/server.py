"""The API server on a socket: TLS, a token, and an end that waits for nobody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from evertrain.embedded.api.app import App
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.logs import LogSource, no_logs
from evertrain.embedded.certificates import Credentials
from evertrain.embedded.nodestats import StatsSource, no_stats

_END_SECONDS = 2.0
_KEEP_ALIVE_SECONDS = 75
_HEAD_SECONDS = 30.0


class _Connection(H11Protocol):
    """A client may take its time between requests, but not in the head of one, before it has said who it is."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head is not None:
            self._head.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        waiting = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if waiting and self._head is None:
            self._head = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)
        elif not waiting and self._head is not None:
            self._head.cancel()
            self._head = None


class ApiServer:
    """Serves in the running loop from `start` to `stop`."""

    def __init__(
        self,
        api: Api,
        credentials: Credentials,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        logs: LogSource = no_logs,
        stats: StatsSource = no_stats,
        more: Sequence[socket.socket] = (),
    ) -> None:
        """Binds the port at once, so that `url` is known before anything runs. Raises OSError. `more`: sockets that
        listen elsewhere; they become the server's."""
        self._api = api
        self._more = list(more)
        self._socket = _listen(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        app = App(api, token=credentials.token, logs=logs, stats=stats)
        config = uvicorn.Config(
            app.asgi,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # that somebody sent nonsense, or asked for a WebSocket, is told to them and not to us
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            ssl_certfile=credentials.certificate,
            ssl_keyfile=credentials.key,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"

    async def start(self) -> None:
        """Not `uvicorn.Server.serve`: that takes over the signals of the process and polls whether to end."""
        await self._server.startup(sockets=[self._socket, *self._more])

    async def stop(self) -> None:
        """Ends watches, gives running requests a moment, and leaves."""
        for listener in self._server.servers:
            listener.close()
        self._api.close()
        state = self._server.server_state
        if state.tasks:
            _, late = await asyncio.wait(set(state.tasks), timeout=_END_SECONDS)
            for task in late:
                task.cancel()
        for connection in list(state.connections):
            # Not `close`: a client that has gone silent would be waited for.
            connection.transport.abort()
        for listening in (self._socket, *self._more):
            listening.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio looks at it before it switches Nagle's delay off; an answer that goes out
    # in two pieces would take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener
