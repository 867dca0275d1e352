"""A team of real rank processes that a test leads: they run functions of the test's own file, one call after another.

The functions get the team member first: its rank, the team's size, and a store in which generations meet. What they
return goes back as JSON; an exception goes back as its text.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


class Failed(AssertionError):
    """A call raised in a rank; the text is its traceback."""


class Team:
    """The test's side. `call` runs a function on all ranks and returns their answers in order of rank."""

    def __init__(self, file: str, directory: Path, size: int) -> None:
        self.size = size
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, file, str(directory), str(rank), str(size)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def wait_until_ready(self) -> None:
        """Importing torch takes seconds, or a minute on a busy machine; no test's time limit is about that."""
        self.answers(timeout=200.0)

    def begin(self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> None:
        for rank in range(self.size) if ranks is None else ranks:
            pipe = self.processes[rank].stdin
            pipe.write(json.dumps([function.__name__, args]) + "\n")
            pipe.flush()

    def answers(self, ranks: Iterable[int] | None = None, timeout: float = 200.0) -> list[Any]:
        results = []
        deadline = time.monotonic() + timeout
        for rank in range(self.size) if ranks is None else ranks:
            pipe = self.processes[rank].stdout
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"rank {rank} gave no answer within {timeout} s"
            line = pipe.readline()
            assert line, f"rank {rank} ended"
            kind, value = json.loads(line)
            if kind == "error":
                raise Failed(f"rank {rank}: {value}")
            results.append(value)
        return results

    def call(self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        ranks = None if ranks is None else list(ranks)
        self.begin(function, *args, ranks=ranks)
        return self.answers(ranks)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def finish(self, rank: int, timeout: float = 90.0) -> int:
        """Let a rank end by itself; returns its exit code."""
        self.processes[rank].stdin.close()
        return self.processes[rank].wait(timeout)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def team(file: str, directory: Path, size: int) -> Iterator[Team]:
    leader = Team(file, directory, size)
    try:
        leader.wait_until_ready()
        yield leader
    finally:
        leader.close()


class Member:
    """A rank's side."""

    def __init__(self, directory: str, rank: int, size: int) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.directory = rank, size, directory
        self.kept: dict[str, Any] = {}
        self._store = dist.FileStore(os.path.join(directory, "store"), -1)

    def store(self, generation: int) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore(f"generation-{generation}/", self._store)


def _serve() -> None:
    file, directory, rank, size = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("scenarios", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    member = Member(directory, int(rank), int(size))
    answers = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps(["answer", "ready"]), file=answers, flush=True)
    for line in sys.stdin:
        name, args = json.loads(line)
        try:
            answer = ["answer", getattr(module, name)(member, *args)]
        except BaseException:
            answer = ["error", traceback.format_exc()]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
