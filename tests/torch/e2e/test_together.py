"""Sharded state together with orders to the job, and with several nodes: the end is the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import harness
from tests.launch.cluster import cluster
from tests.launch.controlled import Job, answer, job
from tests.once import once

KINDS = {
    "sharded": (harness.EXAMPLE, ("--steps=60", "--log-every=1", "--sharded")),
    "fsdp": (harness.EXAMPLE.with_name("train_fsdp.py"), ("--steps=40", "--log-every=1", "--mesh=2x2")),
}
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(240)]


@once
def undisturbed(kind: str) -> harness.Result:
    script, args = KINDS[kind]
    result = harness.run(*args, script=script)
    assert result.code == 0 and len(set(result.proof.values())) == 1, result.explain()
    return result


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    undisturbed(request.param)
    return request.param


def started(kind: str):  # noqa: ANN201
    script, args = KINDS[kind]
    return job(*args, script=script, nproc=harness.RANKS)


def pause(running: Job) -> int:
    running.wait_until_it_trains()
    running.order("pause", "--timeout=100")
    status = running.status()
    assert status["paused"]
    return status["step"]


def test_a_pause_aborts_nothing(kind: str) -> None:
    with started(kind) as running:
        step = pause(running)
        assert running.status()["step"] == step
        running.order("continue")
        result = running.finish()
    assert result.code == 0 and result.proof == undisturbed(kind).proof, result.explain()
    assert not result.incidents, result.explain()
    assert len([event for event in result.events if event["event"] == "generation"]) == 1, "groups were built anew"


@pytest.mark.exhaustive
def test_a_process_is_exchanged(kind: str) -> None:
    with started(kind) as running:
        step = pause(running)
        asker = running.begin("hot-switch", "--rank=1")
        running.wait("the new process", lambda: any(e["state"] == "ready" for e in running.events("switch")))
        running.order("continue")
        assert "rank 1 has a new process" in answer(asker)
        result = running.finish()
    assert result.code == 0 and result.proof == undisturbed(kind).proof, result.explain()
    (incident,) = result.incidents
    assert (incident["decision"], incident["steps_lost"], incident["restarted"]) == ("hot-switch", 0, [1])
    assert incident["step"] == step


def test_a_lost_node_gets_its_shards_from_the_other(tmp_path: Path) -> None:
    args = ("--steps=30", "--sharded")
    with cluster(tmp_path, *args, ft=("--ft-warm=0",)) as nodes:
        nodes.wait_for("step 6/")
        nodes.nodes[1].kill()
        nodes.start(1)
        result = nodes.finish()
    harness.assert_same_end(result, *args)
    (incident,) = result.incidents
    assert incident["restarted"] == [2, 3] and incident["steps_lost"] == 0, incident
