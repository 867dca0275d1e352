"""The examples' train_start.sh starts one TaskD manager in the job, whichever framework it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "resumable" / "train_start.sh"
PYTHON = """\
#!/bin/sh
echo "$@" >> calls
"""


@pytest.mark.parametrize(
    ("variables", "managers"),
    [
        pytest.param({"RANK": "0"}, 1, id="PyTorch-first"),
        pytest.param({"RANK": "1"}, 0, id="PyTorch-second"),
        pytest.param({"MS_SCHED_HOST": "10.0.0.1"}, 1, id="MindSpore-first"),
        pytest.param({"MS_SCHED_HOST": "10.0.0.2"}, 0, id="MindSpore-second"),
    ],
)
def test_the_first_pod_has_the_manager(tmp_path: Path, variables: dict[str, str], managers: int) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    subprocess.run(
        ["bash", SCRIPT, tmp_path, tmp_path, "train.py"],
        env={"PATH": path, "POD_IP": "10.0.0.1", **variables}, check=True, timeout=60,
    )  # fmt: skip
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count("manager.py") == managers
    assert sum("train.py" in call for call in calls) == 1
