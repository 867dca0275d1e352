"""Processes killed at any moment, one after the other, and while others are being replaced."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindio_ttp import controller_ttp
from tests.mindio import jobs
from tests.mindio.jobs import WORLD, Job, Platform

STEPS, KILLS = 400, 8
pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    jobs.start_server()
    yield


@pytest.fixture(scope="module")
def weights(_server: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    with jobs.job(tmp_path_factory.mktemp("undisturbed") / "job", steps=STEPS) as job:
        job.start()
        job.wait()
        return job.results()[0]["weights"]


def kill(job: Job, rank: int) -> None:
    job.processes[rank].kill()
    job.processes[rank].join()


def replace_what_is_reported(job: Job, platform: Platform, faults: dict[int, int]) -> None:
    platform.agree(faults, "recover")
    for rank in faults:
        job.start(rank)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_kills_at_any_moment(tmp_path: Path, weights: str, seed: int) -> None:
    chance = random.Random(seed)
    with jobs.led_job(tmp_path / "job", steps=STEPS) as (job, platform):
        job.allow(STEPS - KILLS)  # however late this test is with its next kill, there is somebody to be killed
        job.start()
        jobs.until(lambda: len(job.steps()) > 10, "the first steps")
        for left in reversed(range(KILLS)):
            time.sleep(chance.uniform(0.0, 0.1))
            victim = chance.randrange(WORLD)
            kill(job, victim)
            job.allow(STEPS - left)  # a step further: a recovery has succeeded when there is one
            replace_what_is_reported(job, platform, {victim: 1})
            assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "recover"), job.story()
        job.wait()
        assert {result["weights"] for result in job.results().values()} == {weights}
        steps = job.steps()
        assert sorted(steps) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "moment", ["before it joins", pytest.param("rebuild_group", marks=pytest.mark.exhaustive), "repair", "another rank"]
)
def test_a_second_loss_during_a_recovery(tmp_path: Path, weights: str, moment: str) -> None:
    with jobs.led_job(tmp_path / "job", steps=STEPS) as (job, platform):
        job.allow(STEPS // 2)
        job.start()
        jobs.until(lambda: len(job.steps()) > 10, "the first steps")
        kill(job, 3)
        job.allow(STEPS)
        platform.agree({3: 1}, "recover")
        platform.wait_state("REPAIR")
        if moment == "another rank":
            kill(job, 2)  # holds the other shard than rank 3
            assert platform.next("report_fault_ranks")[0] == {2: 1}
            job.start(2, 3)
        else:
            if moment == "before it joins":
                job.start(3)
            else:  # it joins, and gets no further than this callback
                job.start(3, TEST_HOLDS_IN=moment)
                jobs.until(lambda: job.callbacks_of(3)["held"], "the replacement to join")
            kill(job, 3)
            job.start(3)
        while (report := platform.any())[0] == "report_fault_ranks":
            pass
        assert report == ("report_result", 0, "Mindio do repair operation ok", {}, "recover"), job.story()
        job.wait()
        assert {result["weights"] for result in job.results().values()} == {weights}


def test_a_dump_of_a_job_whose_ranks_were_killed_together(tmp_path: Path) -> None:
    with jobs.led_job(tmp_path / "job", steps=STEPS) as (job, platform):
        job.allow(STEPS // 2)
        job.start()
        jobs.until(lambda: len(job.steps()) > 10, "the first steps")
        for rank in (0, 1):
            job.processes[rank].kill()
        platform.next("report_fault_ranks")
        assert controller_ttp.tft_notify_controller_stop_train({}, "stop") == 0
        assert platform.next("report_stop_complete")[0] == 0
        assert controller_ttp.tft_notify_controller_on_global_rank({0: 1, 1: 1}, 30) == 0
        while (report := platform.any())[0] == "report_fault_ranks":  # of the one that was missed later
            pass
        assert report[0] == "report_strategies" and "dump" in report[2]
        assert controller_ttp.tft_notify_controller_change_strategy("dump") == 0
        while (report := platform.any())[0] == "report_fault_ranks":
            pass
        assert report == ("report_result", 0, "do dump success", {}, "dump")
        job.wait(codes=(2, -9))
        assert job.callbacks_of(2)["save"] == 1 and job.callbacks_of(3)["save"] == 1
