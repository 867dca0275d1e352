"""A rank is lost and nobody can replace it at once: the others go on with the same samples, and it comes back."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch import harness
from tests.launch.cluster import cluster
from tests.once import once

SCRIPT = Path(__file__).parent / "scripts" / "plain_loop.py"
BOUND = 1e-5
"""Losses and weights differ by the order of additions only."""


def outcome(result: harness.Result) -> dict[int, dict[str, Any]]:
    lines = [json.loads(text) for text in re.findall(r'^.*?(\{"rank".*\})$', result.out, re.MULTILINE)]
    return {line["rank"]: line for line in lines}


@once
def undisturbed(*script_args: str, nproc: int) -> dict[int, dict[str, Any]]:
    result = harness.run(*script_args, script=SCRIPT, nproc=nproc, ft=("--ft-warm=0",))
    assert result.code == 0 and not result.incidents, result.explain()
    return outcome(result)


def run(*script_args: str, faults: tuple[str, ...], nproc: int = 3, compare: tuple[str, ...] = ()) -> harness.Result:
    result = harness.run(
        *script_args, *compare, script=SCRIPT, nproc=nproc, ft=("--ft-warm=0", "--ft-elastic=1"), faults=faults
    )
    assert result.code == 0, result.explain()
    found, expected = outcome(result), undisturbed(*compare, nproc=nproc)
    assert set(found) == set(range(nproc)), result.explain()
    for rank in range(nproc):
        assert found[rank]["weights"] == found[0]["weights"], "the ranks do not end with the same weights"
        for (step, ids, losses, norm, lr, scale), want in zip(
            found[rank]["steps"], expected[rank]["steps"], strict=True
        ):
            assert (step, ids) == (want[0], want[1]), f"step {step} consumed other samples"
            assert losses == pytest.approx(want[2], rel=BOUND, abs=BOUND), step
            assert norm == pytest.approx(want[3], rel=10 * BOUND), step
            assert (lr, scale) == (want[4], want[5]), f"the scheduler or the scaler went wrong in step {step}"
        assert found[rank]["weights"] == pytest.approx(expected[rank]["weights"], rel=BOUND)
    assert all(incident["outcome"] == "recovered" for incident in result.incidents), result.explain()
    assert all(incident["steps_lost"] == 0 for incident in result.incidents), result.explain()
    return result


def kinds(result: harness.Result) -> list[tuple[str, str]]:
    """The first fault of each incident, if somebody's broken link was not heard of before its cause."""
    return [
        (next((f["kind"] for f in incident["faults"] if f["kind"] != "link"), "link"), incident["decision"])
        for incident in result.incidents
    ]


def test_the_others_go_on_and_the_lost_one_comes_back_while_they_train() -> None:
    result = run(
        "--slow-when-smaller=0.1", faults=("kill@step=6,rank=1,phase=backward",), compare=("--steps=120", "--amp")
    )
    assert kinds(result) == [("exit", "elastic-training"), ("rejoin", "elastic-training")], result.explain()
    down, up = result.incidents
    assert down["step"] == 6 and 10 < up["step"] < 120, result.explain()
    assert up["restarted"] == [] and down["restarted"] == [1]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "phase",
    [*(pytest.param(phase, marks=pytest.mark.exhaustive) for phase in ("data", "forward", "optimizer")), "allreduce"],
)
def test_the_first_rank_is_the_lost_one(phase: str) -> None:
    result = run(faults=(f"kill@step=6,rank=0,phase={phase}",), compare=("--steps=14", "--accumulate=2"))
    assert kinds(result) == [("exit", "elastic-training"), ("rejoin", "elastic-training")], result.explain()


@pytest.mark.matrix
def test_one_rank_carries_all_others() -> None:
    faults = ("kill@step=5,rank=0", "kill@step=7,rank=2,phase=optimizer", "kill@step=9,rank=3,phase=backward")
    result = run("--slow-when-smaller=0.1", faults=faults, nproc=4, compare=("--steps=140", "--workers=1"))
    # Whoever dies before the first step after a recovery belongs to the same incident.
    smaller = list(itertools.takewhile(lambda each: "rejoin" not in ranks_by_kind(each), result.incidents))
    assert {each["decision"] for each in smaller} == {"elastic-training"}, result.explain()
    assert sorted(rank for each in smaller for rank in ranks_by_kind(each)["exit"]) == [0, 2, 3], result.explain()


def ranks_by_kind(incident: dict[str, Any]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for fault in incident["faults"]:
        found.setdefault(fault["kind"], set()).add(fault["rank"])
    return found


@pytest.mark.matrix
def test_a_retry_while_smaller() -> None:
    faults = ("kill@step=5,rank=1", "exception@step=8,rank=2,phase=backward", "uce@step=10,rank=0,phase=forward")
    result = run(faults=faults, compare=("--steps=14",))
    # The lost rank may be back at any time, also between the others' faults.
    own = [decision for found, decision in kinds(result) if "rejoin" not in found]
    assert own == ["elastic-training", "retry", "retry"], result.explain()


@pytest.mark.exhaustive
def test_with_a_warm_spare_the_rank_is_simply_replaced() -> None:
    result = harness.run(
        "--steps=400", "--log-every=0", nproc=3, ft=("--ft-elastic=1",), faults=("kill@step=350,rank=1",)
    )
    harness.assert_same_end(result, "--steps=400", "--log-every=0", nproc=3)
    order = [event["event"] for event in result.events if event["event"] in ("spare", "fault")]
    expected = "recover-in-place" if order[0] == "spare" else "elastic-training"  # a busy machine warms up slowly
    assert result.incidents[0]["decision"] == expected, result.explain()


@pytest.mark.matrix
@pytest.mark.timeout(180)
def test_a_job_goes_on_without_a_node(tmp_path: Path) -> None:
    args = ("--steps=150",)
    with cluster(tmp_path, *args, ft=("--ft-warm=0", "--nnodes=1:2")) as job:
        job.wait_for("step 6/")
        job.nodes[1].kill()
        job.wait_for("step 12/")  # nobody has started the node again
        job.start(1)
        result = job.finish()
    assert result.code == 0, result.explain()
    expected = harness.undisturbed(*args)
    assert {rank: (line["step"], line["samples_sha256"]) for rank, line in result.ranks.items()} == {
        rank: (line["step"], line["samples_sha256"]) for rank, line in expected.ranks.items()
    }
    assert len({line["sha256"] for line in result.ranks.values()}) == 1
    assert {incident["decision"] for incident in result.incidents} == {"elastic-training"}, result.explain()
    assert not any(incident["steps_lost"] for incident in result.incidents)
