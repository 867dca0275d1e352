"""A new controller takes over in the middle of anything, and the job ends as if nothing had happened."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.mindio import protocol as p
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.states import AgentLost, FromAgent, FromRank, Gathering, Running
from evertrain.mindio.timing import Timing
from tests.mindio.simulated_ranks import Cluster, Rank


def hello(rank: Rank) -> p.Hello:
    """What this rank says when it links to the next controller."""
    out = None
    if rank.place == "out":
        out = p.Out(step=rank.step, clean=rank.clean, attempt=rank.taken, fresh=rank.fresh, fingerprint="same")
    return p.Hello(
        version=p.VERSION, token="", role="rank", rank=rank.rank, incarnation=rank.incarnation,
        place="inside" if rank.place in ("held", "paused") else rank.place, pause=rank.newest_pause,
        generation=rank.generation if not rank.fresh else 0, attempt=rank.taken, step=rank.step, out=out,
    )  # fmt: skip


def succeed(
    job: Cluster,
    *,
    without: tuple[int, ...] = (),
    memo: p.Memo | None = None,
    gone: frozenset[int] = frozenset(),
    clock: float = 0.0,
) -> None:
    """The controller is gone; all but the ranks `without` link to the next one. What they have said to the old one and
    it had not heard is lost, what it had sent them they still take. An older `memo` is one that did not arrive; of the
    nodes `gone` nothing is left. The next host's clock differs by `clock`."""
    old = job.machine
    memo = memo or old.memo(0)
    linked = {rank: each for rank, each in job.ranks.items() if each.alive and each.place != "boot"}
    for rank in job.ranks.values():
        rank.outbox.clear()
    job.machine = Machine(
        job.world_size, Timing.derive(1.0), nnodes=old.nnodes, max_restarts=old.max_restarts, can_dump=old.can_dump,
        node_loss=old.node_loss, wall_offset=old.wall_offset - clock,
    )  # fmt: skip
    job.now += clock
    agents = {}
    for node in set(range(old.nnodes)) - gone:
        mine = [job.ranks[rank] for rank in old.ranks_of(node)]
        agents[node] = p.Hello(
            version=p.VERSION, token="", role="agent", world_size=job.world_size, node=node,
            incarnations={each.rank: each.incarnation for each in mine if each.alive},
            booting=[each.rank for each in mine if each.alive and each.fresh],
            left=[each.rank for each in mine if not each.alive and each.rank in old._left],
        )  # fmt: skip
    hellos = {rank: hello(each) for rank, each in linked.items() if rank not in without}
    job.linked = {(rank, job.ranks[rank].incarnation) for rank in hellos}
    job.open_generations.clear()
    job.broken_links.clear()
    for action in job.machine.take_over(memo, agents, hellos, "test", job.now):
        job._carry_out(action)


def ends_well(job: Cluster) -> None:
    job.settle()
    assert job.end is not None and job.end.code == 0, job.end
    assert {rank.step for rank in job.ranks.values()} == {job.steps}
    assert len({rank.content for rank in job.ranks.values()}) == 1


def test_training_is_not_interrupted() -> None:
    job = Cluster(3).started()
    succeed(job)
    assert isinstance(job.machine.state, Running) and not job.said(p.Stop)
    ends_well(job)
    assert not job.incidents
    assert [record["ranks"] for record in job.records if record["event"] == "takeover"] == [3]


def test_faults_after_the_take_over_are_recovered_under_new_numbers() -> None:
    job = Cluster(3).started()
    job.end_process(job.ranks[1], -9)
    job.quiesce(train=False)
    job.train(1)
    job.quiesce(train=False)
    generation = job.machine.generation
    succeed(job)
    job.end_process(job.ranks[2], -9)
    ends_well(job)
    assert [incident["id"] for incident in job.incidents] == ["i-0001", "i-0002"]
    assert job.incidents[1]["generation"] > generation
    assert job.spawns[-1] == (2, 1)


def test_an_incident_in_flight_is_finished() -> None:
    job = Cluster(3).started()
    job.end_process(job.ranks[1], -9)
    job.from_agent()  # the controller decides, orders a replacement, tells all to stop, and is gone
    succeed(job)
    assert isinstance(job.machine.state, Gathering)
    ends_well(job)
    (incident,) = job.incidents
    assert incident["id"] == "i-0001" and incident["steps_lost"] == 0 and incident["restarted"] == [1]


@pytest.mark.parametrize("trained", [True, False])
def test_a_rank_that_comes_late_is_stopped_too(trained: bool) -> None:
    job = Cluster(3)
    job.hello()
    for rank in job.ranks.values():
        job.boot(rank)
    if trained:
        job.quiesce(train=False)
        job.train(2)
    succeed(job, without=(1, 2))
    assert isinstance(job.machine.state, Gathering)
    for late in (job.ranks[1], job.ranks[2]):
        job.linked.add((late.rank, late.incarnation))
        job.feed(FromRank(late.rank, late.incarnation, hello(late)))
        assert isinstance(late.inbox[-1], p.Stop)
    ends_well(job)
    assert all(rank.incarnation == 0 for rank in job.ranks.values()), "nobody is replaced"


def test_a_rank_that_never_comes_is_replaced() -> None:
    job = Cluster(3).started()
    job.ranks[2].deaf = True
    succeed(job, without=(2,))
    ends_well(job)
    assert job.ranks[2].incarnation == 1


def test_an_incident_has_the_same_length_on_another_host() -> None:
    job = Cluster(3, wall_offset=5e8).started()
    job.end_process(job.ranks[1], -9)
    job.agent_says.clear()
    fault = p.Fault(kind="exit", rank=1, incarnation=0, exit_code=-9, at=job.now - 0.5)
    job.feed(FromAgent(p.Observed(fault=fault)))
    succeed(job, clock=9000.0)
    ends_well(job)
    (incident,) = job.incidents
    assert 500.0 <= incident["total_ms"] < 60_000.0, incident


def smaller() -> Cluster:
    """Three nodes with one rank each; node 2 is lost and the others go on."""
    job = Cluster(3, nnodes=3, node_loss="shrink", steps=40)
    for node in range(3):
        job.feed(agent(node))
    job.quiesce(train=False)
    job.train(2)
    job.quiesce(train=False)
    job.ranks[2].place = "dead"
    job.feed(AgentLost(node=2))
    job.quiesce(train=False)
    job.train(1)
    job.quiesce(train=False)
    assert job.machine._active == [0, 1] and len(job.incidents) == 1
    return job


def agent(node: int) -> FromAgent:
    return FromAgent(p.Hello(version=p.VERSION, token="", role="agent", world_size=3, node=node), node)


def test_those_who_go_on_without_a_node_are_not_interrupted() -> None:
    job = smaller()
    stops = len(job.said(p.Stop))
    succeed(job, gone=frozenset({2}))
    assert isinstance(job.machine.state, Running)
    job.feed(AgentLost("its agent did not come to the new controller", 2))
    job.settle_for(60.0)
    assert len(job.said(p.Stop)) == stops and len(job.incidents) == 1
    job.feed(agent(2))
    ends_well(job)
    assert job.ranks[2].incarnation > 0


def test_a_node_that_is_lost_with_the_controller_is_lost_once() -> None:
    job = Cluster(3, nnodes=3, node_loss="shrink", steps=40)
    for node in range(3):
        job.feed(agent(node))
    job.quiesce(train=False)
    job.train(2)
    job.quiesce(train=False)
    job.ranks[0].place = "dead"
    succeed(job, gone=frozenset({0}))
    job.quiesce(train=False)
    job.train(2)
    job.quiesce(train=False)
    assert isinstance(job.machine.state, Running) and len(job.incidents) == 1
    job.feed(AgentLost("its agent did not come to the new controller", 0))
    assert isinstance(job.machine.state, Running), "interrupted once more for the same loss"
    job.feed(agent(0))
    ends_well(job)
    assert [incident["faults"][0]["kind"] for incident in job.incidents] == ["agent", "rejoin"]


def test_a_pause_outlives_its_controller() -> None:
    job = Cluster(3, steps=40).started()
    job.command("pause", timeout=100.0)
    job.quiesce()
    assert {(rank.place, rank.step) for rank in job.ranks.values()} == {("paused", 3)}
    succeed(job)
    job.quiesce()
    assert {(rank.place, rank.step) for rank in job.ranks.values()} == {("paused", 4)}, "one more step"
    assert not job.said(p.Stop) and job.machine.deadline == job.now + 100.0
    job.command("continue")
    assert job.answers[-1].ok
    ends_well(job)
    assert not job.incidents


def test_a_pause_of_which_only_the_ranks_have_heard_holds_nobody() -> None:
    job = Cluster(3, steps=40).started()
    memo = job.machine.memo(0)
    job.command("pause", timeout=100.0)
    job.quiesce()
    succeed(job, memo=memo)
    ends_well(job)


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_at_the_end_of_the_training(finished: int) -> None:
    job = Cluster(3, steps=3).started()
    for rank in list(job.ranks.values())[:finished]:
        rank.step, rank.content = 3, "init0.0+3"
        rank.finish()
    succeed(job)
    ends_well(job)


def test_before_anybody_trains() -> None:
    job = Cluster(3)
    job.hello()
    job.boot(job.ranks[0])
    succeed(job)
    ends_well(job)
    assert not job.incidents


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_at_any_moment(choices: list[int], first: int, second: int, lags: bool) -> None:
    """Anything happens in any order, a rank dies, somebody wants a pause, and the controller is replaced twice."""
    job = Cluster(3, max_restarts=2)
    job.hello()
    memo = job.machine.memo(0)
    for number, choice in enumerate(choices):
        if number in (first, second) and job.machine.ended is None:
            succeed(job, memo=memo if lags else None)
        if lags:
            memo = job.machine.memo(0)
        if choice == 8 and job.machine.ended is None:
            job.command("pause", timeout=5.0)
        rank = job.ranks[choice % 3]
        if choice == 9 and not rank.fresh:
            job.end_process(rank, -9)
        elif job.agent_says and choice > 6:
            job.from_agent()
        elif rank.outbox:
            job.from_rank(rank)
        elif rank.place == "boot":
            job.boot(rank)
        elif rank.alive and rank.inbox:
            rank.obey(job)
        elif job.can_step(rank):
            rank.complete_step()
    ends_well(job)
