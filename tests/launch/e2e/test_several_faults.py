"""Faults that come together, one upon the other, or again and again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.launch import harness

ARGS = (f"--steps={harness.STEPS}",)


def restarted(result: harness.Result) -> list[int]:
    return sorted(rank for incident in result.incidents for rank in incident["restarted"])


def test_two_ranks_killed_at_once() -> None:
    result = harness.run(*ARGS, faults=("kill@step=5,rank=0,phase=backward", "kill@step=5,rank=2,phase=backward"))
    harness.assert_same_end(result, *ARGS)
    assert restarted(result) == [0, 2]


@pytest.mark.matrix
def test_all_but_one_rank_killed_at_once() -> None:
    faults = tuple(f"kill@step=5,rank={rank},phase=forward" for rank in (0, 1, 3))
    result = harness.run(*ARGS, faults=faults)
    harness.assert_same_end(result, *ARGS)
    assert restarted(result) == [0, 1, 3]


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        pytest.param("kill", 1, id="kill-replacement", marks=pytest.mark.matrix),
        pytest.param("kill", 2, id="kill-source", marks=pytest.mark.exhaustive),
        pytest.param("exception", 1, id="exception-replacement", marks=pytest.mark.exhaustive),
        pytest.param("exception", 2, id="exception-source", marks=pytest.mark.matrix),
        pytest.param("stop", 1, id="stop-replacement", marks=pytest.mark.exhaustive),
        pytest.param("stop", 2, id="stop-source", marks=pytest.mark.exhaustive),
    ],
)
def test_a_fault_during_the_repair(kind: str, victim: int) -> None:
    """Rank 1 is lost; while rank 2 sends the state to its replacement, one of the two fails as well."""
    faults = ("kill@step=5,rank=1,phase=forward", f"{kind}@step=0,rank={victim},phase=repair")
    result = harness.run(*ARGS, faults=faults)
    harness.assert_same_end(result, *ARGS)
    assert all(incident["steps_lost"] == 0 for incident in result.incidents)


def weights_of(result: harness.Result) -> set[str]:
    assert result.code == 0, result.explain()
    return {line.split("weights")[1] for line in result.out.splitlines() if "weights" in line}


@pytest.mark.parametrize("kind", [pytest.param("kill", marks=pytest.mark.matrix), "corrupt"])
def test_the_only_rank_with_the_newest_step_fails_while_it_gives_it_to_the_others(tmp_path: Path, kind: str) -> None:
    """Rank 0 is a step behind when rank 1 is lost; it keeps what it has until it has all that rank 2 sends."""
    results = []
    for name, faults in (
        ("undisturbed", ()),
        ("disturbed", ("kill@step=9,rank=1,phase=forward", f"{kind}@step=9,rank=2,phase=repair")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        if not faults:
            (folder / "behind").touch()
            (folder / "met").touch()
        results.append(harness.run("behind", str(folder), script=harness.TROUBLE, nproc=3, faults=faults))
    ends = [weights_of(result) for result in results]
    assert ends[0] == ends[1] and len(ends[0]) == 1, results[1].explain()
    assert restarted(results[1]) == ([1, 2] if kind == "kill" else [1]), results[1].explain()
    assert all(incident["steps_lost"] == 0 for incident in results[1].incidents)
    starts = [event["step"] for event in results[1].events if event["event"] == "generation"]
    assert starts == [0, 9, 8], f"step 8 was to be given to all, and is run again: {results[1].explain()}"


@pytest.mark.matrix
@pytest.mark.parametrize("phase", [pytest.param("start", marks=pytest.mark.exhaustive), "forward"])
def test_the_replacement_dies_as_well(phase: str) -> None:
    faults = (
        ("kill@step=5,rank=1,phase=forward,times=2",)
        if phase == "forward"
        else ("kill@step=5,rank=1,phase=forward", "kill@step=1,rank=1,phase=start")
    )
    result = harness.run(*ARGS, faults=faults)
    harness.assert_same_end(result, *ARGS)
    assert restarted(result)[:1] == [1]


def test_a_fault_at_step_0() -> None:
    result = harness.run(*ARGS, faults=("kill@step=0,rank=0,phase=forward",))
    harness.assert_same_end(result, *ARGS)


@pytest.mark.matrix
def test_a_fault_in_the_last_step() -> None:
    last = harness.STEPS - 1
    result = harness.run(*ARGS, faults=(f"kill@step={last},rank=2,phase=optimizer",))
    harness.assert_same_end(result, *ARGS)


@pytest.mark.exhaustive
def test_without_a_warm_spare() -> None:
    result = harness.run(*ARGS, faults=("kill@step=5,rank=1",), ft=("--ft-warm=0",))
    harness.assert_same_end(result, *ARGS)


@pytest.mark.matrix
def test_with_a_parked_spare() -> None:
    result = harness.run(*ARGS, faults=("kill@step=5,rank=1",), ft=("--ft-park",))
    harness.assert_same_end(result, *ARGS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--accumulate=3",), id="accumulation", marks=pytest.mark.exhaustive),
        pytest.param(("--amp",), id="amp"),
        pytest.param(("--workers=2",), id="workers"),
    ],
)
@pytest.mark.matrix
def test_what_scripts_do_in_a_step(options: tuple[str, ...]) -> None:
    args = (*ARGS, *options)
    faults = ("kill@step=5,rank=1,phase=backward", "exception@step=9,rank=2,phase=backward")
    result = harness.run(*args, faults=faults)
    harness.assert_same_end(result, *args)
    assert [incident["restarted"] for incident in result.incidents] == [[1], []], result.explain()


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_twenty_faults_in_two_hundred_steps() -> None:
    args = ("--steps=200", "--samples=8192")
    choose = random.Random(7)
    kinds = ("kill", "kill", "exception", "stop", "uce", "hccl", "exit", "segv")
    phases = ("data", "forward", "backward", "allreduce", "optimizer")
    faults = tuple(
        f"{choose.choice(kinds)}@step={10 * n + 5},rank={choose.randrange(harness.RANKS)},phase={choose.choice(phases)}"
        for n in range(20)
    )
    result = harness.run(*args, faults=faults, timeout=240)
    harness.assert_same_end(result, *args)
    assert len(result.incidents) == 20, result.explain()
    assert all(incident["steps_lost"] == 0 for incident in result.incidents)


@pytest.mark.matrix
def test_a_script_with_a_process_group_of_its_own() -> None:
    results = [
        harness.run("own-group", script=harness.TROUBLE, nproc=3, faults=faults)
        for faults in ((), ("kill@step=9,rank=0,phase=backward", "kill@step=19,rank=2,phase=forward"))
    ]
    ends = [weights_of(result) for result in results]
    assert ends[0] == ends[1] and len(ends[0]) == 1
    assert restarted(results[1]) == [0, 2]
