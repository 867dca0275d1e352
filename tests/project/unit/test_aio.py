"""Timeouts, groups and cancellations as Python 3.11 has them, on every version."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import anyio
import pytest

from evertrain import aio

ROOT = Path(__file__).resolve().parents[3]


async def test_a_timeout_loses_nobody_elses_cancellation_that_comes_at_the_same_moment() -> None:
    went_on = []

    async def work() -> None:
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(0):
                await asyncio.sleep(60)
        went_on.append("after the timeout")

    task = asyncio.create_task(work())
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(task.cancel))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not went_on


async def test_a_timeout_is_the_builtin_error_and_leaves_nothing_behind() -> None:
    with pytest.raises(TimeoutError):
        async with aio.timeout(0.001):
            await asyncio.sleep(60)
    assert not aio.is_cancelled()


async def test_what_anyio_cancels_within_is_no_cancellation_of_ours() -> None:
    """So do HTTP clients when a request is given up."""
    with pytest.raises(TimeoutError):
        async with aio.timeout(0.001):
            try:
                await asyncio.sleep(60)
            finally:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await asyncio.sleep(60)
    assert not aio.is_cancelled()


async def test_a_task_knows_whether_it_is_cancelled_itself() -> None:
    known = []

    async def work() -> None:
        other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        other.cancel()
        for awaited in (other, asyncio.sleep(60)):
            try:
                await awaited
            except asyncio.CancelledError:
                known.append(aio.is_cancelled())

    task = asyncio.create_task(work())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await task
    assert known == [False, True]


async def test_a_group_ends_all_and_names_the_reason() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(aio.ExceptionGroup) as caught:
        async with aio.TaskGroup() as group:
            waiting = group.create_task(asyncio.sleep(60))
            group.create_task(fail())
    assert [str(error) for error in caught.value.exceptions] == ["broken"] and waiting.cancelled()


def test_a_loop_of_ones_own_knows_it_too() -> None:
    async def cancelled() -> bool:
        return aio.is_cancelled()

    loop = aio.new_event_loop()
    with contextlib.closing(loop):
        assert loop.run_until_complete(cancelled()) is False


def test_all_code_has_them_from_there() -> None:
    """ruff and mypy see to it in the sources; tests would only fail on Python 3.10."""
    files = [file for part in ("tests", "bench", "tools", "examples") for file in (ROOT / part).rglob("*.py")]
    taken = re.compile(r"\basyncio\.(timeout|timeout_at|TaskGroup|Runner|run)\(")
    assert [f"{file}: {found[0]}" for file in files for found in taken.finditer(file.read_text())] == []
