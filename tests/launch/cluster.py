"""Jobs on several nodes: every node is a launcher on a loopback address of its own."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.launch import harness, launching
from tests.ports import free_port


class Node:
    """One launcher and what it printed."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: list[str], wake: threading.Condition
    ) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        self._log, self._wake = log, wake
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._wake:
                self._log.append(line.rstrip("\n"))
                self._wake.notify_all()
        self.process.stdout.close()

    def kill(self) -> None:
        """As if the machine had lost its power: the kernel ends the ranks with their launcher."""
        self.process.kill()
        self.end()

    def end(self, timeout: float = 10.0) -> int:
        code = self.process.wait(timeout)
        self._thread.join(timeout)
        return code


class Cluster:
    def __init__(self, folder: Path, *script_args: str, nnodes: int, nproc: int, ft: tuple[str, ...]) -> None:
        self.events_file = folder / "events.jsonl"
        self.log: list[str] = []
        self._wake = threading.Condition()
        self._nnodes = nnodes
        self._environment = harness.environment() | {"EVERTRAIN_TOKEN": secrets.token_hex(16)}
        port = free_port()
        self._command = [
            sys.executable, "-m", "evertrain.cli.main", "launch", f"--nnodes={nnodes}", f"--nproc-per-node={nproc}",
            "--master-addr=127.0.0.2", f"--master-port={port}", f"--ft-bound={harness.DETECTING}",
            f"--ft-events={self.events_file}", *ft,
        ]  # fmt: skip
        self._script = [str(harness.EXAMPLE), "--log-every=1", *script_args]
        self.nodes: dict[int, Node] = {}
        self._all: list[Node] = []

    def start(self, node: int) -> None:
        place = [f"--node-rank={node}", f"--local-addr=127.0.0.{node + 2}"] if self._nnodes > 1 else []
        command = [*self._command, *place, *self._script]
        self.nodes[node] = Node(command, self._environment, self.log, self._wake)
        self._all.append(self.nodes[node])

    def wait_for(self, pattern: str, timeout: float = 60.0, after: int = 0) -> int:
        """Wait for a line of output; returns how many lines there are by then."""
        deadline = time.monotonic() + timeout
        seen = after
        with self._wake:
            while True:
                while seen < len(self.log):
                    seen += 1
                    if re.search(pattern, self.log[seen - 1]):
                        return seen
                if not self._wake.wait(max(deadline - time.monotonic(), 0)):
                    raise AssertionError(f"no {pattern!r} in the output:\n" + "\n".join(self.log[-60:]))

    def wait_for_event(self, name: str, number: int = 1, timeout: float = 60.0) -> None:
        def there() -> bool:
            return sum(event["event"] == name for event in self.events()) >= number

        launching.wait_for(there, f"event {name!r} number {number}", timeout)

    def controller(self) -> psutil.Process:
        """The process of the controller in charge, where that has one of its own."""
        return launching.in_charge(self.nodes[0].process.pid, self.events_file)

    def events(self) -> list[dict]:
        return launching.read_events(self.events_file)

    def finish(self, timeout: float = 60.0) -> harness.Result:
        """Wait for the end of all launchers that still run; their exit codes have to be the same one."""
        deadline = time.monotonic() + timeout
        try:
            codes = {node: each.end(max(deadline - time.monotonic(), 0.1)) for node, each in self.nodes.items()}
        except subprocess.TimeoutExpired:
            raise AssertionError("the job hung:\n" + "\n".join(self.log[-80:])) from None
        text = "\n".join(self.log)
        assert len(set(codes.values())) == 1, f"{codes}\n{text[-6000:]}"
        return harness.parse(codes[0], text, "", self.events())

    def close(self) -> None:
        for node in self._all:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGKILL)
            node.end()


@contextmanager
def cluster(
    folder: Path, *script_args: str, nnodes: int = 2, nproc: int = 2, ft: tuple[str, ...] = ()
) -> Iterator[Cluster]:
    job = Cluster(folder, *script_args, nnodes=nnodes, nproc=nproc, ft=ft)
    try:
        for node in range(nnodes):
            job.start(node)
        yield job
    finally:
        job.close()
