"""The file system as a container sees it: the machine's own, with its volumes at their mount paths.

All of it happens in a private mount namespace that ends with the container. A mount path that the machine doesn't have
is made without touching the disk: the deepest directory that exists is covered by an empty one in memory, into which
everything that was there is bound again, and next to it the missing directories. (For `/` that is a new root.) What
the container then writes directly into such a covered directory is gone when it ends, as with any container.
Inside a volume the missing directory is really made, as container runtimes do: what is written there must stay.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from typing import TypedDict

from evertrain.embedded import kernel

MAX_COVERED = 4096
SHARED_MEMORY = "/dev/shm"
_OLD_ROOT = "/.evertrain-machine"


class Mount(TypedDict):
    source: str
    target: str
    read_only: bool


class MountError(Exception):
    """A message for the user."""


def needless(mount: Mount) -> bool:
    """The machine shows it there anyway."""
    return not mount["read_only"] and os.path.realpath(mount["source"]) == os.path.realpath(mount["target"])


def private_namespace(own_memory: bool) -> None:
    """With `own_memory`, also shared memory is private, and so is gone with the container, whoever forgets it there."""
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | (kernel.CLONE_NEWIPC if own_memory else 0))
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    if own_memory and os.path.isdir(SHARED_MEMORY):
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", os.path.realpath(SHARED_MEMORY), "tmpfs", flags, "mode=1777")


def show_own_network(staging: str) -> None:
    """/sys shows the NICs of whoever mounted it: the machine's. Where the kernel refuses to mount another one, it goes
    on doing so. `staging` is an empty directory."""
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    with contextlib.suppress(OSError):
        kernel.mount("sysfs", staging, "sysfs", flags)
        try:
            for part in ("class/net", "devices/virtual/net"):
                kernel.bind(f"{staging}/{part}", f"/sys/{part}")
        finally:
            kernel.unmount(staging)


def arrange(mounts: Sequence[Mount], staging: str, own_proc: bool) -> None:
    """Call in a private namespace. `staging` is an empty directory."""
    view = _View()
    mounts = [mount | {"target": _plain(mount["target"])} for mount in mounts]
    sources = [_real(mount["source"]) for mount in mounts]
    prefix = ""
    if any(_existing(mount["target"]) == "/" != mount["target"] for mount in mounts):
        _new_root(staging)
        view.ours.add("/")
        prefix = _OLD_ROOT
    for mount, source in sorted(zip(mounts, sources, strict=True), key=lambda pair: pair[0]["target"].count("/")):
        _mount(view, mount, prefix + source)
    if own_proc:
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    if prefix:
        kernel.unmount(prefix)
        os.rmdir(prefix)


def _plain(path: str) -> str:
    """Without what doesn't count: a slash at the end, two in a row."""
    return os.path.normpath("/" + path.strip("/"))


def _real(source: str) -> str:
    try:
        return os.path.realpath(source, strict=True)
    except OSError as error:
        raise MountError(f"{source} is not there: {error.strerror}") from None


class _View:
    def __init__(self) -> None:
        self.ours: set[str] = set()
        """Directories in memory, in which something can be made."""
        self.volumes: dict[str, bool] = {}
        """Mount paths of volumes so far, and whether they are read-only."""

    def volume_of(self, path: str) -> str | None:
        """The volume that the path lies in."""
        while path != "/":
            if path in self.volumes:
                return path
            if path in self.ours:
                return None
            path = os.path.dirname(path)
        return None


def _mount(view: _View, mount: Mount, source: str) -> None:
    target = mount["target"]
    if target == "/":
        raise MountError("nothing can be mounted on /")
    try:
        _provide(view, target, directory=os.path.isdir(source))
        target = os.path.realpath(target)
        kernel.bind(source, target)
        if mount["read_only"]:
            kernel.make_read_only(target)
    except OSError as error:
        raise MountError(f"{mount['source']} can't be mounted on {mount['target']}: {error.strerror}") from None
    view.volumes[target] = mount["read_only"]


def _existing(path: str) -> str:
    """The deepest directory on the way to the path that exists; the path itself if it does."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _provide(view: _View, target: str, directory: bool) -> None:
    if os.path.lexists(target):
        if os.path.isdir(target) != directory:
            raise MountError(
                f"{target} is {'no directory' if directory else 'a directory'} and its volume is the opposite"
            )
        return
    parent = os.path.realpath(_existing(target))
    if not os.path.isdir(parent):
        raise MountError(f"{parent}, on the way to {target}, is no directory")
    volume = view.volume_of(parent)
    if (volume is None or view.volumes[volume]) and not _is_ours(view, parent):
        _cover(parent)
        view.ours.add(parent)
    os.makedirs(target if directory else os.path.dirname(target), exist_ok=True)
    if not directory:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _is_ours(view: _View, path: str) -> bool:
    """Made in memory by us, rather than bound from the machine."""
    return any(os.path.exists(ours) and os.stat(ours).st_dev == os.stat(path).st_dev for ours in view.ours)


def _cover(directory: str) -> None:
    machine = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        names = os.listdir(directory)
        _check_number(directory, names)
        mode = stat.S_IMODE(os.stat(directory).st_mode)
        kernel.mount("tmpfs", directory, "tmpfs", kernel.MS_NODEV, f"mode={mode:o}")
        for name in names:
            _show(f"/proc/self/fd/{machine}/{name}", os.path.join(directory, name))
    finally:
        os.close(machine)


def _new_root(staging: str) -> None:
    names = os.listdir("/")
    _check_number("/", names)
    kernel.mount("tmpfs", staging, "tmpfs", kernel.MS_NODEV, "mode=755")
    for name in names:
        _show(f"/{name}", f"{staging}/{name}")
    old = staging + _OLD_ROOT
    os.mkdir(old)
    kernel.pivot_root(staging, old)
    os.chdir("/")


def _check_number(directory: str, names: Sequence[str]) -> None:
    if len(names) > MAX_COVERED:
        raise MountError(
            f"a mount path has to be added to {directory}, which holds {len(names)} entries; at most {MAX_COVERED} can "
            "be kept visible. Make the missing directory yourself, or choose another mountPath"
        )


def _show(source: str, target: str) -> None:
    """The same entry at another place. What can't be shown (a broken mount, say) is left out."""
    try:
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), target)
            return
        if stat.S_ISDIR(mode):
            os.mkdir(target, stat.S_IMODE(mode))
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        kernel.bind(source, target)
    except OSError:
        return
