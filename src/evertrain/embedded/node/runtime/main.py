"""The runtime process of a node: forks an init process for every container, and ends with whoever started it.

It is asked over a socket of messages (JSON), and answers each with one: {"do": "spawn"} with a descriptor, {"do":
"tmpfs"}, {"do": "unmount"}. Its first word says what the kernel allows: {"mounts": "", "pids": ""}, each empty if
allowed and otherwise the reason why not.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from evertrain.embedded import kernel
from evertrain.embedded.node.runtime import container

MAX_MESSAGE = 65536


def main(arguments: list[str]) -> None:
    """The descriptor of the socket, the process id of who started us, an empty directory to try a mount on (without
    that, no namespaces are used), and the descriptor of the user namespace in which those of networks are, or -1."""
    connection = socket.socket(fileno=int(arguments[0]))
    kernel.die_with_parent(signal.SIGKILL, int(arguments[1]))
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for the cluster, which ends us in order
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Runtime(connection, arguments[2], int(arguments[3])).run()


class Runtime:
    def __init__(self, connection: socket.socket, trial: str, users: int) -> None:
        self._connection = connection
        self._users = users
        if users >= 0:
            os.set_inheritable(users, False)  # for us, not for the containers' own processes
        self._own_mounts, self._own_pids = self._prepare(trial)
        if self._own_pids:
            self._move_to_own_pid_namespace()
        kernel.become_subreaper()
        self._inits: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _prepare(self, trial: str) -> tuple[bool, bool]:
        """Namespaces of our own, as far as the kernel allows."""
        refused = "" if trial else "namespaces are switched off"
        if trial and self._users >= 0:
            refused = _in_a_child(self._join_users)
            if not refused:
                self._join_users()
        elif trial and (os.geteuid() != 0 or not _may_mount(trial)):
            refused = _in_a_child(kernel.become_own_user_namespace)
            if not refused:
                kernel.become_own_user_namespace()
        no_mounts = refused or _in_a_child(lambda: _try_mounts(trial))
        no_pids = no_mounts or _in_a_child(_try_pids)
        if not no_mounts:
            kernel.unshare(kernel.CLONE_NEWNS)
            # What the machine mounts later shows up here too; what we mount doesn't show up there.
            kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_SLAVE)
        self._answer({"mounts": no_mounts, "pids": no_pids})
        return not no_mounts, not no_pids

    def _join_users(self) -> None:
        """In that namespace we may enter the pods' networks; it is ours already if root started us."""
        if not os.path.sameopenfile(self._users, os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)):
            kernel.enter(self._users, kernel.CLONE_NEWUSER)

    def _move_to_own_pid_namespace(self) -> None:
        """We go on as the first process of a namespace, below which those of the containers are; nothing in it outlives
        us. The process that we were stays as its parent, to be seen and killed from outside."""
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
        if pid:
            self._connection.close()
            os.waitpid(pid, 0)
            os._exit(0)
        kernel.die_with_parent(signal.SIGKILL, None)

    def run(self) -> None:
        gc.collect()
        gc.freeze()
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                elif not self._serve():
                    return

    def _serve(self) -> bool:
        data, ancillary, _, _ = self._connection.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(2 * array.array("i").itemsize))
        if not data:
            return False
        received = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
        for descriptor in received:
            os.set_inheritable(descriptor, False)  # the line to us is nothing for the container's own processes
        try:
            self._answer({"error": self._obey(json.loads(data), list(received))})
        finally:
            for descriptor in received:
                os.close(descriptor)
        return True

    def _obey(self, order: dict[str, Any], received: list[int]) -> str:
        try:
            match order["do"]:
                case "spawn":
                    self._spawn(*received)
                case "tmpfs":
                    if not self._own_mounts:
                        return "mounts are not allowed"
                    kernel.mount("tmpfs", order["path"], "tmpfs", kernel.MS_NODEV | kernel.MS_NOSUID, order["options"])
                case "unmount":
                    kernel.unmount(order["path"])
        except OSError as error:
            return str(error)
        return ""

    def _spawn(self, descriptor: int, network: int = -1) -> None:
        runtime = os.getpid()
        if self._own_pids:
            kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_init(descriptor, network, runtime)
        finally:
            if self._own_pids:
                kernel.rejoin_own_pid_namespace()
        self._inits.add(pid)

    def _become_init(self, descriptor: int, network: int, runtime: int) -> None:
        try:
            if network >= 0:
                kernel.enter(network, kernel.CLONE_NEWNET)
                os.close(network)
            signal.set_wakeup_fd(-1)
            # With a namespace of its own the death of init is that of all. Without, init has to do it: see container.
            if self._own_pids:
                kernel.die_with_parent(signal.SIGKILL, None)
            else:
                kernel.die_with_parent(signal.SIGTERM, runtime)
            self._connection.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            container.serve(socket.socket(fileno=descriptor), self._own_pids, self._own_mounts, network >= 0)
        except BaseException as error:
            container.fail(error)
        finally:
            os._exit(0)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._inits.discard(pid)
        if self._own_pids:
            return
        # Whoever else is our child is the orphan of an init process that somebody has killed. When it dies, its
        # children become ours, and we are back here.
        for pid in container.children(os.getpid()):
            if pid not in self._inits:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _answer(self, message: dict[str, Any]) -> None:
        self._connection.send(json.dumps(message).encode())


def _in_a_child(attempt: Any) -> str:
    """Why the attempt fails; empty if it doesn't."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except BaseException as error:
            os.write(writing, (str(error) or repr(error)).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        reason = answer.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return reason


def _may_mount(trial: str) -> bool:
    return not _in_a_child(lambda: _try_mounts(trial))


def _try_mounts(trial: str) -> None:
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", trial, "tmpfs")
    kernel.bind("/usr", trial)


def _try_pids() -> None:
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    refused = _in_a_child(lambda: kernel.mount("proc", "/proc", "proc"))
    if refused:
        raise OSError(refused)


if __name__ == "__main__":
    main(sys.argv[1:])
