"""Work on a thread with an event loop of its own: it goes on while ours is held up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from evertrain import aio


async def beside(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Until it ends, with what it raises. Who is cancelled cancels it, and waits for its end."""
    here = asyncio.get_running_loop()
    over: asyncio.Future[BaseException | None] = here.create_future()
    begun = threading.Event()
    there: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        there.append((asyncio.get_running_loop(), task))
        begun.set()
        await work()

    def run() -> None:
        end: BaseException | None = None
        try:
            aio.run(main())
        except BaseException as error:
            end = error
        finally:
            begun.set()
            with contextlib.suppress(RuntimeError):  # our loop is closed: nobody waits any more
                here.call_soon_threadsafe(over.set_result, end)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        end = await asyncio.shield(over)
    except asyncio.CancelledError:
        begun.wait()
        for loop, task in there:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)
        await over
        thread.join()
        raise
    thread.join()  # that was its last word
    if end is not None:
        raise end
