"""What is made of a process that reacts late."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from evertrain.launch.diagnosis import Evidence, diagnose
from evertrain.launch.stalls import wait_for_reaction


@pytest.fixture
def process() -> Iterator[Any]:
    fd = os.memfd_create("stack")
    yield SimpleNamespace(code=None, stack_fd=fd)
    os.close(fd)


def seen(states: str) -> Evidence:
    return Evidence(states=states, window=0.1, thread_cpu=0.0, process_cpu=0.0, answered=False, stacks=("", ""))


async def test_a_stack_that_comes_late_is_shown(process: Any) -> None:
    asyncio.get_running_loop().call_later(0.02, os.write, process.stack_fd, b"Thread 1\n  File a.py")
    evidence = await wait_for_reaction(process, seen("SSS"), lambda: False)
    assert evidence.stacks == ("Thread 1\n  File a.py",)
    assert "frozen" not in diagnose(evidence).words


async def test_an_answer_that_comes_late_counts(process: Any) -> None:
    answers = iter([False, True])
    evidence = await wait_for_reaction(process, seen("SRS"), lambda: next(answers))
    assert diagnose(evidence).words == "blocked in a system call"


async def test_one_that_does_not_react_is_frozen(process: Any) -> None:
    evidence = await wait_for_reaction(process, seen("SSS"), lambda: False)
    assert diagnose(evidence).words == "frozen: it does not react to anything"


@pytest.mark.parametrize("states", ["TTT", "DDD"])
async def test_one_that_can_not_react_is_not_waited_for(process: Any, states: str) -> None:
    def ask() -> bool:
        raise AssertionError("nobody asks")

    before = seen(states)
    assert await wait_for_reaction(process, before, ask) is before
