"""The API server on a socket: TLS, a token, and an end that waits for nobody."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from evertrain.embedded.api.app import App
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.logs import LogSource, no_logs
from evertrain.embedded.certificates import Credentials

_END_SECONDS = 2
_KEEP_ALIVE_SECONDS = 75


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
    ) -> None:
        """Binds the port at once, so that `url` is known before anything runs. Raises OSError."""
        self._api = api
        self._socket = socket.create_server((host, port), backlog=1024)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        app = App(api, token=credentials.token, logs=logs)
        config = uvicorn.Config(
            app.asgi,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_END_SECONDS,
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
        await self._server.startup(sockets=[self._socket])

    async def stop(self) -> None:
        """Ends watches and connections."""
        self._api.close()
        try:
            async with asyncio.timeout(_END_SECONDS + 3):
                await self._server.shutdown(sockets=[self._socket])
        finally:
            self._socket.close()
            for connection in list(self._server.server_state.connections):
                transport = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
