"""A job made by the documents' lines alone: the wheels, the Dockerfile's lines, `manager.py`, the shell lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.taskd.documents import DOCKERFILE_PYTORCH
from tests.taskd.e2e.led import end_of, led, start_of
from tests.taskd.e2e.test_chain import assert_same_end
from tests.taskd.integration.test_wheels import (
    TORCHS,
    add_torch,
    build,
    copy_of_the_sources,
    environment_with_dependencies,
    shell,
)
from tests.taskd.jobs import EXAMPLE

CRASHING = f"""\
import ctypes, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import train

assert "taskd" not in sys.modules
train.FAULTS["crash"] = lambda job: ctypes.string_at(8)
train.main()
"""
"""The example with one more kind of fault. It knows nothing of TaskD; only what is preloaded sees what it dies of."""


@pytest.mark.matrix
async def test_a_crash_is_recovered_from_in_place(tmp_path: Path) -> None:
    place = environment_with_dependencies(tmp_path / "environment", *TORCHS)
    run = add_torch(place)
    shell(DOCKERFILE_PYTORCH, tmp_path / "image", place, build(copy_of_the_sources(tmp_path / "sources")))
    assert "\nimport taskd.python.adaptor.patch\nimport os\n" in run.read_text()
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    async with led(tmp_path / "job", script=script, place=place) as job:
        await job.begins("--fault=6:3:crash")
        await job.recovers_in_place()
        result = await job.ends()
    assert_same_end(result)
    assert all(len({pid for _, pid in result.events[rank]}) == 1 for rank in (0, 1, 2)), "they kept their processes"
    assert "ld.so" not in "".join(result.outputs)
    words = r"rank 3 \(process \d+\) failed: killed by SIGSEGV \(address not mapped\) at 0x8 in the main thread"
    assert re.search(words, result.outputs[1]), result.explain()
    assert job.story.of("Agent 0") == [*start_of(0), end_of(0)]
    ordered = ('Mgr orders Agent 1: 209 ["3"]', "Agent 1 confirms 209")
    assert job.story.agent(1) == [*start_of(1), *ordered, end_of(1)]
    assert job.story.lines.count("Agent 1 says STATUS 202 [3]") == 1
