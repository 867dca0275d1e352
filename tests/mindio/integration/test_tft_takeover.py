"""The controller is lost in the middle of a recovery: a standby does it anew, with equal bits at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mindio import jobs
from tests.mindio.jobs import WORLD

STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    jobs.start_server()
    yield


@pytest.fixture(scope="module")
def undisturbed(_server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    with jobs.job(tmp_path_factory.mktemp("undisturbed") / "job", steps=STEPS) as job:
        job.start()
        job.wait()
        return job.steps(), {rank: result["weights"] for rank, result in job.results().items()}


@pytest.mark.parametrize(
    "moment",
    [
        "repair",
        pytest.param("stop", marks=pytest.mark.matrix),
        pytest.param("clean", marks=pytest.mark.exhaustive),
        pytest.param("rollback", marks=pytest.mark.matrix),
    ],
)
def test_a_recovery_in_flight_is_finished_by_the_standby(
    moment: str, tmp_path: Path, undisturbed: tuple[Any, Any]
) -> None:
    # Rank 2 gets its state back from rank 0, in whose process the controller is.
    with jobs.job(tmp_path / "job", "--fault", "10:2:uce", steps=STEPS) as job:
        job.start(TEST_LOSE_CONTROLLER_IN=moment, TEST_AWAIT_STANDBYS="1")
        job.wait()
        logs = [file.read_text() for file in (tmp_path / "job" / "logs").iterdir()]
        assert sum("takes over" in log for log in logs) == 1
        assert job.callbacks()["rollback"] >= WORLD
        assert job.steps() == undisturbed[0]
        assert job.times() == WORLD * STEPS, "a step was done twice"
        assert {rank: result["weights"] for rank, result in job.results().items()} == undisturbed[1]


def test_who_loses_a_peer_and_the_controller_waits_for_the_next_controller(
    tmp_path: Path, undisturbed: tuple[Any, Any]
) -> None:
    """As with the first pod of a job: a broken collective is no fault of the network because nobody finds the cause."""
    with jobs.led_job(tmp_path / "job", steps=STEPS) as (job, _):
        job.environment["TEST_PATIENCE"] = "3"
        job.allow(10)
        job.start()
        jobs.until(lambda: len(job.steps().get(10, {})) == WORLD, "step 10")
        jobs.lose_controller()
        job.processes[3].kill()
        job.allow(STEPS)
        time.sleep(5)  # longer than the patience
        platform = jobs.Platform(job.port)
        platform.agree({3: 1}, "recover")
        job.start(3)
        assert platform.next("report_result") == (0, "Mindio do repair operation ok", {}, "recover")
        job.wait()
        assert job.steps() == undisturbed[0]
        assert job.times() == WORLD * STEPS, "a step was done twice"
