"""A script that is broken, under torchrun and a manager without ClusterD: the job ends at once and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.taskd.jobs import EXAMPLE, Result, TwoPods

TRAIN = f"""\
import os, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import train
"""
SYNTAX = "this is no Python\n"
BEFORE_MINDIO = "import sys, torch\nsys.exit('no data')\n"
ONE_RANK = TRAIN + "if os.environ['RANK'] == '3':\n    raise OSError('no data')\ntrain.main()\n"
"""The others have met the controller, and wait."""
PREPARED = TRAIN + "def fail(job):\n    raise OSError('no data')\ntrain.Job.inject = fail\ntrain.main()\n"
"""In the first step of the training function, by an error that MindIO does not handle."""
FIRST_STEP = TRAIN + "def fail(job):\n    raise RuntimeError('no such layer')\ntrain.Job.inject = fail\ntrain.main()\n"
"""By one that it does."""


def run(folder: Path, text: str, *args: str) -> tuple[TwoPods, Result]:
    script = folder / "broken.py"
    script.write_text(text)
    pods = TwoPods(folder / "job", script=script)
    return pods, pods.run("--steps=4", *args)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "words", "restarts"),
    [
        *(
            pytest.param(
                text,
                "ended before any rank came to a training of Evertrain (exit: exited with code 1)",
                0,
                marks=pytest.mark.exhaustive,
            )
            for text in (SYNTAX, BEFORE_MINDIO)
        ),
        (ONE_RANK, "rank 3 ended before its first step (exit: exited with code 1)", 0),
        pytest.param(PREPARED, "the same error at step 0 again and again", 1, marks=pytest.mark.exhaustive),
        (FIRST_STEP, "the same error at step 0 again and again", 1),
    ],
    ids=["syntax", "before MindIO", "one rank", "prepared", "first step"],
)
def test_a_broken_script_ends_the_job(tmp_path: Path, text: str, words: str, restarts: int) -> None:
    pods, result = run(tmp_path, text)
    assert result.codes == [1, 1], result.explain()
    for output in result.outputs:
        assert "taskd: the agent exits: rank " in output and words in output, result.explain()
        assert "an error of the script" in output
    assert pods.log(1).count("receive 208") == restarts
