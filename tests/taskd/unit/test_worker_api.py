from __future__ import annotations

import itertools
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evertrain.taskd import frames
from evertrain.taskd.tracing import Switch
from evertrain.taskd.worker import api, cpu_stress, operations
from evertrain.taskd.worker.worker import Worker, _in_file
from taskd.api import destroy_taskd_worker, init_taskd_worker, start_taskd_worker


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(api, "taskd_worker", None)
    monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / "log"))
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


@pytest.mark.parametrize("rank", ["0", -1, 1.0, None, True])
def test_a_rank_is_a_number_from_0(rank: Any) -> None:
    assert not init_taskd_worker(rank)


@pytest.mark.parametrize("limit", ["1", -1])
def test_a_limit_is_a_number_from_0(limit: Any) -> None:
    assert not init_taskd_worker(9, limit)


@pytest.mark.parametrize(
    ("framework", "variable", "value"),
    [
        ("pt", "RANK", ""),
        ("pt", "LOCAL_WORLD_SIZE", "0"),
        ("pt", "RANK", "-1"),
        ("ms", "MS_NODE_RANK", "x"),
        ("tf", "RANK", "0"),
    ],
)
def test_the_node_is_known_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, framework: str, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert not init_taskd_worker(9, framework=framework)


def test_the_node_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_NODE_RANK", "3")
    monkeypatch.setenv("RANK", "20")
    assert (api._node("pt"), api._node("ms")) == (2, 3)


def test_nothing_works_before_init() -> None:
    assert start_taskd_worker() is False
    assert destroy_taskd_worker() is False


def test_a_stress_test_that_raises_or_says_nonsense_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: int) -> int:
        raise RuntimeError("no voltage")

    cases = [
        (broken, (4, "voltage recovery failed")),
        (lambda op: 77, (1, "exec failed")),
        (lambda op: 2, (2, "find fault rank")),
        (lambda op: None, (1, "can not exec stress test")),
    ]
    for detect, result in cases:
        monkeypatch.setattr(operations, "_detector", lambda framework, found=detect: found)
        assert operations.stress("pt", 0) == result


def test_a_stress_test_finds_a_processor_that_errs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_STRESS_SECONDS", "0.1")
    assert (cpu_stress.detect(0), cpu_stress.detect(1)) == (0, 0)
    digests = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(cpu_stress, "_chain", lambda: next(digests))
        assert cpu_stress.detect(0) == 2
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self.double() + 1)
        assert cpu_stress.detect(0) == 2
    with monkeypatch.context() as patch:
        received = socket.socket.recv
        patch.setattr(socket.socket, "recv", lambda self, most: _flip(received(self, most)))
        assert cpu_stress.detect(1) == 2


def _flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def test_a_stress_test_takes_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("7.5", 7.5), ("", 5.0), ("x", 5.0), ("-1", 0.0), ("9999", 240.0)):
        monkeypatch.setenv("TASKD_STRESS_SECONDS", text)
        assert cpu_stress.seconds() == seconds


def test_no_link_to_change_to(caplog: pytest.LogCaptureFixture) -> None:
    operations.register_nic_switch(None)
    assert operations.switch_nic("pt", 0, "s1", [0], [True]) is False
    assert "the training is not paused" in caplog.text
    assert operations.switch_nic("ms", 0, "s2", [0], [True]) is False


def test_a_file_of_switches_is_not_read_through_a_link_on_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "profilingSwitch").write_text('{"Step": "on"}')
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for folder, found in (("real", Switch(True, False)), ("link", None), ("missing", None)):
        monkeypatch.setenv("TASKD_DATATRACE_DIR", str(tmp_path / folder))
        assert _in_file() == found


def test_a_stress_test_with_an_operation_that_nobody_knows_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(operations, "stress", lambda framework, op: (begun.append(op), (0, "OK"))[1])
    worker = Worker(9, 1, "pt", 5000)
    said: list[Any] = []
    monkeypatch.setattr(worker._member, "send", lambda *args: (said.append(args), True)[1])

    def order(ops: list[int]) -> None:
        params = json.dumps({"9": {"ops": ops}})
        extension = {"stressTestUUID": "t", "StressTestRankOPStr": params}
        worker._obey(frames.body("ACTION", 205, "", extension), time.monotonic())

    order([0, 7])
    assert (begun, said) == ([], []) and "unknown operations: [0, 7]" in caplog.text
    order([1, 0])
    assert begun == [0, 1] and said[-1][1] == 205
