"""The processor against a controller that speaks a script: every order, and what becomes of a broken link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from evertrain.mindio.tft import environment, messages, processor
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.messages import RepairUnit, SaveGroup
from evertrain.mindio.tft.numbers import (
    Action,
    DataStatus,
    RepairType,
    ReportState,
    Result,
    TrainState,
)
from evertrain.mindio.tft.processor import Processor, StartFailed
from evertrain.mindio.tft.rank import Life
from tests.mindio import tft_controllers
from tests.mindio.tft_controllers import PATIENCE, ScriptedController


class Recorder(Callbacks):
    """Callbacks that note their arguments; what clean returns and who raises can be set."""

    def __init__(self, *without: str) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.clean_result = 0
        self.raising: set[str] = set()
        for name in ("save_ckpt", "rename", "exit", "stop", "clean", "rebuild_group", "repair", "rollback",
                     "stream_sync", "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair",
                     "zit_upgrade_rollback"):  # fmt: skip
            if name not in without:
                self.register(name, self._noting(name), f"ctx of {name}")
        self.args = ["the arguments"]

    def _noting(self, name: str) -> Any:
        def callback(*args: Any) -> int:
            self.calls.append((name, *args))
            if name in self.raising:
                raise ValueError(f"{name} does not work")
            return self.clean_result if name == "clean" else 77

        return callback

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def callbacks() -> Recorder:
    return Recorder()


@pytest.fixture
def leader() -> Iterator[ScriptedController]:
    with tft_controllers.controller() as scripted:
        yield scripted


@pytest.fixture
def member(leader: ScriptedController, callbacks: Recorder) -> Iterator[Processor]:
    with tft_controllers.processor(leader, callbacks) as made:
        yield made


def in_thread(target: Any, *args: Any) -> tuple[threading.Thread, list]:
    result: list = []

    def run() -> None:
        try:
            result.append(target(*args))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def finished(started: tuple[threading.Thread, list]) -> Any:
    started[0].join(PATIENCE)
    assert not started[0].is_alive()
    return started[1][0]


def train_to(member: Processor, step: int) -> None:
    member.steps.start_updating()
    member.end_updating(step)


def park(leader: ScriptedController, member: Processor, step: int = 3) -> None:
    """A rank that was locked at this step, reported a network fault and waits, idle."""
    train_to(member, step)
    assert leader.ask(messages.Prelock, step=step, limit=5).result == Result.OK
    member.report(ReportState.RS_HCCL_FAILED)


def idle(member: Processor) -> tuple[threading.Thread, list]:
    return in_thread(member.main.wait_resumed)


UNIT = RepairUnit(src=0, dst=1, kind=0, repair_type=RepairType.RT_RECV_REPAIR.value)


# --- registration ----------------------------------------------------------------------------------------------------


def test_registers_as_new_and_reports_its_groups(leader: ScriptedController, member: Processor) -> None:
    first = leader.registrations.get(timeout=PATIENCE)
    assert first.replaces and leader.hellos[0].rank == 1 and leader.hellos[0].world_size == 4
    assert member.rank.life == Life.NORMAL and not member.reborn
    group = messages.ReplicaGroup(rank_list=[0, 1, 2, 3], replica_cnt=2)
    assert member.set_replica([group])
    assert leader.next(messages.InitReport).groups == [group]


def test_a_replacement_is_isolated_until_the_recovery_is_over() -> None:
    answer = messages.Registered(result=Result.REPAIR, repair_id=7)
    with tft_controllers.controller(registered=answer) as leader:
        leader.greeting = messages.Welcome(heartbeat=0.05)
        with tft_controllers.processor(leader) as member:
            assert member.reborn and not member.hot_switch
            assert member.rank.status().run_status == TrainState.ISOLATE
            assert leader.next(messages.Heartbeat).repair_id == 7


def test_a_refusal_is_told(leader: ScriptedController) -> None:
    leader.greeting = messages.Refused(reason="wrong token")
    with pytest.raises(StartFailed, match="wrong token"), tft_controllers.processor(leader):
        pass


def test_no_controller_is_an_error_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processor, "SILENT", 0.1)
    monkeypatch.setattr(environment, "connect_budget", lambda: 0.3)
    with tft_controllers.controller() as leader:
        leader.close()
        with pytest.raises(StartFailed, match="within 0.3 s"), tft_controllers.processor(leader):
            pass
    assert capsys.readouterr().err.count("mindio_ttp: rank 1 waits for the controller: 127.0.0.1:") == 1


# --- serial numbers --------------------------------------------------------------------------------------------------


def test_an_order_that_comes_again_is_answered_again_but_not_carried_out(
    leader: ScriptedController, member: Processor, callbacks: Recorder
) -> None:
    order = messages.RebuildGroup(sn=5, repair_id=1, fault_ranks=[3])
    leader.send(order)
    first = leader.next(messages.Reply)
    leader.send(order)
    assert leader.next(messages.Reply) == first
    leader.send(messages.Rename(sn=4, step=1))
    assert leader.silent()
    assert callbacks.names == ["rebuild_group"]


def test_another_controller_counts_anew(leader: ScriptedController, member: Processor) -> None:
    leader.send(messages.Collect(sn=1 << 40))
    leader.next(messages.Reply)
    leader.greeting = messages.Welcome(instance="two")
    leader.registrations.get(timeout=PATIENCE)
    leader.drop_link()
    leader.registrations.get(timeout=PATIENCE)
    assert leader.ask(messages.Collect).result == Result.OK


# --- the lock of the step --------------------------------------------------------------------------------------------


def test_a_rank_that_is_behind_finishes_the_step_and_is_held(leader: ScriptedController, member: Processor) -> None:
    train_to(member, 4)
    sn = leader.order(messages.Prelock, step=5, limit=PATIENCE)
    with member.steps._changed:  # the order has to be there before the step is done
        assert member.steps._changed.wait_for(lambda: member.steps.lock_step == 5, PATIENCE)
    assert leader.silent()
    member.steps.start_updating()
    held = in_thread(member.end_updating, 5)
    reply = leader.next(messages.Reply)
    assert (reply.sn, reply.result, reply.status.step) == (sn, Result.OK, 5)
    assert held[0].is_alive()
    member.steps.lift()
    assert finished(held) is None
    with pytest.raises(RuntimeError, match=r"FORCE STOP\. By mindio-ttp BeginUpdating"):
        member.steps.start_updating()


def test_a_rank_at_the_step_answers_at_once_and_is_stopped_before_the_next(
    leader: ScriptedController, member: Processor
) -> None:
    train_to(member, 5)
    assert leader.ask(messages.Prelock, step=5, limit=30).result == Result.OK
    held = in_thread(member.steps.start_updating)
    assert leader.silent() and held[0].is_alive()
    member.steps.lift()
    assert "FORCE STOP" in str(finished(held))


def test_a_rank_beyond_the_step_and_one_that_does_not_come(leader: ScriptedController, member: Processor) -> None:
    train_to(member, 6)
    assert leader.ask(messages.Prelock, step=5, limit=30).result == Result.NEED_RETRY
    assert leader.ask(messages.Prelock, step=7, limit=0.05).result == Result.TIMEOUT


def test_a_newer_order_ends_the_wait_for_a_lock(leader: ScriptedController, member: Processor) -> None:
    leader.order(messages.Prelock, step=1, limit=30)
    assert leader.ask(messages.Collect).result == Result.OK
    member.steps.start_updating()
    in_thread(member.end_updating, 1)
    assert leader.silent()


def test_a_faulty_rank_counts_as_locked(leader: ScriptedController, member: Processor) -> None:
    member.steps.start_updating()
    sn = leader.order(messages.Prelock, step=1, limit=PATIENCE)
    member.report(ReportState.RS_UCE, "0x10")
    assert leader.next(messages.Heartbeat).status.npu_status == TrainState.UCE_HIGH
    reply = leader.next(messages.Reply)
    assert (reply.sn, reply.result, reply.status.data_status) == (sn, Result.OK, DataStatus.UPDATING)
    assert reply.status.error_code == "0x10" and reply.status.parked


def test_mindspore_is_let_go_without_an_error(leader: ScriptedController) -> None:
    with tft_controllers.processor(leader, mindspore=True) as member:
        train_to(member, 1)
        leader.ask(messages.Prelock, step=1, limit=5)
        held = in_thread(member.steps.start_updating)
        member.steps.lift()
        assert finished(held) is None


def test_mindspore_is_not_let_go_into_an_update_while_its_state_is_saved(leader: ScriptedController) -> None:
    with tft_controllers.processor(leader, mindspore=True) as member:
        train_to(member, 1)
        leader.ask(messages.Prelock, step=1, limit=5)
        held = in_thread(member.steps.start_updating)
        member.steps.begin_dump()
        member.steps.lift()
        assert "checkpoint is being written" in str(finished(held))


# --- a recovery, order by order --------------------------------------------------------------------------------------


def test_a_healthy_rank_through_a_retry(leader: ScriptedController, member: Processor, callbacks: Recorder) -> None:
    train_to(member, 3)
    held = in_thread(member.steps.start_updating)
    finished(held)
    member.end_updating(4)
    leader.ask(messages.Prelock, step=4, limit=5)
    training = in_thread(member.steps.start_updating)
    sn = leader.order(messages.DeviceStop, repair_type=1)
    assert "FORCE STOP" in str(finished(training))
    assert leader.silent(), "the stop is complete only when the training thread has reported it"
    member.report(ReportState.RS_NORMAL)
    assert leader.next(messages.Reply) == messages.Reply(sn=sn, result=0, status=member.rank.status())
    waiting = in_thread(member.main.wait_cleaned)
    assert leader.ask(messages.DeviceClean, repair_type=1).result == 0
    assert finished(waiting) == Action.RETRY
    resumed = idle(member)
    assert leader.ask(messages.Rollback, repair_id=2, step=4, repair_type=1).result == 0
    assert leader.ask(messages.NotifyNormal).result == 0
    assert finished(resumed) == Action.RETRY
    assert callbacks.calls == [
        ("stop", ["the arguments"], "ctx of stop"),
        ("clean", False, ["the arguments"], "ctx of clean"),
        ("rollback", 4, ["the arguments"], "ctx of rollback"),
    ]
    assert member.rank.life == Life.NORMAL and member.rank.repair_name == "retry" and member.rank.repair_step == 4
    member.main.enter()
    member.steps.start_updating()
    member.end_updating(5)
    # The first step after a recovery is told at once.
    while leader.next(messages.Heartbeat).status.step != 5:
        pass


def test_a_rank_with_a_memory_error_receives_its_state(
    leader: ScriptedController, member: Processor, callbacks: Recorder
) -> None:
    train_to(member, 3)
    leader.ask(messages.Prelock, step=3, limit=5)
    member.report(ReportState.RS_UCE)
    assert leader.ask(messages.DeviceStop, repair_type=1).result == 0
    assert leader.ask(messages.DeviceClean, repair_type=1).result == 0
    assert callbacks.calls[-1][1] is True
    seen: list[int] = []
    callbacks.register(
        "repair", lambda *args: seen.append(member.rank.status().data_status) or callbacks.calls.append(args)
    )
    resumed = idle(member)
    unit = RepairUnit(src=3, dst=1, kind=1, repair_type=RepairType.RT_UCE_HIGHLEVEL.value)
    reply = leader.ask(messages.Repair, repair_id=1, step=3, units=[unit], rank_list=[1, 3])
    assert reply.result == 0 and reply.status.data_status == DataStatus.UPDATED and reply.status.step == 3
    info = {"type": [1], "repair_type": 1, "src": [3], "dst": [1], "rank_list": [1, 3]}
    assert callbacks.calls[-1] == (3, True, [1], info, ["the arguments"], None)
    assert seen == [DataStatus.UPDATING]
    leader.ask(messages.NotifyNormal)
    assert finished(resumed) == Action.RETRY


def test_a_rank_that_has_not_noticed_its_memory_error_is_stopped_first(
    leader: ScriptedController, member: Processor, callbacks: Recorder
) -> None:
    train_to(member, 3)
    leader.ask(messages.Prelock, step=3, limit=5)
    sn = leader.order(messages.DeviceStop, repair_type=1, uce=True)
    assert leader.silent(), "its training thread is at work"
    member.report(ReportState.RS_NORMAL)
    reply = leader.next(messages.Reply)
    assert (reply.sn, reply.result, reply.status.npu_status) == (sn, 0, TrainState.UCE_HIGH)
    assert leader.ask(messages.DeviceClean, repair_type=1).result == 0
    assert callbacks.calls[-1][:2] == ("clean", True)
    resumed = idle(member)
    assert leader.ask(messages.NotifyNormal).status.npu_status == TrainState.NORMAL
    assert finished(resumed) == Action.RETRY


def test_a_process_that_joins_learns_which_recovery_it_is(leader: ScriptedController, member: Processor) -> None:
    member.report(ReportState.RS_PREREPAIR_FINISH)
    idle(member)
    assert member.rank.repair_name == "unknow"
    leader.ask(messages.Repair, repair_id=1, step=3, units=[UNIT], rank_list=[0, 1], repair_type=2)
    assert member.rank.repair_name == "recover"
    leader.ask(messages.Rollback, repair_id=1, step=3)
    assert member.rank.repair_name == "unknow"


def test_a_low_level_memory_error_is_told_by_clean(
    leader: ScriptedController, member: Processor, callbacks: Recorder
) -> None:
    callbacks.clean_result = 2
    member.report(ReportState.RS_UCE)
    reply = leader.ask(messages.DeviceClean, repair_type=1)
    assert reply.result == 0 and reply.status.npu_status == TrainState.UCE_LOW


@pytest.mark.parametrize(("outcome", "result"), [(1, 1), ("raise", 4), ("absent", 4), (None, 4)])
def test_a_failed_clean_still_lets_the_training_thread_go(
    leader: ScriptedController, outcome: object, result: int
) -> None:
    callbacks = Recorder(*(["clean"] if outcome == "absent" else []))
    callbacks.clean_result = outcome  # type: ignore[assignment]
    callbacks.raising = {"clean"} if outcome == "raise" else set()
    with tft_controllers.processor(leader, callbacks) as member:
        park(leader, member)
        waiting = in_thread(member.main.wait_cleaned)
        assert leader.ask(messages.DeviceClean, repair_type=1).result == result
        assert finished(waiting) == Action.RETRY


def test_a_repair_waits_until_the_training_thread_is_idle(
    leader: ScriptedController, member: Processor, callbacks: Recorder
) -> None:
    park(leader, member)
    leader.order(messages.Repair, repair_id=1, step=3, units=[UNIT], rank_list=[0, 1])
    assert leader.silent() and "repair" not in callbacks.names
    idle(member)
    assert leader.next(messages.Reply).result == 0 and callbacks.names == ["repair"]


def test_a_rank_does_not_send_a_state_that_it_has_not(leader: ScriptedController, member: Processor) -> None:
    park(leader, member)
    idle(member)
    sends = RepairUnit(src=1, dst=0, kind=0, repair_type=RepairType.RT_SEND.value)
    reply = leader.ask(messages.Repair, repair_id=1, step=9, units=[sends], rank_list=[0, 1])
    assert reply.result == Result.ERROR and "step 9" in reply.detail


def test_a_stop_gets_a_stuck_callback_unstuck(leader: ScriptedController, callbacks: Recorder) -> None:
    released = threading.Event()
    callbacks.register("repair", lambda *_: released.wait(PATIENCE))
    callbacks.register("stop", lambda *_: released.set())
    with tft_controllers.processor(leader, callbacks) as member:
        park(leader, member)
        idle(member)
        leader.order(messages.Repair, repair_id=1, step=3, units=[UNIT], rank_list=[0, 1])
        assert leader.ask(messages.Collect).result == Result.OK
        assert leader.ask(messages.Prelock, step=3, limit=5).result == Result.OK
        assert leader.ask(messages.DeviceStop, repair_type=2).result == Result.OK
        assert leader.ask(messages.DeviceClean, repair_type=2).result == Result.OK
        assert leader.ask(messages.NotifyNormal).result == Result.OK


def test_a_release_that_nobody_waited_for_is_none_for_the_next_recovery(
    leader: ScriptedController, member: Processor
) -> None:
    park(leader, member)
    leader.ask(messages.DeviceClean, repair_type=1)  # nobody takes this one
    resumed = idle(member)
    leader.ask(messages.NotifyNormal)
    assert finished(resumed) == Action.RETRY
    member.main.enter()
    member.report(ReportState.RS_HCCL_FAILED)
    waiting = in_thread(member.main.wait_cleaned)
    waiting[0].join(0.1)
    assert waiting[0].is_alive()
    leader.ask(messages.DeviceClean, repair_type=1)
    assert finished(waiting) == Action.RETRY


def test_the_step_of_a_loaded_checkpoint_goes_with_the_last_reply(
    leader: ScriptedController, member: Processor
) -> None:
    park(leader, member, step=9)
    idle(member)
    member.callbacks.register("repair", lambda *_: setattr(member.rank, "load_step", 4))
    loads = RepairUnit(src=1, dst=1, kind=0, repair_type=RepairType.RT_LOAD_CKPT.value)
    assert leader.ask(messages.Repair, repair_id=1, step=9, units=[loads], rank_list=[1]).result == 0
    leader.ask(messages.Rollback, repair_id=1, step=9)
    reply = leader.ask(messages.NotifyNormal)
    assert reply.load_step == 4 and reply.status.step == 4


def test_a_load_that_failed_leaves_no_step_behind(leader: ScriptedController, member: Processor) -> None:
    park(leader, member, step=9)
    idle(member)

    def load(*_: Any) -> None:
        member.rank.load_step = 4
        raise ValueError("a shard of it is missing")

    member.callbacks.register("repair", load)
    loads = RepairUnit(src=1, dst=1, kind=0, repair_type=RepairType.RT_LOAD_CKPT.value)
    assert leader.ask(messages.Repair, repair_id=1, step=9, units=[loads], rank_list=[1]).result == Result.ERROR
    member.callbacks.register("repair", lambda *_: None)
    reply = leader.ask(messages.Repair, repair_id=2, step=9, units=[UNIT], rank_list=[0, 1])
    assert reply.result == 0 and reply.status.step == 9
    leader.ask(messages.Rollback, repair_id=2, step=9)
    assert leader.ask(messages.NotifyNormal).load_step == 0


def test_orders_of_a_recovery_need_a_recovery(
    leader: ScriptedController, member: Processor, callbacks: Recorder
) -> None:
    for kind, fields in (
        (messages.DeviceStop, {"repair_type": 1}),
        (messages.DeviceClean, {"repair_type": 1}),
        (messages.Repair, {"repair_id": 1, "step": 1, "units": [UNIT], "rank_list": [0, 1]}),
        (messages.Rollback, {"repair_id": 1, "step": 1}),
        (messages.NotifyNormal, {}),
    ):
        reply = leader.ask(kind, **fields)
        assert reply.result == Result.ERROR and "NORMAL" in reply.detail
    assert not callbacks.calls


# --- pause -----------------------------------------------------------------------------------------------------------


def has_pause(leader: ScriptedController, member: Processor, step: int) -> None:
    """The order to pause has arrived, and is not answered before that step ends."""
    with member.main._changed:
        assert member.main._changed.wait_for(lambda: member.main._pause_step == step, PATIENCE)
    assert leader.silent()


def test_pause_and_continue(leader: ScriptedController, member: Processor, callbacks: Recorder) -> None:
    leader.order(messages.Pause, step=3)
    has_pause(leader, member, 3)
    member.main.pause_point(2)
    assert leader.silent()
    paused = in_thread(member.main.pause_point, 3)
    assert leader.next(messages.Reply).result == 0
    assert callbacks.calls == [("stream_sync",)] and paused[0].is_alive()
    assert leader.ask(messages.Continue).result == 0
    assert finished(paused) is None
    member.main.pause_point(4)


def test_a_hot_switch_takes_the_thread_out_between_two_steps(leader: ScriptedController, member: Processor) -> None:
    leader.order(messages.Pause, step=1)
    has_pause(leader, member, 1)
    halted = in_thread(member.main.pause_point, 1)
    assert leader.next(messages.Reply).result == 0 and halted[0].is_alive()
    assert leader.ask(messages.Continue, leave=True).result == 0
    assert str(finished(halted)) == "STEP FINISH"


def test_who_works_on_a_paused_training_keeps_it_paused(leader: ScriptedController, member: Processor) -> None:
    with member.main.hold() as ended:
        assert ended is None, "it is not paused"
    leader.order(messages.Pause, step=1)
    has_pause(leader, member, 1)
    paused = in_thread(member.main.pause_point, 1)
    assert leader.next(messages.Reply).result == 0
    with member.main.hold() as ended:
        assert ended is not None and not ended()
        assert leader.ask(messages.Continue).result == 0
        assert ended() and paused[0].is_alive()
    assert finished(paused) is None


def test_a_pause_at_a_step_that_is_past_and_then_at_a_later_one(leader: ScriptedController, member: Processor) -> None:
    member.main.pause_point(3)
    assert leader.ask(messages.Pause, step=3).result == Result.NEED_RETRY
    leader.order(messages.Pause, step=4)
    has_pause(leader, member, 4)
    halted = in_thread(member.main.pause_point, 4)
    assert leader.next(messages.Reply).result == 0
    leader.order(messages.Pause, step=5)  # another rank was beyond step 4
    assert finished(halted) is None
    halted = in_thread(member.main.pause_point, 5)
    assert leader.next(messages.Reply).result == 0
    assert leader.ask(messages.Pause, step=5).result == 0, "it is there"
    assert leader.ask(messages.Continue).result == 0
    assert finished(halted) is None


def test_after_a_recovery_the_same_steps_come_again(leader: ScriptedController, member: Processor) -> None:
    member.main.pause_point(3)
    park(leader, member)
    resumed = idle(member)
    leader.ask(messages.NotifyNormal)
    finished(resumed)
    leader.order(messages.Pause, step=2)
    has_pause(leader, member, 2)
    halted = in_thread(member.main.pause_point, 2)
    assert leader.next(messages.Reply).result == 0
    member.main.end_pause()
    finished(halted)


def test_a_lock_that_nothing_follows_is_ended(leader: ScriptedController, member: Processor) -> None:
    train_to(member, 5)
    leader.ask(messages.Prelock, step=5, limit=5)
    held = in_thread(member.steps.start_updating)
    assert leader.ask(messages.Continue).result == Result.ERROR and held[0].is_alive()
    assert leader.ask(messages.Continue, unlock=True).result == Result.OK
    assert finished(held) is None, "no FORCE STOP: training goes on"
    member.end_updating(6)
    assert member.rank.life == Life.NORMAL


def test_a_rank_that_has_left_the_training_function_is_not_unlocked(
    leader: ScriptedController, member: Processor
) -> None:
    park(leader, member)
    assert leader.ask(messages.Continue, unlock=True).result == Result.ERROR
    assert member.rank.life == Life.PAUSE


def test_a_stop_ends_a_pause(leader: ScriptedController, member: Processor) -> None:
    train_to(member, 1)
    leader.order(messages.Pause, step=1)
    has_pause(leader, member, 1)
    paused = in_thread(member.main.pause_point, 1)
    leader.next(messages.Reply)
    leader.ask(messages.Prelock, step=1, limit=5)
    leader.order(messages.DeviceStop, repair_type=1)
    assert finished(paused) is None
    member.report(ReportState.RS_NORMAL)
    assert leader.next(messages.Reply).result == 0


def test_a_pause_that_nobody_comes_to_times_out(
    leader: ScriptedController, member: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "action_limit", lambda: 0.05)
    assert leader.ask(messages.Pause, step=1).result == Result.TIMEOUT
    member.main.pause_point(1)


# --- elastic, dump, exit ---------------------------------------------------------------------------------------------


def test_elastic_callbacks(leader: ScriptedController, member: Processor, callbacks: Recorder) -> None:
    park(leader, member)
    idle(member)
    fields: dict[str, Any] = {"repair_id": 1, "param": "{}"}
    shrink = messages.DowngradeRebuild
    assert leader.ask(shrink, world_ranks=[0, 2], groups=[[0, 2]], **fields).result == Result.ERROR
    assert leader.ask(shrink, world_ranks=[0, 1], groups=[[0, 1]], **fields).result == 0
    assert leader.ask(messages.RebuildGroup, fault_ranks=[2, 3], upgrade=True, **fields).result == 0
    assert leader.ask(
        messages.Repair, step=3, units=[UNIT], rank_list=[0, 1], upgrade=True, **fields
    ).result == 0  # fmt: skip
    assert leader.ask(messages.Rollback, step=3, upgrade=True, **fields).result == 0
    args = ["the arguments"]
    info = {"type": [0], "repair_type": 3, "src": [0], "dst": [1], "rank_list": [0, 1]}
    assert callbacks.calls == [
        ("zit_downgrade_rebuild", [0, 1], [0, 1], args, "{}"),
        ("zit_upgrade_rebuild", [2, 3], args, "{}"),
        ("zit_upgrade_repair", 3, False, [1], info, args, "{}"),
        ("zit_upgrade_rollback", 3, args, "{}"),
    ]


def test_a_dump_is_written_once_and_renamed(leader: ScriptedController, member: Processor, callbacks: Recorder) -> None:
    train_to(member, 3)
    leader.ask(messages.Prelock, step=3, limit=5)
    groups = [SaveGroup(kind=0, ranks=[0, 1])]
    assert leader.ask(messages.SaveCheckpoint, repair_id=1, step=3, groups=groups).result == 0
    # A standby that has taken over does not know that it was done.
    assert leader.ask(messages.SaveCheckpoint, repair_id=20001, step=3, groups=groups).result == 0
    assert leader.ask(messages.Rename, step=3).result == 0
    assert callbacks.calls == [
        ("save_ckpt", 3, [{"type": 0, "ranks": [0, 1]}], ["the arguments"], "ctx of save_ckpt"),
        ("rename", 3, ["the arguments"]),
    ]
    with pytest.raises(Exception, match="checkpoint is being written"):
        member.steps.start_updating()


def test_a_dump_is_written_anew_with_another_rank(
    leader: ScriptedController, member: Processor, callbacks: Recorder
) -> None:
    """The rank it was to save with is lost. What is being written is not disturbed; its end is of no interest."""
    train_to(member, 3)
    leader.ask(messages.Prelock, step=3, limit=5)
    begun, go_on = threading.Event(), threading.Event()

    def save(step: int, info: list[dict[str, Any]], *_: Any) -> None:
        callbacks.calls.append((info[0]["ranks"],))
        begun.set()
        go_on.wait(10)

    member.callbacks.register("save_ckpt", save)
    leader.order(messages.SaveCheckpoint, repair_id=1, step=3, groups=[SaveGroup(kind=0, ranks=[0, 1])])
    assert begun.wait(10)
    # In this state it is held for good; a standby that takes over now has to know that.
    assert leader.ask(messages.Prelock, step=3, limit=5).result == 0
    anew = leader.order(messages.SaveCheckpoint, repair_id=1, step=3, groups=[SaveGroup(kind=0, ranks=[1, 2])])
    go_on.set()
    reply = leader.next(messages.Reply)
    assert (reply.sn, reply.result) == (anew, 0)
    assert callbacks.calls == [([0, 1],), ([1, 2],)]


def test_a_dump_is_refused_for_another_step_or_by_a_stranger(leader: ScriptedController, member: Processor) -> None:
    train_to(member, 3)
    save = messages.SaveCheckpoint
    wrong_step = leader.ask(save, repair_id=1, step=4, groups=[SaveGroup(kind=0, ranks=[1])])
    assert wrong_step.result == Result.ERROR and "this is step 3" in wrong_step.detail
    assert leader.ask(save, repair_id=1, step=3, groups=[SaveGroup(kind=0, ranks=[0])]).result == Result.ERROR


def test_stop_and_clean_before_a_dump(
    leader: ScriptedController, member: Processor, callbacks: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "1")
    park(leader, member)
    groups = [SaveGroup(kind=0, ranks=[1])]
    assert leader.ask(messages.SaveCheckpoint, repair_id=1, step=3, groups=groups).result == 0
    assert callbacks.names == ["stop", "clean", "save_ckpt"]


def test_rename_for_mindspore_gets_the_context(
    leader: ScriptedController, member: Processor, callbacks: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    leader.ask(messages.Rename, step=3)
    assert callbacks.calls == [("rename", 3, "ctx of rename")]


def test_exit_releases_every_wait_and_ends_the_process(leader: ScriptedController, callbacks: Recorder) -> None:
    ended = threading.Event()
    with tft_controllers.processor(leader, callbacks, on_exit=ended.set) as member:
        waiting = in_thread(member.main.wait_resumed)
        leader.order(messages.Exit)
        assert finished(waiting) == Action.EXIT
        assert ended.wait(PATIENCE) and callbacks.names == ["exit"]


def test_an_exit_handler_that_is_stuck_does_not_keep_the_process(
    leader: ScriptedController, callbacks: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "action_limit", lambda: 0.05)
    ended, never = threading.Event(), threading.Event()
    callbacks.register("exit", lambda ctx: never.wait())
    with tft_controllers.processor(leader, callbacks, on_exit=ended.set):
        leader.order(messages.Exit)
        assert ended.wait(PATIENCE)
    never.set()


# --- the link --------------------------------------------------------------------------------------------------------


def test_a_broken_link_comes_back_and_orders_go_on(leader: ScriptedController, member: Processor) -> None:
    group = messages.ReplicaGroup(rank_list=[0, 1, 2, 3], replica_cnt=2)
    member.set_replica([group])
    train_to(member, 2)
    leader.registrations.get(timeout=PATIENCE)
    leader.drop_link()
    again = leader.registrations.get(timeout=PATIENCE)
    assert not again.replaces and again.status.step == 2
    while leader.next(messages.InitReport).groups != [group]:
        pass
    assert leader.ask(messages.Collect).result == Result.OK


def test_goes_to_a_standby_that_is_asked_until_it_leads(leader: ScriptedController, member: Processor) -> None:
    with tft_controllers.controller() as standby:
        standby.greeting = messages.Refused(reason="not yet", passive=True)
        leader.order(messages.Standbys, addresses=[(3, *standby.address)])
        leader.ask(messages.Collect)
        train_to(member, 2)
        leader.close()
        while len(standby.hellos) < 3:
            threading.Event().wait(0.01)
        standby.greeting = messages.Welcome(instance="two")
        assert standby.registrations.get(timeout=PATIENCE).status.step == 2
        assert standby.ask(messages.Collect).result == Result.OK


def test_starts_a_standby_when_named_and_tells_where(leader: ScriptedController) -> None:
    asked: list[tuple] = []

    def start(ip: str, port: int, epoch: int) -> tuple[str, int]:
        asked.append((ip, port, epoch))
        return ip, 4567

    with tft_controllers.processor(leader, on_standby=start):
        leader.order(messages.Standbys, addresses=[(0, "127.0.0.9", 9), (1, "127.0.0.1", 0)], epoch=2)
        assert leader.next(messages.StandbyUp) == messages.StandbyUp(ip="127.0.0.1", port=4567)
        assert asked == [("127.0.0.1", 0, 4)]


def test_after_the_end_of_the_controller_training_goes_on(leader: ScriptedController, member: Processor) -> None:
    leader.order(messages.Destroyed)
    leader.ask(messages.Collect)
    leader.registrations.get(timeout=PATIENCE)
    leader.drop_link()
    member._keeper.join(PATIENCE)
    assert leader.registrations.empty()
    train_to(member, 1)


def test_a_fault_after_the_end_of_the_controller_does_not_wait_for_it(leader: ScriptedController) -> None:
    ended = threading.Event()
    with tft_controllers.processor(leader, on_exit=ended.set) as member:
        leader.order(messages.Destroyed)
        leader.ask(messages.Collect)
        leader.drop_link()
        member._keeper.join(PATIENCE)
        assert member.unprotected and not ended.is_set()
        member.report(ReportState.RS_HCCL_FAILED)
        assert ended.is_set() and member.main.wait_cleaned() == Action.EXIT


def test_a_recovery_without_a_controller_is_given_up(
    leader: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    with tft_controllers.processor(leader, on_exit=ended.set) as member:
        monkeypatch.setattr(environment, "connect_budget", lambda: 0.2)
        train_to(member, 1)
        leader.ask(messages.Prelock, step=1, limit=5)
        leader.close()
        assert ended.wait(PATIENCE)


def test_says_goodbye_only_when_done(leader: ScriptedController) -> None:
    with tft_controllers.processor(leader):
        pass
    leader.next(messages.Bye)
    with tft_controllers.processor(leader) as member:
        member.report(ReportState.RS_UNKNOWN)
    seen = []
    while not leader.received.empty():
        seen.append(type(leader.received.get()))
    assert messages.Bye not in seen


def test_a_rank_that_is_leaving_answers_a_pause_with_its_goodbye(leader: ScriptedController, member: Processor) -> None:
    """An error before that would be taken for a rank that can't be paused, and end a job that is about to succeed."""
    beat = member.beat

    def beat_later() -> None:  # in the middle of leaving
        leader.order(messages.Pause, step=1)
        assert leader.silent()
        beat()

    member.beat = beat_later  # type: ignore[method-assign]
    member.destroy()
    assert leader.next(messages.Bye)


def test_a_link_that_breaks_while_registering_is_tried_again(leader: ScriptedController, member: Processor) -> None:
    leader.registrations.get(timeout=PATIENCE)
    leader.mute = True
    leader.drop_link()
    leader.registrations.get(timeout=PATIENCE)
    leader.mute = False
    leader.drop_link()
    leader.registrations.get(timeout=PATIENCE)
    assert leader.ask(messages.Collect).result == Result.OK


def test_a_process_that_is_its_rank_no_more_ends(leader: ScriptedController) -> None:
    ended = threading.Event()
    with tft_controllers.processor(leader, on_exit=ended.set):
        leader.registrations.get(timeout=PATIENCE)
        leader.registered = messages.Registered(result=Result.STOP_SERVICE)
        leader.drop_link()
        assert ended.wait(PATIENCE)
        assert leader.hellos[0].process and leader.hellos[0].process == leader.hellos[1].process


def test_a_controller_that_says_nothing_is_left_with_a_word(leader: ScriptedController) -> None:
    leader.greeting = messages.Welcome(heartbeat=0.02, patience=0.1)
    with tft_controllers.processor(leader):
        leader.registrations.get(timeout=PATIENCE)
        leader.next(messages.Leaving)
        leader.registrations.get(timeout=PATIENCE)


def test_heartbeats_come_by_themselves(leader: ScriptedController) -> None:
    leader.greeting = messages.Welcome(heartbeat=0.05)
    with tft_controllers.processor(leader):
        for _ in range(3):
            leader.next(messages.Heartbeat)
