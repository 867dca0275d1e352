"""Every action, as a call of MindIO's controller; every report of it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from evertrain.taskd.manager.bridge import Bridge
from evertrain.taskd.manager.orders import ToController
from evertrain.taskd.manager.reports import Progress, Report

NAMES = (
    "tft_init_controller", "tft_start_controller", "tft_destroy_controller", "tft_notify_controller_dump",
    "tft_notify_controller_stop_train", "tft_notify_controller_on_global_rank", "tft_query_high_availability_switch",
    "tft_notify_controller_change_strategy", "tft_notify_controller_prepare_action",
)  # fmt: skip
STARTED = [("init_controller", -1, 4, False, True, True), ("start_controller", "127.0.0.1", 8000, False, "")]


class Controller(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("mindio_ttp.controller_ttp")
        self.calls: list[tuple[Any, ...]] = []
        self.callbacks: dict[str, Callable[..., None]] = {}
        self.answer: int | Exception = 0
        for name in NAMES:
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.calls.append((name.removeprefix("tft_").removeprefix("notify_controller_"), *args))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return call

    def tft_register_mindx_callback(self, name: str, callback: Callable[..., None]) -> int:
        self.callbacks[name] = callback
        return 0


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    module = Controller()
    monkeypatch.setitem(sys.modules, "mindio_ttp.controller_ttp", module)
    for name, value in {
        "WORLD_SIZE": "4", "POD_IP": "127.0.0.1", "TTP_PORT": "8000", "PROCESS_RECOVER": "on",
        "HIGH_AVAILABILITY": "recover,elastic-training",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    return module


@pytest.mark.parametrize(
    ("order", "calls"),
    [
        (ToController("save_and_exit"), [("dump",)]),
        (ToController("stop_train", {3: 1}, timeout=9), [("stop_train", {3: 1}, "stop")]),
        (ToController("pause_train", timeout=900), [("stop_train", {}, "pause", 900)]),
        (ToController("pause_train"), [("stop_train", {}, "pause", 600)]),
        (ToController("on_global_rank", {3: 2}, timeout=33), [("on_global_rank", {3: 2}, 33)]),
        (ToController("on_global_rank", {3: 1}), [("on_global_rank", {3: 1})]),
        (ToController("change_strategy", strategy="downgrade", params="{}"), [("change_strategy", "downgrade", "{}")]),
        (ToController("hot switch", {3: 1}), [("prepare_action", "hot switch", {3: 1})]),
        (ToController("stop switch"), [("prepare_action", "stop switch", {})]),
        (ToController("new pod running"), []),
        (ToController("restart_controller"), [("destroy_controller",), *STARTED]),
        (ToController("destroy_controller"), [("destroy_controller",)]),
        (ToController("something else"), []),
    ],
    ids=lambda each: each.action if isinstance(each, ToController) else "",
)
async def test_every_action_is_a_call(controller: Controller, order: ToController, calls: list[Any]) -> None:
    bridge = Bridge(lambda report: None)
    assert await bridge.start() and controller.calls == STARTED
    controller.calls.clear()
    controller.callbacks.clear()
    assert await bridge.call(order)
    assert controller.calls == calls
    assert bool(controller.callbacks) == (order.action == "restart_controller"), "one that ended has forgotten them"
    before = list(controller.calls)
    await bridge.close(leave=True)
    assert controller.calls == before, "who looks for the next one was not told that there is none"


async def test_a_controller_ends_with_the_job(controller: Controller) -> None:
    bridge = Bridge(lambda report: None)
    assert await bridge.start()
    await bridge.close()
    assert controller.calls[-1] == ("destroy_controller",)


@pytest.mark.parametrize("answer", [1, RuntimeError("no")])
async def test_a_call_that_fails_is_told(controller: Controller, answer: int | Exception) -> None:
    bridge = Bridge(lambda report: None)
    assert await bridge.start()
    controller.answer = answer
    assert not await bridge.call(ToController("save_and_exit"))
    await bridge.close()


async def test_an_old_mindio_has_no_hot_switch(controller: Controller) -> None:
    bridge = Bridge(lambda report: None)
    assert await bridge.start()
    del controller.tft_notify_controller_prepare_action
    assert await bridge.call(ToController("hot switch", {3: 1}))
    await bridge.close()


async def test_every_report_is_passed_on_until_the_bridge_is_closed(controller: Controller) -> None:
    heard: list[Report] = []
    bridge = Bridge(heard.append)
    assert await bridge.start()
    faults = {3: 1}
    controller.callbacks["report_fault_ranks"](faults, {3: "code"})
    controller.callbacks["report_fault_ranks"](faults)
    controller.callbacks["report_stop_complete"](404, "no", faults)
    controller.callbacks["report_strategies"](faults, ["recover", "exit"])
    controller.callbacks["report_result"](406, "no", faults, "recover")
    faults.clear()  # it is theirs
    assert heard == [
        Report("process_fault", {3: 1}),
        Report("process_fault", {3: 1}),
        Report("stop_complete", {3: 1}, 404, "no"),
        Report("recover_strategy", {3: 1}, strategies=("recover", "exit")),
        Report("recover_status", {3: 1}, 406, "no", strategy="recover"),
    ]
    await bridge.close()
    controller.callbacks["report_fault_ranks"]({1: 1})
    assert len(heard) == 5


@pytest.mark.parametrize(
    ("ordered", "reported", "stops"),
    [
        ({3: 1}, {3: 1}, True),
        ({2: 1, 3: 1}, {3: 1}, True),
        ({2: 1}, {3: 1}, False),
        ({3: 77}, {3: 1}, False),
        ({3: 1, 4: 1}, {3: 1}, False),
    ],
    ids=["it", "one-of-them", "others", "no-such-type", "no-such-rank"],
)
async def test_a_new_controller_that_was_told_to_stop_too_early(
    controller: Controller, ordered: dict[int, int], reported: dict[int, int], stops: bool
) -> None:
    """It knew nothing of the ranks. When it reports their faults, it does."""
    bridge = Bridge(lambda report: None)
    assert await bridge.start()
    controller.answer = 1
    assert not await bridge.call(ToController("stop_train", ordered))
    controller.answer = 0
    controller.calls.clear()
    for _ in range(2):
        controller.callbacks["report_fault_ranks"](reported)
    assert controller.calls == ([("stop_train", reported, "stop")] if stops else [])
    await bridge.close()


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "POD_IP", "TTP_PORT"])
async def test_what_is_missing_is_named(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    monkeypatch.delenv(missing)
    monkeypatch.delenv("MS_WORKER_NUM", raising=False)
    bridge = Bridge(lambda report: None)
    assert not await bridge.start() and missing in caplog.text
    assert not await bridge.call(ToController("save_and_exit"))
    await bridge.close()
    assert controller.calls == []


async def test_a_variable_that_is_no_number_is_named(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TTP_PORT", "abc")
    bridge = Bridge(lambda report: None)
    assert not await bridge.start() and "TTP_PORT: a number is needed, not 'abc'" in caplog.text
    await bridge.close()


async def test_without_mindio(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "mindio_ttp.controller_ttp", None)
    bridge = Bridge(lambda report: None)
    assert not await bridge.start()
    assert "mindio not found, process-rescheduling checkpoint-saving DO NOT work!" in caplog.text
    assert not await bridge.linked()
    await bridge.close()


async def test_how_far_the_training_is(controller: Controller) -> None:
    bridge = Bridge(lambda report: None)
    assert bridge.progress() is None
    await bridge.start()
    assert bridge.progress() is None, "the original does not tell"
    found = {"step": 7, "known": [0, 3], "raised": {3: "ValueError: no"}}
    controller.tft_query_progress = lambda: found  # type: ignore[attr-defined]
    assert bridge.progress() == Progress(7, frozenset({0, 3}), {3: "ValueError: no"})
    await bridge.close()
