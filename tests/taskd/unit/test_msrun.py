"""What msrun says about its processes, and what its agent makes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from evertrain.taskd import environment
from evertrain.taskd.agent import mindspore, msrun, pids
from evertrain.taskd.agent.mindspore import MsAgent

RUNS = {"pid": 40, "status": None, "global_rank": 3, "local_rank": 1, "node_id": 1}


@pytest.mark.parametrize(
    "answer",
    [
        None, [], {0: None}, {0: {}}, {"first": RUNS}, {None: RUNS}, {0: {**RUNS, "pid": "40"}},
        {0: {**RUNS, "status": "ok"}}, {0: {**RUNS, "global_rank": None}}, {0: RUNS, 1: {"pid": 1, "status": None}},
    ],
)  # fmt: skip
def test_an_answer_that_can_not_be_understood(answer: Any) -> None:
    assert msrun.processes(answer) is None


@pytest.mark.parametrize(
    ("status", "runs", "failed"),
    [
        (None, True, False),
        (0, False, False),
        (200, False, False),
        (300, False, True),
        (1, False, True),
        (-9, False, True),
    ],
)
def test_what_a_status_means(status: int | None, runs: bool, failed: bool) -> None:
    (process,) = msrun.processes({1: {**RUNS, "status": status}}) or []
    assert (process.local_rank, process.rank, process.runs, process.failed) == (1, 3, runs, failed)


def test_a_rank_that_was_not_started_has_no_process() -> None:
    (process,) = msrun.processes({0: {"pid": None, "status": 200, "global_rank": 0}}) or []
    assert not process.runs and not process.failed


@pytest.fixture
def agent() -> Iterator[MsAgent]:
    agent = MsAgent("1", "127.0.0.1:1")
    yield agent
    agent._msrun.close()


def test_a_fault_that_nobody_handles_ends_the_agent(agent: MsAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(agent._reporter, "faults", lambda ranks, causes: told.append((set(ranks), causes)))
    answer = {0: {**RUNS, "status": 300}, 1: {**RUNS, "global_rank": 4, "pid": os.getpid()}}
    agent.register_func("MONITOR", lambda ranks: answer)
    monkeypatch.setattr(environment, "report_fault_timeout", lambda: None)
    assert agent._msrun.look()
    for _ in range(2):
        agent._tell_faults()
    ((ranks, causes),) = told
    assert ranks == {3} and causes[3].words == "it is gone"
    monkeypatch.setattr(environment, "report_fault_timeout", lambda: 300)
    agent._tell_faults()
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + 301)
    with pytest.raises(mindspore._Leave, match="agent report fault rank timeout, exiting"):
        agent._tell_faults()
    answer[0]["status"] = None
    agent._faulty.clear()
    agent._tell_faults()


@pytest.mark.parametrize(
    ("statuses", "succeeded"), [((0, 0), True), ((0, None), False), ((0, 200), False), ((0, 300), False), ((), False)]
)
def test_success_is_that_of_all(agent: MsAgent, statuses: tuple[int | None, ...], succeeded: bool) -> None:
    answer = {local: {**RUNS, "pid": 0, "status": status} for local, status in enumerate(statuses)}
    agent.register_func("MONITOR", lambda ranks: answer)
    assert agent._msrun.look() and agent._msrun.succeeded is succeeded


def test_a_process_that_has_ended_ends_one_wait_although_msrun_does_not_say_how_it_is(agent: MsAgent) -> None:
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    try:
        agent.register_func("MONITOR", lambda ranks: {0: {**RUNS, "pid": child}})
        assert agent._msrun.look()
        agent.register_func("MONITOR", lambda ranks: 1 / 0)
        os.kill(child, 9)
        assert not agent._msrun.wait(60) and not agent._msrun.look()
        assert agent._msrun._selector.select(0) == []
    finally:
        os.waitpid(child, 0)


def test_children_are_found() -> None:
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    try:
        assert child in pids.children() and 1 not in pids.children()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert child not in pids.children()
