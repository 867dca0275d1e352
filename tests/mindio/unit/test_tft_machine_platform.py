"""The conversation with the platform: what is told in which order, and what each strategy does."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.mindio.tft import messages as w
from evertrain.mindio.tft.numbers import RepairType, Result, TrainState
from evertrain.mindio.tft.requests import FromLink, Signal
from tests.mindio.tft_job import PLATFORM_FAST, Job, Process

OK = "Mindio do repair operation ok"
HIGH = TrainState.UCE_HIGH


def choosing(strategy: str, **more: list[Signal]) -> dict[str, list[Signal]]:
    return PLATFORM_FAST | {"report_strategies": [Signal("strategy", text=strategy)]} | more


# --- the conversation ------------------------------------------------------------------------------------------------


def test_the_conversation_of_a_repair_in_place() -> None:
    job = Job(platform=choosing("retry"))
    job.beat(3, npu_status=HIGH, error_code="507053")
    assert job.calls == [
        ("report_fault_ranks", ({3: 0}, {3: "507053"})),
        ("report_stop_complete", (0, "stop complete", {3: 0})),
        ("report_strategies", ({3: 0}, ["exit", "dump", "retry"])),
    ]
    assert job.counts() == {"DeviceStop": 4, "DeviceClean": 4, "Repair": 2, "Rollback": 4, "NotifyNormal": 4}
    job.beat(0, step=5)
    assert job.results() == [], "nothing has succeeded before a step is done"
    job.beat(0, step=6)
    assert job.calls[-1] == ("report_result", (0, OK, {}, "retry"))
    job.beat_all(step=7)
    assert len(job.results()) == 1


def test_a_conversation_that_the_platform_begins() -> None:
    job = Job(platform=choosing("recover") | {"report_fault_ranks": []}, arf=True)
    job.signal("stop", faults={2: 1})
    assert job.names() == ["report_fault_ranks", "report_stop_complete", "report_strategies"]
    assert job.ranks(w.DeviceStop) == [0, 1, 3]


@pytest.mark.parametrize("place", [4, 5, 6])
def test_a_memory_fault_that_the_training_has_not_noticed(place: int) -> None:
    """The rank trains on. It is held like the others wherever it got to, stopped, and repaired like one that had."""
    job = Job(platform=choosing("retry") | {"report_fault_ranks": []})

    def stopped(process: Process, order: w.DeviceStop) -> w.Reply:
        locked = any(isinstance(each, w.Prelock) for each in process.orders)
        if order.uce:
            process.change(npu_status=HIGH)
        return w.Reply(sn=order.sn, result=Result.OK if locked else Result.ERROR, status=process.status)

    for process in job.processes.values():
        process.answers["DeviceStop"] = stopped
    job.processes[3].answers["Prelock"] = lambda process, order: w.Reply(
        sn=order.sn, result=Result.NEED_RETRY if place > order.step else Result.TIMEOUT, status=process.status
    )
    job.processes[3].change(step=place)
    job.signal("stop", faults={3: 0})
    assert job.names() == ["report_fault_ranks", "report_stop_complete", "report_strategies"]
    assert job.calls[-1][1][1] == ["exit", "dump", "retry"]
    assert job.ranks(w.DeviceStop) == job.ranks(w.NotifyNormal) == [0, 1, 2, 3]
    assert [job.order(rank, w.DeviceStop).uce for rank in range(4)] == [False, False, False, True]
    assert job.units() == {
        1: (RepairType.RT_SEND.value, [(1, 3)]),
        3: (RepairType.RT_UCE_HIGHLEVEL.value, [(1, 3)]),
    }
    assert job.order(3, w.Rollback).step == 5
    job.beat(0, step=6)
    assert job.results() == [(0, "Mindio do repair operation ok", "retry")]
    assert job.machine.state == "NORMAL" and not job.machine.roster.news


def test_faults_that_the_platform_knows_more_about_are_told_once_more() -> None:
    script = choosing("recover") | {"report_stop_complete": [Signal("global", faults={1: 1}, limit=1)]}
    job = Job(world=6, copies=3, platform=script, arf=True)
    job.kill(3)
    assert job.calls[2] == ("report_fault_ranks", ({1: 1}, {1: ""}))
    assert job.calls[3][1][0] == {3: 1, 1: 1}


def test_a_process_fault_is_never_made_less_of() -> None:
    script = choosing("recover") | {"report_stop_complete": [Signal("global", faults={3: 0}, limit=1)]}
    job = Job(platform=script, arf=True)
    job.kill(3)
    assert job.machine.roster.errors == {3: 1}


@pytest.mark.parametrize("silent_at", ["report_fault_ranks", "report_stop_complete", "report_strategies"])
def test_a_platform_that_does_not_answer_ends_the_job(silent_at: str) -> None:
    job = Job(platform=choosing("retry") | {silent_at: []})
    job.beat(3, npu_status=HIGH)
    assert job.machine.ended is None and job.names()[-1] == silent_at
    job.idle(29)
    assert job.machine.ended is None
    job.idle(2)
    assert job.counts()["Exit"] == 4


def test_the_platform_may_ask_for_more_time() -> None:
    script = choosing("retry") | {"report_stop_complete": [Signal("global", limit=100)], "report_strategies": []}
    job = Job(platform=script)
    job.beat(3, npu_status=HIGH)
    job.idle(95)
    job.strategy("retry")
    assert job.machine.state == "NORMAL"


def test_words_out_of_order_end_the_job() -> None:
    job = Job(platform={})
    job.beat(3, npu_status=HIGH)
    job.signal("global", limit=1)
    assert job.counts() == {"Exit": 4}


def test_a_word_that_was_said_too_early_is_void() -> None:
    """A strategy from before the strategies were told can't be an answer to them."""
    job = Job(platform=PLATFORM_FAST)
    job.machine.signals.append(Signal("strategy", text="exit"))
    job.machine.signals.appendleft(Signal("stop"))
    job.beat(3, npu_status=HIGH)
    assert job.names()[-1] == "report_strategies" and job.machine.ended is None
    job.strategy("retry")
    assert job.machine.state == "NORMAL"


def test_a_callback_that_fails_ends_the_job() -> None:
    job = Job(platform=choosing("retry"))
    job.broken.add("report_stop_complete")
    job.beat(3, npu_status=HIGH)
    assert job.counts() == {"Exit": 4}


def test_a_strategy_that_was_not_offered() -> None:
    job = Job(platform=PLATFORM_FAST | {"report_strategies": [Signal("invalid", text="recover")]})
    job.beat(3, npu_status=HIGH)
    assert job.results() == [(499, "invalid strategy", "recover")]
    assert job.counts() == {"Exit": 4}


def test_processors_that_are_not_ready() -> None:
    job = Job(platform=PLATFORM_FAST, report=False)
    job.beat(2, npu_status=HIGH)
    name, args = job.calls[-1]
    assert name == "report_stop_complete" and args[0] == 404
    assert job.counts() == {"Exit": 4}


def test_a_failed_lock_leaves_the_exit_only() -> None:
    job = Job(platform=choosing("exit"))
    job.processes[0].answers["Prelock"] = Result.TIMEOUT
    job.beat(3, npu_status=HIGH)
    assert job.calls[-1] == ("report_strategies", ({3: 0}, ["exit"]))
    assert job.counts() == {"Exit": 4}


@pytest.mark.parametrize(
    "settings, fault, offered",
    [
        ({}, HIGH, ["exit", "dump", "retry"]),
        ({"arf": True}, HIGH, ["exit", "dump", "retry", "recover"]),
        ({"arf": True}, None, ["exit", "dump", "recover"]),
        ({"arf": True, "zit": True}, None, ["exit", "dump", "recover", "downgrade", "upgrade"]),
        ({"zit": True}, None, ["exit", "dump", "downgrade", "upgrade"]),
        ({}, None, ["exit", "dump"]),
        ({"uce": False}, HIGH, ["exit", "dump"]),
        ({"uce": False}, TrainState.HCCL_FAILED, ["exit", "dump", "retry"]),
    ],
)
def test_what_is_offered(settings: dict[str, Any], fault: TrainState | None, offered: list[str]) -> None:
    job = Job(platform=PLATFORM_FAST, **settings)
    if fault is None:
        job.beat(3, run_status=TrainState.ABNORMAL)
    else:
        job.beat(3, npu_status=fault)
    assert job.calls[-1][1][1] == offered


def test_one_rank_that_is_not_prepared_for_replacements_rules_them_out() -> None:
    job = Job(platform=PLATFORM_FAST, arf=True)
    group = w.ReplicaGroup(rank_list=[0, 1, 2, 3], replica_cnt=2)
    job.feed(FromLink(job.processes[1].link, w.InitReport(groups=[group], enable_arf=False)))
    job.kill(3)
    assert job.calls[-1][1][1] == ["exit", "dump"]


def test_with_a_stride_only_what_is_possible_is_offered() -> None:
    job = Job(world=6, copies=2, shift=2, x1=True, platform=PLATFORM_FAST, arf=True)
    job.processes[3].change(run_status=TrainState.ABNORMAL)
    job.beat(1, run_status=TrainState.ABNORMAL)
    assert job.calls[-1][1][1] == ["exit", "dump"], "the additional copy can be saved and repairs nobody"


def test_in_mindspore_mode_nothing_is_offered_without_a_whole_copy() -> None:
    job = Job(kinds=[[[0, 2], [1, 3]]], mindspore=True, platform=PLATFORM_FAST, arf=True)
    job.processes[1].change(run_status=TrainState.ABNORMAL)
    job.beat(3, run_status=TrainState.ABNORMAL)
    assert job.calls[-1][1][1] == ["exit"]


# --- replaced processes ----------------------------------------------------------------------------------------------


def test_a_lost_process_is_replaced() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3)
    assert job.counts() == {"DeviceStop": 3, "DeviceClean": 3}
    new = job.replace(3)
    assert new.registered == w.Registered(result=Result.REPAIR, repair_id=1)
    assert job.counts() == {
        "DeviceStop": 3,
        "DeviceClean": 3,
        "RebuildGroup": 4,
        "Repair": 2,
        "Rollback": 4,
        "NotifyNormal": 4,
    }
    assert job.order(0, w.RebuildGroup).fault_ranks == [3]
    assert job.order(3, w.Repair).repair_type == job.order(3, w.Rollback).repair_type == 2
    assert job.units() == {1: (RepairType.RT_SEND.value, [(1, 3)]), 3: (RepairType.RT_RECV_REPAIR.value, [(1, 3)])}
    job.beat(1, step=6)
    assert job.calls[-1] == ("report_result", (0, OK, {}, "recover"))
    assert job.machine.state == "NORMAL"


def test_a_replacement_that_needs_its_groups_first() -> None:
    """MindSpore: the new process reports that it is initialised, and again after the groups are built."""
    job = Job(platform=choosing("recover"), arf=True, mindspore=True, kinds=[[[0, 2], [1, 3]]])
    job.kill(3)
    job.replace(3, TrainState.INIT_FINISH)
    assert job.ranks(w.RebuildGroup) == [0, 1, 2, 3] and job.ranks(w.Repair) == []
    job.beat(3, run_status=TrainState.PREREPAIR_FINISH)
    assert job.ranks(w.Repair) == [1, 3]
    assert job.machine.state == "NORMAL"


def test_a_new_process_that_comes_before_the_loss_was_noticed() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3, notice=False)
    new = job.replace(3)
    assert new.registered == w.Registered(result=Result.REPAIR, repair_id=1)
    assert job.machine.state == "NORMAL" and job.ranks(w.Repair) == [1, 3]


def test_a_second_process_for_a_healthy_rank_is_not_wanted() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    assert job.start(2).registered == w.Registered(result=Result.ERROR)
    assert job.counts() == {}


def test_a_process_that_was_replaced_can_t_come_back() -> None:
    """It may have stood still and not know of it."""
    job = Job(platform=choosing("recover"), arf=True)
    old = job.identities[3]
    job.kill(3)
    new = job.replace(3)
    assert job.machine.state == "NORMAL"
    job.identities[3] = old
    back = job.start(3, replaces=False, status=w.Status(step=5))
    assert back.registered == w.Registered(result=Result.STOP_SERVICE, repair_id=1)
    assert new.link not in job.closed and job.machine.roster.members[3].link == new.link


def test_a_registration_whose_answer_was_lost_is_repeated() -> None:
    job = Job()
    job.kill(3, notice=False)
    name = job.identities[3]
    link = next(job.ids)
    job.by_link[link] = process = type(job.processes[0])(3, link)
    job.feed(FromLink(link, w.Hello(version=w.VERSION, rank=3, process=name)))
    job.feed(FromLink(link, w.Register(replaces=True)))
    assert process.registered == w.Registered(result=0), "it has not been told yet that it belongs to the job"
    assert job.counts() == {} and job.machine.repair_id == 0


def test_a_rank_outside_of_the_world() -> None:
    job = Job()
    assert job.start(9).registered == w.Registered(result=Result.WAIT_CHECK)


def test_another_loss_while_processes_are_replaced_is_taken_in() -> None:
    job = Job(world=6, copies=3, platform=choosing("recover"), arf=True)
    job.kill(5)
    job.kill(2)
    assert job.calls[-1] == ("report_fault_ranks", ({2: 1}, {2: ""}))
    job.replace(5)
    assert job.ranks(w.RebuildGroup) == []
    job.replace(2)
    assert job.order(0, w.RebuildGroup).fault_ranks == [2, 5]
    assert job.counts()["DeviceStop"] == 5, "nobody is stopped twice"
    assert {rank: pairs for rank, (_, pairs) in job.units().items()} == {
        1: [(1, 5)],
        4: [(4, 2)],
        5: [(1, 5)],
        2: [(4, 2)],
    }
    job.beat(0, step=6)
    assert job.results() == [(0, OK, "recover")]


def test_a_replacement_that_dies_is_replaced() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3)
    job.start(3)
    job.kill(3)
    assert job.calls[-1] == ("report_fault_ranks", ({3: 1}, {3: ""}))
    job.replace(3)
    assert job.machine.state == "NORMAL"


def test_a_replacement_that_dies_before_it_comes_is_replaced() -> None:
    """Only who started it can tell."""
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3)
    before = len(job.calls)
    job.signal("ended", faults={3: 1})
    assert job.calls[before:] == [("report_fault_ranks", ({3: 1}, {3: ""}))]
    job.replace(3)
    assert job.machine.state == "NORMAL"
    job.beat(1, step=6)
    assert job.results() == [(0, OK, "recover")]


def test_a_rank_that_was_cut_off_and_that_nobody_replaces() -> None:
    """Its old process has not ended, and its link hangs: neither breaks it nor does anything come over it."""
    job = Job(platform=choosing("recover"), arf=True)
    job.processes[3].answers |= {"Collect": None}
    while "report_strategies" not in job.names() and job.now < 60:
        for rank in (0, 1, 2):
            job.beat(rank)
        job.wait(1.0)
    assert job.machine.roster.members[3].link is not None and 3 in job.machine.roster.errors
    before = len(job.calls)
    job.signal("not replaced", faults={3: 1})
    assert job.calls[before:] == [("report_fault_ranks", ({3: 1}, {3: ""}))]
    job.replace(3)
    assert job.machine.state == "NORMAL"
    job.beat(1, step=6)
    assert job.results() == [(0, OK, "recover")]


def test_a_process_whose_link_breaks_before_it_is_given_up() -> None:
    """Its pod was told to go as soon as the fault was known. That it does is no news, also when its time to come back
    ends later."""
    job = Job(platform=choosing("recover") | {"report_strategies": []}, arf=True)
    job.signal("stop", faults={3: 1})
    job.kill(3, notice=False)
    job.strategy("recover")
    before = len(job.calls)
    job.wait(2 * job.machine.settings.grace)
    assert len(job.calls) == before
    job.replace(3)
    assert job.machine.state == "NORMAL"
    job.beat(1, step=6)
    assert job.results() == [(0, OK, "recover")]


def test_a_replacement_that_dies_while_the_groups_are_built() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3)
    victim = job.start(3)
    victim.status = w.Status(run_status=TrainState.PREREPAIR_FINISH)
    victim.answers["RebuildGroup"] = None
    for rank in range(3):
        job.processes[rank].answers["RebuildGroup"] = 1  # they lost their peer
    job.beat(3)
    for rank in range(3):
        del job.processes[rank].answers["RebuildGroup"]
    job.kill(3)
    job.replace(3)
    assert job.machine.state == "NORMAL"
    ids = sorted({m.repair_id for _, m in job.sent if isinstance(m, w.RebuildGroup)})
    assert len(ids) == 2, "groups that are built anew have another name"


def test_who_waits_for_a_peer_in_a_repair_that_failed_is_stopped_before_it_saves() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(2)
    job.kill(3)
    job.processes[0].answers["Repair"] = None
    job.processes[1].answers["Repair"] = 1
    job.replace(2)
    job.replace(3)
    job.idle(2)
    assert job.results()[0][0] == 405
    job.sent.clear()
    job.strategy("dump")
    assert job.results()[1] == (0, "do dump success", "dump")
    orders = [type(message).__name__ for rank, message in job.sent if rank == 0]
    assert orders[:3] == ["DeviceStop", "DeviceClean", "SaveCheckpoint"], orders


def test_replacements_that_do_not_come() -> None:
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3)
    job.idle(590)
    assert job.results() == []
    job.idle(11)
    assert job.results()[0][0] == 405
    job.strategy("dump")
    assert job.results()[1] == (0, "do dump success", "dump")
    assert job.ranks(w.SaveCheckpoint) == [0, 1]


def test_a_replacement_that_failed_is_replaced_itself_if_the_platform_begins_anew() -> None:
    """Another process has to come: the one that could not be repaired is of no use, though it is there."""
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3)
    job.processes[1].answers["Repair"] = 1
    job.replace(3)
    job.idle(2)
    assert job.results() == [(405, "rank 1 answered 1", "recover")]
    del job.processes[1].answers["Repair"]
    job.calls.clear()
    job.sent.clear()
    job.signal("stop", faults={3: 1})
    assert job.names()[-3:] == ["report_fault_ranks", "report_stop_complete", "report_strategies"]
    assert (job.machine.state, job.ranks(w.RebuildGroup)) == ("REPAIR", [])
    job.kill(3)
    assert job.names().count("report_fault_ranks") == 1, "that the old one ends is no news"
    job.replace(3)
    assert job.order(0, w.RebuildGroup).fault_ranks == [3]
    job.beat(0, step=6)
    assert job.results() == [(0, OK, "recover")]


def test_the_end_of_a_process_that_is_to_be_replaced_is_no_news() -> None:
    """Not even while the others are still being stopped."""
    job = Job(platform=choosing("recover") | {"report_fault_ranks": []}, arf=True)
    job.processes[0].answers["DeviceStop"] = None
    job.signal("stop", faults={2: 1, 3: 1})
    job.calls.clear()
    job.kill(3)
    job.kill(2)
    stop = job.order(0, w.DeviceStop)
    job.feed(FromLink(job.processes[0].link, w.Reply(sn=stop.sn, result=1, status=job.processes[0].status)))
    job.wait(2)
    assert "report_fault_ranks" not in job.names()


@pytest.mark.parametrize("next_one", ["recover", "dump"])
def test_what_follows_a_repair_in_place_that_lost_a_process(next_one: str) -> None:
    """It is called by its name: the platform waits for the result of that, not of what was before."""
    job = Job(platform=choosing("retry"), arf=True)
    for process in job.processes.values():
        process.answers["Repair"] = None
    job.beat(3, npu_status=HIGH)
    job.kill(3)
    job.script = {}
    assert job.results()[0][::2] == (405, "retry")
    job.signal("global", limit=1)
    job.strategy(next_one)
    if next_one == "dump":
        assert job.results()[1:] == [(0, "do dump success", "dump")]
    else:
        job.idle(601)
        assert job.results()[1][::2] == (405, "recover")


def test_going_on_smaller_for_want_of_replacements_that_fails_is_called_by_its_name() -> None:
    job = Job(platform=choosing("recover"), arf=True, zit=True)
    job.kill(3)
    job.processes[0].answers["DowngradeRebuild"] = 1
    job.strategy("downgrade")
    job.wait(2)
    assert [each[::2] for each in job.results()] == [(201, "downgrade"), (499, "downgrade")]


@pytest.mark.parametrize("word", ["dump", "exit", "recover"])
def test_another_decision_while_waiting_for_replacements(word: str) -> None:
    job = Job(platform=choosing("recover"), arf=True)
    job.kill(3)
    job.strategy(word)
    expected = {"dump": [(0, "do dump success", "dump")], "exit": [], "recover": [(499, "invalid strategy", "recover")]}
    assert job.results() == expected[word]
    assert job.counts()["Exit"] == 3


def test_without_replicas_replaced_jobs_load() -> None:
    job = Job(copies=1, platform=choosing("recover"), arf=True)
    job.kill(3)
    job.replace(3)
    assert {kind for kind, _ in job.units().values()} == {RepairType.RT_LOAD_CKPT.value}
    assert job.ranks(w.Repair) == [0, 1, 2, 3]


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_one", ["recover", "dump"])
def test_a_failed_repair_in_place_leaves_the_rest_of_the_strategies(next_one: str) -> None:
    job = Job(platform=choosing("retry", report_result=[Signal("global", limit=1)]), arf=True)
    job.processes[1].answers["Repair"] = 1
    job.script["report_strategies"] = []
    job.beat(3, npu_status=HIGH)
    job.strategy("retry")
    job.wait(1)
    assert job.results()[0][::2] == (405, "retry")
    assert "recover" in job.calls[-1][1][1]
    job.script = {}
    job.strategy(next_one)
    if next_one == "dump":
        assert job.results()[1] == (0, "do dump success", "dump")
    else:
        del job.processes[1].answers["Repair"]
        job.kill(3)
        job.replace(3)
        job.beat(1, step=6)
        assert job.results()[1:] == [(0, OK, "recover")]


def test_a_failed_repair_in_place() -> None:
    job = Job(platform=choosing("retry"))
    job.processes[1].answers["Repair"] = 1
    job.beat(3, npu_status=HIGH)
    job.wait(1)
    assert job.results()[0][0] == 499
    job.strategy("dump")
    assert job.results()[1] == (0, "do dump success", "dump")


def test_a_rank_that_can_t_be_cleaned_is_replaced() -> None:
    job = Job(platform=choosing("retry"), arf=True)
    job.processes[2].answers["DeviceClean"] = 1
    job.script["report_result"] = [Signal("global", limit=1)]
    job.beat(3, npu_status=HIGH)
    assert job.results()[0][0] == 405
    name, args = job.calls[4]
    assert name == "report_strategies" and args[0] == {3: 0, 2: 1} and "recover" in args[1]


def test_a_rank_that_can_t_be_cleaned_is_replaced_from_where_the_repair_stopped() -> None:
    script = PLATFORM_FAST | {"report_result": [Signal("global", limit=1)]}
    job = Job(world=6, copies=3, platform=script, arf=True)
    job.processes[2].answers["DeviceClean"] = 1
    job.beat(3, npu_status=HIGH)
    job.strategy("retry")
    assert job.results()[0][0] == 405 and job.names()[-1] == "report_strategies"
    job.strategy("recover")
    job.kill(2)
    job.kill(3)
    job.replace(2)
    job.replace(3)
    assert job.counts()["DeviceStop"] == job.counts()["DeviceClean"] == 6
    assert job.order(0, w.RebuildGroup).fault_ranks == [2, 3]
    job.beat(0, step=6)
    assert job.results()[-1] == (0, OK, "recover")


def test_without_replacements_a_rank_that_can_t_be_cleaned_is_the_end() -> None:
    job = Job(platform=choosing("retry"))
    job.processes[2].answers["DeviceClean"] = 1
    job.beat(3, npu_status=HIGH)
    assert job.results()[0][0] == 499
    job.strategy("dump")
    assert job.results()[1][0] == 499, "a state of which nobody knows whether it is clean is not saved"
    assert job.counts()["Exit"] == 4


def test_a_fault_before_the_last_recovery_has_shown_success() -> None:
    job = Job(platform=choosing("retry"))
    job.beat(3, npu_status=HIGH)
    job.beat(2, npu_status=HIGH)
    assert job.results() == [(406, "last repair failed", "retry")]
    job.strategy("dump")
    assert job.results()[-1] == (0, "do dump success", "dump")


def test_after_a_failure_the_platform_may_begin_anew() -> None:
    job = Job(platform=choosing("retry"))
    job.beat(3, npu_status=HIGH)
    job.beat(2, npu_status=HIGH)
    job.signal("stop")
    assert job.machine.state == "NORMAL"
    job.beat(0, step=6)
    assert job.results()[-1] == (0, OK, "retry")


def test_a_process_lost_during_a_repair_in_place_is_replaced() -> None:
    job = Job(world=6, copies=3, platform=choosing("retry"), arf=True)
    job.script["report_strategies"] = []
    job.processes[1].answers["DeviceStop"] = None
    job.beat(3, npu_status=HIGH)
    job.strategy("retry")
    job.kill(1)
    assert job.results()[0][0] == 405
    job.signal("global", limit=1)
    job.strategy("recover")
    for rank in (3, 1):
        if rank in job.processes:
            job.kill(rank)
        job.replace(rank)
    assert job.machine.state == "NORMAL"


# --- wishes of the platform ------------------------------------------------------------------------------------------


def test_no_signal_hides_another() -> None:
    job = Job(platform={})
    job.processes[0].answers["Pause"] = None
    job.signal("pause", limit=60)
    job.signal("dump")
    process = job.processes[0]
    del process.answers["Pause"]
    reply = process.obey(process.orders[-1])
    assert reply is not None
    job.feed(FromLink(process.link, reply))
    job.strategy("continue")
    assert job.results() == [(0, OK, "continue"), (0, "do dump success", "dump")]


def test_wishes_are_fulfilled_in_their_order() -> None:
    job = Job(platform=PLATFORM_FAST, arf=True)
    job.beat(3, npu_status=HIGH)
    job.signal("hot switch", faults={2: 1})
    job.signal("stop switch")
    job.strategy("retry")
    assert job.machine.state == "NORMAL" and not job.machine.signals and job.machine.hot == set()


@pytest.mark.parametrize("answers", [("report_fault_ranks",), ("report_fault_ranks", "report_stop_complete")])
def test_a_dump_may_be_the_answer_to_a_fault(answers: tuple[str, ...]) -> None:
    """At any point of the conversation: a platform that has no other strategy doesn't ask for offers."""
    script = {name: PLATFORM_FAST[name] for name in answers[:-1]}
    job = Job(platform={**script, answers[-1]: [Signal("dump")]}, arf=True)
    job.kill(3)
    assert job.results() == [(0, "do dump success", "dump")]


def test_a_dump_wished_for_during_a_conversation_is_a_choice() -> None:
    job = Job(platform=PLATFORM_FAST)
    job.beat(3, npu_status=HIGH)
    job.signal("dump")
    assert job.results() == [(0, "do dump success", "dump")]
