"""System calls that Python doesn't have before 3.12: namespaces, mounts, process settings."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_LIMITED = {CLONE_NEWUSER: "user", CLONE_NEWNET: "net", CLONE_NEWNS: "mnt", CLONE_NEWPID: "pid"}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
MS_PRIVATE, MS_SLAVE = 1 << 18, 1 << 19
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217, "loongarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.sethostname.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    try:
        _check(_libc.unshare(flags), "unshare")
    except OSError as error:
        if error.errno == errno.ENOSPC:  # what the kernel says when a limit on their number is reached
            raise OSError(errno.ENOSPC, f"no more namespaces are allowed, see {_limits(flags)}") from None
        raise


def _limits(flags: int) -> str:
    """The sysctls that say how many namespaces of these kinds there may be."""
    found = [f"user.max_{name}_namespaces" for kind, name in _LIMITED.items() if flags & kind]
    return " and ".join(found) or "/proc/sys/user"


def enter(namespace: int, kind: int) -> None:
    """The one that the descriptor stands for."""
    _check(_libc.setns(namespace, kind), "setns")


def rejoin_own_pid_namespace() -> None:
    """After `unshare(CLONE_NEWPID)` and a fork: the next child is ours again, or gets a namespace of its own."""
    descriptor = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(descriptor, CLONE_NEWPID)
    finally:
        os.close(descriptor)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, data.encode() or None)
    _check(result, f"mount {kind or source} on {target}")


def bind(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)


def make_read_only(target: str) -> None:
    """A bind mount. Flags that a user namespace may not take away are kept."""
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"pivot_root is not known on {os.uname().machine}")
    result = _libc.syscall(ctypes.c_long(number), ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))
    _check(result, f"pivot_root to {new}")


def set_host_name(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def die_with_parent(number: int, parent: int | None) -> None:
    """The kernel sends us this signal when the parent process ends. `parent` is its process id, None if it can't be
    told from here (a new process id namespace shows it as 0)."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it ended before we asked


def raise_limit_of_descriptors() -> None:
    """To what the process may have; the usual 1024 are soon used up."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def become_subreaper() -> None:
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def become_own_user_namespace() -> None:
    """An ordinary user gets the right to mount in a namespace of their own, in which they stay who they are."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
