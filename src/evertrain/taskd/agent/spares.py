"""Warm spares of an agent: processes that have imported torch and run a step, and wait to become a training process.

A new process needs seconds until it trains; a spare needs one line on a socket. It is started when the training
processes run, at the lowest priority for its first seconds, and it ends with the agent: by the end of the socket, by
the kernel's parent-death signal, by the guardian. What it becomes is what torchrun would have started: the same
command, environment and output. Where that is nothing that a spare can become, or none is ready, torchrun starts it
cold.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from evertrain.mindio import priority

log = logging.getLogger(__name__)

PROGRAM = "evertrain.torch.plain_spare"
_POLITE = 5.0
"""Seconds after which a spare that is not ready goes on like any other process: all cores are taken."""
_PROMOTION = 5.0
_MAX_FAILURES = 3
_DESCRIPTOR, _AGENT, _IMPORTS = "EVERTRAIN_SPARE_FD", "EVERTRAIN_AGENT_PID", "EVERTRAIN_WARM_IMPORTS"


class Spare:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], imports: str) -> None:
        self.link, theirs = socket.socketpair()
        self.environment = {
            **environment,
            _DESCRIPTOR: str(theirs.fileno()),
            _AGENT: str(os.getpid()),
            _IMPORTS: imports,
        }
        with theirs:
            self.popen = subprocess.Popen(
                command, env=self.environment, start_new_session=True, pass_fds=(theirs.fileno(),)
            )
        priority.lower(self.popen.pid)
        self.ready = False
        self.raise_at: float | None = time.monotonic() + _POLITE

    def restore_priority(self) -> None:
        self.raise_at = None if priority.restore(self.popen.pid) else time.monotonic() + priority.AGAIN

    def become(self, argv: list[str], environment: Mapping[str, str], outputs: Mapping[int, int]) -> None:
        """OSError if it has died meanwhile."""
        changes: dict[str, str | None] = dict.fromkeys(self.environment.keys() - environment.keys())
        order = {"env": {**changes, **environment}, "argv": argv, "outputs": list(outputs)}
        line = json.dumps(order).encode() + b"\n"
        self.link.settimeout(_PROMOTION)
        ancillary = []
        if outputs:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", outputs.values()))]
        sent = self.link.sendmsg([line], ancillary)
        if sent < len(line):  # else it may have taken its order, and the link may be closed
            self.link.sendall(line[sent:])
        self.link.close()

    def end(self) -> None:
        self.link.close()
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


class Spares:
    """`started` is told the id of each spare, before anything can happen to the agent that the spare would outlive."""

    def __init__(
        self, count: int, imports: str, selector: selectors.BaseSelector, started: Callable[[Iterable[int]], None]
    ) -> None:
        self._count, self._imports = count, imports
        self._selector = selector
        self._started = started
        self._spares: dict[int, Spare] = {}
        """By the descriptors of their links."""
        self._like: tuple[str, ...] = ()
        """The command of the processes that they may become."""
        self._environment: dict[str, str] = {}
        self._failures = 0

    def keep(self, count: int) -> None:
        """So many from now on; those that are there already stay."""
        self._count = count

    @property
    def ready(self) -> int:
        return sum(spare.ready for spare in self._spares.values())

    def replenish(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start as many as are missing, for processes that are started by this command."""
        argv = _argv(command)
        if argv is None:
            return
        self._like, self._environment = tuple(command), dict(environment)
        while len(self._spares) < self._count and self._failures < _MAX_FAILURES:
            try:
                program = (command[0], "-u", "-m", PROGRAM, "--rank", "unknown", *argv)
                spare = Spare(program, environment, self._imports)
            except OSError as error:
                self._failures = _MAX_FAILURES
                log.warning("a warm spare could not be started: %s; replacements start cold", str(error))
                return
            self._started([spare.popen.pid])
            self._spares[spare.link.fileno()] = spare
            self._selector.register(spare.link, selectors.EVENT_READ)

    def take(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: IO[str] | None, stderr: IO[str] | None
    ) -> subprocess.Popen[bytes] | None:
        """A process that has become what this command would be; None if no spare can."""
        argv = _argv(command)
        if argv is None or tuple(command[:1]) != self._like[:1]:
            return None
        outputs = {number: file.fileno() for number, file in ((1, stdout), (2, stderr)) if file is not None}
        for spare in [each for each in self._spares.values() if each.ready]:
            self._forget(spare)
            try:
                spare.become(argv, environment, outputs)
            except OSError as error:
                log.warning("a warm spare was of no use: %s", str(error))
                spare.end()
            else:
                log.info("process %d was a warm spare", spare.popen.pid)
                return spare.popen
        return None

    def _forget(self, spare: Spare) -> None:
        self._selector.unregister(spare.link)
        del self._spares[spare.link.fileno()]

    # Waiting.

    def knows(self, descriptor: int) -> bool:
        return descriptor in self._spares

    def hear(self, descriptor: int) -> None:
        """Its only line is that it is ready; anything else is its end."""
        spare = self._spares[descriptor]
        try:
            ready = bool(json.loads(spare.link.recv(4096)).get("ready"))
        except (OSError, ValueError, AttributeError):
            ready = False
        if ready and not spare.ready:
            spare.ready = True
            spare.restore_priority()
            self._failures = 0
            log.info("a warm spare is ready: process %d", spare.popen.pid)
            return
        self._forget(spare)
        spare.end()
        self._failures += 1
        more = "another is started" if self._failures < _MAX_FAILURES else "replacements start cold"
        log.warning("a warm spare ended with code %s; %s", spare.popen.returncode, more)
        self.replenish(self._like, self._environment)

    @property
    def deadline(self) -> float | None:
        return min((each.raise_at for each in self._spares.values() if each.raise_at is not None), default=None)

    @property
    def left(self) -> float | None:
        """Seconds until something is due."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def tick(self) -> None:
        now = time.monotonic()
        for spare in self._spares.values():
            if spare.raise_at is not None and spare.raise_at <= now:
                spare.restore_priority()

    def close(self) -> None:
        for spare in list(self._spares.values()):
            self._forget(spare)
            spare.end()


def _argv(command: Sequence[str]) -> list[str] | None:
    """What a spare is told to run for torchrun's command, `python -u [-m] script ARG...`; None for anything else."""
    if len(command) < 3 or command[1] != "-u":
        return None
    module = command[2] == "-m"
    rest = list(command[3 if module else 2 :])
    if not rest or rest[0].startswith("-"):
        return None
    return [*(["--module"] if module else []), "--", *rest]
