"""The agent for PyTorch, with processes that are only numbers: whom it watches, and when it gives up."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from evertrain.taskd import frames
from evertrain.taskd.agent import common, pytorch, standby

REUSED = 103
"""A process id that was free for a moment: whoever opens it now gets somebody else's process."""


class Elastic:
    """Ranks 2 and 3 are here."""

    def __init__(self, *_: Any) -> None:
        self.ranks = {0: 2, 1: 3}
        self.pids = {0: 102, 1: REUSED}
        self.codes: dict[int, int] = {}
        self.restarts = 7
        self.command = ("train.py",)
        self.extra: dict[str, str] = {}

    def ended(self, local_rank: int) -> int | None:
        return self.codes.get(local_rank)

    def tidy(self, local_rank: int) -> None:
        pass

    def replace(self, local_ranks: list[int], extra: dict[str, str]) -> None:
        for each in local_ranks:
            self.pids[each] += 100
            self.codes.pop(each, None)

    def stop(self, local_ranks: list[int]) -> None:
        self.codes |= dict.fromkeys(local_ranks, -9)


class Reporter:
    def __init__(self, *_: Any) -> None:
        self.replaced, self.reported = 0, list[set[int]]()

    def faults(self, ranks: set[int], causes: Any) -> None:
        self.reported.append(set(ranks))

    def stands(self, ranks: set[int]) -> None:
        pass

    def starts_again(self, restarts: int) -> None:
        pass

    def order(self) -> None:
        return None


class Agent:
    """What it has opened and had guarded since the last look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[int] = []
        self.guarded: list[int] = []
        self.gone: set[int] = set()
        spares = SimpleNamespace(
            take=None, ready=0, deadline=None, knows=lambda fd: False, tick=lambda: None, replenish=lambda *_: None,
        )  # fmt: skip
        guardian = SimpleNamespace(guard=self.guarded.extend, close=lambda: None)
        reserve = SimpleNamespace(selector=selectors.DefaultSelector(), guardian=guardian, spares=spares)
        monkeypatch.setattr(pytorch, "Elastic", Elastic)
        monkeypatch.setattr(common, "Reporter", Reporter)
        monkeypatch.setattr(standby, "inherited", lambda: reserve)
        self.agent = pytorch.PtAgent(None, "1", "")
        self.agent._most = 7
        reserve.selector.register(self.agent._wakeup, selectors.EVENT_READ)
        monkeypatch.setattr(pytorch.os, "pidfd_open", self._open)
        self.elastic: Any = self.agent._elastic
        self.reporter: Any = self.agent._reporter

    def _open(self, pid: int) -> int:
        if pid in self.gone:
            raise ProcessLookupError(pid)
        self.opened.append(pid)
        return os.eventfd(0)

    def watches(self) -> tuple[list[int], list[int]]:
        seen = sorted(self.opened), sorted(self.guarded)
        self.opened.clear()
        self.guarded.clear()
        return seen

    def order(self, code: int, text: str) -> None:
        self.agent._ordered.append(frames.body("ACTION", code, text))

    def dies(self, local_rank: int, code: int = -9) -> None:
        self.elastic.codes[local_rank] = code
        self.agent._ended([local_rank])
        self.gone.add(self.elastic.pids[local_rank])


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    made = Agent(monkeypatch)
    made.agent._watch()
    assert made.watches() == ([102, REUSED], [102, REUSED])
    yield made
    made.agent._unwatch()
    made.agent._selector.close()
    made.agent._crashes.close()
    os.close(made.agent._wakeup)


@pytest.mark.parametrize("code", [-9, 0])
def test_the_id_of_a_process_that_has_ended_is_neither_watched_nor_guarded(agent: Agent, code: int) -> None:
    agent.dies(0)
    agent.dies(1, code)
    agent.gone.clear()  # the ids are somebody else's
    agent.order(209, '["2"]')
    agent.agent._obey()
    assert agent.watches() == ([202], [202])
    agent.order(209, '["3"]')
    agent.agent._obey()
    assert agent.watches() == ([202, 203], [202, 203]), "from its replacement on it is watched again"


@pytest.mark.parametrize("reused", [False, True])
def test_processes_that_were_stopped_just_before_others_are_replaced_are_reported_like_any_other(
    agent: Agent, reused: bool
) -> None:
    agent.order(213, '["3"]')
    agent.order(209, '["2"]')
    agent.gone = set() if reused else {REUSED}
    agent.agent._obey()
    assert agent.reporter.reported == [{3}]
    assert agent.watches() == ([202], [202])


def test_a_process_that_can_not_be_found_does_not_take_torchrun_along(agent: Agent) -> None:
    agent.gone.add(REUSED)
    agent.agent._watch()
    assert agent.watches()[0] == [102]


def test_a_fault_that_nobody_handles_ends_the_agent_after_the_time_that_the_environment_says(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(agent.agent, "_select", lambda end: waits.append(end) or [])
    agent.dies(0)
    agent.agent._wait()
    assert waits == [None], "it isn't set"
    monkeypatch.setenv("TASKD_REPORT_FAULT_TIMEOUT", "300")
    agent.agent._wait()
    reported = agent.agent._reported_at
    assert reported is not None and waits.pop() == reported + 300
    clock = SimpleNamespace(monotonic=lambda: reported + 300, time_ns=time.time_ns)
    monkeypatch.setattr(pytorch, "time", clock)
    with pytest.raises(pytorch._Leave, match=r"report fault rank timeout.*nobody handled \[2\]"):
        agent.agent._wait()
    agent.order(209, '["2"]')
    agent.agent._obey()
    agent.agent._wait()
    assert waits[-1] is None, "it was handled"
