"""Runs whole jobs: the launcher with real processes on this machine, and reads what they left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.once import once

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pytorch" / "train.py"
TROUBLE = Path(__file__).parent / "scripts" / "trouble.py"
RANKS = 4
STEPS = 14
EVERY = 5
BOUND = "5"
"""Generous: a rank that a busy machine starves is not taken for a hanging one."""
DETECTING = "2"
"""For jobs in which something hangs, and has to be noticed."""
HANGING = ("hang", "gil")


@dataclass
class Result:
    code: int
    out: str
    err: str
    events: list[dict[str, Any]]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "incident"]

    @property
    def proof(self) -> dict[int, tuple[Any, ...]]:
        """What must be equal to an undisturbed run, by rank."""
        return {rank: (line["step"], line["sha256"], line["samples_sha256"]) for rank, line in self.ranks.items()}

    def explain(self) -> str:
        events = "\n".join(json.dumps(event) for event in self.events)
        said = f"--- stdout\n{self.out[-6000:]}\n--- stderr\n{self.err[-8000:]}"
        return f"exit code {self.code}\n{said}\n--- events\n{events[-20000:]}"


def command(
    *script_args: str, script: str | Path = EXAMPLE, nproc: int = RANKS, ft: tuple[str, ...] = (), bound: str = BOUND
) -> list[str]:
    return [
        sys.executable, "-m", "evertrain.cli.main", "launch", "--standalone", f"--nproc-per-node={nproc}",
        f"--ft-bound={bound}", *ft, str(script), *script_args,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    # The tests of one run share two cores; a rank must not take both.
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def run(
    *script_args: str,
    script: str | Path = EXAMPLE,
    nproc: int = RANKS,
    ft: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
    timeout: float = 180,
) -> Result:
    """Run a job to its end. A run that takes longer than the timeout is a hang: the launcher is killed and it fails."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.jsonl"
        bound = DETECTING if any(fault.startswith(HANGING) for fault in faults) else BOUND
        flags = (*ft, f"--ft-events={events}", *(f"--ft-fault={fault}" for fault in faults))
        process = subprocess.Popen(
            command(*script_args, script=script, nproc=nproc, ft=flags, bound=bound),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"the job hung\n--- stdout\n{out[-6000:]}\n--- stderr\n{err[-8000:]}") from None
        lines = events.read_text().splitlines() if events.exists() else []
        return parse(process.returncode, out, err, [json.loads(line) for line in lines])


def parse(code: int, out: str, err: str, events: list[dict[str, Any]]) -> Result:
    result = Result(code, out, err, events)
    for match in re.finditer(r'\{"rank".*?\}', out):
        line = json.loads(match.group())
        result.ranks[line["rank"]] = line
    return result


@once
def undisturbed(*script_args: str, nproc: int = RANKS) -> Result:
    """The same run without faults; made once for each set of arguments."""
    result = run(*script_args, nproc=nproc)
    assert result.code == 0, result.explain()
    assert set(result.ranks) == set(range(nproc)), result.explain()
    assert len({proof for proof in result.proof.values()}) == 1, result.explain()
    assert not result.incidents, result.explain()
    return result


def assert_same_end(result: Result, *script_args: str, nproc: int = RANKS) -> None:
    assert result.code == 0, result.explain()
    assert result.proof == undisturbed(*script_args, nproc=nproc).proof, result.explain()
