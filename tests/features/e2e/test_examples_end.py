"""Every example ends, with a code that says so, when one of its processes is killed: nobody waits for the dead."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch.harness import ROOT, environment
from tests.ports import free_port

EXAMPLES = ROOT / "examples"
FOR_EVER = "1000000"
LIMIT = 100.0
"""Seconds; the examples' own groups wait for two minutes for who doesn't come."""


def torchrun(script: Path, folder: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    """Without our launcher, which would replace the process."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    return [*run, f"--steps={FOR_EVER}", "--log-every=1", *more], {}


def sharded(script: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    return torchrun(script, folder, "--mesh=1x2")


def pod(script: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The only one of its job."""
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return [sys.executable, str(script), f"--output={folder}", f"--epochs={FOR_EVER}"], job | {
        "MASTER_PORT": str(free_port())
    }


def loop(script: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """As its first lines say it."""
    (line,) = re.findall(r"\(for rank in .*?; exit \$code\)", script.read_text(), re.DOTALL)
    assert "--steps 50 " in line
    line = line.replace("--steps 50 ", f"--steps {FOR_EVER} --dir {folder} ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return ["bash", "-c", line], {"PATH": path, "TTP_PORT": str(free_port()), "TTP_LOG_PATH": str(folder / "logs")}


STARTED: dict[str, tuple[Callable[[Path, Path], tuple[list[str], dict[str, str]]], int]] = {
    "cluster/train.py": (pod, 2),
    "pytorch/train.py": (torchrun, 2),
    "pytorch/train_fsdp.py": (sharded, 2),
    "resumable/train.py": (loop, 4),
}
"""How a user starts it, and as how many processes."""


def processes(run: int) -> list[psutil.Process]:
    """Those that train: nobody is below them."""
    found = [
        each
        for each in psutil.Process(run).children(recursive=True)
        if not any("resource_tracker" in word for word in each.cmdline())
    ]
    above = {each.ppid() for each in found}
    return sorted((each for each in found if each.pid not in above), key=lambda each: each.pid)


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [0, -1], ids=["the first", "the last"])
@pytest.mark.parametrize("name", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("train*.py")))
def test_it_ends_when_one_of_its_processes_is_killed(tmp_path: Path, name: str, victim: int) -> None:
    start, count = STARTED[name]
    command, variables = start(EXAMPLES / name, tmp_path)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        training: list[psutil.Process] = []
        try:
            assert run.stdout is not None
            said = ""
            while "loss" not in (line := run.stdout.readline()):
                said += line
                assert line, said
            training = processes(run.pid)
            assert len(training) == count, training
            training[victim].kill()
            said, _ = run.communicate(timeout=LIMIT)  # to its end: nobody is left who could write
            assert run.returncode > 0, said[-3000:]
        finally:
            run.kill()
            for each in training:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
