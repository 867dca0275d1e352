"""Going on smaller and growing back, pausing, and exchanging a process: what the controller orders."""

from __future__ import annotations

import pytest

from evertrain.mindio import protocol as p
from evertrain.mindio.controller.machine import FromAgent
from evertrain.mindio.controller.states import Running
from tests.mindio.simulated_ranks import Cluster


def go_on(job: Cluster, steps: int = 1) -> None:
    for _ in range(steps):
        job.quiesce(train=False)
        job.train(1)
    job.quiesce(train=False)


def elastic(world_size: int = 4, *, steps: int = 40, least: int = 1, **options: object) -> Cluster:
    return Cluster(world_size, steps=steps, elastic=least, **options).started()


def lose(job: Cluster, number: int) -> None:
    """The rank dies and its replacement takes its time."""
    job.start_ranks = False
    job.end_process(job.ranks[number], -9)
    go_on(job, 2)


def arrive(job: Cluster, number: int) -> None:
    job.start_ranks = True
    job.ranks[number].deaf = False
    go_on(job, 4)


def members(job: Cluster) -> list[int]:
    return [message for _, message in job.said(p.Join)][-1].members


# Smaller.


def test_the_others_go_on_while_the_replacement_starts() -> None:
    job = elastic()
    lose(job, 2)
    (incident,) = job.incidents
    assert (incident["decision"], incident["outcome"], incident["steps_lost"]) == ("elastic-training", "recovered", 0)
    assert "3 of 4 ranks go on" in incident["reason"]
    assert members(job) == [0, 1, 3]
    assert job.spawns[-1] == (2, 1)
    before = job.ranks[0].step
    go_on(job, 3)
    assert job.ranks[0].step == before + 3


def test_the_job_grows_back_at_the_end_of_a_step() -> None:
    job = elastic()
    lose(job, 2)
    stops = len(job.said(p.Stop))
    job.start_ranks = True
    job.ranks[2].deaf = False
    job.quiesce(train=False)
    assert {rank for rank, _ in job.said(p.Pause)} == {0, 1, 3}
    assert len(job.said(p.Stop)) == stops, "somebody was interrupted within a step"
    step = job.ranks[0].step
    go_on(job, 3)
    assert members(job) == [0, 1, 2, 3]
    grown = job.incidents[-1]
    assert (grown["faults"][0]["kind"], grown["faults"][0]["rank"]) == ("rejoin", 2)
    assert (grown["step"], grown["steps_lost"]) == (step + 1, 0)
    assert "4 of 4" in grown["reason"]
    assert {rank.content for rank in job.ranks.values()} == {f"init0.0+{job.ranks[0].step}"}
    job.settle()
    assert job.end is not None and job.end.code == 0


def test_a_warm_spare_is_better() -> None:
    job = elastic()
    job.feed(FromAgent(p.Spares(ready=1)))
    job.end_process(job.ranks[2], -9)
    go_on(job, 2)
    assert [incident["decision"] for incident in job.incidents] == ["recover-in-place"]
    job.end_process(job.ranks[1], -9)
    go_on(job, 1)
    assert job.incidents[-1]["decision"] == "elastic-training", "the spare was counted twice"


def test_below_the_minimum_the_job_waits() -> None:
    job = elastic(3, least=2)
    lose(job, 2)
    assert members(job) == [0, 1]
    job.end_process(job.ranks[1], -9)
    step = job.ranks[0].step
    go_on(job, 2)
    assert job.ranks[0].step == step
    assert not isinstance(job.machine.state, Running)
    arrive(job, 1)
    assert members(job) == [0, 1]
    arrive(job, 2)
    assert members(job) == [0, 1, 2]


def test_without_the_flag_nobody_goes_on_alone() -> None:
    job = Cluster(3, steps=40).started()
    lose(job, 2)
    assert not job.incidents
    assert members(job) == [0, 1, 2]


def test_a_script_that_can_not_share_its_data_is_not_split() -> None:
    job = elastic(3)
    job.machine._can_share = False
    lose(job, 2)
    assert not job.incidents


def test_a_second_fault_while_smaller_takes_along_who_is_ready() -> None:
    job = elastic(4)
    lose(job, 2)
    job.start_ranks = True
    job.ranks[2].deaf = False
    job.boot(job.ranks[2])
    job.from_rank(job.ranks[2])
    job.ranks[1].fail("exception", "ValueError: odd")
    go_on(job, 2)
    assert members(job) == [0, 1, 2, 3]
    assert len(job.incidents) == 2


def test_a_replacement_that_fails_in_the_background_disturbs_nobody() -> None:
    job = elastic(3)
    lose(job, 2)
    generation = job.machine.generation
    for incarnation in (1, 2, 3):
        assert job.ranks[2].incarnation == incarnation
        job.end_process(job.ranks[2], 1)
        go_on(job, 1)
    assert job.machine.generation == generation
    assert job.spawns[-1] == (2, 3), "it was tried again without end"
    assert "go on without it" in job.incidents[-1]["reason"]
    job.settle()
    assert job.end is not None and job.end.code == 0


def test_who_is_still_starting_comes_to_the_end_as_well() -> None:
    job = elastic(3, steps=6)
    lose(job, 1)
    go_on(job, 4)
    assert job.ranks[0].place == "finished"
    assert not job.said(p.Release)
    arrive(job, 1)
    assert {rank.step for rank in job.ranks.values()} == {6}
    job.settle()
    assert job.end == p.End(code=0, reason="all ranks are done")


def test_the_first_rank_may_be_the_missing_one() -> None:
    job = elastic(3)
    lose(job, 0)
    assert members(job) == [1, 2]
    arrive(job, 0)
    assert members(job) == [0, 1, 2]
    assert {rank.content for rank in job.ranks.values()} == {f"init0.0+{job.ranks[1].step}"}


# Pause and continue.


def test_a_pause_waits_for_the_end_of_a_common_step_and_interrupts_nobody() -> None:
    job = Cluster(3, steps=40).started()
    job.command("pause", timeout=100.0)
    assert not job.answers
    go_on(job, 4)
    (answer,) = job.answers
    assert answer.ok and answer.text == "paused at step 3"
    assert {rank.step for rank in job.ranks.values()} == {3}
    assert not job.said(p.Stop)
    job.command("status")
    assert job.answers[-1].fields["paused"]
    assert job.answers[-1].text == "paused"
    job.command("continue")
    go_on(job, 3)
    assert {rank.step for rank in job.ranks.values()} == {6}
    assert not job.incidents
    job.settle()
    assert job.end is not None and job.end.code == 0


def test_a_pause_that_one_rank_hears_of_late_is_one_pause() -> None:
    job = Cluster(2, steps=40).started()
    job.command("pause")
    job.ranks[0].obey(job)
    job.train(2)
    assert [(rank.place, rank.step) for rank in job.ranks.values()] == [("held", 3), ("inside", 3)]
    job.ranks[1].obey(job)  # it has completed step 3 and may have begun the next one
    go_on(job, 2)
    assert [(rank.place, rank.step) for rank in job.ranks.values()] == [("paused", 4), ("paused", 4)]
    job.command("continue")
    go_on(job, 3)
    assert {rank.step for rank in job.ranks.values()} == {7}


def test_a_pause_ends_by_itself() -> None:
    job = Cluster(2, steps=40).started()
    job.command("pause", timeout=5.0)
    go_on(job, 2)
    assert job.machine.deadline == job.now + 5.0
    assert job.tick()
    go_on(job, 2)
    assert job.ranks[0].step == 5
    assert job.machine.deadline is None


def test_a_pause_may_end_the_job() -> None:
    job = Cluster(2, steps=40).started()
    job.command("pause", timeout=5.0, exit_after=True)
    go_on(job, 2)
    job.settle()
    assert job.end is not None and job.end.code == 1 and "pause" in job.end.reason
    assert [step for step, _, _ in job.dumps] == [3]


def test_a_fault_while_paused_is_repaired_and_the_pause_is_kept() -> None:
    job = Cluster(3, steps=40).started()
    job.command("pause", timeout=100.0)
    go_on(job, 2)
    job.end_process(job.ranks[1], -9)
    go_on(job, 5)
    assert [incident["outcome"] for incident in job.incidents] == ["recovered"]
    assert {rank.place for rank in job.ranks.values()} == {"paused"}
    job.command("continue")
    go_on(job, 1)
    assert {rank.place for rank in job.ranks.values()} == {"inside"}


def test_a_restart_of_all_processes_keeps_the_pause() -> None:
    job = Cluster(2, steps=40, max_restarts=1).started()
    job.command("pause", timeout=1000.0)
    go_on(job, 2)
    job.start_ranks = False
    job.end_process(job.ranks[1], -9)
    for _ in range(3):
        job.quiesce(train=False)
        job.start_ranks = job.machine._history.failed_starts[1] == 2
        job.end_process(job.ranks[1], 1)
    go_on(job, 4)
    assert job.machine.restarts == 1
    assert {rank.place for rank in job.ranks.values()} == {"paused"}
    job.command("continue")
    job.settle()
    assert job.end is not None and job.end.code == 0


@pytest.mark.parametrize("order", ["continue", "cancel-switch", "dance"])
def test_an_order_that_makes_no_sense_is_refused(order: str) -> None:
    job = Cluster(2).started()
    job.command(order)
    assert [answer.ok for answer in job.answers] == [False]


# Hot switch.


def test_a_process_is_exchanged_at_the_end_of_a_step() -> None:
    job = Cluster(3, steps=40).started()
    job.start_ranks = False
    job.command("hot-switch", rank=1)
    go_on(job, 3)
    assert job.ranks[1].incarnation == 0 and job.ranks[1].step == 5, "the training goes on meanwhile"
    job.shadows[1].deaf = False
    go_on(job, 3)
    assert job.ranks[1].incarnation == 1
    (incident,) = job.incidents
    assert (incident["decision"], incident["outcome"], incident["steps_lost"]) == ("hot-switch", "recovered", 0)
    assert incident["restarted"] == [1]
    assert job.answers[-1].ok
    receivers = [rank for rank, m in job.said(p.Repair) if m.receives and m.generation == 2]
    assert receivers == [1]
    job.settle()
    assert job.end is not None and job.end.code == 0
    assert {rank.content for rank in job.ranks.values()} == {"init0.0+40"}


def test_a_switch_is_cancelled() -> None:
    job = Cluster(3, steps=40).started()
    job.start_ranks = False
    job.command("hot-switch", rank=1)
    job.command("cancel-switch")
    assert [answer.ok for answer in job.answers] == [False, True]
    assert not job.shadows
    go_on(job, 3)
    assert not job.incidents and job.machine.generation == 1
    job.start_ranks = True
    job.end_process(job.ranks[1], -9)
    go_on(job, 2)
    assert job.ranks[1].incarnation == 2, "the number of the cancelled process must not be used again"


def test_a_prepared_process_that_dies_disturbs_nobody() -> None:
    job = Cluster(3, steps=40).started()
    job.start_ranks = False
    job.command("hot-switch", rank=1)
    job.end_process(job.shadows[1], 1)
    go_on(job, 3)
    assert not job.incidents and job.machine.generation == 1
    assert not job.answers[-1].ok and "the new process failed: exit" in job.answers[-1].text


def test_a_prepared_process_takes_over_at_once_when_the_old_one_dies() -> None:
    job = Cluster(3, steps=40).started()
    job.start_ranks = False
    job.command("hot-switch", rank=1)
    job.end_process(job.ranks[1], -9)
    job.quiesce(train=False)
    assert job.spawns == [(0, 0), (1, 0), (2, 0)], "no third process"
    assert job.ranks[1].incarnation == 1
    job.ranks[1].deaf = False
    go_on(job, 2)
    assert [incident["decision"] for incident in job.incidents] == ["recover-in-place"]


def test_a_prepared_process_has_a_deadline() -> None:
    job = Cluster(3, steps=40).started()
    job.start_ranks = False
    job.command("hot-switch", rank=1)
    assert job.machine.deadline is not None
    job.tick()
    assert not job.shadows and not job.answers[-1].ok


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (3, 3), (3, -1)])
def test_a_switch_that_can_not_be_is_refused(world_size: int, rank: int) -> None:
    job = Cluster(world_size).started()
    job.command("hot-switch", rank=rank)
    assert [answer.ok for answer in job.answers] == [False]


def test_a_part_that_only_the_old_process_has_is_not_thrown_away() -> None:
    """A controller that has just taken over does not know who holds what before all are out."""
    job = Cluster(4, shards=4, steps=40).started()
    for member in job.machine._roster:
        member.out = None
    job.command("hot-switch", rank=1)
    go_on(job, 4)
    assert "nobody but rank 1 has its state" in job.answers[-1].text and not job.answers[-1].ok
    assert job.ranks[1].incarnation == 0
    job.settle()
    assert job.end is not None and job.end.code == 0
    assert not any(incident["steps_lost"] for incident in job.incidents)


def test_status_has_the_newest_step_and_the_processes() -> None:
    job = Cluster(2).started()
    job.feed(FromAgent(p.Started(rank=1, incarnation=0, pid=4711, warm=False)))
    job.machine.saw_step(0, 90)
    job.command("status")
    fields = job.answers[-1].fields
    assert (fields["step"], fields["pids"]["1"], fields["missing"]) == (90, 4711, [])


def test_a_rank_that_alone_holds_a_part_of_the_state_is_not_exchanged() -> None:
    job = Cluster(2, steps=40, shards=2).started()
    job.command("hot-switch", rank=1)
    (answer,) = job.answers
    assert not answer.ok and "no other rank holds shard:1" in answer.text
    assert not job.shadows
    job = Cluster(4, steps=40, shards=2).started()
    job.command("hot-switch", rank=1)
    assert 1 in job.shadows
