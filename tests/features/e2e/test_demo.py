"""What a newcomer sees first has to work, and to say so if it doesn't."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evertrain.cli.demo.features import FEATURES
from tests.launch import harness

LONGER = ("link-failover", "elastic-training")
"""A minute each. What the others show has whole tests of its own: test_clusterd_* and test_features_*."""
PROOFS = {"elastic-training": "the same samples in each step"}
"""Of those that do not end in the same bits."""


def demo(*arguments: str, folder: Path = harness.ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evertrain.cli.main", "demo", *arguments],
        cwd=folder,
        env=harness.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
        check=False,
    )


def assert_shown(text: str) -> None:
    """The parts of the screen: the job and its ranks, its loss, the phases and their sum."""
    assert re.search(r"-worker-0 on node-\d: rank 2 \(process \d+\), rank 3 \(process \d+\)", text), text
    assert re.search(r"step +(\d+)/\1  loss \d+\.\d+  4 ranks", text), text
    recorded = text.split("3. What ClusterD recorded.")[1].split("4. The proof")[0]
    for incident in recorded.split("cause ")[1:]:
        *phases, total = [int(ms) for ms in re.findall(r" (-?\d+) ms  ", incident)]
        assert sum(phases) == total > 0, text


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("feature", ["in-place", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in LONGER)])
def test_a_feature_is_shown_and_proved(feature: str) -> None:
    done = demo(feature)
    assert done.returncode == 0, done.stdout
    assert f"   yes  {PROOFS.get(feature, 'identical to the undisturbed run, bit for bit')}" in done.stdout, done.stdout
    assert "NO " not in done.stdout, done.stdout
    assert_shown(done.stdout)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_demo_that_falls_short_says_so(tmp_path: Path) -> None:
    """The job asks for something else than what is to be shown."""
    shutil.copytree(harness.ROOT / "examples" / "resumable", tmp_path / "examples" / "resumable")
    file = tmp_path / "examples" / "resumable" / FEATURES["in-place"].example
    file.write_text(file.read_text().replace('"recover-in-place"', '"recover"'))
    done = demo("in-place", folder=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "NO   ClusterD decided for recover-in-place" in done.stdout, done.stdout
    assert "NO   both pods are still the same" in done.stdout, done.stdout
    assert "yes  identical to the undisturbed run, bit for bit" in done.stdout, done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evertrain.cli.main", "demo", "--keep", str(tmp_path / "kept")]
    with subprocess.Popen(
        command, cwd=harness.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            assert run.stdout is not None
            seen = []
            for line in run.stdout:
                seen.append(line)
                if line.startswith("1. For comparison"):
                    run.send_signal(number)
            assert run.wait() == 130, seen
        finally:
            run.kill()
    assert "interrupted; everything has been ended" in seen[-1], seen


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_the_demo_of_launch_kills_a_rank_and_ends_in_the_same_bits() -> None:
    done = demo("launch", "--steps=80", "--kill-rank=0")
    assert done.returncode == 0, done.stdout
    assert "kill -9" in done.stdout and "identical: yes" in done.stdout, done.stdout
    assert "recover-in-place" in done.stdout, done.stdout
    assert "steps lost: 0; processes restarted: rank 0" in done.stdout, done.stdout
    for phase in ("detect", "stop", "rebuild", "repair", "resume", "total"):
        assert f"   {phase}" in done.stdout, done.stdout
