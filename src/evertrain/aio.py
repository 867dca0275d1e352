"""What asyncio has since Python 3.11, for 3.10 too.

The training images of MindCluster's documents have Python 3.10. There, `taskgroup` backports it, with tasks that count
how often they are to be cancelled: without that, a timeout can't tell its own cancellation from somebody else's that
comes at the same moment, and loses it. `run` and `new_event_loop` give a loop all of whose tasks count.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    from asyncio import Runner, TaskGroup, timeout, timeout_at
    from builtins import BaseExceptionGroup, ExceptionGroup
else:
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup
    from taskgroup import Runner, TaskGroup, timeout, timeout_at

__all__ = [
    "BaseExceptionGroup",
    "ExceptionGroup",
    "TaskGroup",
    "is_cancelled",
    "new_event_loop",
    "run",
    "timeout",
    "timeout_at",
]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    with Runner(loop_factory=loop_factory) as runner:
        _let_tasks_count(runner.get_loop())
        return runner.run(_as_a_task_of_the_loop(main))


def new_event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()  # noqa: TID251
    _let_tasks_count(loop)
    return loop


def is_cancelled() -> bool:
    """Whether the current task is to end. What it awaits may have been cancelled by somebody else."""
    task: Any = asyncio.current_task()
    return task is None or task.cancelling() > 0


if sys.version_info >= (3, 11):

    def _let_tasks_count(loop: asyncio.AbstractEventLoop) -> None:
        """They do."""

    def _as_a_task_of_the_loop(main: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return main

else:
    from taskgroup.tasks import Task

    class _Task(Task[T]):
        def cancel(self, msg: Any = None) -> bool:
            # anyio, which is below HTTP clients, ends what it cancels itself, and takes it back since Python 3.11 only.
            if isinstance(msg, str) and " cancel scope " in msg:
                return asyncio.Task.cancel(self, msg)
            return super().cancel(msg)

    def _let_tasks_count(loop: asyncio.AbstractEventLoop) -> None:
        loop.set_task_factory(lambda loop, coroutine, **more: _Task(coroutine, loop=loop, **more))

    async def _as_a_task_of_the_loop(main: Coroutine[Any, Any, T]) -> T:
        return await asyncio.get_running_loop().create_task(main)
