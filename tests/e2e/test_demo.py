"""What a newcomer sees first has to work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e import harness


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evertrain.cli.main", "demo", *arguments],
        cwd=harness.ROOT,
        env=harness.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.matrix
def test_the_demo_kills_a_rank_and_ends_in_the_same_bits() -> None:
    done = demo("--steps=80", "--kill-rank=0")
    assert done.returncode == 0, done.stdout
    assert "kill -9" in done.stdout and "identical: yes" in done.stdout, done.stdout
    assert "recover-in-place" in done.stdout, done.stdout
    assert "steps lost: 0; processes restarted: rank 0" in done.stdout, done.stdout
    for phase in ("detect", "stop", "rebuild", "repair", "resume", "total"):
        assert f"   {phase}" in done.stdout, done.stdout
