"""An embedded API server with its controllers, in a thread of the test process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.embedded.api.bootstrap import bootstrap
from evertrain.embedded.api.core import Api
from evertrain.embedded.api.local import LocalKube
from evertrain.embedded.api.logs import LogRequest, LogsUnavailable
from evertrain.embedded.api.server import ApiServer
from evertrain.embedded.certificates import Credentials, credentials, write_kubeconfig
from evertrain.embedded.controllers import GarbageCollector, Removal
from evertrain.embedded.schema import Registry
from evertrain.embedded.store import Store


async def echo_logs(pod: Any, request: LogRequest) -> AsyncIterator[bytes]:
    """Says what it was asked for: a pod whose annotation `logs` has the lines."""
    text = (pod["metadata"].get("annotations") or {}).get("logs")
    if text is None:
        raise LogsUnavailable(f'container "{request.container}" in pod "{pod["metadata"]["name"]}" is waiting to start')
    lines = text.splitlines(keepends=True)
    for line in lines if request.tail is None else lines[len(lines) - request.tail :]:
        yield line.encode()
    if request.follow:
        yield b"followed\n"


@dataclass
class Running:
    url: str
    credentials: Credentials
    api: Api
    loop: asyncio.AbstractEventLoop

    def kubeconfig(self, path: Path) -> Path:
        write_kubeconfig(path, self.url, self.credentials)
        return path

    def call(self, coroutine: Any) -> Any:
        """Runs it in the loop of the server."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


class EmbeddedApi:
    """Used as a context."""

    def __init__(self, folder: Path, *, controllers: bool = True, **store_options: Any) -> None:
        self._folder = folder
        self._controllers = controllers
        self._store_options = store_options
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: aio.run(self._main()), daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._started.wait(90), "the server did not start"
        if self._failure is not None:
            raise self._failure
        return self._running

    def __exit__(self, *_: object) -> None:
        self._running.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(15)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _main(self) -> None:
        try:
            self._stop = asyncio.Event()
            store = Store(self._folder / "state.db", **self._store_options)
            api = Api(store, Registry.builtin())
            bootstrap(api)
            keys = credentials(self._folder / "keys")
            server = ApiServer(api, keys, logs=echo_logs)
            await server.start()
        except BaseException as error:
            self._failure = error
            self._started.set()
            return
        self._running = Running(server.url, keys, api, asyncio.get_running_loop())
        kube = LocalKube(api, manager="controllers")
        parts = [GarbageCollector(kube), Removal(kube)] if self._controllers else []
        tasks = [asyncio.create_task(part.run()) for part in parts]
        self._started.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()
        store.close()
