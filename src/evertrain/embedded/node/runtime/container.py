"""The init process of one container: sets its world up, starts its main process, keeps its log, ends all of it.

It reads orders from a socket, one JSON object per line, the first being what to run; and it writes what happened:

    {"is": "started", "pid": …}                     the main process runs its program
    {"is": "refused", "reason": …, "message": …}    it could not be started
    {"is": "exited", "code": …, "signal": …}        and with it everything else in the container
    {"is": "done", "id": …, "code": …}              a program that was asked for by {"do": "exec"} has ended

The orders: {"do": "stop"} asks the main process and its group to end (SIGTERM), {"do": "kill"} ends them, {"do":
"exec"} runs another program beside them, {"do": "end"} ends that one. The end of the socket is an order too: whoever
gave the others is gone.

That a program was started, and how it ended by itself, is also kept in a file: whoever was to be told may be dead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from evertrain.embedded import kernel
from evertrain.embedded.node.runtime import mounts
from evertrain.embedded.node.runtime.logs import LogWriter
from evertrain.embedded.node.runtime.record import Record

READ = 65536
MAX_SPEC = 64 * 1024 * 1024
END_PATIENCE = 10.0
"""Seconds that killed processes may take to be gone before the container counts as ended."""
OOM_SCORE = 300
"""If memory runs out, the kernel should choose a pod rather than the cluster."""


def serve(connection: socket.socket, own_pids: bool, own_mounts: bool, own_network: bool) -> None:
    """The life of the process. Returns when the container has ended."""
    lines = _Lines(connection)
    spec = lines.first()
    if spec is None:
        return
    try:
        container = _Container(spec, lines, own_pids)
        if own_mounts:
            _enter(spec, own_pids, own_network)
        elif wanted := [mount for mount in spec["mounts"] if not mounts.needless(mount)]:
            paths = ", ".join(mount["target"] for mount in wanted)
            raise mounts.MountError(f"volumes can't be mounted ({paths}): {spec['no_mounts']}")
        container.start()
    except mounts.MountError as error:
        lines.send({"is": "refused", "reason": "CreateContainerError", "message": str(error)})
    except _CannotStart as error:
        lines.send({"is": "refused", "reason": "StartError", "message": str(error)})
    except OSError as error:
        lines.send({"is": "refused", "reason": "CreateContainerError", "message": str(error)})
    else:
        lines.send({"is": "started", "pid": container.main})
        container.run()


class _CannotStart(Exception):
    """The program can't be executed."""


def _enter(spec: dict[str, Any], own_pids: bool, own_network: bool) -> None:
    mounts.private_namespace(spec.get("own_memory", True))
    if spec["hostname"]:
        kernel.set_host_name(spec["hostname"])
    if own_network:
        mounts.show_own_network(spec["staging"])
    mounts.arrange(spec["mounts"], spec["staging"], own_pids)


class _Lines:
    """JSON lines over a socket, both ways."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self.ended = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def first(self) -> dict[str, Any] | None:
        while b"\n" not in self._buffer:
            if not self._read() or len(self._buffer) > MAX_SPEC:
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def read(self) -> list[dict[str, Any]]:
        self._read()
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def _read(self) -> bool:
        try:
            data = self._connection.recv(READ)
        except OSError:
            data = b""
        self._buffer += data
        self.ended = self.ended or not data
        return bool(data)

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more; the end of the stream is seen elsewhere
            self._connection.sendall(json.dumps(message).encode() + b"\n")


class _Container:
    def __init__(self, spec: dict[str, Any], lines: _Lines, own_pids: bool) -> None:
        self._spec = spec
        self._lines = lines
        self._own_pids = own_pids
        self._log = LogWriter(spec["log_folder"], spec["log_name"], **spec.get("log_limits", {}))
        self._record = Record(spec["log_folder"], spec["log_name"])
        self._streams: dict[int, str] = {}
        self._executions: dict[int, str] = {}
        """Other programs that run in the container, by process id: probes and hooks."""
        self.main = 0
        self._status: int | None = None
        self._stopping = False
        self._asked = False
        """Did the cluster want the end? Then it is not the program's own."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._abandoned = False
        if not own_pids:
            kernel.become_subreaper()
            signal.signal(signal.SIGTERM, self._abandon)

    def _abandon(self, *_: object) -> None:
        """The runtime process is gone."""
        self._abandoned = True

    def start(self) -> None:
        pipes = {name: os.pipe2(os.O_CLOEXEC) for name in ("stdout", "stderr")}
        self._record.started()
        try:
            self.main = self._spawn(self._spec["argv"], pipes["stdout"][1], pipes["stderr"][1])
        except (_CannotStart, OSError):
            self._record.forget()
            raise
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            os.set_blocking(reading, False)
            self._streams[reading] = name

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._lines, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        for descriptor in self._streams:
            poll.register(descriptor, select.POLLIN)
        while not self._over():
            for descriptor, _ in poll.poll():
                if descriptor == self._lines.fileno():
                    for order in self._lines.read():
                        self._obey(order)
                    if self._lines.ended:
                        self._kill_all()
                        os._exit(0)
                elif descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                    if self._abandoned:
                        self._kill_all()
                        os._exit(0)
                elif not self._pump(descriptor):
                    poll.unregister(descriptor)
        self._kill_all()
        for descriptor in list(self._streams):
            while self._pump(descriptor) and select.select([descriptor], [], [], 0)[0]:
                pass
        self._log.close()
        status = self._status or 0
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + killed if killed else os.WEXITSTATUS(status)
        if not self._asked:
            self._record.ended(code, killed)
        self._lines.send({"is": "exited", "code": code, "signal": killed})

    def _over(self) -> bool:
        """The main process has ended, and those who were asked to end with it as well."""
        return self._status is not None and not (self._stopping and _members(self.main))

    def _obey(self, order: dict[str, Any]) -> None:
        match order.get("do"):
            case "stop":
                self._stopping = self._asked = True
                for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process would not see the first
                    with contextlib.suppress(OSError):
                        os.killpg(self.main, number)
            case "kill":
                self._stopping, self._asked = False, True
                with contextlib.suppress(OSError):
                    os.killpg(self.main, signal.SIGKILL)
            case "end":
                for pid in [pid for pid, name in self._executions.items() if name == order["id"]]:
                    with contextlib.suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)
            case "exec":
                try:
                    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                    try:
                        self._executions[self._spawn(order["argv"], null, null)] = order["id"]
                    finally:
                        os.close(null)
                except (_CannotStart, OSError):
                    self._lines.send({"is": "done", "id": order["id"], "code": 127})

    def _pump(self, descriptor: int) -> bool:
        """False when the stream has ended."""
        try:
            data = os.read(descriptor, READ)
        except BlockingIOError:
            return True
        if data:
            self._log.feed(self._streams[descriptor], data)
            return True
        os.close(descriptor)
        del self._streams[descriptor]
        return False

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._note(*found)

    def _note(self, pid: int, status: int) -> None:
        if pid == self.main:
            self._status = status
        elif pid in self._executions:
            code = os.waitstatus_to_exitcode(status)
            self._lines.send({"is": "done", "id": self._executions.pop(pid), "code": code})

    def _kill_all(self) -> None:
        """Kills and reaps until nobody is left; processes that are born meanwhile included."""
        deadline = time.monotonic() + END_PATIENCE
        while time.monotonic() < deadline:
            if self._own_pids:
                with contextlib.suppress(OSError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in _descendants(os.getpid()):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            try:
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    self._note(*found)
            except ChildProcessError:
                return
            select.select([self._wake_read], [], [], 0.05)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)

    def _spawn(self, argv: list[str], output: int, errors: int) -> int:
        """Starts a program in a session of its own. Returns once it runs, or raises what kept it from running."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        parent = None if self._own_pids else os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _become(self._spec, argv, output, errors, parent)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.write(writing, _explain(error, argv, self._spec).encode()[:4000])
            except _CannotStart as error:
                os.write(writing, str(error).encode()[:4000])
            except BaseException as error:
                os.write(writing, repr(error).encode()[:4000])
            finally:
                os._exit(127)
        os.close(writing)
        with os.fdopen(reading, "rb") as complaint:
            message = complaint.read().decode(errors="replace")
        if message:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            raise _CannotStart(message)
        return pid


def _become(spec: dict[str, Any], argv: list[str], output: int, errors: int, parent: int | None) -> None:
    """In the child, up to its program."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL, parent)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)
    try:
        if spec.get("group") is not None and spec["group"] != os.getgid():
            os.setgroups([spec["group"]])
            os.setgid(spec["group"])
        if spec.get("user") is not None and spec["user"] != os.getuid():
            os.setuid(spec["user"])
            kernel.die_with_parent(signal.SIGKILL, parent)  # changing the user forgets it
    except OSError as error:
        raise _CannotStart(f"runAsUser needs a cluster that runs as root: {error.strerror}") from None
    os.chdir(spec["workdir"])
    os.execvpe(argv[0], argv, spec["env"])


def _explain(error: OSError, argv: list[str], spec: dict[str, Any]) -> str:
    program = argv[0] if argv else ""
    if not os.path.isdir(spec["workdir"]):
        return f'the working directory "{spec["workdir"]}" does not exist'
    if error.errno == errno.ENOENT and "/" not in program:
        return f'exec: "{program}": executable file not found in $PATH'
    words = {errno.ENOENT: "no such file or directory", errno.EACCES: "permission denied"}
    reason = words.get(error.errno or 0, error.strerror or str(error))
    return f'exec: "{program}": {reason}'


def children(parent: int) -> list[int]:
    return [pid for pid, (above, _) in _living().items() if above == parent]


def _members(group: int) -> list[int]:
    return [pid for pid, (_, its_group) in _living().items() if its_group == group]


def _descendants(root: int) -> list[int]:
    """Living processes below this one. A container's orphans are adopted by its init process and stay below it."""
    parents = {pid: parent for pid, (parent, _) in _living().items()}
    below, found = {root}, list[int]()
    grown = True
    while grown:
        new = {pid for pid, parent in parents.items() if parent in below} - below
        found += sorted(new)
        below |= new
        grown = bool(new)
    return found


def _living() -> dict[int, tuple[int, int]]:
    """Parent and group of all living processes."""
    found: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    found[int(name)] = int(fields[1]), int(fields[2])
    return found


def fail(error: BaseException) -> None:
    """The last word of an init process with a mistake of ours, for the log of the cluster."""
    print(f"evertrain: container init: {error!r}", file=sys.stderr, flush=True)
