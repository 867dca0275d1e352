"""The flows of the controller with scripted ranks: which orders go to whom, and what the platform is told."""

from __future__ import annotations

import pytest

from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.numbers import DataStatus, RepairType, Result, TrainState
from evertrain.mindio.tft.requests import Act, Flow, FromLink, Signal, Wait
from tests.mindio.tft_job import PLATFORM_FAST, Job

OK = (0, "Mindio do repair operation ok")
HIGH, LOW = TrainState.UCE_HIGH, TrainState.UCE_LOW
NETWORK = TrainState.HCCL_FAILED


def choosing(strategy: str, **more: list[Signal]) -> dict[str, list[Signal]]:
    return PLATFORM_FAST | {"report_strategies": [Signal("strategy", text=strategy)]} | more


# --- repair in place -------------------------------------------------------------------------------------------------


def test_a_memory_error_is_repaired_in_place() -> None:
    job = Job()
    job.beat(3, npu_status=HIGH)
    assert job.counts() == {"DeviceStop": 4, "DeviceClean": 4, "Repair": 2, "Rollback": 4, "NotifyNormal": 4}
    assert job.units() == {
        1: (RepairType.RT_SEND.value, [(1, 3)]),
        3: (RepairType.RT_UCE_HIGHLEVEL.value, [(1, 3)]),
    }
    assert job.order(3, w.Repair).rank_list == [1, 3]
    assert job.order(0, w.Rollback).step == 5
    assert job.machine.state == "NORMAL" and job.machine.repair_id == 1


def test_the_order_of_a_repair() -> None:
    job = Job()
    job.beat(2, npu_status=HIGH)
    seen = list(dict.fromkeys(type(message).__name__ for _, message in job.sent))
    assert seen == ["Collect", "Prelock", "DeviceStop", "DeviceClean", "Repair", "Rollback", "NotifyNormal"]


def test_the_step_is_the_newest_of_the_healthy_ranks() -> None:
    job = Job()
    job.beat(0, step=6)
    job.processes[3].change(step=7)
    job.beat(3, npu_status=HIGH)
    assert job.order(1, w.Prelock).step == 6
    assert 3 not in job.ranks(w.Prelock)
    assert job.order(1, w.Rollback).step == 6


def test_a_memory_error_outside_of_the_state_needs_no_repair() -> None:
    job = Job()

    def clean(process: object, order: w.DeviceClean) -> w.Reply:
        return w.Reply(sn=order.sn, result=0, status=job.processes[3].change(npu_status=LOW))

    job.processes[3].answers["DeviceClean"] = clean
    job.beat(3, npu_status=HIGH)
    assert job.counts() == {"DeviceStop": 4, "DeviceClean": 4, "Rollback": 4, "NotifyNormal": 4}


def test_a_memory_error_outside_of_the_state_of_a_rank_that_is_behind_does() -> None:
    job = Job()
    job.beat_all(step=6)

    def clean(process: object, order: w.DeviceClean) -> w.Reply:
        return w.Reply(sn=order.sn, result=0, status=job.processes[3].change(npu_status=LOW))

    job.processes[3].answers["DeviceClean"] = clean
    job.beat(3, npu_status=HIGH, step=5)
    assert job.units()[3] == (RepairType.RT_RECV_REPAIR.value, [(1, 3)])


def test_a_broken_network_needs_no_repair() -> None:
    job = Job(uce=False)
    job.beat(1, npu_status=TrainState.HCCL_FAILED)
    assert job.counts() == {"DeviceStop": 4, "DeviceClean": 4, "Rollback": 4, "NotifyNormal": 4}


def test_a_network_that_broke_for_all() -> None:
    job = Job(uce=False)
    for process in job.processes.values():
        process.change(npu_status=TrainState.HCCL_FAILED)
    job.beat(0)
    assert job.counts() == {"DeviceStop": 4, "DeviceClean": 4, "Rollback": 4, "NotifyNormal": 4}


def test_beside_a_memory_error_a_broken_network_makes_a_bad_rank() -> None:
    job = Job()
    job.processes[1].change(npu_status=TrainState.HCCL_FAILED)
    job.beat(0, npu_status=HIGH)
    assert job.units()[1] == (RepairType.RT_RECV_REPAIR.value, [(3, 1)])
    assert job.units()[0] == (RepairType.RT_UCE_HIGHLEVEL.value, [(2, 0)])


def test_without_replicas_everybody_loads() -> None:
    job = Job(copies=1)

    def normal(process: object, order: w.NotifyNormal) -> w.Reply:
        return w.Reply(sn=order.sn, result=0, status=job.processes[0].change(step=3), load_step=3)

    job.processes[0].answers["NotifyNormal"] = normal
    job.beat(2, npu_status=HIGH)
    kinds = [units[0] for _, units in sorted(job.units().items())]
    load, rebuild = RepairType.RT_LOAD_CKPT.value, RepairType.RT_LOAD_REBUILD.value
    assert kinds == [load, load, rebuild, load]
    assert job.machine.unconfirmed == (3, "retry")


@pytest.mark.parametrize("state", [TrainState.UCE_CORRUPTED, TrainState.PRECISION_ERROR])
def test_when_the_state_is_not_trusted_everybody_loads(state: TrainState) -> None:
    job = Job()
    job.beat(1, npu_status=state)
    kinds = [units[0] for _, units in sorted(job.units().items())]
    corrupted = state is TrainState.UCE_CORRUPTED
    load, rebuild = RepairType.RT_LOAD_CKPT.value, RepairType.RT_LOAD_REBUILD.value
    assert kinds == [load, rebuild if corrupted else load, load, load]


def test_a_wrong_result_on_all_ranks() -> None:
    job = Job()
    for process in job.processes.values():
        process.change(npu_status=TrainState.PRECISION_ERROR)
    job.beat(0)
    assert {units[0] for units in job.units().values()} == {RepairType.RT_LOAD_CKPT.value}
    assert job.machine.state == "NORMAL"


def test_a_rank_that_ran_ahead_moves_the_lock() -> None:
    job = Job()
    job.processes[2].status = w.Status(step=6)
    job.processes[2].answers["Collect"] = lambda p, o: w.Reply(sn=o.sn, result=0, status=w.Status(step=5))
    job.beat(3, npu_status=HIGH)
    assert [m.step for rank, m in job.sent if rank == 0 and isinstance(m, w.Prelock)] == [5, 6]
    assert job.order(0, w.Rollback).step == 6


def test_a_lock_that_takes_too_long_ends_the_job() -> None:
    job = Job()
    job.processes[2].answers["Prelock"] = Result.TIMEOUT
    job.beat(3, npu_status=HIGH)
    assert job.counts() == {"Exit": 4}
    assert job.machine.ended is not None


def test_in_mindspore_mode_nobody_loads() -> None:
    job = Job(world=2, copies=2, mindspore=True)
    for process in job.processes.values():
        process.change(npu_status=HIGH)
    job.beat(0)
    assert job.counts() == {"Exit": 2}


def test_a_recovery_begins_anew_when_another_rank_fails_meanwhile() -> None:
    job = Job(world=6, copies=3)

    def fail(process: object, order: w.Repair) -> w.Reply:
        job.processes[0].change(npu_status=HIGH)
        del job.processes[0].answers["Repair"]
        return w.Reply(sn=order.sn, result=1, status=job.processes[0].status)

    job.processes[0].answers["Repair"] = fail
    job.beat(4, npu_status=HIGH)  # the next holder of its shard is rank 0
    assert job.machine.state == "NORMAL" and job.machine.repair_id == 2
    counts = job.counts()
    # Who is stopped is not stopped again, except the one whose repair needed the one that failed.
    assert counts["DeviceStop"] == counts["DeviceClean"] == 7
    assert job.units()[0] == (RepairType.RT_UCE_HIGHLEVEL.value, [(2, 0)])
    assert job.units()[4] == (RepairType.RT_UCE_HIGHLEVEL.value, [(2, 4)])


def failing_when_stopped(job: Job, rank: int, **fault: TrainState) -> None:
    """This rank runs into a fault of its own after the lock: who stops it learns of that."""
    process = job.processes[rank]

    def stop(_: object, order: w.DeviceStop) -> w.Reply:
        return w.Reply(sn=order.sn, result=0, status=process.change(**fault))

    process.answers["DeviceStop"] = stop


@pytest.mark.parametrize(
    ("first", "late", "kinds"),
    [
        (NETWORK, HIGH, [*[RepairType.RT_LOAD_CKPT] * 3, RepairType.RT_LOAD_REBUILD]),
        (NETWORK, TrainState.UCE_CORRUPTED, [*[RepairType.RT_LOAD_CKPT] * 3, RepairType.RT_LOAD_REBUILD]),
        (NETWORK, TrainState.PRECISION_ERROR, [RepairType.RT_LOAD_CKPT] * 4),
        (NETWORK, NETWORK, []),
        (HIGH, HIGH, [RepairType.RT_LOAD_CKPT, RepairType.RT_LOAD_REBUILD] * 2),
        (HIGH, NETWORK, [RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_SEND]),
    ],
)
def test_a_fault_of_a_rank_that_is_being_stopped_counts(
    first: TrainState, late: TrainState, kinds: list[RepairType]
) -> None:
    """Rank 3, which holds the only copy of what rank 1 has, had its fault when the strategy was chosen for rank 1's."""
    job = Job()
    failing_when_stopped(job, 3, npu_status=late)
    job.beat(1, npu_status=first)
    assert [kind for _, (kind, _) in sorted(job.units().items())] == [kind.value for kind in kinds]
    assert job.counts()["DeviceStop"] == job.counts()["Rollback"] == job.counts()["NotifyNormal"] == 4
    assert job.machine.state == "NORMAL" and not job.machine.roster.errors


@pytest.mark.parametrize("first", [NETWORK, HIGH])
def test_a_process_that_fails_while_it_is_stopped_is_not_repaired_in_place(first: TrainState) -> None:
    job = Job(world=6, copies=3)
    failing_when_stopped(job, 3, run_status=TrainState.ABNORMAL)
    job.beat(1, npu_status=first)
    assert job.counts() == {"DeviceStop": 6, "DeviceClean": 6, "SaveCheckpoint": 2, "Rename": 1, "Exit": 6}


def test_a_target_whose_repair_was_cut_short_is_no_source() -> None:
    """A load that was begun spoils the state of every rank: the second attempt has to load as well."""
    job = Job(copies=1)
    first = job.processes[2]

    def fail(process: object, order: w.Repair) -> w.Reply:
        del first.answers["Repair"]
        first.change(npu_status=HIGH)
        return w.Reply(sn=order.sn, result=1, status=first.status)

    first.answers["Repair"] = fail
    job.beat(3, npu_status=TrainState.UCE_HIGH)
    assert job.ranks(w.Repair) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert job.machine.state == "NORMAL"


# --- the dying gasp --------------------------------------------------------------------------------------------------


def test_a_lost_process_without_a_platform_is_answered_by_a_checkpoint() -> None:
    job = Job()
    job.kill(3)
    assert job.counts() == {"SaveCheckpoint": 2, "Rename": 1, "Exit": 3}
    assert job.ranks(w.SaveCheckpoint) == [0, 1] and job.ranks(w.Rename) == [1]
    assert job.order(0, w.SaveCheckpoint).groups == [w.SaveGroup(kind=0, ranks=[0, 1])]
    assert job.order(1, w.SaveCheckpoint).step == job.order(1, w.Rename).step == 5


def test_with_whole_copies_one_rank_of_each_group_saves() -> None:
    job = Job(kinds=[[[0, 2], [1, 3]]], mindspore=True)
    job.kill(1)
    assert job.order(0, w.SaveCheckpoint).groups == [w.SaveGroup(kind=0, ranks=[0])]
    assert job.order(3, w.SaveCheckpoint).groups == [w.SaveGroup(kind=0, ranks=[3])]
    assert job.ranks(w.SaveCheckpoint) == [0, 3] and job.ranks(w.Rename) == [3]


def test_a_silent_process_is_lost() -> None:
    job = Job()
    job.processes[2].answers |= {"Collect": None}
    while job.machine.ended is None and job.now < 20:
        for rank in (0, 1, 3):
            job.beat(rank)
        job.wait(1.0)
    assert 8 <= job.now <= 14
    assert job.ranks(w.SaveCheckpoint) == [0, 1]


def test_a_process_that_reconnects_in_time_is_not_lost() -> None:
    job = Job()
    job.kill(2, notice=False)
    job.wait(0.2)
    assert job.start(2, replaces=False, status=w.Status(step=5)).registered == w.Registered(result=0)
    job.idle(3)
    assert job.counts() == {} and job.machine.repair_id == 0


@pytest.mark.parametrize("link_first", [True, False])
def test_a_process_whose_end_was_seen_is_not_waited_for(link_first: bool) -> None:
    job = Job()
    begun = job.now
    if link_first:
        job.kill(2, notice=False)
    job.signal("ended", faults={2: 1})
    if not link_first:
        assert job.counts() == {}, "its link is still there, so it may be somebody else's end"
        job.kill(2, notice=False)
    assert job.now == begun and job.ranks(w.SaveCheckpoint) == [0, 1]


def test_the_end_of_a_process_that_is_not_there_means_nothing_for_its_successor() -> None:
    job = Job()
    job.signal("ended", faults={2: 1, 99: 1})
    old = job.processes[2].link
    job.start(2, replaces=False, status=w.Status(step=5))
    assert job.processes[2].link != old
    job.kill(2, notice=False)
    job.wait(0.2)
    assert job.counts() == {}, "the link of another process: it has its time to come back"
    job.start(2, replaces=False, status=w.Status(step=5))
    job.idle(3)
    assert job.counts() == {} and job.machine.repair_id == 0


def test_an_order_that_got_lost_with_a_link_is_sent_again() -> None:
    job = Job()
    job.processes[2].answers["DeviceStop"] = None
    job.beat(3, npu_status=HIGH)
    job.kill(2, notice=False)
    job.start(2, replaces=False, status=w.Status(step=5))
    assert job.machine.state == "NORMAL"
    stops = [m.sn for rank, m in job.sent if rank == 2 and isinstance(m, w.DeviceStop)]
    assert len(stops) == 2 and len(set(stops)) == 1


def test_no_checkpoint_without_a_whole_copy() -> None:
    job = Job(copies=1)
    job.kill(3)
    assert job.counts() == {"Exit": 3}


def test_no_checkpoint_when_the_state_is_not_trusted() -> None:
    job = Job(uce=False)
    job.beat(2, npu_status=TrainState.PRECISION_ERROR)
    assert job.counts() == {"Exit": 4}


def test_a_half_updated_copy_is_not_saved() -> None:
    job = Job()
    job.processes[1].answers["Prelock"] = lambda p, o: w.Reply(
        sn=o.sn, result=0, status=w.Status(step=5, data_status=DataStatus.UPDATING)
    )
    job.kill(2)
    assert job.ranks(w.SaveCheckpoint) == [0, 3]


def test_a_checkpoint_that_was_asked_for() -> None:
    job = Job()
    job.signal("dump")
    assert job.counts() == {"SaveCheckpoint": 2, "Rename": 1, "Exit": 4}


def test_a_checkpoint_asked_for_by_the_platform_is_reported_without_a_conversation() -> None:
    job = Job(platform={})
    job.signal("dump")
    assert job.calls == [("report_result", (0, "do dump success", {}, "dump"))]


def saved_together(job: Job, rank: int) -> list[list[int]]:
    """With whom this rank was told to save, one time after the other."""
    orders = [order for to, order in job.sent if to == rank and isinstance(order, w.SaveCheckpoint)]
    return [order.groups[0].ranks for order in orders]


def test_a_rank_that_is_lost_while_it_saves_leaves_it_to_another_holder() -> None:
    job = Job(world=6, copies=3)
    job.processes[1].answers["SaveCheckpoint"] = None
    job.kill(5)
    job.kill(1)
    assert [saved_together(job, rank) for rank in (0, 1, 3)] == [[[0, 1], [0, 3]], [[0, 1]], [[0, 3]]]
    assert job.ranks(w.Rename) == [3]
    assert job.machine.ended == "a checkpoint of step 5 is saved"


def test_a_rank_fails_to_save_because_another_is_lost() -> None:
    """Its failure is heard of first."""
    job = Job(world=6, copies=3)
    job.processes[1].answers["SaveCheckpoint"] = None
    job.processes[0].answers["SaveCheckpoint"] = 1
    job.kill(5)
    del job.processes[0].answers["SaveCheckpoint"]
    job.kill(1)
    assert saved_together(job, 0) == [[0, 1], [0, 3]]
    assert job.machine.ended == "a checkpoint of step 5 is saved"


def test_the_last_holder_of_a_shard_is_lost_while_it_saves() -> None:
    job = Job()
    job.processes[1].answers["SaveCheckpoint"] = None
    job.kill(3)
    job.kill(1)
    assert job.machine.ended == "no checkpoint could be saved: no whole copy of the state is left"


def test_a_rank_that_can_t_save_ends_it() -> None:
    job = Job(world=6, copies=3)
    job.processes[0].answers["SaveCheckpoint"] = 1
    job.kill(5)
    job.wait(job.machine.settings.settle)
    assert job.ranks(w.SaveCheckpoint) == [0, 1]
    assert job.machine.ended == "no checkpoint could be saved: rank 0 answered 1"


def test_the_variant_with_a_stride_saves_the_additional_copy() -> None:
    job = Job(world=6, copies=2, shift=2, x1=True)
    job.processes[3].change(run_status=TrainState.ABNORMAL)
    job.beat(1, run_status=TrainState.ABNORMAL)
    assert job.ranks(w.SaveCheckpoint) == [4, 5]


@pytest.mark.parametrize("local_copy", [True, False])
def test_a_checkpoint_from_local_copies(local_copy: bool) -> None:
    """Both holders of a shard are in the middle of an update. They have a copy of the step before."""
    job = Job(local_copy=local_copy)
    for rank in (1, 3):
        job.beat(rank, data_status=DataStatus.UPDATING, backup_step=5)
    job.kill(2)
    assert job.ranks(w.SaveCheckpoint) == ([0, 1] if local_copy else [])
    said = "a checkpoint of step 5 is saved" if local_copy else "no checkpoint could be saved: no whole copy"
    assert (job.machine.ended or "").startswith(said)


# --- a controller that stood still -----------------------------------------------------------------------------------


def test_the_time_in_which_the_controller_stood_still_is_nobody_s_silence() -> None:
    job = Job()
    job.now += 30
    job.beat(0)  # what the others said meanwhile is read after this
    assert job.sent == [(0, w.Alive()), (1, w.Alive()), (2, w.Alive()), (3, w.Alive())]
    assert job.machine.repair_id == 0


def test_the_end_of_a_checkpoint_that_came_while_the_controller_stood_still_counts() -> None:
    job = Job()
    job.processes[1].answers["SaveCheckpoint"] = None
    job.kill(3)
    job.now += 2000
    job.beat(0)
    order = job.processes[1].orders[-1]
    job.feed(FromLink(job.processes[1].link, w.Reply(sn=order.sn, result=0, status=job.processes[1].status)))
    assert job.ranks(w.Rename) == [1]


@pytest.mark.parametrize("alive", [True, False])
def test_a_controller_that_stood_still_does_not_save_what_a_standby_has_saved(alive: bool) -> None:
    """Every rank holds everything, so that one of them would be enough. If the others have died meanwhile, it is."""
    job = Job(copies=4)
    own = job.processes[0].link
    job.now += 60
    for rank in (1, 2, 3):
        if alive:
            job.feed(FromLink(job.processes[rank].link, w.Leaving()))
        job.kill(rank, notice=False)
    job.wait(1)
    assert job.ranks(w.SaveCheckpoint) == ([] if alive else [0])
    assert job.machine.ended is not None
    assert (own in job.closed) == alive, "it looks for the new controller"


def test_ranks_that_come_back_to_a_controller_that_stood_still() -> None:
    job = Job(copies=4)
    job.now += 60
    for rank in (1, 2, 3):
        job.feed(FromLink(job.processes[rank].link, w.Leaving()))
        job.kill(rank, notice=False)
        job.start(rank, replaces=False, status=w.Status(step=5))
    job.idle(20)
    assert job.machine.ended is None and job.machine.repair_id == 0


def test_a_mistake_in_the_controller_ends_the_job() -> None:
    """Wherever it is: nobody waits for ever."""
    for request in (Wait(lambda: 1 // 0), Act([0], lambda sn, rank: 1 // 0, 5.0)):
        job = Job()

        def flow(request: object = request) -> Flow:
            yield request

        job.machine._start(flow())
        job.beat(0)
        assert job.machine.ended == "an error in the controller" and job.counts() == {"Exit": 4}


# --- the end ---------------------------------------------------------------------------------------------------------


def test_ranks_that_are_done_are_not_missed() -> None:
    job = Job()
    for rank in range(4):
        process = job.processes[rank]
        job.feed(job_bye(process.link))
        job.kill(rank)
    assert job.counts() == {} and job.machine.ended is None
    assert not job.machine.roster.heard, "nobody listens for them any more"


def test_a_loss_after_others_have_finished_is_the_end() -> None:
    job = Job()
    job.feed(job_bye(job.processes[0].link))
    job.kill(3)
    assert job.counts() == {"Exit": 3}


def test_the_last_word_of_the_controller() -> None:
    job = Job()
    for action in job.machine.leave():
        assert isinstance(action.message, w.Destroyed) and len(action.links) == 4  # type: ignore[union-attr]


def job_bye(link: int) -> FromLink:
    return FromLink(link, w.Bye())


def test_how_far_the_training_is() -> None:
    job = Job(platform={})
    assert job.machine.progress() == {"step": 5, "known": [0, 1, 2, 3], "raised": {}}
    job.beat(1, step=7)
    job.beat(2, run_status=TrainState.ABNORMAL, error="ValueError: no")
    assert job.machine.progress() == {"step": 7, "known": [0, 1, 2, 3], "raised": {2: "ValueError: no"}}
    job.kill(2)
    job.machine.roster.members[3].offline = True
    assert job.machine.progress() == {"step": 7, "known": [0, 1, 2], "raised": {}}
