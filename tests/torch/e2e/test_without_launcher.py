"""The same script under plain python and plain torchrun: it trains to the same bits and says it is not protected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import harness

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


OWN_GROUP = """
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evertrain.torch import Training

dist.init_process_group(*sys.argv[1:])
data = TensorDataset(torch.arange(8.0).view(8, 1))
sampler = DistributedSampler(data)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = Training(model=model, optimizer=optimizer, sampler=sampler)


@training.resilient
def train():
    for step, (batch,) in training.steps(DataLoader(data, 2, sampler=sampler), until=3):
        training.model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train()
print("trained", training.step, dist.get_world_size())
"""
"""As getting-started has it: a script for torchrun that makes its own group first thing."""


@pytest.mark.parametrize("arguments", [(), ("gloo", "env://")])
def test_plain_python_with_a_group_of_the_scripts_own(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_GROUP)
    result = plain(script=script, args=arguments)
    assert (result.code, result.out) == (0, "trained 3 1\n"), result.explain()
    assert result.err.count("group of this process alone") == 1, result.explain()
    assert result.err.count("not protected") == 1, result.explain()


def test_a_script_that_names_other_processes_is_taken_at_its_word(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_GROUP)
    result = plain(script=script, args=("gloo", f"file://{tmp_path}/meet"))
    assert result.code == 1 and "rank" in result.err.splitlines()[-1], result.explain()
    assert "alone" not in result.err, result.explain()


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
