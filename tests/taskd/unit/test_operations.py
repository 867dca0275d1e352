"""What a training process does on order: by which function of torch_npu or MindSpore, and when it refuses."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evertrain.taskd import frames
from evertrain.taskd.codes import STRESS_SILENCE
from evertrain.taskd.worker import cpu_stress, operations
from evertrain.taskd.worker.worker import Worker

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of the functions of an NPU; and nothing but them tests anything."""
    monkeypatch.setattr(operations, "_detect", None)
    monkeypatch.setattr(operations, "_switch_nic", None)
    monkeypatch.setattr(cpu_stress, "detect", lambda op: pytest.fail("the processor is not what is to be tested"))
    monkeypatch.setenv("LOCAL_RANK", "5")
    return []


def noted(calls: Calls, name: str, answer: Any) -> Callable[..., Any]:
    return lambda *args: (calls.append((name, *args)), answer)[1]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """It is installed, with all that is above it."""
    made = ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    above, _, own = name.rpartition(".")
    if above:
        monkeypatch.setattr(sys.modules.get(above) or module(monkeypatch, above), own, made, raising=False)
    return made


def test_torch_npu_tests_the_device_of_this_process(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    npu = SimpleNamespace(stress_detect=noted(calls, "stress_detect", 2))
    module(monkeypatch, "torch_npu", npu=npu)
    device = SimpleNamespace(set_device=noted(calls, "set_device", None))
    monkeypatch.setattr(torch, "npu", device, raising=False)
    assert operations.stress("pt", 1) == (2, "find fault rank")
    assert calls == [("set_device", "npu:5"), ("stress_detect", 1)]


def test_mindspore_tests_its_device(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    module(monkeypatch, "mindspore.utils", stress_detect=noted(calls, "stress_detect", 0))
    assert operations.stress("ms", 0) == (0, "OK")
    assert calls == [("stress_detect", 0)]


@pytest.mark.parametrize(("framework", "name"), [("pt", "torch_npu.npu"), ("ms", "mindspore.communication.management")])
@pytest.mark.parametrize("answer", [True, False])
def test_frameworks_change_the_links_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, framework: str, name: str, answer: bool
) -> None:
    module(monkeypatch, name, _comm_switch_nic=noted(calls, "switch", answer))
    assert operations.switch_nic(framework, 3, "s1", ("0", 2), (True, False)) is answer  # type: ignore[arg-type]
    assert calls == [("switch", ["0", 2], [True, False])]


class Unloadable:
    """torch_npu is there, and a library that it needs is not."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch_npu":
            raise ImportError("libhccl.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("framework", "why"),
    [("ms", "has no attribute 'stress_detect'"), ("pt", "has no attribute 'npu'"), ("pt", "libhccl.so: cannot open")],
)
def test_an_npu_that_can_not_be_tested_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture, framework: str, why: str
) -> None:
    if "libhccl" in why:
        monkeypatch.setattr(sys, "meta_path", [Unloadable(), *sys.meta_path])
    else:
        module(monkeypatch, "mindspore.utils" if framework == "ms" else "torch_npu")
    assert operations.stress(framework, 0) == (1, "exec failed")
    assert why in caplog.text


def test_a_link_that_the_framework_could_not_change_is_told_with_its_ranks(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    def _comm_switch_nic(ranks: list[int], ops: list[bool]) -> bool:
        return False

    module(monkeypatch, "torch_npu.npu", _comm_switch_nic=_comm_switch_nic)
    assert not operations.switch_nic("pt", 0, "s", [0, 2], [True, True])
    assert "link failover failed: _comm_switch_nic could not do it for ranks [0, 2]" in caplog.text


@pytest.mark.parametrize("framework", ["pt", "ms"])
def test_where_there_is_no_npu_the_processor_is_tested(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    monkeypatch.setattr(operations, "_detect", None)
    monkeypatch.setattr(cpu_stress, "detect", lambda op: 2 * op)
    assert operations.stress(framework, 1) == (2, "find fault rank")


# When a stress test is refused.


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[list[int], list[Any]]]]:
    begun: list[int] = []
    said: list[Any] = []
    monkeypatch.setattr(operations, "stress", lambda framework, op: (begun.append(op), (0, "OK"))[1])
    monkeypatch.setenv("RANK", "9")
    worker = Worker(9, 1, "pt", 5000)
    monkeypatch.setattr(worker._member, "send", lambda *args: (said.append(args), True)[1])

    def order(waited: float = 0.0, held: bool | None = None) -> tuple[list[int], list[Any]]:
        """By a worker that had something else to do for so long; `held`: MindIO has paused the training, or has not."""
        hold = contextlib.nullcontext((lambda: False) if held else None)
        processor = None if held is None else SimpleNamespace(main=SimpleNamespace(hold=lambda: hold))
        monkeypatch.setattr(operations.runtime, "processor", processor)
        extension = {"stressTestUUID": "t", "StressTestRankOPStr": '{"9": {"ops": [0, 1]}}'}
        worker._obey(frames.body("ACTION", 205, "", extension), time.monotonic() - waited)
        return begun, [json.loads(args[2])["rankResult"] for args in said if args[1] == 205]

    yield order
    worker.close()


@pytest.mark.parametrize("held", [True, None])
def test_a_training_that_is_paused_or_that_mindio_does_not_know_is_tested(tested: Any, held: bool | None) -> None:
    right = {"code": "0", "result": "OK"}
    assert tested(held=held) == ([0, 1], [{"0": right, "1": right}])


def test_a_training_that_is_not_paused_is_not_tested(tested: Any, caplog: pytest.LogCaptureFixture) -> None:
    refused = {"code": "1", "result": "can not exec stress test"}
    assert tested(held=False) == ([], [{"0": refused, "1": refused}])
    assert "no stress test, since the training is not paused" in caplog.text


def test_a_test_that_the_manager_has_given_up_is_not_begun(tested: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert tested(waited=STRESS_SILENCE + 1, held=True) == ([], [])
    assert "has been given up before it could begin" in caplog.text


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[bool]], list[Any]]]:
    """What a worker says that was told to change its link, if it can send as often as it is said."""
    monkeypatch.setattr(operations, "_switch_nic", lambda ranks, ops: True)
    worker = Worker(9, 1, "pt", 5000)
    said: list[Any] = []

    def order(sent: list[bool]) -> list[Any]:
        monkeypatch.setattr(worker._member, "send", lambda *args: (said.append(args), sent.pop(0))[1])
        extension = {"switchNicUUID": "s", "globalRankIDs": '["9"]', "globalOps": "[true]"}
        worker._obey(frames.body("ACTION", 204, "", extension), 0.0)
        return said

    yield order
    worker.close()


def test_a_result_is_told_until_the_manager_has_it(switched: Any) -> None:
    left = [False] * 9 + [True, True]
    assert switched(left) == [("ACTION", 204, "switchOK", {"switchNicUUID": "s"})] * 10 and left == [True]


def test_a_manager_that_stays_away_is_not_waited_for_with_a_result(
    switched: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("evertrain.taskd.worker.worker.RESULT", -1.0)
    assert len(switched([False])) == 1
    assert "worker 9: the manager did not get the result of order 204: switchOK" in caplog.text


def test_orders_are_kept_with_the_time_at_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(9, 1, "pt", 5000)
    body = frames.body("ACTION", 205)
    worker._member.received.put_nowait(body)
    monkeypatch.setattr("evertrain.taskd.worker.worker.time", SimpleNamespace(monotonic=lambda: 7.0))
    worker._take()
    assert worker._orders.get_nowait() == (7.0, body)
