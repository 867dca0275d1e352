"""What MSRunPlugin makes of files and processes, one look at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evertrain.taskd.agent import msrun_plugin, pids
from evertrain.taskd.agent.msrun import Msrun
from evertrain.taskd.agent.msrun_plugin import MSRunPlugin, _Leave


class Node:
    """Ranks 2 and 3, or 0 and 1 on the first node; their statuses are what the test says."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.first = folder, 2 * rank
        self.statuses: list[int | None] = [None, None]
        self.done: list[tuple[str, Any]] = []
        self.plugin = MSRunPlugin()
        self.plugin._rank = str(rank)
        for name in ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST"):
            self.plugin.register_callbacks(name, lambda *given, name=name: self.done.append((name, *given)))
        self.plugin.register_callbacks("MONITOR", self._monitor)
        self.plugin._start_all()
        self.done.clear()

    def _monitor(self, _: list[int]) -> Any:
        return {
            local: {"pid": 0 if status is not None else None, "status": status, "global_rank": self.first + local}
            for local, status in enumerate(self.statuses)
        }

    def reset(self, ranks: dict[int, str] | None = None, **fields: Any) -> None:
        entries = [{"RankId": rank, "Status": status} for rank, status in (ranks or {}).items()]
        (self.folder / "reset.json").write_text(json.dumps({"RankList": entries, **fields}))

    def look(self) -> bool:
        return self.plugin._round()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    monkeypatch.setenv("TASKD_RESET_DIR", str(tmp_path))
    monkeypatch.setenv("TASKD_RANK_TABLE_DIR", str(tmp_path))
    monkeypatch.setenv("ENABLE_RESTART_FAULT_PROCESS", "on")
    for name in ("RESTART_FAULT_PROCESS_TYPE", "TASKD_CRASH_DIR"):
        monkeypatch.setenv(name, "")  # it sets them
    found = [Node(tmp_path, rank) for rank in range(2)]
    yield found
    for node in found:
        node.plugin._msrun.close()


def test_only_other_nodes_than_the_first_restart_single_processes(nodes: list[Node]) -> None:
    nodes[0].reset({0: "fault", 2: "fault"}, RestartFaultProcess=True)
    with pytest.raises(_Leave, match=r"ranks \[0\] are faulty"):
        nodes[0].look()
    assert nodes[1].look() is False
    assert nodes[1].done == [("START_WORKER_LIST", [0])]
    assert nodes[1].look() is False and len(nodes[1].done) == 1, "once"


def test_nobody_does_unless_the_cluster_says_so(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes[1].reset({2: "fault"})
    with pytest.raises(_Leave):
        nodes[1].look()
    monkeypatch.setenv("ENABLE_RESTART_FAULT_PROCESS", "off")
    nodes[1].reset({2: "fault"}, RestartFaultProcess=True)
    with pytest.raises(_Leave):
        nodes[1].look()


@pytest.mark.parametrize(("rank", "seconds"), [(0, 10), (1, 120)])
def test_how_long_a_failed_process_is_waited_for(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, rank: int, seconds: int
) -> None:
    node, now = nodes[rank], [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    node.statuses = [300, None]
    monkeypatch.setattr(Msrun, "running", ["the other one"])
    assert node.look() is False
    now[0] += seconds - 1
    assert node.look() is False
    now[0] += 2
    with pytest.raises(_Leave, match=rf"ranks \[{2 * rank}\] have failed"):
        node.look()


def test_the_first_node_waits_for_nobody_if_nobody_is_left(nodes: list[Node]) -> None:
    nodes[0].statuses = [300, 0]
    with pytest.raises(_Leave):
        nodes[0].look()
    nodes[1].statuses = [300, 0]
    assert nodes[1].look() is False, "the cluster may still want it restarted"


def test_pods_that_are_replaced_have_to_be_in_the_rank_table(nodes: list[Node], tmp_path: Path) -> None:
    (tmp_path / "restartType").write_text("podReschedule")
    (tmp_path / "version").write_text("7")
    nodes[1].plugin._start_all()
    nodes[1].done.clear()
    nodes[1].reset({0: "fault"}, RetryTime=1)
    assert nodes[1].look() is False
    nodes[1].reset(RetryTime=1)
    assert nodes[1].look() is False and not nodes[1].done
    (tmp_path / "version").write_text("8")
    assert nodes[1].look() is False and nodes[1].look() is False
    assert nodes[1].done == [("KILL_WORKER", [-1]), ("START_ALL_WORKER",)]


def test_success_is_success_when_the_scheduler_has_ended(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    node = nodes[1]
    monkeypatch.setattr(Msrun, "wait_for_scheduler", lambda self: node.done.append(("scheduler",)))
    node.statuses = [0, 0]
    assert node.plugin._run() == 0
    assert [each[0] for each in node.done] == ["START_ALL_WORKER", "KILL_WORKER", "scheduler"]


def test_a_graceful_end_is_asked_for_once_it_is_new(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(pids, "grace_exit_pids", asked.append)
    nodes[1].reset(GracefulExit=1)
    nodes[1].plugin._start_all()  # which has read of it
    assert nodes[1].look() is False and not asked
    nodes[1].reset(GracefulExit=0)
    assert nodes[1].look() is False
    nodes[1].reset(GracefulExit=1)
    with pytest.raises(_Leave):
        nodes[1].look()
    assert len(asked) == 1


def test_an_answer_that_can_not_be_understood_changes_nothing(nodes: list[Node]) -> None:
    nodes[0].reset({0: "fault"})
    nodes[0].plugin.register_callbacks("MONITOR", lambda _: None)
    assert nodes[0].look() is False and not nodes[0].done


def test_faults_that_nobody_deals_with_hinder_the_start_for_so_long(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msrun_plugin, "START_LIMIT", 0.0)
    monkeypatch.setattr(msrun_plugin, "LOOK", 0.001)
    monkeypatch.setenv("MS_LOCAL_WORKER", "2")
    nodes[1].reset({1: "fault"})
    nodes[1].plugin._wait_to_start()
    nodes[1].reset({3: "fault"})
    with pytest.raises(ValueError, match="not dealt with"):
        nodes[1].plugin._wait_to_start()
