"""What a newcomer sees first has to work, and to say so if it doesn't."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from evertrain.cli.demo.features import DEFAULT, FEATURES
from tests.embedded.ordinary import User, ordinary
from tests.embedded.up import evertrain
from tests.launch import harness

PROOFS = {"elastic-training": "the same samples in each step"}
"""Of those that do not end in the same bits."""

TIMED = r"the phases add up to [\d and]+ ms; by the training's own clock its next step was done after [\d and]+ ms"


def demo(*arguments: str, folder: Path = harness.ROOT, user: User | None = None) -> subprocess.CompletedProcess[str]:
    """As somebody else, if not as whoever runs the tests."""
    theirs = {"HOME": str(user.folder), "TMPDIR": str(user.folder), "PATH": user.path} if user else {}
    return subprocess.run(
        [*(user.program if user else evertrain()), "demo", *arguments],
        cwd=folder,
        env=harness.environment() | theirs,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
        check=False,
    )


def assert_shown(text: str) -> None:
    """The parts of the screen: the job and its ranks, its loss, the phases and their sum, the seconds."""
    assert re.search(r"-worker-0 on node-\d: rank 2 \(process \d+\), rank 3 \(process \d+\)", text), text
    assert re.search(r"step +(\d+)/\1  loss \d+\.\d+  4 ranks", text), text
    recorded = text.split("3. What ClusterD recorded.")[1].split("4. The proof")[0]
    for incident in recorded.split("cause ")[1:]:
        *phases, total = [int(ms) for ms in re.findall(r" (-?\d+) ms  ", incident)]
        assert sum(phases) == total > 0, text
    assert re.search(r"\nIt took \d+ s in all\.\n$", text), text


def assert_proved(done: subprocess.CompletedProcess[str], feature: str) -> None:
    assert done.returncode == 0, done.stdout
    assert f"   yes  {PROOFS.get(feature, 'identical to the undisturbed run, bit for bit')}" in done.stdout, done.stdout
    assert re.search(rf"\n   yes  {TIMED}\n", done.stdout), done.stdout
    assert "NO " not in done.stdout, done.stdout
    assert_shown(done.stdout)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "feature", [name if name == DEFAULT else pytest.param(name, marks=pytest.mark.matrix) for name in FEATURES]
)
def test_a_feature_is_shown_and_proved(feature: str) -> None:
    assert_proved(demo(feature), feature)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_links_are_shown_where_pods_share_the_network(tmp_path: Path) -> None:
    """They are loopback addresses then, by which connections are counted."""
    done = demo("link-failover", "--shared-network")
    assert_proved(done, "link-failover")
    counted = re.findall(r"ranks: (\d+) over primary links, (\d+) over backup links", done.stdout)
    assert [(primary != "0", backup != "0") for primary, backup in counted] == [
        (True, False), (False, True), (True, False)
    ], done.stdout  # fmt: skip


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("feature", [DEFAULT, "online-recovery"])
def test_a_demo_of_an_ordinary_user(feature: str) -> None:
    """The second one does something to the network, which is what rights are needed for."""
    with ordinary() as user:
        done = demo(feature, user=user)
        assert_proved(done, feature)
        assert not list(user.folder.glob("evertrain-*")), "nothing of it is left"


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
    command = evertrain("demo", "--keep", tmp_path / "kept")
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
