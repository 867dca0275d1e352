"""The same script under plain python and plain torchrun: it trains to the same bits and says it is not protected."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e import harness

ARGS = ("--steps=6",)


def plain(*command: str) -> harness.Result:
    done = subprocess.run(
        [sys.executable, *command, str(harness.EXAMPLE), *ARGS],
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
