"""What the patch of torchrun says about a torch that it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("job", [{}, {"MINDX_TASK_ID": "job-1"}])
def test_a_torch_without_a_name_that_is_needed_is_named_too(tmp_path: Path, job: dict[str, str]) -> None:
    """As in 2.3, where the first import of it fails."""
    program = tmp_path / "p.py"
    program.write_text(
        "import torch.distributed.elastic.rendezvous as r; del r.RendezvousInfo\n"
        "import torch; torch.__version__ = '2.3.1'\n"
        "import taskd.python.adaptor.patch; print('went on')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "MINDX_TASK_ID"} | job
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TASKD_LOG_PATH": str(tmp_path / "log")}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=100)
    said = "TaskD knows torch 2.4 to 2.13; this is 2.3.1, and it lacks a name"
    (line,) = (line for line in done.stderr.splitlines() if said in line)
    assert "RendezvousInfo" in line and line.split(":")[0].endswith("UnknownTorch" if job else "taskd")
    assert (done.returncode, done.stdout) == ((1, "") if job else (0, "went on\n"))
