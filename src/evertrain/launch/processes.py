"""Starting processes: a rank from nothing, a spare that waits for a rank, and their common end.

Each process leads a session of its own. Ctrl-C in the terminal therefore reaches the launcher only, which ends the job
in order, and whatever the process started itself, such as a loader's workers, can be found and ended with it. Against a
launcher that is itself killed the process asks the kernel for its death signal (`evertrain.torch.boot`); the request
is bound to the thread that started it, so processes are only ever started from the launcher's main thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import TypeVar

from evertrain.launch import orphan, procfs
from evertrain.launch.config import STDERR, STDOUT, LaunchConfig
from evertrain.launch.output import Outputs, Stream
from evertrain.mindio import board, faultspec, title, tls

BOOT, SPARE = "evertrain.torch.boot", "evertrain.torch.spare"
_GOING = 0.5
"""Seconds that killed processes may take to be gone."""
GLOO_HOST, GLOO_INTERFACE = "EVERTRAIN_GLOO_HOST", "GLOO_SOCKET_IFNAME"


class Process:
    """One process, from its start until it has been reaped and forgotten."""

    def __init__(
        self, popen: subprocess.Popen[bytes], board: board.Board, stack_fd: int, streams: dict[int, Stream]
    ) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.stat_fd = procfs.open_stat(popen.pid)
        self.board = board
        self.stack_fd = stack_fd
        self.streams = streams
        self.started_at = time.monotonic()
        self.rank = -1
        self.incarnation = -1
        self.warm = False
        """Was it promoted from a spare?"""
        self.doomed = False
        """The launcher has killed it or is about to: its death is no news."""
        self.reported = False
        """The controller knows that it is dead or stopped."""
        self.code: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else "spare"

    def send(self, number: int) -> None:
        """A signal to the process and everything in its process group. Its number can't have been given to another
        process, because nobody but the launcher reaps it."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """SIGTERM for the process alone: a loader's workers end with it, and would be an error if they went first."""
        self.doomed = True
        if self.code is None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process would not see the first
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def kill(self) -> None:
        self.doomed = True
        self.send(signal.SIGKILL)

    def reap(self) -> int:
        """Call when the pidfd is readable: ends what is left of the group, then takes the exit code."""
        self.send(signal.SIGKILL)
        if self.code is None:
            self.code = self.popen.wait()
        return self.code

    def close(self) -> None:
        for fd in (self.pidfd, self.stat_fd, self.stack_fd):
            os.close(fd)
        # Somebody may be in the middle of looking at this process, and the numbers will soon mean other files.
        self.pidfd = self.stat_fd = self.stack_fd = -1
        self.board.close()


class SpareProcess(Process):
    """A process that is warm but has no rank yet."""

    link: socket.socket
    is_ready = False

    def promote(self, env: Mapping[str, str], argv: list[str]) -> None:
        """It becomes a rank. Raises OSError if it has died meanwhile."""
        self.link.setblocking(True)
        self.link.sendall(json.dumps({"env": dict(env), "argv": argv}).encode() + b"\n")
        self.link.close()
        self.warm = True

    def close(self) -> None:
        self.link.close()
        super().close()


_P = TypeVar("_P", bound=Process)


class Spawner:
    def __init__(self, config: LaunchConfig, outputs: Outputs, token: str) -> None:
        self._config = config
        self._outputs = outputs
        self._token = token
        self.controllers: list[str] = []
        """HOST:PORT of the controllers, the one in charge first."""
        self.host = ""
        """The address under which other nodes reach the ranks of this one; empty if there are no others."""
        self.master = ""
        """HOST:PORT of the script's own rendezvous, if the controller names it."""
        self._fault_board = board.FaultBoard(len(config.faults))
        self._environment = dict(os.environ)
        # torchrun's rule: without it each of the processes would take all cores.
        if config.local_size > 1:
            self._environment.setdefault("OMP_NUM_THREADS", "1")
        self.attempt = 0
        """How often the whole job was restarted."""
        self.park = config.park
        """May spares run the script until it asks for its rank?"""
        self.learned: list[str] = []
        """Modules of torch that the ranks have imported."""
        self._master_port = self._find_master_port()

    def _find_master_port(self) -> int:
        # On several nodes the given port is the controller's.
        given = self._config.master_port if self._config.nnodes == 1 else 0
        return given or free_port(self._config.master_addr)

    @property
    def master_port(self) -> int:
        return self._master_port

    def begin_attempt(self, number: int) -> None:
        self.attempt = number
        # The old port may be held by a process that is not gone yet.
        self._master_port = self._find_master_port()

    def close(self) -> None:
        self._fault_board.close()

    def cold(self, rank: int, incarnation: int) -> Process:
        """Start a rank's process from nothing."""
        config = self._config
        if config.no_python:
            wrapper = [sys.executable, "-I", "-S", orphan.__file__, str(os.getpid())]
            command = [*wrapper, config.script, *config.script_args]
        else:
            command = [self._python(), "-u", "-m", BOOT, title.OPTION, str(rank), *self._arguments()]
        process = self._start(Process, command, self._rank_environment(rank, incarnation))
        self._give_rank(process, rank, incarnation)
        return process

    def spare(self) -> SpareProcess:
        """Start a process that warms up and waits to become any rank."""
        ours, theirs = socket.socketpair()
        environment = {
            "EVERTRAIN_SPARE_FD": str(theirs.fileno()),
            "EVERTRAIN_WARM_IMPORTS": ",".join(self._config.warm_imports),
            "EVERTRAIN_LEARNED_IMPORTS": ",".join(self.learned),
        }
        if self.park:
            environment |= {"EVERTRAIN_PARK": "1", "EVERTRAIN_PARK_ARGV": json.dumps(self._arguments())}
            # What a script may read before it needs its rank is the same for all ranks.
            for_a_rank = self._rank_environment(self._config.first_rank, 0)
            environment |= {name: value for name, value in for_a_rank.items() if name not in _OF_ONE_RANK}
        command = [self._python(), "-u", "-m", SPARE, title.OPTION, title.UNKNOWN, *self._arguments()]
        try:
            process = self._start(SpareProcess, command, environment, theirs.fileno())
        finally:
            theirs.close()
        ours.setblocking(False)
        process.link = ours
        return process

    def promote(self, spare: SpareProcess, rank: int, incarnation: int) -> None:
        spare.promote(self._rank_environment(rank, incarnation), self._arguments())
        self._give_rank(spare, rank, incarnation)

    def _give_rank(self, process: Process, rank: int, incarnation: int) -> None:
        process.rank, process.incarnation = rank, incarnation
        for which, stream in process.streams.items():
            stream.assign(self._outputs.route(rank, which))

    def _python(self) -> str:
        return os.environ.get("PYTHON_EXEC", sys.executable)

    def _arguments(self) -> list[str]:
        config = self._config
        return [*(["--module"] if config.module else []), "--", config.script, *config.script_args]

    def _start(self, kind: type[_P], command: list[str], environment: Mapping[str, str], *pass_fds: int) -> _P:
        progress = board.Board()
        stack_fd = os.memfd_create("evertrain-stack", 0)
        inherited = {
            board.BOARD_FD: progress.fd,
            board.STACK_FD: stack_fd,
            board.FAULT_BOARD_FD: self._fault_board.fd,
        }
        try:
            popen = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(*inherited.values(), *pass_fds),
                env={
                    **self._environment,
                    "EVERTRAIN_AGENT_PID": str(os.getpid()),
                    **environment,
                    **{name: str(fd) for name, fd in inherited.items()},
                },
            )
        except OSError:
            progress.close()
            os.close(stack_fd)
            raise
        assert popen.stdout and popen.stderr
        # The streams own descriptors of their own; those of Popen would be closed at a moment of its choice.
        streams = {
            which: self._outputs.open(os.dup(pipe.fileno()), which)
            for which, pipe in ((STDOUT, popen.stdout), (STDERR, popen.stderr))
        }
        popen.stdout.close()
        popen.stderr.close()
        return kind(popen, progress, stack_fd, streams)

    def _rank_environment(self, rank: int, incarnation: int) -> dict[str, str]:
        config = self._config
        size = str(config.world_size)
        local = rank - config.first_rank
        master_addr, _, master_port = self.master.rpartition(":")
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": "0" if config.virtual_local_rank else str(local),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(config.local_size),
            "GROUP_RANK": str(config.node_rank),
            "NODE_RANK": str(config.node_rank),
            "GROUP_WORLD_SIZE": str(config.nnodes),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": config.role,
            "MASTER_ADDR": master_addr or config.master_addr,
            "MASTER_PORT": master_port or str(self._master_port),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "EVERTRAIN_CONTROLLER": ",".join(self.controllers),
            "EVERTRAIN_TOKEN": self._token,
            "EVERTRAIN_INCARNATION": str(incarnation),
            "EVERTRAIN_TIMING": _timing_json(config),
            "EVERTRAIN_FAULTS": faultspec.encode(list(config.faults)),
        }
        if config.tls:
            environment |= config.tls.environment()
        if config.standby:
            environment["EVERTRAIN_STANDBY"] = "1"
        if self.host and not {GLOO_HOST, GLOO_INTERFACE} & self._environment.keys():
            environment[GLOO_HOST] = self.host
        if config.checkpoint_dir:
            environment["EVERTRAIN_CHECKPOINT_DIR"] = config.checkpoint_dir
        if config.checkpoint_every:
            environment["EVERTRAIN_CHECKPOINT_EVERY"] = str(config.checkpoint_every)
        error_file = self._outputs.error_file(rank)
        if error_file:
            environment["TORCHELASTIC_ERROR_FILE"] = error_file
        if config.virtual_local_rank:
            visible = [part for part in self._environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
            environment["CUDA_VISIBLE_DEVICES"] = visible[local] if local < len(visible) else str(local)
        return environment


_OF_A_JOB = (
    "EVERTRAIN_AGENT_PID",
    "EVERTRAIN_CHECKPOINT_DIR",
    "EVERTRAIN_CHECKPOINT_EVERY",
    "EVERTRAIN_CONTROLLER",
    "EVERTRAIN_FAULTS",
    "EVERTRAIN_INCARNATION",
    "EVERTRAIN_STANDBY",
    "EVERTRAIN_TIMING",
    "EVERTRAIN_TOKEN",
    "TORCHELASTIC_ERROR_FILE",
    GLOO_HOST,
    board.BOARD_FD,
    board.STACK_FD,
    board.FAULT_BOARD_FD,
    *tls.VARIABLES,
)
"""Variables of a rank that mean something to a launcher or to another job's ranks."""


def forget_outer_job(environment: MutableMapping[str, str]) -> None:
    """A launcher that a rank of another job has started is not meant by what that job tells its ranks."""
    if "EVERTRAIN_INCARNATION" in environment:
        for name in _OF_A_JOB:
            environment.pop(name, None)


_OF_ONE_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE", "EVERTRAIN_INCARNATION", "CUDA_VISIBLE_DEVICES"}
)


def _timing_json(config: LaunchConfig) -> str:
    import dataclasses

    return json.dumps(dataclasses.asdict(config.timing))


def free_port(host: str) -> int:
    """A port that is free now. Somebody else may take it before rank 0 does; --master-port excludes that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host.strip("[]"), 0))
        except OSError:
            probe.bind(("", 0))
        return probe.getsockname()[1]


def end_session(session: int) -> None:
    """Kill what a process that is gone has left behind in its session but outside its process group, and see it go."""
    deadline = time.monotonic() + _GOING
    for pid in procfs.session_members(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            watched = os.pidfd_open(pid)
            try:
                os.kill(pid, signal.SIGKILL)
                # One that is in the kernel stays for a while, and nobody waits for it.
                poll = select.poll()
                poll.register(watched, select.POLLIN)
                poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
            finally:
                os.close(watched)
