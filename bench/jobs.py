"""Jobs of the toy workload, started, disturbed and read by the benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
TOY = Path(__file__).with_name("toy.py")
_PATIENCE = 120.0


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


class Stuck(Exception):
    """The job did not do what was waited for."""


@dataclass
class Recovery:
    seconds: float
    """From the fault to the end of the first new step on the slowest rank."""
    repeated: int
    """Steps that some rank had to compute twice."""
    restarted: int
    """How many ranks had another process afterwards."""


class Job:
    """One running job. Use it as a context manager: at its end no process is left."""

    def __init__(
        self,
        *,
        ranks: int,
        evertrain: bool,
        flags: tuple[str, ...] = (),
        script: tuple[str, ...] = (),
        resumable: bool = True,
    ) -> None:
        """`resumable`: without Evertrain, rank 0 saves a checkpoint every 20 steps, which a restart begins from."""
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self.events = self.folder / "events"
        self._environment = environment()
        common = ("--standalone", f"--nproc-per-node={ranks}")
        toy = (str(TOY), f"--folder={self.folder}", *script)
        if evertrain:
            launcher = (sys.executable, "-m", "evertrain.cli.main", "launch", f"--ft-events={self.events}")
        else:
            # Without this, attempts share one store and restarted ranks read the addresses of dead ones.
            self._environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            launcher = (sys.executable, "-m", "torch.distributed.run", "--max-restarts=100", "--monitor-interval=0.1")
            toy = (*toy, "--plain")
            if resumable:
                toy = (*toy, f"--checkpoint={self.folder / 'checkpoint'}")
        self._output = (self.folder / "output").open("w+")
        self.process = subprocess.Popen(
            [*launcher, *common, *flags, *toy], stdout=self._output, stderr=subprocess.STDOUT, env=self._environment
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                ranks = [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
                self.process.kill()
                self.process.wait()
                for pid in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._output.close()
        self._folder.cleanup()

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def log(self, rank: int) -> list[tuple[int, int, float]]:
        """What a rank has completed so far: (pid, step, time)."""
        try:
            lines = (self.folder / f"rank{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        entries = (line.split() for line in lines if line.count(" ") == 2)
        return [(int(pid), int(step), float(at)) for pid, step, at in entries]

    def last(self, rank: int) -> tuple[int, int, float]:
        entries = self.log(rank)
        return entries[-1] if entries else (0, 0, 0.0)

    def wait(self, what: str, ready: Callable[[], bool], patience: float = _PATIENCE, pause: float = 0.005) -> None:
        """Look every `pause` seconds. A look costs time that the job may be measured in."""
        end = time.monotonic() + patience
        while not ready():
            if self.process.poll() is not None:
                code, output = self.process.returncode, self.output()[-4000:]
                raise Stuck(f"the job ended with code {code} while waiting for {what}\n{output}")
            if time.monotonic() > end:
                raise Stuck(f"waited {patience:g} s for {what}\n{self.output()[-4000:]}")
            time.sleep(pause)

    def wait_for_steps(self, more: int) -> None:
        """Until every rank has completed that many steps from now on."""
        goal = {rank: len(self.log(rank)) + more for rank in range(self.ranks)}
        self.wait(f"{more} steps", lambda: all(len(self.log(rank)) >= goal[rank] for rank in goal))

    def wait_for_spare(self) -> None:
        def ready() -> bool:
            events = [json.loads(line) for line in self.events.read_text().splitlines()]
            warmed = sum(event["event"] == "spare" for event in events)
            used = sum(event["event"] == "started" and event["warm"] for event in events)
            return warmed > used

        self.wait("a warm spare", ready)

    def disturb(self, fault: str, everybody: bool = True) -> Recovery:
        """Do something to the highest rank and measure until everybody is past where the best one had been; or until
        all others are, who go on without it."""
        victim = self.ranks - 1
        awaited = range(self.ranks) if everybody else range(victim)
        if fault in ("raise", "gil"):
            noted = self.folder / "troubled"
            noted.unlink(missing_ok=True)
            (self.folder / "trouble.tmp").write_text(fault)
            (self.folder / "trouble.tmp").rename(self.folder / "trouble")
            self.wait("the trouble", lambda: noted.exists() and noted.read_text() != "")
            at = float(noted.read_text())
        else:
            pid = self.last(victim)[0]
            at = time.monotonic()
            os.kill(pid, getattr(signal, fault))
        before = {rank: [entry for entry in self.log(rank) if entry[2] <= at] for rank in range(self.ranks)}
        best = max(entries[-1][1] for entries in before.values())

        def first_new(rank: int) -> float | None:
            return next((t for _, step, t in self.log(rank) if t > at and step > best), None)

        self.wait("the first new step", lambda: all(first_new(rank) for rank in awaited))
        seconds = max(first_new(rank) or 0.0 for rank in awaited) - at
        repeated = 0
        restarted = 0
        for rank in range(self.ranks):
            after = [entry for entry in self.log(rank) if entry[2] > at]
            if not after:
                continue  # its replacement is still to come
            done = {step for _, step, _ in before[rank]}
            repeated = max(repeated, sum(1 for _, step, _ in after if step in done))
            restarted += after[-1][0] != before[rank][-1][0]
        return Recovery(seconds, repeated, restarted)
