"""Several agents around the machine: who gets which order, and what the loss of a node costs."""

from __future__ import annotations

from evertrain.mindio import protocol as p
from evertrain.mindio.controller.clocks import Clocks
from evertrain.mindio.controller.states import AgentLost, FromAgent, Gathering, Idle, LinkLost, Running, ToAgent
from tests.mindio.simulated_ranks import Cluster


def agent(node: int, **more: object) -> FromAgent:
    return FromAgent(p.Hello(version=p.VERSION, token="", role="agent", world_size=4, node=node, **more), node)


def two_nodes(**options: object) -> Cluster:
    return Cluster(4, nnodes=2, **options)


def running(**options: object) -> Cluster:
    job = two_nodes(**options)
    job.feed(agent(0))
    job.feed(agent(1))
    job.quiesce(train=False)
    job.train(2)
    job.quiesce(train=False)
    return job


def lose_node(job: Cluster, node: int, *, links_first: bool) -> None:
    """All processes of a node and its agent are gone; the controller sees that in any order."""
    broken = []
    for rank in job.machine.ranks_of(node):
        job.ranks[rank].place = "dead"
        job.ranks[rank].inbox.clear()
        broken.append(LinkLost(rank, job.ranks[rank].incarnation))
    events = [*broken, AgentLost(node=node)] if links_first else [AgentLost(node=node), *broken]
    for event in events:
        job.feed(event)


def test_the_job_starts_when_all_nodes_are_there_and_orders_go_to_their_owners() -> None:
    job = two_nodes()
    assert job.feed(agent(1)) == [] and isinstance(job.machine.state, Idle)
    actions = job.feed(agent(0, address="10.0.0.1", master_port=4000))
    orders = [action.message.rank for action in actions if isinstance(action, ToAgent)]
    assert orders == [0, 1, 2, 3] and [job.machine.node_of(rank) for rank in orders] == [0, 0, 1, 1]
    assert {action.message.master for action in actions if isinstance(action, ToAgent)} == {"10.0.0.1:4000"}


def test_a_node_that_never_comes_ends_the_job() -> None:
    job = two_nodes(node_wait=60.0)
    job.feed(agent(0))
    began = job.now
    assert job.tick() and job.now == began + 60.0
    assert job.end is not None and job.end.code == 1 and "node 1 did not come within 60 s" in job.end.reason


def test_a_lost_node_is_one_incident_and_costs_no_step() -> None:
    for links_first in (False, True):
        job = running()
        lose_node(job, 1, links_first=links_first)
        job.quiesce()
        assert isinstance(job.machine.state, Gathering)
        spawned = len(job.spawns)
        job.feed(agent(1))
        assert [rank for rank, _ in job.spawns[spawned:]] == [2, 3]
        job.settle()
        assert job.end is not None and job.end.code == 0
        (incident,) = job.incidents
        assert incident["restarted"] == [2, 3] and incident["steps_lost"] == 0
        assert [fault["kind"] for fault in incident["faults"]].count("agent") == 1


def test_a_node_that_does_not_come_back_ends_the_job_after_a_checkpoint() -> None:
    job = running(node_wait=100.0)
    lose_node(job, 1, links_first=True)
    job.settle()
    assert job.end is not None and job.end.code == 1 and "did not come back within 100 s" in job.end.reason
    assert len(job.dumps) == 1


def test_a_lost_node_may_end_the_job_at_once() -> None:
    job = running(node_loss="exit")
    lose_node(job, 0, links_first=False)
    job.settle()
    assert job.end is not None and job.end.code == 1 and "node 0" in job.end.reason


def test_both_nodes_lost_one_after_the_other() -> None:
    """The state of the second is what the first is repaired from; when both are gone it is a restart."""
    job = running(max_restarts=1)
    lose_node(job, 1, links_first=True)
    job.quiesce()
    lose_node(job, 0, links_first=True)
    job.feed(agent(0))
    job.feed(agent(1))
    job.settle()
    assert job.end is not None and job.end.code == 0
    assert job.machine.restarts == 1


def test_processes_of_a_node_whose_agent_is_gone_are_told_to_leave() -> None:
    job = running()
    job.feed(AgentLost(node=1))
    assert sorted(rank for rank, _ in job.said(p.Exit)) == [2, 3]


def stuck(rank: int, step: int, node: int) -> FromAgent:
    fault = p.Fault(kind="hccl", rank=rank, detail="all wait")
    return FromAgent(p.Observed(fault=fault, step=step, partial=True), node)


def test_nobody_waits_for_the_word_of_a_node_that_is_missing() -> None:
    job = running(node_loss="shrink", steps=12)
    lose_node(job, 1, links_first=False)
    job.quiesce(train=False)
    job.train(1)
    job.quiesce(train=False)
    stops = len(job.said(p.Stop))
    job.feed(stuck(0, 3, 0))
    assert {rank for rank, _ in job.said(p.Stop)[stops:]} == {0, 1}


def test_a_stuck_collective_takes_the_word_of_all_nodes() -> None:
    job = running()
    job.feed(stuck(0, 2, 0))
    assert not job.said(p.Stop), "they may wait for a slow rank of the other node"
    job.feed(stuck(2, 3, 1))
    assert not job.said(p.Stop), "another step: node 0 has gone on since"
    job.feed(stuck(0, 3, 0))
    assert {rank for rank, _ in job.said(p.Stop)} == {0, 1, 2, 3}


def test_ranks_must_be_dealt_out_alike() -> None:
    machine = two_nodes().machine
    hello = p.Hello(version=p.VERSION, token="", role="agent", world_size=4, node=1, ranks=[1, 2, 3])
    assert "the same on all nodes" in (machine.agent_refusal(hello) or "")
    assert "not in a job" in (machine.agent_refusal(p.replace(hello, node=2)) or "")


def test_clocks_of_other_hosts_are_translated() -> None:
    clocks = Clocks()
    clocks.sample(1, sent=5000.0, arrived=100.3)
    clocks.sample(1, sent=5001.0, arrived=101.1)
    clocks.sample(0, sent=100.0, arrived=100.001)
    fault = p.Fault(kind="exit", rank=2, at=5002.0)
    assert abs(clocks.fault(1, fault).at - 102.1) < 1e-6, "by the fastest of the messages"
    assert clocks.fault(0, fault) is fault, "the same host has the same clock"


def test_the_others_may_go_on_without_a_lost_node_and_take_it_back() -> None:
    job = running(node_loss="shrink", steps=12)
    lose_node(job, 1, links_first=False)
    job.quiesce(train=False)
    assert isinstance(job.machine.state, Running) and job.machine.state.unfinished == {0, 1}
    job.train(2)
    job.feed(agent(1))
    job.settle()
    assert job.end is not None and job.end.code == 0
    assert {incident["decision"] for incident in job.incidents} == {"elastic-training"}
    assert job.incidents[0]["restarted"] == [2, 3] and not any(incident["steps_lost"] for incident in job.incidents)
    assert {rank.step for rank in job.ranks.values()} == {12}


def test_below_the_least_number_of_nodes_the_job_waits() -> None:
    job = running(node_loss="shrink", least_nodes=2, steps=12)
    lose_node(job, 1, links_first=False)
    job.quiesce(train=False)
    assert not isinstance(job.machine.state, Running)


def test_a_minority_waits_instead_of_going_on_alone() -> None:
    job = Cluster(3, nnodes=3, node_loss="shrink", steps=12)
    for node in range(3):
        job.feed(FromAgent(p.Hello(version=p.VERSION, token="", role="agent", world_size=3, node=node), node))
    job.quiesce(train=False)
    job.train(2)
    job.quiesce(train=False)
    lose_node(job, 1, links_first=False)
    lose_node(job, 2, links_first=False)
    job.quiesce(train=False)
    assert isinstance(job.machine.state, Gathering), "the other two may be alive with a controller of their own"


def test_a_prepared_process_is_lost_with_its_node() -> None:
    """No matter whether its link is known to be broken: a node without power breaks none."""
    job = running(steps=20)
    job.command("hot-switch", rank=2)
    job.boot(job.shadows[2])
    job.from_rank(job.shadows[2])
    for rank in (2, 3):
        job.ranks[rank].place = "dead"
    job.shadows[2].place = "dead"
    job.feed(AgentLost(node=1))
    assert [answer.ok for answer in job.answers] == [False] and "node 1 is lost" in job.answers[0].text
    job.quiesce()
    assert isinstance(job.machine.state, Gathering), "it waits for the node"
    job.feed(agent(1))
    job.settle()
    assert job.end is not None and job.end.code == 0
    assert not any(incident["steps_lost"] for incident in job.incidents)
