"""A job made by the documents' lines alone: the wheels, the Dockerfile's lines, `manager.py`, the shell lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.taskd.documents import DOCKERFILE_PYTORCH, PACKAGES, START_WITH_MSPTI
from tests.taskd.e2e.led import AT_FAULT, assert_controlled, end_of, exit_of, led, start_of
from tests.taskd.e2e.test_chain import assert_same_end
from tests.taskd.integration.test_wheels import (
    TORCHS,
    add_torch,
    build,
    copy_of_the_sources,
    environment_with_dependencies,
    shell,
)
from tests.taskd.jobs import example_with

CRASH = """
assert "taskd" not in sys.modules
train.FAULTS["crash"] = lambda job: __import__("ctypes").string_at(8)
"""
"""For the example, which knows nothing of TaskD; only what is preloaded sees what it dies of."""
CAUSE = r"rank 3 \(process \d+\) failed: killed by SIGSEGV \(address not mapped\) at 0x8 in the main thread"
MISSING = re.compile(r"ERROR: ld.so: object '.*/libmspti.so' from LD_PRELOAD cannot be preloaded \(.*\): ignored.")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that was made as the documents say."""
    folder = tmp_path_factory.mktemp("documents")
    found = environment_with_dependencies(folder / "environment", *TORCHS)
    run = add_torch(found)
    shell(DOCKERFILE_PYTORCH, folder / "image", found, build(copy_of_the_sources(folder / "sources")))
    assert "\nimport taskd.python.adaptor.patch\nimport os\n" in run.read_text()
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return example_with(CRASH, tmp_path / "crashing.py")


@pytest.mark.matrix
async def test_a_crash_is_recovered_from_in_place(tmp_path: Path, place: Path, script: Path) -> None:
    async with led(tmp_path / "job", script=script, place=place, TASKD_WARM_SPARES=None) as job:
        await job.begins("--fault=6:3:crash")
        await job.recovers_in_place()
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1, 2)), "they kept their processes"
    assert "ld.so" not in "".join(result.outputs)
    assert re.search(CAUSE, result.outputs[1]), result.explain()
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    ordered = ('Mgr orders Agent 1: 209 ["3"]', "Agent 1 confirms 209")
    assert job.story.agent(1) == [*start_of(1), *ordered, end_of(1)]
    assert job.story.lines.count("Agent 1 says STATUS 202 [3]") == 1
    assert_controlled(job, "stop_train {3: 1}", "on_global_rank {3: 1}", "change_strategy recover")


@pytest.mark.matrix
async def test_a_crash_is_recovered_from_with_a_new_pod(tmp_path: Path, place: Path, script: Path) -> None:
    """Where CANN's library, which is to be preloaded, is missing: each program says so, and the other one is loaded."""
    (packages,) = place.glob("lib/python3*/site-packages")
    start = START_WITH_MSPTI.replace(PACKAGES, str(packages))
    async with led(tmp_path / "job", start=start, script=script, place=place, TASKD_WARM_SPARES=None) as job:
        await job.begins("--fault=6:3:crash")
        await job.recovers_with_a_new_pod()
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1)), "they kept their processes"
    assert re.search(CAUSE, result.outputs[1]), result.explain()
    complaints = [line for text in result.outputs for line in text.splitlines() if "ld.so" in line]
    assert complaints and all(MISSING.fullmatch(line) for line in complaints), "\n".join(complaints)
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    assert job.story.agent(1) == [*start_of(1), *exit_of(1, AT_FAULT), *start_of(1), end_of(1)]
    assert_controlled(job, "stop_train {3: 1}", "on_global_rank {2: 1, 3: 1}", "change_strategy recover")
