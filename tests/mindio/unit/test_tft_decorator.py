"""`tft_exception_handler`: what an exception means, and how the training function is called again."""

from __future__ import annotations

import dataclasses
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evertrain.mindio.tft import api_framework, decorator, environment, faults, hosting, messages, runtime, update_time
from evertrain.mindio.tft.decorator import tft_exception_handler
from evertrain.mindio.tft.numbers import RepairType, ReportState, Result, TrainState
from evertrain.mindio.tft.processor import Settings
from evertrain.mindio.tft.runtime import Runtime
from tests.mindio import tft_controllers
from tests.mindio.tft_controllers import PATIENCE, ScriptedController


class GaveUp(BaseException):
    pass


def _give_up(reason: str) -> None:
    raise GaveUp(reason)


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[ScriptedController]:
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    monkeypatch.setattr(decorator, "give_up", _give_up)
    monkeypatch.setattr(Runtime, "exit", lambda self: None)
    with tft_controllers.controller() as scripted:
        run = runtime.runtime
        run.init_processor(Settings(rank=1, world_size=4), lambda *_: None)
        run.processor.start(*scripted.address)
        for name in ("stop", "clean", "repair", "rollback"):
            run.callbacks.register(name, lambda *_: 0)
        yield scripted
        runtime.reset()
        faults.reset()
        gc.unfreeze()


class Call:
    """The decorated function, called in a thread."""

    def __init__(self, func: Callable[..., Any], *args: Any) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(tft_exception_handler(func), args), daemon=True)
        self.thread.start()

    def _run(self, func: Callable[..., Any], args: tuple) -> None:
        try:
            self.result = func(*args)
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def fault_seen(leader: ScriptedController) -> messages.Status:
    while True:
        status = leader.next(messages.Heartbeat).status
        if status.npu_status or status.run_status:
            return status


def recover(leader: ScriptedController, repair: bool = False) -> None:
    assert leader.ask(messages.Prelock, step=0, limit=5).result == Result.OK
    assert leader.ask(messages.DeviceStop, repair_type=1).result == 0
    assert leader.ask(messages.DeviceClean, repair_type=1).result == 0
    if repair:
        unit = messages.RepairUnit(src=0, dst=1, kind=0, repair_type=RepairType.RT_UCE_HIGHLEVEL.value)
        assert leader.ask(messages.Repair, repair_id=1, step=0, units=[unit], rank_list=[0, 1]).result == 0
    assert leader.ask(messages.Rollback, repair_id=1, step=0).result == 0
    assert leader.ask(messages.NotifyNormal).result == 0


def test_only_functions_are_decorated() -> None:
    with pytest.raises(TypeError):
        tft_exception_handler(3)  # type: ignore[type-var]


def test_without_a_processor_it_is_the_function_itself() -> None:
    def train(x: int) -> int:
        if x < 0:
            raise RuntimeError("UCE ERROR")
        return x + 1

    assert tft_exception_handler(train)(2) == 3
    with pytest.raises(RuntimeError):
        tft_exception_handler(train)(-1)


def test_a_normal_return_ends_the_processor(leader: ScriptedController) -> None:
    assert Call(lambda x: x * 2, 21).end() == 42
    while leader.next(messages.Heartbeat).status.run_status != TrainState.EXIT:
        pass
    leader.next(messages.Bye)
    assert runtime.runtime.processor is None


@pytest.mark.parametrize(("rank", "platform"), [(0, False), (0, True), (1, False)])
def test_the_controller_ends_with_the_function_of_rank_0_unless_a_platform_leads_it(
    leader: ScriptedController, monkeypatch: pytest.MonkeyPatch, rank: int, platform: bool
) -> None:
    processor = runtime.runtime.processor
    processor.settings = dataclasses.replace(processor.settings, rank=rank)
    if platform:
        monkeypatch.setenv("MINDX_TASK_ID", "a-job")
    ended: list[int] = []
    monkeypatch.setattr(hosting, "destroy_controller", lambda: ended.append(rank))
    Call(lambda: None).end()
    assert ended == ([0] if rank == 0 and not platform else [])


def test_after_a_memory_error_it_is_called_again_with_what_the_callbacks_put_into_the_list(
    leader: ScriptedController,
) -> None:
    seen: list[Any] = []

    def train(model: str, data: str) -> str:
        seen.append((model, data))
        if len(seen) == 1:
            raise RuntimeError("ACL: UCE ERROR happened, device error type: 0x2c")
        return "done"

    def rebuild(step: int, need_rebuild: bool, ranks: list, info: dict, args: list, ctx: Any) -> None:
        assert need_rebuild
        args[0] = "a new model"

    runtime.runtime.callbacks.register("repair", rebuild)
    call = Call(train, "model", "data")
    status = fault_seen(leader)
    assert status.npu_status == TrainState.UCE_HIGH and status.error_code == "0x2c"
    recover(leader, repair=True)
    assert call.end() == "done"
    assert seen == [("model", "data"), ("a new model", "data")]


def test_nothing_of_the_failed_call_is_held_while_others_repair(leader: ScriptedController) -> None:
    class Big:
        pass

    alive: list[weakref.ref] = []
    during: list[bool] = []

    def train() -> None:
        big = Big()
        alive.append(weakref.ref(big))
        if len(alive) == 1:
            raise RuntimeError("HCCL OP RETRY FAILED")

    gc.disable()
    try:
        runtime.runtime.callbacks.register("repair", lambda *_: during.append(alive[0]() is not None))
        call = Call(train)
        fault_seen(leader)
        recover(leader, repair=True)
        call.end()
    finally:
        gc.enable()
    assert during == [False]


def test_a_recovery_does_not_look_at_what_was_there_before_the_training(leader: ScriptedController) -> None:
    """In a process with torch that takes every survivor a tenth of a second and more, all at the same time."""
    before: list[Any] = []
    seen: list[bool] = []

    def train() -> None:
        seen.append(any(each is before for each in gc.get_objects()))
        if len(seen) == 1:
            raise RuntimeError("HCCL OP RETRY FAILED")

    call = Call(train)
    fault_seen(leader)
    recover(leader)
    call.end()
    assert seen == [False, False]


def test_a_model_that_is_rebuilt_is_not_kept_because_it_was_there_before_the_training(
    leader: ScriptedController,
) -> None:
    class Model:
        def __init__(self) -> None:
            self.itself = self

    calls: list[int] = []

    def train(model: Model) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("UCE ERROR")

    def rebuild(step: int, need_rebuild: bool, ranks: list, info: dict, args: list, ctx: Any) -> None:
        args[0] = Model()

    runtime.runtime.callbacks.register("repair", rebuild)
    models = [Model()]
    old = weakref.ref(models[0])
    call = Call(train, models.pop())
    fault_seen(leader)
    recover(leader, repair=True)
    call.end()
    del call
    gc.collect()
    assert old() is None


def test_two_recoveries_one_after_the_other(leader: ScriptedController) -> None:
    calls = []

    def train() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("SUSPECT REMOTE ERROR")
        return len(calls)

    call = Call(train)
    for _ in range(2):
        assert fault_seen(leader).npu_status == TrainState.HCCL_FAILED
        recover(leader)
    assert call.end() == 3


@pytest.mark.parametrize(
    ("text", "run_status"), [("ARF FINISH", "PREREPAIR_FINISH"), ("STEP FINISH", "STEP_FINISH"), ("bad", "ABNORMAL")]
)
def test_some_wait_only_once(leader: ScriptedController, text: str, run_status: str) -> None:
    calls = []

    def train() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(text)

    call = Call(train)
    assert fault_seen(leader).run_status == TrainState[run_status]
    assert leader.ask(messages.Rollback, repair_id=1, step=0).result == 0
    assert leader.ask(messages.NotifyNormal).result == 0
    call.end()
    assert len(calls) == 2


def test_exit_ends_both_waits(leader: ScriptedController) -> None:
    def train() -> None:
        raise RuntimeError("UCE ERROR")

    call = Call(train)
    fault_seen(leader)
    leader.order(messages.Exit)
    with pytest.raises(GaveUp):
        call.end()


def test_other_exceptions_are_reported_and_end_the_function(leader: ScriptedController, capsys: Any) -> None:
    def train() -> None:
        raise ValueError("a mistake of the script")

    call = Call(train)
    status = fault_seen(leader)
    assert (status.run_status, status.error) == (TrainState.ABNORMAL, "ValueError: a mistake of the script")
    assert call.thread.is_alive(), "the process may still be needed, until the controller says otherwise"
    leader.order(messages.Exit)
    with pytest.raises(ValueError, match="a mistake of the script"):
        call.end()
    assert "a mistake of the script" in capsys.readouterr().err


def test_a_process_that_failed_does_not_end_while_its_checkpoint_is_written(
    leader: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, written = threading.Event(), threading.Event()
    waits: list[int] = []

    def limit() -> float:
        waits.append(1)
        if len(waits) == 3:
            written.set()
        return 0.05

    def save(*_: Any) -> None:
        begun.set()
        written.wait(PATIENCE)

    def train() -> None:
        raise ValueError("a mistake of the script")

    monkeypatch.setattr(environment, "action_limit", limit)
    runtime.runtime.callbacks.register("save_ckpt", save)
    sn = leader.order(messages.SaveCheckpoint, repair_id=1, step=0, groups=[messages.SaveGroup(kind=0, ranks=[1])])
    assert begun.wait(PATIENCE)
    with pytest.raises(ValueError, match="a mistake of the script"):
        Call(train).end()
    assert written.is_set()
    reply = leader.next(messages.Reply)
    assert (reply.sn, reply.result) == (sn, Result.OK)


def test_without_a_controller_an_exception_is_that_of_the_function(leader: ScriptedController) -> None:
    processor = runtime.runtime.processor
    leader.order(messages.Destroyed)
    leader.ask(messages.Collect)
    leader.drop_link()
    processor._keeper.join(PATIENCE)
    for kind in (RuntimeError, ValueError):

        def train(kind: type[Exception] = kind) -> None:
            raise kind("UCE ERROR")

        with pytest.raises(kind, match="UCE ERROR"):
            Call(train).end()


def test_with_an_export_version_arguments_stay_a_tuple(
    leader: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "0")
    api_framework.set_mindio_export_version("MindSpeed-LLM")
    api_framework.tft_set_step_args("ignored")
    assert Call(lambda *args: runtime.runtime.callbacks.args, 1, 2).end() == (1, 2)


def test_signals_of_the_platform_do_not_end_the_process(leader: ScriptedController) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    runtime.runtime.destroy_processor()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


# --- the table of texts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "uce", "state"),
    [
        ("a UCE ERROR b", True, "RS_UCE"),
        ("a UCE ERROR b", False, "RS_UNKNOWN"),
        ("HBM MULTI BIT ECC without a time", True, "RS_UCE_CORRUPTED"),
        ("HBM MULTI BIT ECC time us=250", True, "RS_UCE"),
        ("HBM MULTI BIT ECC time us= 150.", True, "RS_UCE"),
        ("HBM MULTI BIT ECC time us=50", True, "RS_UCE_CORRUPTED"),
        ("FORCE STOP", False, "RS_NORMAL"),
        ("ARF FINISH", False, "RS_PREREPAIR_FINISH"),
        ("STEP FINISH", False, "RS_STEP_FINISH"),
        ("HCCL OP RETRY FAILED", True, "RS_HCCL_FAILED"),
        ("SUSPECT REMOTE ERROR", True, "RS_HCCL_FAILED"),
        ("UB LINK ERROR", True, "RS_HCCL_FAILED"),
        ("HCCS LINK ERROR", True, "RS_HCCL_FAILED"),
        ("HCCS LINK ERROR", False, "RS_UNKNOWN"),
        ("FORCE STOP because of a UCE ERROR", True, "RS_UCE"),
        ("CUDA out of memory", True, "RS_UNKNOWN"),
    ],
)
def test_texts(text: str, uce: bool, state: str) -> None:
    update_time.tft_set_update_start_time(100)
    update_time.tft_set_update_end_time(200)
    assert faults.classify(text, uce).state == ReportState[state]
    update_time.forget()


def test_patterns_of_the_user_come_last() -> None:
    try:
        api_framework.tft_register_exception_handler("PRECISION", "RS_RETRY", lambda text: "PRECISION")
        api_framework.tft_register_exception_handler("ODD", "RS_RETRY", lambda text: "never registered")
        assert faults.classify("PRECISION ERROR", True).state == ReportState.RS_RETRY
        assert faults.classify("PRECISION and UCE ERROR", True).state == ReportState.RS_UCE
        assert faults.classify("ODD", True).state == ReportState.RS_UNKNOWN
    finally:
        faults.reset()


@pytest.mark.parametrize(
    ("error", "start", "end", "repairable"),
    [(0, 1, 2, False), (5, None, 2, False), (5, 0, 2, False), (5, 1, 2, True), (2, 1, 4, True), (2, 3, 4, False),
     (4, 3, 2, True), (2, 2, 4, False)],
)  # fmt: skip
def test_times_of_memory_errors(error: int, start: int | None, end: int, repairable: bool) -> None:
    update_time.forget()
    assert update_time.tft_can_do_uce_repair(error, start, end) is repairable
