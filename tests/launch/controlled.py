"""A job that a test gives orders to while it runs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.launch import harness, launching


class Job:
    def __init__(self, folder: Path, *script_args: str, script: Path, nproc: int, ft: tuple[str, ...]) -> None:
        self.events_file = folder / "events.jsonl"
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                harness.command(*script_args, script=script, nproc=nproc, ft=(*ft, f"--ft-events={self.events_file}")),
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=harness.environment(),
            )  # fmt: skip

    def events(self, name: str = "") -> list[dict[str, Any]]:
        return launching.read_events(self.events_file, name)

    def wait(self, what: str, ready: Callable[[], Any], seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := ready():
                return value
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"waited for {what}; exit code {self.process.poll()}\n{self.err.read_text()[-4000:]}")

    def begin(self, *order: str) -> subprocess.Popen[str]:
        """Give an order without waiting for what becomes of it."""
        return subprocess.Popen(
            [sys.executable, "-m", "evertrain.cli.main", "ctl", f"--events={self.events_file}", "--wait=60", *order],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=harness.environment(),
        )  # fmt: skip

    def order(self, *order: str, code: int = 0) -> str:
        return answer(self.begin(*order), code)

    def status(self) -> dict[str, Any]:
        return json.loads(self.order("status"))

    def wait_until_it_trains(self) -> None:
        self.wait("the training", lambda: self.events("generation") and "loss" in self.out.read_text())

    def finish(self, timeout: float = 90.0) -> harness.Result:
        code = self.process.wait(timeout)
        return harness.parse(code, self.out.read_text(), self.err.read_text(), self.events())


def answer(asker: subprocess.Popen[str], code: int = 0) -> str:
    out, err = asker.communicate(timeout=70)
    assert asker.returncode == code, (asker.args, out, err)
    return (out + err).strip()


@contextlib.contextmanager
def job(
    *script_args: str, script: Path = harness.EXAMPLE, nproc: int = 3, ft: tuple[str, ...] = ("--ft-warm=0",)
) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        started = Job(Path(folder), *script_args, script=script, nproc=nproc, ft=ft)
        try:
            yield started
        finally:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait()
