"""Scenarios: one fault at a time, and what the controller orders because of it."""

from __future__ import annotations

import time

import pytest

from evertrain.mindio import protocol as p
from evertrain.mindio.controller.machine import AgentLost, FromAgent, FromRank, LinkLost, Machine, Send, Tick, ToAgent
from evertrain.mindio.controller.states import Gathering, Running
from evertrain.mindio.timing import Timing
from tests.mindio import simulated_ranks
from tests.mindio.simulated_ranks import Cluster


def exit_of(rank: int, incarnation: int = 0, code: int = -9) -> FromAgent:
    fault = p.Fault(kind="exit", rank=rank, incarnation=incarnation, exit_code=code, detail=f"exit code {code}")
    return FromAgent(p.Observed(fault=fault))


def recover(job: Cluster) -> dict:
    """Everything due happens, one step is trained; returns the incident that must have closed by that."""
    closed = len(job.incidents)
    job.quiesce(train=False)
    job.train(1)
    job.quiesce(train=False)
    assert isinstance(job.machine.state, Running), job.machine.state
    assert len(job.incidents) == closed + 1, [record for record in job.records if "incident" in record]
    return job.incidents[-1]


def test_a_job_without_faults() -> None:
    job = Cluster(3)
    job.hello()
    assert job.spawns == [(0, 0), (1, 0), (2, 0)]
    job.settle()
    assert job.end == p.End(code=0, reason="all ranks are done")
    assert not job.incidents
    assert {rank.content for rank in job.ranks.values()} == {"init0.0+6"}


def test_a_death_stops_the_survivors_and_orders_the_replacement_in_the_same_moment() -> None:
    job = Cluster(4).started()
    actions = job.feed(exit_of(2))
    assert [a.message for a in actions if isinstance(a, ToAgent) and isinstance(a.message, p.Spawn)] == [
        p.Spawn(rank=2, incarnation=1)
    ]
    stopped = [a.rank for a in actions if isinstance(a, Send) and isinstance(a.message, p.Stop)]
    assert stopped == [0, 1, 3]


def test_the_incident_of_a_death() -> None:
    job = Cluster(3).started()
    job.end_process(job.ranks[1], -9)
    incident = recover(job)
    assert incident["decision"] == "recover-in-place"
    assert incident["outcome"] == "recovered"
    assert incident["restarted"] == [1]
    assert (incident["step"], incident["steps_lost"], incident["generation"]) == (2, 0, 2)
    assert [(fault["kind"], fault["rank"], fault["exit_code"]) for fault in incident["faults"]] == [("exit", 1, -9)]
    assert incident["id"] == "i-0001"
    job.settle()
    assert job.end is not None and job.end.code == 0
    assert {rank.content for rank in job.ranks.values()} == {"init0.0+6"}


def test_phases_add_up_and_tell_where_the_time_went() -> None:
    job = Cluster(2).started()
    fault = p.Fault(kind="exit", rank=1, exit_code=-9, at=job.now - 0.010)
    job.ranks[1].place = "dead"
    job.feed(FromAgent(p.Observed(fault=fault)))
    job.now += 0.020
    job.ranks[0].obey(job)
    job.from_rank(job.ranks[0])  # the survivor is out
    job.now += 0.500
    job.boot(job.ranks[1])
    job.from_rank(job.ranks[1])  # the replacement is there
    for seconds in (0.030, 0.040):
        job.now += seconds
        for rank in job.ranks.values():
            rank.obey(job)
            job.from_rank(rank)
    job.now += 0.050
    for rank in job.ranks.values():
        rank.obey(job)
    job.train(1)
    job.quiesce(train=False)
    (incident,) = job.incidents
    expected = {"detect": 10, "decide": 0, "stop": 20, "start": 500, "rebuild": 30, "repair": 40, "resume": 50}
    assert incident["phases_ms"] == pytest.approx(expected, abs=0.01)
    assert incident["total_ms"] == pytest.approx(650, abs=0.01)


def test_an_exception_is_retried_without_any_new_process() -> None:
    job = Cluster(3).started()
    job.ranks[1].fail("exception", "ValueError: odd")
    incident = recover(job)
    assert (incident["decision"], incident["restarted"], incident["steps_lost"]) == ("retry", [], 0)
    assert job.spawns == [(0, 0), (1, 0), (2, 0)]


def test_the_state_lost_to_a_memory_error_comes_from_a_peer() -> None:
    job = Cluster(3).started()
    job.ranks[1].fail("uce", "uncorrectable")
    incident = recover(job)
    assert incident["decision"] == "retry"
    receivers = [rank for rank, m in job.said(p.Repair) if m.receives and m.generation == 2]
    assert receivers == [1]


def test_survivors_that_see_the_broken_link_first_are_no_faults() -> None:
    job = Cluster(3).started()
    job.ranks[0].fail("link", "connection closed by peer")
    job.from_rank(job.ranks[0])  # opens the incident
    job.ranks[2].fail("link", "connection closed by peer")
    job.from_rank(job.ranks[2])
    job.end_process(job.ranks[1], -9)
    incident = recover(job)
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("link", 0), ("exit", 1)]
    assert incident["decision"] == "recover-in-place"
    assert job.machine._history.retried[0, 2] == 0, "the survivor was blamed for the death of its peer"


def test_a_broken_link_and_the_exit_behind_it_are_one_fault() -> None:
    job = Cluster(3).started()
    job.feed(LinkLost(1, 0))
    assert job.spawns[-1] == (1, 1)
    job.feed(exit_of(1, code=-11))
    incident = recover(job)
    assert [(fault["kind"], fault["exit_code"]) for fault in incident["faults"]] == [("exit", -11)]


def test_an_out_that_crossed_with_a_stop_is_not_its_answer() -> None:
    """Rank 1 raises while the Stop for rank 0's death is on its way to it."""
    job = Cluster(3).started()
    job.ranks[1].fail("exception", "crossed")
    job.end_process(job.ranks[0], -9)
    job.from_agent()
    job.ranks[2].obey(job)
    job.from_rank(job.ranks[2])
    job.boot(job.ranks[0])
    job.from_rank(job.ranks[0])
    job.from_rank(job.ranks[1])  # the Out from before the Stop
    assert isinstance(job.machine.state, Gathering), "a generation was begun with what rank 1 said before it stopped"
    incident = recover(job)
    assert {fault["kind"] for fault in incident["faults"]} == {"exit", "exception"}
    assert job.machine.generation == 2


def test_a_rank_that_does_not_stop_is_replaced() -> None:
    job = Cluster(3).started()
    job.ranks[2].deaf = True
    job.ranks[0].fail("exception", "x")
    job.quiesce(train=False)
    assert job.machine.deadline == job.now + job.machine.timing.stop
    job.tick()
    incident = recover(job)
    assert {(fault["kind"], fault["rank"]) for fault in incident["faults"]} == {("exception", 0), ("unresponsive", 2)}
    assert incident["restarted"] == [2]
    # What the replaced one says now is of no interest.
    job.feed(FromRank(2, 0, p.Out(step=99, clean=True, attempt=99)))
    assert isinstance(job.machine.state, Running)


def test_a_rank_that_is_told_to_stop_in_an_update_is_waited_for() -> None:
    job = Cluster(3).started()
    job.ranks[2].deaf = True
    job.ranks[0].fail("exception", "x")
    job.quiesce(train=False)
    told = job.now
    job.now += job.machine.timing.stop / 2
    job.feed(FromRank(2, 0, p.Updating(attempt=job.machine._attempt)))
    job.now = told + 10 * job.machine.timing.stop
    job.feed(Tick())
    job.ranks[2].deaf = False
    incident = recover(job)
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("exception", 0)]
    assert incident["restarted"] == []


def test_a_rank_that_does_not_get_to_the_end_of_its_update_is_replaced() -> None:
    job = Cluster(3).started()
    job.ranks[2].deaf = True
    job.ranks[0].fail("exception", "x")
    job.quiesce(train=False)
    job.feed(FromRank(2, 0, p.Updating(attempt=job.machine._attempt)))
    assert job.machine.deadline == job.now + job.machine.timing.first_step
    job.tick()
    incident = recover(job)
    assert incident["restarted"] == [2]


def test_an_update_of_before_the_stop_is_no_excuse() -> None:
    job = Cluster(3).started()
    job.ranks[2].deaf = True
    job.ranks[0].fail("exception", "x")
    job.quiesce(train=False)
    due = job.machine.deadline
    job.feed(FromRank(2, 0, p.Updating(attempt=job.machine._attempt - 1)))
    assert job.machine.deadline == due


def test_a_replacement_that_does_not_start_is_replaced_twice_then_all_restart() -> None:
    job = Cluster(3, max_restarts=1).started()
    job.start_ranks = False
    job.end_process(job.ranks[1], -9)
    job.quiesce(train=False)
    for _ in range(3):
        assert job.machine.restarts == 0
        job.tick()
        job.quiesce(train=False)
    assert job.machine.restarts == 1
    assert [step for step, _, _ in job.dumps] == [2], "the state is written before the restart"
    for rank in job.ranks.values():
        rank.deaf = False
    job.settle()
    assert job.end is not None and job.end.code == 0
    assert job.incidents[-1]["outcome"] == "restarted"


def test_a_fault_during_the_rebuild_begins_it_again() -> None:
    job = Cluster(3).started()
    job.end_process(job.ranks[1], -9)
    while job.machine.generation == 1:
        job._one_thing(False)
    job.end_process(job.ranks[2], -9)
    incident = recover(job)
    assert incident["restarted"] == [1, 2]
    assert job.machine.generation == 3


def test_a_corrupt_source_is_distrusted_and_repaired_itself() -> None:
    job = Cluster(4).started()
    job.ranks[2].flips = True
    job.end_process(job.ranks[1], -9)
    incident = recover(job)
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("exit", 1), ("repair", 2)]
    receivers = {rank for rank, m in job.said(p.Repair) if m.receives and m.generation == 3}
    assert receivers == {1, 2}
    assert incident["restarted"] == [1]


def test_three_failed_attempts_end_in_the_fallback() -> None:
    job = Cluster(2).started()
    job.ranks[0].fail("exception", "x")
    for _ in range(3):
        while not (job.ranks[1].inbox and isinstance(job.ranks[1].inbox[0], p.Join)):
            assert job._one_thing(False)
        join = job.ranks[1].inbox.popleft()
        job.ranks[1].say(p.Joined(generation=join.generation, error="no route"))
    job.quiesce(train=False)
    assert job.end is not None and job.end.code == 1
    assert "3 recovery attempts failed" in job.end.reason and "no route" in job.end.reason
    assert job.end.cause == "rank 0: exception: x"


def test_a_rebuild_that_takes_too_long_is_tried_again() -> None:
    job = Cluster(2).started()
    job.ranks[0].fail("exception", "x")
    while not (job.ranks[1].inbox and isinstance(job.ranks[1].inbox[0], p.Join)):
        job._one_thing(False)
    job.ranks[1].inbox.clear()  # never joins
    job.quiesce(train=False)
    job.tick()
    incident = recover(job)
    assert incident["generation"] == 3
    assert "did not join within" in incident["faults"][-1]["detail"]


def test_big_states_take_time_to_hash_and_are_not_given_up_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty gigabytes: whoever hashes them neither joins nor reacts to anything for half a minute."""
    monkeypatch.setattr(simulated_ranks, "STATE_BYTES", 80_000_000_000)
    job = Cluster(3).started()
    job.end_process(job.ranks[1], -9)
    while job.machine.generation == 1:
        job._one_thing(False)
    assert job.machine.deadline is not None and job.machine.deadline > job.now + 60.0, "while they hash"
    job.end_process(job.ranks[2], -9)
    job.from_agent()
    assert job.machine.deadline is not None and job.machine.deadline > job.now + 60.0, "while they get out of it"
    assert recover(job)["restarted"] == [1, 2]


def test_giving_up_names_the_first_cause() -> None:
    job = Cluster(3, max_restarts=1).started()
    for _ in range(40):
        rank = job.ranks[2]
        if rank.place == "inside" and rank.step == 2:
            rank.fail("exception", "ValueError: always at step 2")
        job.quiesce(train=False)
        if job.end is not None:
            break
        for each in job.ranks.values():
            if each.step < 2 and job.can_step(each):
                each.complete_step()
    assert job.end is not None and job.end.code == 1 and job.machine.restarts == 0
    assert job.dumps, "what there is was written first"
    assert job.end.cause == "rank 2: exception: ValueError: always at step 2"
    decisions = [record["decision"] for record in job.records if record["event"] == "decision"]
    assert decisions == ["retry", "retry", "recover-in-place", "exit"]


def test_different_models_end_the_job_with_the_names_of_the_ranks() -> None:
    machine = Machine(3, Timing.derive(1.0))
    machine.handle(FromAgent(p.Hello(version=1, token="", role="agent")), 0.0)
    for rank, (fingerprint, summary) in enumerate([("a", "2 layers"), ("a", "2 layers"), ("b", "3 layers")]):
        out = p.Out(step=0, clean=True, fresh=True, fingerprint=fingerprint, summary=summary)
        machine.handle(FromRank(rank, 0, out), 1.0)
    assert machine.ended is not None
    code, reason = machine.ended
    assert code == 1
    assert "rank 2: 3 layers" in reason and "all others: 2 layers" in reason


def test_a_replacement_is_told_that_others_have_its_state() -> None:
    job = Cluster(2)
    job.hello()
    assert not job.machine.running_for(1)
    job.started()
    job.end_process(job.ranks[1], -9)
    job.from_agent()
    assert job.machine.running_for(1), "the replacement need not load a checkpoint"
    assert job.machine.refusal(1, 0) is not None and job.machine.refusal(1, 1) is None


def test_termination_writes_the_newest_state_and_ends() -> None:
    job = Cluster(3).started()
    job.agent_says.append(p.Terminate(reason="SIGTERM", grace=30.0))
    job.quiesce(train=False)
    assert job.dumps == [(2, "init0.0+2", True)]
    assert job.end is not None and job.end.code == 143
    assert {rank for rank, _ in job.said(p.Exit)} == {0, 1, 2}


def test_termination_does_not_wait_for_a_hung_rank() -> None:
    job = Cluster(3).started()
    job.ranks[0].deaf = True
    job.agent_says.append(p.Terminate(reason="SIGINT", grace=30.0))
    begun = job.now
    job.settle()
    assert job.end is not None and job.end.code == 130
    assert [step for step, _, _ in job.dumps] == [2]
    assert job.now - begun <= job.machine.timing.stop


def test_the_writer_of_the_last_checkpoint_dies() -> None:
    job = Cluster(3).started()
    job.agent_says.append(p.Terminate(reason="SIGTERM", grace=30.0))
    while not any(isinstance(m, p.Dump) for m in job.ranks[0].inbox):
        job._one_thing(False)
    job.end_process(job.ranks[0], -9)
    job.quiesce(train=False)
    assert [rank for rank, _ in job.said(p.Dump)] == [0, 1]
    assert job.end is not None and job.end.code == 143 and len(job.dumps) == 1


def test_termination_before_anybody_trained_is_immediate() -> None:
    job = Cluster(3)
    job.hello()
    job.feed(FromAgent(p.Terminate(reason="SIGTERM", grace=30.0)))
    assert job.end is not None and job.end.code == 143
    assert not job.said(p.Dump)


def test_a_script_error_before_the_training_ends_the_job_at_once() -> None:
    job = Cluster(2, max_restarts=3)
    job.hello()
    job.boot(job.ranks[0])
    job.from_rank(job.ranks[0])
    job.feed(exit_of(1, code=1))
    assert job.end is not None and job.end.code == 1
    assert "an error of the script" in job.end.reason


def test_a_rank_that_says_what_is_wrong_with_the_script_before_the_training_ends_the_job_at_once() -> None:
    job = Cluster(2, max_restarts=3)
    job.hello()
    job.boot(job.ranks[0])
    fault = p.Fault(kind="script", rank=0, detail="do it like this", stack='  File "train.py", line 3, in train\n')
    job.ranks[0].outbox.clear()
    job.ranks[0].outbox.append(p.Out(step=0, clean=False, fresh=True, fault=fault))
    job.from_rank(job.ranks[0])
    assert job.end is not None and job.end.code == 1
    assert job.end.reason == "rank 0: do it like this"
    assert job.end.cause == 'rank 0, here:\n  File "train.py", line 3, in train'
    assert job.said(p.Exit)


def test_its_broken_link_does_not_hide_the_script_error() -> None:
    job = Cluster(2, max_restarts=3)
    job.hello()
    job.boot(job.ranks[0])
    job.from_rank(job.ranks[0])
    job.feed(LinkLost(1, 0))
    job.feed(exit_of(1, code=1))
    assert job.end is not None and job.end.code == 1
    assert len(job.spawns) == 2


def test_a_typo_in_the_first_step_ends_the_job_after_one_retry() -> None:
    job = Cluster(2, max_restarts=3)
    job.hello()
    job.quiesce(train=False)
    for _ in range(2):
        for rank in job.ranks.values():
            rank.fail("exception", "NameError: typo")
        job.quiesce(train=False)
    assert job.end is not None and job.end.code == 1 and len(job.spawns) == 2
    assert "NameError: typo" in job.end.cause


def test_an_import_error_is_not_restarted_unless_somebody_wants_it() -> None:
    job = Cluster(2, max_restarts=3, restarts_asked=False)
    job.hello()
    job.feed(exit_of(1, 0, code=1))
    assert job.end is not None and job.end.code == 1 and len(job.spawns) == 2


@pytest.mark.parametrize("asked", [False, True])
def test_nobody_begins_at_step_0_again_unless_somebody_wants_it(asked: bool) -> None:
    job = Cluster(2, max_restarts=3, restarts_asked=asked).started()
    job.train(3)
    for rank in list(job.ranks.values()):
        job.end_process(rank, -9)
    job.settle()
    assert job.end is not None and job.end.code == (0 if asked else 1)
    if not asked:
        assert "begin at step 0 again" in job.end.reason


@pytest.mark.parametrize(("max_restarts", "code"), [(0, 1), (2, 3)])
def test_a_script_without_training(max_restarts: int, code: int) -> None:
    job = Cluster(2, max_restarts=max_restarts)
    job.hello()
    assert job.machine.deadline is None, "nobody waits for a training that never comes"
    for number in range(max_restarts + 1):
        assert job.end is None
        job.feed(FromAgent(p.Ended(rank=0, incarnation=number)))
        job.feed(exit_of(1, number, code=1))
    assert job.end is not None and job.end.code == code
    assert len(job.spawns) == 2 * (max_restarts + 1)

    job = Cluster(2)
    job.hello()
    for rank in range(2):
        job.feed(FromAgent(p.Ended(rank=rank, incarnation=0)))
    assert job.end is not None and job.end.code == 0


def test_a_rank_that_returns_early_while_others_train_is_a_fault() -> None:
    job = Cluster(3).started()
    job.end_process(job.ranks[1], 0)
    incident = recover(job)
    assert incident["faults"][0]["detail"] == "ended with code 0 before the training was over"


def test_a_rank_that_never_calls_the_training_function_is_told_so() -> None:
    job = Cluster(2)
    job.hello()
    job.feed(FromRank(0, 0, p.Hello(version=p.VERSION, token="", role="rank", rank=0, incarnation=0)))
    job.feed(FromAgent(p.Ended(rank=0, incarnation=0)))
    assert job.end is not None and job.end.code == 1
    assert "never called a function with @training.resilient" in job.end.reason


@pytest.mark.parametrize(("max_restarts", "code"), [(0, 1), (1, 0)])
def test_a_failure_after_the_release(max_restarts: int, code: int) -> None:
    job = Cluster(2, max_restarts=max_restarts, steps=3).started()
    job.train(1)
    while job.ranks[0].place != "leaving":
        job._one_thing(False)
    job.end_process(job.ranks[0], 1)
    job.settle()
    assert job.end is not None and job.end.code == code
    assert job.machine.restarts == max_restarts


def test_a_fault_in_the_last_step_is_repaired_before_the_release() -> None:
    job = Cluster(3, steps=3).started()
    job.ranks[0].complete_step()
    job.quiesce(train=False)  # rank 0 has finished, the others have not
    job.end_process(job.ranks[2], -9)
    job.quiesce(train=False)
    job.settle()
    assert job.end is not None and job.end.code == 0
    (incident,) = job.incidents
    assert (incident["step"], incident["steps_lost"]) == (3, 0), "the finished rank's state is the newest"
    assert {rank.content for rank in job.ranks.values()} == {"init0.0+3"}


def test_all_die_and_a_checkpoint_is_loaded_online() -> None:
    job = Cluster(2).started()
    for rank in (0, 1):
        job.ranks[rank].fail("uce", "lost")
        job.from_rank(job.ranks[rank])
    for rank in (0, 1):
        out = p.Out(step=2, clean=False, attempt=1, fingerprint="same", checkpoint=1)
        job.feed(FromRank(rank, 0, out))
    orders = [m for _, m in job.said(p.Join) if m.generation == 2]
    assert [(m.step, m.need_digest) for m in orders] == [(1, False)] * 2
    for rank in (0, 1):
        job.feed(FromRank(rank, 0, p.Joined(generation=2)))
    assert [m.load for _, m in job.said(p.Repair) if m.generation == 2] == [True, True]
    for rank in (0, 1):
        job.feed(FromRank(rank, 0, p.Repaired(generation=2, ok=True, step=1)))
    for rank in (0, 1):
        job.feed(FromRank(rank, 0, p.Resumed(generation=2, step=2)))
    assert (job.incidents[-1]["step"], job.incidents[-1]["steps_lost"]) == (1, 1)


def test_a_step_that_only_the_rank_without_a_state_had_completed_is_run_again_and_was_not_lost() -> None:
    job = Cluster(3).started()
    job.ranks[1].complete_step()  # the others have its gradients, but are not through with their update
    job.ranks[1].fail("uce", "uncorrectable")
    incident = recover(job)
    assert (incident["step"], incident["steps_lost"]) == (2, 0)
    job.settle()
    assert {rank.content for rank in job.ranks.values()} == {"init0.0+6"}


def test_the_end_of_the_agent_is_the_end_of_the_job() -> None:
    job = Cluster(2).started()
    job.feed(AgentLost())
    assert job.machine.ended == (70, "the link to the agent broke")


def test_a_suspect_is_pinged() -> None:
    job = Cluster(2).started()
    actions = job.feed(FromAgent(p.Suspect(rank=1, number=7)))
    assert actions == [Send(1, 0, p.Ping(number=7))]


def test_ten_thousand_ranks() -> None:
    """One fault costs one pass over the ranks, and so do ten thousand answers; not one pass each."""
    size = 10_000
    machine = Machine(size, Timing.derive(2.0))
    machine.handle(FromAgent(p.Hello(version=1, token="", role="agent")), 0.0)

    def everybody(make, incarnation=lambda rank: 0) -> None:
        for rank in range(size):
            machine.handle(FromRank(rank, incarnation(rank), make(rank)), 1.0)

    def of(rank: int) -> int:
        return int(rank == 77)

    everybody(lambda rank: p.Out(step=0, clean=True, fresh=True))
    everybody(lambda rank: p.Joined(generation=1, digests={"state": "x"}))
    everybody(lambda rank: p.Repaired(generation=1, ok=True))
    everybody(lambda rank: p.Resumed(generation=1, step=1))
    begun = time.process_time()
    machine.handle(exit_of(77), 2.0)
    everybody(lambda rank: p.Out(step=1, clean=rank != 77, fresh=rank == 77, attempt=-1 if rank == 77 else 1), of)
    everybody(lambda rank: p.Joined(generation=2, digests={} if rank == 77 else {"state": "x"}), of)
    everybody(lambda rank: p.Repaired(generation=2, ok=True, step=1), of)
    assert isinstance(machine.state, Running)
    everybody(lambda rank: p.Resumed(generation=2, step=2), of)
    assert time.process_time() - begun < 1.0


# State in parts.


def test_a_shard_comes_from_the_rank_that_holds_its_copy() -> None:
    job = Cluster(4, shards=2).started()
    job.end_process(job.ranks[3], -9)
    incident = recover(job)
    assert incident["steps_lost"] == 0
    orders = {rank: m for rank, m in job.said(p.Repair) if m.generation == 2}
    assert orders[1].sends == [("shard:1", 3)]
    assert [(part, source) for part, source, _ in orders[3].receives] == [("shard:1", 1), ("state", 0)]
    job.settle()
    assert {rank.shard_content for rank in job.ranks.values() if rank.shard == 1} == {"shard1ofinit1.0+6"}


def test_who_completed_the_step_takes_the_others_along() -> None:
    """Rank 0 has gathered all of step 3, and rank 3 dies before the others have: they have their own shards of it."""
    job = Cluster(4, shards=2).started()
    job.ranks[0].complete_step()
    job.end_process(job.ranks[3], -9)
    incident = recover(job)
    assert (incident["step"], incident["steps_lost"]) == (3, 0)
    job.settle()
    assert {rank.content for rank in job.ranks.values()} == {"init0.0+6"}


def test_the_parts_of_the_last_checkpoint_are_written_by_those_who_hold_them() -> None:
    job = Cluster(4, shards=2).started()
    job.feed(FromAgent(p.Terminate(reason="SIGTERM", grace=5.0)))
    job.quiesce(train=False)
    orders = [(rank, m.parts, m.step) for rank, m in job.said(p.Dump)]
    assert orders == [(0, ("shard:0", "state"), 2), (1, ("shard:1",), 2)]
    assert len({m.mark for _, m in job.said(p.Dump)}) == 1
    assert job.end is not None and job.end.code == 143


def test_a_writer_that_fails_is_replaced_by_another_holder() -> None:
    job = Cluster(4, shards=2).started()
    job.feed(FromAgent(p.Terminate(reason="SIGTERM", grace=5.0)))
    for _ in range(4):
        for rank in job.ranks.values():
            while rank.inbox and not isinstance(rank.inbox[0], p.Dump):
                rank.obey(job)
            if not rank.outbox:
                continue
            job.from_rank(rank)
    job.ranks[1].inbox.clear()
    job.ranks[1].say(p.Dumped(ok=False, step=2, parts=("shard:1",), detail="disk full"))
    job.quiesce(train=False)
    assert [(rank, m.parts) for rank, m in job.said(p.Dump)][2:] in (
        [(3, ("shard:1",))],
        [(0, ("shard:0", "state")), (3, ("shard:1",))],
    )
    assert job.end is not None and job.end.code == 143
    assert [r["ok"] for r in job.records if r["event"] == "checkpoint"] == [False, True]
