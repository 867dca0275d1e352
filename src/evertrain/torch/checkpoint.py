"""Checkpoints that are either whole or not there.

A checkpoint is read when everything else is lost, so a file that looks right and isn't is worse than none. Each is
written beside its place, forced to the disk and then renamed into it; a SHA-256 over everything ends the file and is
checked before any of it is used. A damaged one is passed over for the next older. A failed write harms nothing that
is there already.

    preamble (64 bytes: magic, version, step, sizes, CRC-32 of the header and of the preamble itself)
    header (msgpack: step, time, reason, skeleton, table of tensors)   padding to 64
    tensors, raw, each at a multiple of 64
    SHA-256 of all before it

The preamble alone tells whether a file has its full length: enough for a list without reading gigabytes. Several
processes may share a directory: a name has one content, whoever wrote it last, and temporary files carry their writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import queue
import re
import shutil
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import torch

from evertrain.torch import codec
from evertrain.torch.codec import Packed

MAGIC = b"EVERTRN\n"
VERSION = 1
PREAMBLE = struct.Struct("<8sIqQQII")
PREAMBLE_SPACE = 64
ALIGNMENT = 64
CHUNK = 4 << 20
NAME = re.compile(r"step-(\d{12,18})\.ckpt")
TEMPORARY = re.compile(r"\.step-\d+\.(?P<host>[^.]*)\.(?P<pid>\d+)-(?P<start>\d+)-\d+\.tmp")
ADVICE = {
    errno.ENOSPC: "the disk is full: free some space or choose another checkpoint directory",
    errno.EDQUOT: "your disk quota is used up: free some space or choose another checkpoint directory",
    errno.EFBIG: "the file would be larger than this process may write: raise the limit (ulimit -f)",
    errno.EACCES: "this user may not write there: correct the permissions or choose another checkpoint directory",
    errno.EPERM: "this user may not write there: correct the permissions or choose another checkpoint directory",
    errno.EROFS: "the file system is read-only: choose another checkpoint directory",
    errno.ENOENT: "the checkpoint directory is gone: create it again or choose another",
    errno.EEXIST: "it is a file: choose another checkpoint directory",
    errno.ENOTDIR: "a part of that path is a file: choose another checkpoint directory",
    errno.EIO: "the disk reports an error: look into the kernel's log, choose another checkpoint directory",
}
log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or used; the message says why and what to do."""


class Header(msgspec.Struct, frozen=True):
    """What a checkpoint says about itself. Offsets count from the end of the padded header."""

    step: int
    wall_time: float
    reason: str
    skeleton: bytes
    tensors: list[tuple[int, int]]
    """(offset, size) of each, in the order of the skeleton's slots."""


class Saving:
    """A checkpoint being written in the background."""

    def __init__(
        self, step: int, copies: list[torch.Tensor], write: Callable[[list[torch.Tensor]], Path | None]
    ) -> None:
        self.step, self.copies, self.write = step, copies, write
        self.path: Path | None = None
        self.error: Exception | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Path | None:
        """The path once it is on the disk; None after the timeout. Raises CheckpointError if it failed."""
        if self._done.wait(timeout) and self.error is not None:
            raise self.error
        return self.path


OnResult = Callable[[int, Path | None, Exception | None], None]


class Checkpoints:
    """The checkpoints of one job in one directory. `on_result(step, path, error)` is called by the writer thread."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3, on_result: OnResult | None = None) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self._on_result = on_result
        self.unusable: set[int] = set()
        """Steps whose checkpoints turned out to be damaged."""
        self._clones: list[torch.Tensor] = []
        self._count = itertools.count()
        # Work for the one writer thread, in order. Being in this queue is the only mark of being under way: there is
        # no second variable that an exception in the main thread could leave in disagreement with it.
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _explained(error, f"can't create the checkpoint directory {self.directory}") from error
        self._remove_leftovers()
        writer = threading.Thread(target=_work_off, args=(self._jobs,), name="evertrain-checkpoint", daemon=True)
        writer.start()
        # At the end of the program, or of this object, what was begun is written to its end.
        self.close = weakref.finalize(self, _finish, self._jobs, writer)

    def save(self, step: int, packed: Packed, reason: str = "periodic") -> Path:
        """Write a checkpoint now. Returns when it is on the disk under its name; raises CheckpointError."""
        if step < 0:
            raise ValueError(f"a step can't be negative: {step}")
        path = self.path_of(step)
        self._put(path, step, packed, reason)
        self.unusable.discard(step)
        self._prune(path)
        return path

    def path_of(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}.ckpt"

    def _put(self, path: Path, step: int, packed: Packed, reason: str) -> None:
        """Write one file, whole or not at all."""
        writer = f"{_host()}.{os.getpid()}-{_started(os.getpid())}-{next(self._count)}"
        temporary = self.directory / f".step-{step:012d}.{writer}.tmp"
        try:
            try:
                with open(temporary, "xb", buffering=0) as file:
                    with contextlib.suppress(OSError):  # not every network file system has locks
                        fcntl.flock(file, fcntl.LOCK_EX)
                    _write(file, step, packed, reason)
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            finally:
                with contextlib.suppress(OSError):  # after the renaming there is nothing to remove
                    temporary.unlink()
            _sync_directory(path.parent)
        except OSError as error:
            what = f"can't write the checkpoint of step {step} to {self.directory}"
            space = self._space(packed) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise _explained(error, what, space) from error

    def save_async(self, step: int, packed: Packed, reason: str = "periodic") -> Saving:
        """Copy the state and write the copy in the background. Waits first if another one is still being written."""
        skeleton = packed.skeleton
        return self._copy_and_write(
            step, packed.tensors, lambda copies: self.save(step, Packed(skeleton, copies), reason)
        )

    def _copy_and_write(
        self, step: int, tensors: list[torch.Tensor], write: Callable[[list[torch.Tensor]], Path | None]
    ) -> Saving:
        self.wait()
        if not self.close.alive:
            raise CheckpointError("no checkpoint can be saved any more: this object was closed")
        # Taken out while in use: if an exception gets in between, the next save makes new ones.
        clones, self._clones = self._clones, []
        saving = Saving(step, _copy(tensors, clones), write)
        self._jobs.put((self._write_behind, saving))
        return saving

    def wait(self) -> None:
        """Returns when no checkpoint is being written in the background. How it went is told by `on_result`."""
        if self.close.alive:
            reached = threading.Event()
            self._jobs.put((threading.Event.set, reached))
            reached.wait()

    def steps(self) -> list[int]:
        """Steps with a checkpoint of full length that did not turn out to be damaged, ascending. Cheap: contents aren't
        checked."""
        return [step for step, path in self._files() if step not in self.unusable and self._seems_whole(path, step)]

    def newest_step(self) -> int | None:
        """Of those that seem whole and did not turn out to be damaged."""
        for step, path in reversed(self._files()):
            if step not in self.unusable and self._seems_whole(path, step):
                return step
        return None

    def load_newest(self, load: Callable[[Path], tuple[int, Any]] | None = None) -> tuple[int, Any] | None:
        """The newest checkpoint that is whole; damaged ones are passed over with a warning. None if there is none."""
        load = load or self.load
        for _ in range(10):
            vanished = False
            for step, path in reversed(self._files()):
                try:
                    return load(path)
                except CheckpointError as error:
                    if isinstance(error.__cause__, FileNotFoundError):
                        vanished = True  # another process has just replaced it by a newer one: look again
                    else:
                        self.unusable.add(step)
                        log.warning("checkpoint passed over, trying the next older one: %s", error)
            if not vanished:
                break
        return None

    def load_step(self, step: int) -> Any:
        """The state of that step."""
        found, tree = self.load(self.path_of(step))
        if found != step:
            raise CheckpointError(f"{self.directory}/step-{step:012d}.ckpt holds step {found}: it was renamed")
        return tree

    @staticmethod
    def load(path: str | os.PathLike[str]) -> tuple[int, Any]:
        """(step, state) of a file, if every bit of it is as it was written; else CheckpointError."""
        try:
            with open(path, "rb", buffering=0) as file:
                return _read(file)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:  # RuntimeError: torch found no memory
            raise CheckpointError(f"{os.fspath(path)} can't be used: {error}") from error

    def _write_behind(self, saving: Saving) -> None:
        try:
            saving.path = saving.write(saving.copies)
        except Exception as error:
            saving.error = error
            log.warning("checkpoint failed, training goes on: %s", error)
        self._clones = saving.copies
        saving.copies, saving.write = [], lambda _: None
        saving._done.set()
        if self._on_result is not None:
            self._on_result(saving.step, saving.path, saving.error)

    def _space(self, packed: Packed) -> str:
        try:
            return f" (needed: {packed.nbytes:,} bytes, free: {shutil.disk_usage(self.directory).free:,})"
        except OSError:
            return ""

    def _seems_whole(self, path: Path, step: int) -> bool:
        return size_of(path, step) is not None

    def _files(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            raise _explained(error, f"can't read the checkpoint directory {self.directory}") from error
        found = ((NAME.fullmatch(name), name) for name in names)
        return sorted((int(match[1]), self.directory / name) for match, name in found if match)

    def _prune(self, written: Path) -> None:
        """Keep the newest that seem whole, and always the one just written, of which we know that it is."""
        try:
            others = [(step, path) for step, path in self._files() if path != written]
            whole = [(step, path) for step, path in others if self._seems_whole(path, step)]
            surplus = whole[: max(0, len(whole) - (self.keep - 1))]
            # A damaged one that is newer stays: it may be evidence, and the run will write that step again.
            oldest = whole[len(surplus)][0] if len(surplus) < len(whole) else int(written.stem.removeprefix("step-"))
            for step, path in others:
                if (step, path) in surplus or (step < oldest and (step, path) not in whole):
                    path.unlink(missing_ok=True)
        except (OSError, CheckpointError) as error:
            log.warning("can't remove old checkpoints: %s", error)

    def _remove_leftovers(self) -> None:
        """Remove what writers that died left behind. Another live process's file is never touched."""
        for path in self.directory.glob(".step-*.tmp"):
            match = TEMPORARY.fullmatch(path.name)
            if match and match["host"] == _host() and _started(int(match["pid"])) != int(match["start"]):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    # In a container the writer may live although its pid means nothing here: it then holds the lock.
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _work_off(jobs: queue.SimpleQueue[Any]) -> None:
    """The writer thread. It holds no reference to the Checkpoints between two jobs, so that these can be collected."""
    while (job := jobs.get()) is not None:
        function, argument = job
        try:
            function(argument)
        except Exception:
            log.exception("the callback for a finished checkpoint failed")
        del job, function, argument


def _finish(jobs: queue.SimpleQueue[Any], writer: threading.Thread) -> None:
    jobs.put(None)
    if writer is not threading.current_thread():
        writer.join()


def _copy(tensors: list[torch.Tensor], clones: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory, in the given ones if these fit: fresh pages cost more than the copying."""
    alike = len(tensors) == len(clones) and all(
        tensor.shape == clone.shape and tensor.dtype == clone.dtype
        for tensor, clone in zip(tensors, clones, strict=True)
    )
    if not alike:
        # Pinned memory is what an accelerator can copy to at full speed.
        clones = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.device.type != "cpu") for t in tensors]
    for tensor, clone in zip(tensors, clones, strict=True):
        clone.copy_(tensor)
    return clones


def _write(file: FileIO, step: int, packed: Packed, reason: str) -> None:
    table, end = [], 0
    for tensor in packed.tensors:
        table.append((end, tensor.nbytes))
        end = _aligned(end + tensor.nbytes)
    header = msgspec.msgpack.encode(Header(step, time.time(), reason, packed.skeleton, table))
    start = _aligned(PREAMBLE_SPACE + len(header))
    total = start + end + hashlib.sha256().digest_size
    preamble = PREAMBLE.pack(MAGIC, VERSION, step, len(header), total, zlib.crc32(header), 0)[:-4]
    preamble += struct.pack("<I", zlib.crc32(preamble))
    sha = hashlib.sha256()

    def put(data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            chunk = rest[:CHUNK]
            sha.update(chunk)
            while len(chunk):
                chunk = chunk[file.write(chunk) :]
            rest = rest[CHUNK:]

    put(preamble.ljust(PREAMBLE_SPACE, b"\0") + header.ljust(start - PREAMBLE_SPACE, b"\0"))
    for tensor in packed.tensors:
        put(codec.view_bytes(tensor))
        put(bytes(-tensor.nbytes % ALIGNMENT))
    put(sha.digest())


def _read_preamble(file: FileIO) -> tuple[int, int, int, int]:
    """(step, size of the header, size of the file, CRC of the header), if the file has that size."""
    raw = file.read(PREAMBLE_SPACE)
    size = os.fstat(file.fileno()).st_size
    if len(raw) < PREAMBLE_SPACE:
        raise ValueError(f"it has {size} bytes, which is less than the beginning of a checkpoint")
    magic, version, step, header_size, total, header_crc, own_crc = PREAMBLE.unpack_from(raw)
    if magic != MAGIC:
        raise ValueError("it isn't a checkpoint")
    if own_crc != zlib.crc32(raw[: PREAMBLE.size - 4]):
        raise ValueError("its beginning is damaged")
    if version != VERSION:
        raise ValueError(f"it has format {version}, and this version of evertrain reads format {VERSION}")
    if size != total:
        raise ValueError(f"it has {size} of {total} bytes: it was cut off or changed")
    return step, header_size, total, header_crc


def _read(file: FileIO) -> tuple[int, Any]:
    step, header_size, total, header_crc = _read_preamble(file)
    start = _aligned(PREAMBLE_SPACE + header_size)
    file.seek(0)
    sha = hashlib.sha256()

    def get(view: memoryview) -> None:
        while len(view):
            count = file.readinto(view[:CHUNK])
            if not count:
                raise ValueError("it became shorter while it was read")
            sha.update(view[:count])
            view = view[count:]

    if start > total:
        raise ValueError("its header doesn't fit in it")
    front = memoryview(bytearray(start))
    get(front)
    raw = front[PREAMBLE_SPACE : PREAMBLE_SPACE + header_size]
    if zlib.crc32(raw) != header_crc:
        raise ValueError("its header is damaged")
    header = msgspec.msgpack.decode(raw, type=Header)
    specs = codec.specs(header.skeleton)
    end = start
    for (offset, size), spec in zip(header.tensors, specs, strict=True):
        if size != spec.nbytes or start + offset != end:
            raise ValueError("its table of tensors is inconsistent")
        end = _aligned(end + size)
    if end + sha.digest_size != total or header.step != step:
        raise ValueError("its header contradicts its size or its step")
    tensors = codec.allocate(specs)
    for tensor in tensors:
        get(codec.view_bytes(tensor))
        get(memoryview(bytearray(-tensor.nbytes % ALIGNMENT)))
    expected = sha.digest()
    found = bytearray(len(expected))
    get(memoryview(found))
    if found != expected:
        raise ValueError("its contents are damaged: the checksum is wrong")
    return step, codec.unpack(header.skeleton, tensors)


def size_of(path: Path, step: int) -> int | None:
    """The size of a file of that step if it has its full length, else None."""
    try:
        with open(path, "rb", buffering=0) as file:
            found, _, total, _ = _read_preamble(file)
            return total if found == step else None
    except (OSError, ValueError):
        return None


def holds_no_tensors(path: Path) -> bool:
    with open(path, "rb", buffering=0) as file:
        _, header_size, total, _ = _read_preamble(file)
        return total == _aligned(PREAMBLE_SPACE + header_size) + hashlib.sha256().digest_size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


def _started(pid: int) -> int:
    """When the process started, which tells it from a later one with the same number; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if state in (b"Z", b"X") else int(fields[18])


def _explained(error: OSError, what: str, space: str = "") -> CheckpointError:
    advice = ADVICE.get(error.errno or 0, "look into the state of that file system")
    return CheckpointError(f"{what}: {error.strerror or error}; {advice}{space}")
