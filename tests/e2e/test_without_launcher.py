"""The same script under plain python and plain torchrun: it trains to the same bits and says it is not protected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import harness

ARGS = ("--steps=6",)


def plain(*command: str, script: Path = harness.EXAMPLE, args: tuple[str, ...] = ARGS) -> harness.Result:
    done = subprocess.run(
        [sys.executable, *command, str(script), *args],
        capture_output=True, text=True, timeout=90, env=harness.environment(),
    )  # fmt: skip
    return harness.parse(done.returncode, done.stdout, done.stderr, [])


@pytest.mark.matrix
def test_plain_python() -> None:
    result = plain()
    assert result.code == 0, result.explain()
    assert result.err.count("not protected") == 1, result.explain()
    assert result.proof == harness.undisturbed(*ARGS, nproc=1).proof


@pytest.mark.matrix
def test_plain_torchrun() -> None:
    result = plain("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    assert result.code == 0, result.explain()
    assert result.err.count("not protected") == 1, result.explain()
    assert result.proof == harness.undisturbed(*ARGS, nproc=3).proof


@pytest.mark.matrix
def test_checkpoints_of_a_sharded_model_are_complete(tmp_path: Path) -> None:
    script = harness.EXAMPLE.with_name("train_fsdp.py")
    args = ("--steps=4", "--mesh=1x2", f"--checkpoint-dir={tmp_path}", "--checkpoint-every=2")
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = plain(*run, script=script, args=args)
    assert result.code == 0, result.explain()
    assert len(list(tmp_path.glob("*.ckpt"))) == 2, [path.name for path in tmp_path.rglob("*")]
