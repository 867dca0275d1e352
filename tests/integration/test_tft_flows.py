"""Every flow of the callback interface through the example script: real processes, real groups, equal bits at the end.

The weights at the beginning of every step are compared with those of an undisturbed run; so a recovery that lost,
repeated or mixed up anything is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mindio_jobs
from mindio_jobs import WORLD, Job
from mindio_ttp import controller_ttp

STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    mindio_jobs.start_server()
    yield


@pytest.fixture(scope="module")
def undisturbed(_server: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, list]]:
    with mindio_jobs.job(tmp_path_factory.mktemp("undisturbed") / "job", steps=STEPS) as job:
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
    with mindio_jobs.job(tmp_path / "job", "--fault", "10:1:uce", steps=STEPS) as job:
        job.start()
        job.wait()
        counts = job.callbacks()
        assert counts == {"stop": 4, "clean": 4, "RT_SEND": 1, "RT_UCE_HIGHLEVEL": 1, "rollback": 4}
        assert job.callbacks_of(3)["RT_SEND"] == 1 and job.callbacks_of(1)["RT_UCE_HIGHLEVEL"] == 1
        assert_undisturbed(job, undisturbed)


def test_network_fault_needs_no_repair(tmp_path: Path, undisturbed: Any) -> None:
    with mindio_jobs.job(tmp_path / "job", "--fault", "10:2:network", steps=STEPS) as job:
        job.start()
        job.wait()
        assert job.callbacks() == {"stop": 4, "clean": 4, "rollback": 4}
        assert_undisturbed(job, undisturbed)


def test_a_killed_process_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    with mindio_jobs.led_job(tmp_path / "job", "--fault", "10:3:kill", steps=STEPS) as (job, platform):
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
