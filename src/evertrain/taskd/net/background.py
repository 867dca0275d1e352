"""An asyncio loop in a thread, for processes whose main thread is not ours: torchrun, msrun, the training."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent import futures
from typing import Any, TypeVar

from evertrain import aio

T = TypeVar("T")


class Background:
    def __init__(self, name: str = "taskd") -> None:
        self._loop = aio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Wait for the result; TimeoutError, with the work cancelled, if it takes longer."""
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except futures.TimeoutError as error:  # an exception of its own up to Python 3.10
            future.cancel()
            raise TimeoutError(*error.args) from None

    def close(self) -> None:
        """End all tasks and the thread."""
        if self._thread.is_alive():
            self.run(self._cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_lock = threading.Lock()
_shared: Background | None = None


def shared() -> Background:
    """The one loop of this process: a proxy and an agent in torchrun share it."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = Background()
        return _shared
