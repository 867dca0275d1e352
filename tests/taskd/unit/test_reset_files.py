"""What a launcher reads in the cluster's mounted files, and what is new in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evertrain.taskd.agent import reset_files
from evertrain.taskd.agent.reset_files import EMPTY, FaultStatus, Reset, ResetFiles, fault_status, may_start


def reset(ranks: dict[int, str] | None = None, **fields: Any) -> Reset:
    entries = [{"RankId": rank, "Status": status, "ErrorCode": []} for rank, status in (ranks or {}).items()]
    parsed = reset_files.parse(json.dumps({"RankList": entries, **fields}))
    assert parsed is not None
    return parsed


def test_all_fields_are_read_and_others_ignored() -> None:
    got = reset(
        {3: "fault"}, RetryTime=2, GracefulExit=1, FaultFlushing=True, RestartFaultProcess=True, UpdateTime=7, Else=[1]
    )
    assert got.statuses == {3: "fault"}
    assert (got.retry_time, got.graceful_exit, got.flushing, got.restart_processes) == (2, 1, True, True)
    assert got.update_time == 7


@pytest.mark.parametrize("text", ["", "{", "[]", '{"RankList": [{"Status": "fault"}]}', '{"RetryTime": "many"}'])
def test_garbage_is_no_file(text: str) -> None:
    assert reset_files.parse(text) is None


def test_a_list_may_be_null() -> None:
    assert reset_files.parse('{"RankList": null}') == EMPTY


def test_a_fault_counts_once_and_only_on_its_node() -> None:
    fault = reset({3: "fault"}, RestartFaultProcess=True)
    assert fault_status(fault, EMPTY, [2, 3]) == FaultStatus(is_fault=True, restart_fault_process=True)
    assert not fault_status(fault, fault, [2, 3]).is_fault
    assert not fault_status(fault, EMPTY, [0, 1]).is_fault
    elsewhere = reset({3: "fault", 7: "fault"}, RestartFaultProcess=True)
    assert not fault_status(elsewhere, fault, [2, 3]).is_fault
    assert fault_status(reset({2: "fault", 3: "fault"}), fault, [2, 3]).is_fault


def test_chips_that_are_reset_concern_all_nodes() -> None:
    down, up = reset({3: "unrecovered"}), reset({3: "recovered"})
    assert fault_status(down, EMPTY, [0]).is_unrecovered and not down.recovered
    assert fault_status(up, EMPTY, [0]).is_unrecovered and up.recovered
    assert not fault_status(up, up, [0]).is_unrecovered
    assert not fault_status(up, reset({3: "recovered", 4: "recovered"}), [0]).is_unrecovered, "the list is cleared"
    mixed = reset({3: "recovered", 4: "unrecovered"})
    assert fault_status(mixed, up, [0]).is_unrecovered and not mixed.recovered


def test_pods_that_were_replaced() -> None:
    assert fault_status(reset(RetryTime=1), EMPTY, []).is_retried
    assert not fault_status(reset(RetryTime=1), reset(RetryTime=1), []).is_retried
    assert not fault_status(EMPTY, reset(RetryTime=1), []).is_retried


def test_when_processes_may_start() -> None:
    assert may_start(EMPTY, [0, 1])
    assert not may_start(reset(FaultFlushing=True), [0, 1])
    assert not may_start(reset({1: "fault"}), [0, 1])
    assert may_start(reset({2: "fault", 1: "recovered"}), [0, 1])


def test_the_files(tmp_path: Path) -> None:
    files = ResetFiles(tmp_path, tmp_path)
    assert (files.reset(), files.restart_type(), files.version()) == (EMPTY, "", -1)
    (tmp_path / "reset.json").write_text('{"RetryTime": 3}')
    (tmp_path / "restartType").write_text("podReschedule\n")
    (tmp_path / "version").write_text("12\n")
    assert (files.reset(), files.restart_type(), files.version()) == (Reset(retry_time=3), "podReschedule", 12)
    (tmp_path / "version").write_text("twelve")
    assert files.version() == -1


def test_a_file_that_is_being_written_says_nothing_and_an_unsafe_one_nothing_either(tmp_path: Path) -> None:
    files = ResetFiles(tmp_path, tmp_path)
    (tmp_path / "reset.json").write_text('{"RetryTime"')
    assert files.reset() is None
    (tmp_path / "real").write_text('{"RetryTime": 3}')
    os.unlink(tmp_path / "reset.json")
    (tmp_path / "reset.json").symlink_to(tmp_path / "real")
    assert files.reset() == EMPTY
