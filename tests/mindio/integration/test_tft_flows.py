"""Every flow of the callback interface through the example script: real processes, real groups, equal bits at the end.

The weights at the beginning of every step are compared with those of an undisturbed run; so a recovery that lost,
repeated or mixed up anything is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindio_ttp import controller_ttp
from tests.mindio import jobs
from tests.mindio.jobs import WORLD, Job
from tests.ports import free_port

STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    jobs.start_server()
    yield


@pytest.fixture(scope="module")
def undisturbed(_server: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, list]]:
    with jobs.job(tmp_path_factory.mktemp("undisturbed") / "job", steps=STEPS) as job:
        job.start()
        job.wait()
        return job.steps()


def assert_undisturbed(job: Job, undisturbed: dict[int, dict[int, list]], once: bool = True) -> None:
    steps = job.steps()
    assert sorted(steps) == sorted(undisturbed)
    for step, ranks in undisturbed.items():
        for rank, record in ranks.items():
            assert steps[step].get(rank) == record, f"rank {rank}, step {step}"
    results = job.results()
    assert len(results) == WORLD and len({result["weights"] for result in results.values()}) == 1
    assert results[0]["state"] == results[2]["state"] and results[1]["state"] == results[3]["state"]
    if once:
        assert job.times() == WORLD * STEPS, "a step was done twice"


def test_memory_error_without_a_platform(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.job(tmp_path / "job", "--fault", "10:1:uce", steps=STEPS) as job:
        job.start()
        job.wait()
        counts = job.callbacks()
        assert counts == {"stop": 4, "clean": 4, "RT_SEND": 1, "RT_UCE_HIGHLEVEL": 1, "rollback": 4}
        assert job.callbacks_of(3)["RT_SEND"] == 1 and job.callbacks_of(1)["RT_UCE_HIGHLEVEL"] == 1
        assert_undisturbed(job, undisturbed)


def test_a_memory_error_that_only_the_platform_knows_of(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.led_job(tmp_path / "job", "--fault", "10:2:gate", steps=STEPS) as (job, platform):
        gate = job.gate("gate")
        job.start()
        jobs.until(lambda: len(job.steps().get(10, {})) == WORLD, "step 10")
        assert controller_ttp.tft_notify_controller_stop_train({1: 0}, "stop") == 0
        assert platform.next("report_fault_ranks") == ({1: 0}, {1: ""})
        assert platform.next("report_stop_complete")[0] == 0
        assert "retry" in platform.choose({1: 0}, "retry")
        gate.set()
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "retry")
        job.wait()
        assert job.callbacks() == {"stop": 4, "clean": 4, "RT_SEND": 1, "RT_UCE_HIGHLEVEL": 1, "rollback": 4}
        assert job.callbacks_of(3)["RT_SEND"] == 1 and job.callbacks_of(1)["RT_UCE_HIGHLEVEL"] == 1
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
def test_network_fault_needs_no_repair(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.job(tmp_path / "job", "--fault", "10:2:network", steps=STEPS) as job:
        job.start()
        job.wait()
        assert job.callbacks() == {"stop": 4, "clean": 4, "rollback": 4}
        assert_undisturbed(job, undisturbed)


def test_a_killed_process_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.led_job(tmp_path / "job", "--fault", "10:3:kill", steps=STEPS) as (job, platform):
        job.start()
        offered = platform.agree({3: 1}, "recover")
        assert offered == ["exit", "dump", "recover", "downgrade", "upgrade"]
        job.start(3)
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "recover")
        job.wait()
        counts = {"stop": 3, "clean": 3, "rebuild_group": 4, "RT_SEND": 1, "RT_RECV_REPAIR": 1, "rollback": 4}
        assert job.callbacks() == counts
        assert job.callbacks_of(1)["RT_SEND"] == 1
        assert_undisturbed(job, undisturbed)


def test_a_process_killed_in_an_update_that_others_have_done(tmp_path: Path, undisturbed: Any) -> None:
    """The step counts: the killed one's share is in it, so it is on record, although it died before that."""
    with jobs.led_job(tmp_path / "job", steps=STEPS) as (job, platform):
        job.environment["TEST_FAULT_IN_UPDATE"] = "11"
        job.start()
        platform.agree({3: 1}, "recover")
        job.start(3)
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "recover")
        job.wait()
        assert (tmp_path / "job" / "faulted.1").exists() and (tmp_path / "job" / "faulted.3").exists()
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
def test_dump_when_nothing_else_is_possible(tmp_path: Path, undisturbed: Any) -> None:
    """Without a platform nobody replaces a process: one copy of everything is saved, and the next start goes on."""
    with jobs.job(tmp_path / "job", "--fault", "10:3:kill", steps=STEPS) as job:
        job.start()
        job.wait(codes=(2, -9))
        assert job.callbacks() == {"save": 2, "rename": 1}
        assert job.callbacks_of(0)["save"] == 1 and job.callbacks_of(1)["save"] == 1
        assert job.callbacks_of(1)["rename"] == 1, "the first saver that is not rank 0"
        assert (tmp_path / "job" / "iter_0000010").is_dir()
        assert not list((tmp_path / "job").glob("*_tmp"))
        assert (tmp_path / "job" / "latest_checkpointed_iteration.txt").read_text() == "10"
        job.arguments = [argument for argument in job.arguments if argument not in ("--fault", "10:3:kill")]
        job.start()
        job.wait()
        assert_undisturbed(job, undisturbed)


@pytest.mark.parametrize(
    ("dies", "lost", "savers"),
    [
        ("1:save", 2, {0: 2, 3: 1}),
        pytest.param("1:rename", 2, {0: 2, 1: 1, 3: 1}, marks=pytest.mark.matrix),
        pytest.param("0:save", 3, {1: 2, 2: 1}, marks=pytest.mark.matrix),
    ],
)
def test_a_rank_is_lost_while_it_saves(
    dies: str, lost: int, savers: dict[int, int], tmp_path: Path, undisturbed: Any
) -> None:
    """Another holder of its shard does it, together with the others; also if the controller was in that process."""
    with jobs.job(tmp_path / "job", "--fault", f"10:{lost}:kill", steps=STEPS) as job:
        job.start(TEST_DIES_IN=dies, TEST_AWAIT_STANDBYS="1")
        job.wait(codes=(2, -9))
        assert {rank: n for rank in range(WORLD) if (n := job.callbacks_of(rank)["save"])} == savers
        assert (tmp_path / "job" / "latest_checkpointed_iteration.txt").read_text() == "10"
        assert not list((tmp_path / "job").glob("*_tmp"))
        job.arguments = [argument for argument in job.arguments if argument not in ("--fault", f"10:{lost}:kill")]
        job.start()
        job.wait()
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
def test_requested_dump(tmp_path: Path) -> None:
    with jobs.led_job(tmp_path / "job", "--fault", "10:0:gate", steps=STEPS) as (job, platform):
        gate = job.gate("gate")
        job.start()
        jobs.until(lambda: job.steps().get(10, {}).keys() >= {0, 1, 2, 3}, "step 10")
        assert controller_ttp.tft_notify_controller_dump() == 0
        assert platform.next("report_result") == (0, "do dump success", {}, "dump")
        gate.set()
        job.wait(codes=(2,))
        assert job.callbacks() == {"save": 2, "rename": 1}


def assert_halted(job: Job) -> None:
    assert max(job.steps()) == 11 and len(job.steps()[11]) == WORLD


def test_pause_and_continue(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.led_job(tmp_path / "job", "--fault", "10:2:gate", steps=STEPS) as (job, platform):
        gate = job.gate("gate")
        job.start()
        jobs.until(lambda: len(job.steps().get(10, {})) == WORLD, "step 10")
        assert controller_ttp.tft_notify_controller_stop_train({}, "pause", 30) == 0
        job.wait_told_to_halt(11)
        gate.set()
        assert platform.next("report_stop_complete")[0] == 0
        assert_halted(job)
        assert set(job.callbacks()) == {"stream_sync"}
        assert controller_ttp.tft_notify_controller_change_strategy("continue") == 0
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "continue")
        job.wait()
        assert_undisturbed(job, undisturbed)


def test_hot_switch(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.led_job(tmp_path / "job", "--fault", "10:1:gate", steps=STEPS) as (job, platform):
        gate = job.gate("gate")
        job.start()
        jobs.until(lambda: len(job.steps().get(10, {})) == WORLD, "step 10")
        assert controller_ttp.tft_notify_controller_prepare_action("hot switch", {2: 1}) == 0
        old = job.processes[2]
        job.start(2)
        job.wait_told_to_halt(11)
        gate.set()
        assert platform.next("report_strategies") == ({}, ["migration"])
        assert_halted(job)
        old.kill()  # the platform deletes the old pod
        assert controller_ttp.tft_notify_controller_change_strategy("migration") == 0
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "migration")
        job.wait()
        counts = job.callbacks()
        assert counts.pop("stream_sync") == 4
        assert counts == {"rebuild_group": 4, "RT_SEND": 1, "RT_RECV_REPAIR": 1, "rollback": 4}
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
def test_a_failed_clean_degrades_retry_to_recover(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.led_job(tmp_path / "job", "--fault", "10:1:uce", steps=STEPS) as (job, platform):
        job.environment["TEST_CLEAN_FAILS_ON"] = "1"
        job.start()
        offered = platform.agree({1: 0}, "retry")
        assert offered == ["exit", "dump", "retry", "recover"]
        code, _, errors, strategy = platform.next("report_result")
        assert (code, errors, strategy) == (405, {1: 1}, "retry")
        assert "recover" in platform.choose({1: 1}, "recover")
        job.processes[1].kill()
        job.processes[1].join()
        job.start(1)
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "recover")
        job.wait()
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
@pytest.mark.parametrize("second", ["uce-together", "uce-stopped"])
def test_without_a_copy_all_load_the_last_checkpoint(second: str, tmp_path: Path, undisturbed: Any) -> None:
    """The two that hold the same shard lose it in the same step, also if one says so only when it is stopped for the
    other's sake."""
    faults = ("--fault", "13:1:uce-together", "--fault", f"13:3:{second}", "--checkpoint-every", "5")
    with jobs.job(tmp_path / "job", *faults, steps=STEPS) as job:
        job.start()
        job.wait()
        counts = job.callbacks()
        assert (counts["RT_LOAD_CKPT"], counts["RT_LOAD_REBUILD"], counts["rollback"]) == (2, 2, 4)
        assert_undisturbed(job, undisturbed, once=False)


@pytest.mark.matrix
def test_a_memory_error_of_a_rank_that_is_stopped_for_a_broken_network(tmp_path: Path, undisturbed: Any) -> None:
    """The network's fault alone would need no repair."""
    faults = ("--fault", "13:0:network-together", "--fault", "13:3:uce-stopped")
    with jobs.job(tmp_path / "job", *faults, steps=STEPS) as job:
        job.start()
        job.wait()
        counts = {"stop": 4, "clean": 4, "RT_SEND": 2, "RT_RECV_REPAIR": 1, "RT_UCE_HIGHLEVEL": 1, "rollback": 4}
        assert job.callbacks() == counts
        assert job.callbacks_of(1)["RT_SEND"] == job.callbacks_of(3)["RT_UCE_HIGHLEVEL"] == 1
        assert_undisturbed(job, undisturbed)


def test_scale_in_and_out(tmp_path: Path, undisturbed: Any) -> None:
    arguments = ("--fault", "10:3:kill", "--fault", "20:0:gate")
    with jobs.led_job(tmp_path / "job", *arguments, steps=STEPS) as (job, platform):
        gate = job.gate("gate")
        job.start()
        assert "downgrade" in platform.agree({3: 1}, "downgrade", '{"scale-in-strategy": "DP"}')
        code, _, isolated, strategy = platform.next("report_result")
        assert (code, isolated, strategy) == (201, {3: 1}, "downgrade")
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "downgrade")
        assert job.callbacks() == {"stop": 3, "clean": 3, "downgrade_rebuild": 3, "rollback": 3}
        jobs.until(lambda: len(job.steps().get(20, {})) == WORLD - 1, "step 20 with three ranks")
        job.start(3)
        assert controller_ttp.tft_notify_controller_change_strategy("upgrade", '{"scale-out-strategy": "DP"}') == 0
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "upgrade")
        gate.set()
        job.wait()
        steps = job.steps()
        assert sorted(steps) == sorted(undisturbed)
        for step, ranks in steps.items():
            samples = sorted(sample for record in ranks.values() for sample in record[0])
            assert samples == sorted(sample for record in undisturbed[step].values() for sample in record[0])
            assert len(ranks) == (WORLD - 1 if 10 < step <= 20 else WORLD)
            loss, expected = ranks[0][1], undisturbed[step][0][1]
            assert abs(loss - expected) <= 1e-4 * max(1.0, abs(expected)), f"step {step}"
        assert len({result["weights"] for result in job.results().values()}) == 1


def test_a_standby_goes_on_when_the_controller_is_lost(tmp_path: Path, undisturbed: Any) -> None:
    faults = ("--fault", "10:0:lose-controller", "--fault", "20:1:uce", "--fault", "10:3:gate")
    with jobs.job(tmp_path / "job", *faults, steps=STEPS) as job:
        gate = job.gate("gate")
        job.start(TEST_AWAIT_STANDBYS="1")
        job.wait_at_another_controller()
        gate.set()
        job.wait()
        assert job.callbacks() == {"stop": 4, "clean": 4, "RT_SEND": 1, "RT_UCE_HIGHLEVEL": 1, "rollback": 4}
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
def test_a_standby_saves_the_job_when_the_controllers_process_is_killed(tmp_path: Path, undisturbed: Any) -> None:
    with jobs.job(tmp_path / "job", "--fault", "20:0:kill", steps=STEPS) as job:
        job.start(TEST_AWAIT_STANDBYS="1")
        job.wait(codes=(2, -9))
        assert job.callbacks() == {"save": 2, "rename": 1}
        assert job.callbacks_of(2)["save"] == 1 and job.callbacks_of(1)["save"] == 1
        job.arguments = [argument for argument in job.arguments if argument not in ("--fault", "20:0:kill")]
        job.start()
        job.wait()
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
def test_connections_that_break_although_nobody_died(tmp_path: Path, undisturbed: Any) -> None:
    """Nobody reports a fault at first: the collectives wait for the controller to name one, then they do."""
    with jobs.job(tmp_path / "job", "--fault", "10:2:cut", steps=STEPS) as job:
        job.start(TEST_PATIENCE="0.5")
        job.wait()
        counts = job.callbacks()
        assert set(counts) == {"stop", "clean", "rollback"} and counts["rollback"] >= 4
        assert_undisturbed(job, undisturbed)


@pytest.mark.matrix
@pytest.mark.timeout(400)  # eight processes that all import torch
def test_the_example_as_a_user_runs_it_twice(tmp_path: Path, undisturbed: Any) -> None:
    """Plain processes; the second run in the same directory has new connections and the checkpoint of the first."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1",
                 "TTP_LOG_PATH": str(tmp_path / "logs"), "TTP_PORT": str(free_port())}  # fmt: skip
    weights = []
    for steps in (20, STEPS):
        command = [sys.executable, "-W", "ignore", str(jobs.EXAMPLE), "--dir", str(tmp_path / "job"),
                   "--steps", str(steps), "--checkpoint-every", "10", "--fault", "14:1:uce"]  # fmt: skip
        ranks = [
            subprocess.Popen(command, env={**variables, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(WORLD)
        ]
        try:
            results = [json.loads(rank.communicate(timeout=180)[0].splitlines()[-1]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * WORLD
        weights.append({result["weights"] for result in results})
    assert weights[0] == {undisturbed[21][0][2]} and len(weights[1]) == 1
