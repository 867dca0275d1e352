"""A process group that can always be left.

A rank that waits in a collective for a peer that died must get out at once, wherever it is. The collective library
can't promise that: shutting gloo's connections down wakes most waits within milliseconds, but 6 to 11 of 100 stay
blocked until the group's timeout, with nothing left to poke. So the caller never waits inside the library without a way
out. `GuardedWork.wait` waits for the raw operation in slices of a few milliseconds, on the library's own condition
variable: a completed operation wakes it at once, and between two slices it looks whether the group was stopped. This
costs nothing while training runs, and no Python code ever runs on the library's threads, where it would crash a process
that is about to exit. (A callback that sets an event costs 0.1 ms for every bucket.) Some of gloo's operations have no
such slices: a send or receive that times out breaks the whole group, and a reduce_scatter ignores the time given. There
a thread waits in the caller's place.

Whatever goes wrong in a group ends in `Interrupted`, never in a RuntimeError that a script might swallow: the step is
over for this rank, and the controller decides how it goes on. A stopped group is finished. It goes to the attic
(`attic`), and the next generation gets a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from evertrain.torch import attic
from evertrain.torch.backends import Backend, RawGroup
from evertrain.torch.interrupt import Interrupted
from evertrain.torch.waiters import Waiters

_SLICE = timedelta(milliseconds=10)
"""How long a stop may go unnoticed if the library doesn't wake up. A slice that passes costs 0.08 ms of CPU."""
_LOOK = 0.005
"""Seconds between two looks at the cancellation while a group is built and gloo connects to its peers."""

OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""What a process group can do, under every name that torch has had for it."""
_NO_SLICES = frozenset(
    {
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
        "send",
        "recv",
        "recv_anysource",
    }
)
"""Operations whose wait has no way out: a thread waits for them."""


_FIRST_KIND, MOST_MOVES = 16, 240
"""torch tells the backends of a group apart by a small number, and never lets go of one that it has."""


class Cancellation(Protocol):
    """What a `threading.Event` offers."""

    def is_set(self) -> bool: ...


class GroupError(RuntimeError):
    """A group could not be built although nobody cancelled it."""


def _ignore(_: Any) -> None:
    pass


class GuardedWork(dist.Work):
    """An operation under way in a guarded group."""

    def __init__(self, group: GuardedGroup, raw: dist.Work, in_thread: bool, host_waits: bool) -> None:
        super().__init__()
        self._group = group
        self._raw = raw
        self._in_thread = in_thread
        self._host_waits = host_waits
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation. Raises Interrupted if the group was stopped or broke."""
        group, raw = self._group, self._raw
        group._check()
        if self._done:
            return True
        if self._host_waits and not raw.is_completed():
            group.on_wait(True)
            try:
                if self._in_thread:
                    self._wait_in_thread()
                else:
                    self._wait_in_slices(timeout)
            finally:
                group.on_wait(False)
        if not self._done:
            try:
                raw.wait()
            except Exception as error:
                group._broke(error)
            self._done = True
        return True

    def _wait_in_slices(self, timeout: timedelta | None) -> None:
        group, raw = self._group, self._raw
        limit = timeout.total_seconds() if timeout else 0.0
        began = time.monotonic()
        while True:
            # Raises when the slice has passed, and when the operation failed: only in the latter case it is complete.
            with contextlib.suppress(Exception):
                raw.wait(_SLICE)
                self._done = True
            if self._done or raw.is_completed():
                return
            group._check()
            if limit > 0 and time.monotonic() - began > limit:
                raise RuntimeError(f"the operation was not complete after {limit:g} s")

    def _wait_in_thread(self) -> None:
        error = self._group._waiters.wait(self._raw)
        if error is not None:
            self._group._broke(error)
        self._group._check()
        # A raw receive can be waited for only once; a second time it would wait for the next message.
        self._done = True

    def is_completed(self) -> bool:
        return self._done or self._group.stopped or self._raw.is_completed()

    def is_success(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self._raw.synchronize()

    def result(self) -> list[torch.Tensor]:
        return self._raw.result()

    def source_rank(self) -> int:
        return self._raw._source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        return self._raw.get_future()


def _guarded(name: str, in_thread: bool = False) -> Callable[..., GuardedWork]:
    def operation(self: GuardedGroup, *args: Any, **options: Any) -> GuardedWork:
        return self._start(name, in_thread, args, options)

    operation.__name__ = name
    operation.__qualname__ = f"GuardedGroup.{name}"
    operation.__doc__ = f"torch's `{name}`, guarded."
    return operation


class GuardedGroup(dist.ProcessGroup):
    """The process group of one generation, as training code and torch.distributed see it.

    `on_wait(True)` and `on_wait(False)` are called around every wait that has to block, `on_broken(text)` once if an
    operation fails although nobody stopped the group.
    """

    def __init__(
        self,
        generation: int,
        rank: int,
        size: int,
        store: dist.Store,
        backend: Backend,
        raw: RawGroup,
        timeout: float,
        on_wait: Callable[[bool], None] = _ignore,
        on_broken: Callable[[str], None] = _ignore,
    ) -> None:
        super().__init__(rank, size)
        self.generation = generation
        self.store = store
        self.backend = backend
        self.host_waits = backend.host_waits
        self.on_wait = on_wait
        self.on_broken = on_broken
        self.stopped = False
        self._rank, self._size = rank, size
        self._raw = raw
        self.timeout = timeout
        self.moves = 0
        self._lock = threading.Lock()
        self._waiters = Waiters()
        # For torch's C++ side, DDP for one, which asks a group for its backend but starts operations by our methods.
        self._set_default_backend(raw.kind)
        self._register_backend(raw.device, raw.kind, raw.backend)
        self._retire = self._hold(raw)
        _alive[next(_numbers)] = self

    def _hold(self, raw: RawGroup) -> weakref.finalize:
        """Whether stopped or merely dropped: the raw group goes to the attic, once, by what this returns."""
        attic.watch(raw)
        retire = weakref.finalize(self, attic.keep, raw, self.timeout)
        retire.atexit = False
        return retire

    def stop(self) -> None:
        """End the group: wake whoever waits in it, here and at the peers, and refuse what comes. From any thread."""
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
        self._waiters.stop()
        self._retire()
        self.backend.stop(self._raw)

    def replace(self, raw: RawGroup) -> bool:
        """Go on with another raw group of the same members, while nobody uses this one. False if it was stopped."""
        with self._lock:
            if self.stopped:
                return False
            old, self._raw = self._raw, raw
            retire, self._retire = self._retire, self._hold(raw)
        self.moves = expose(self, raw, self.moves)
        retire()
        self.backend.stop(old)
        return True

    def _start(self, name: str, in_thread: bool, args: tuple, options: dict[str, Any]) -> GuardedWork:
        self._check()
        raw = self._raw.of((args, tuple(options.values())))
        try:
            work = getattr(raw.group, name)(*args, **options)
        except Exception as error:
            if self.stopped or self.backend.is_broken(error):
                self._broke(error)
            raise
        return GuardedWork(self, work, in_thread, self.host_waits or raw is not self._raw)

    def _check(self) -> None:
        if self.stopped:
            raise Interrupted(f"the process group of generation {self.generation} was stopped")

    def _broke(self, error: Exception) -> NoReturn:
        """An operation failed. If the group was not stopped before, this rank is the first here to know."""
        with self._lock:
            first = not self.stopped
        text = str(error).strip() or type(error).__name__
        if first:
            # Peers that don't exchange data with the lost one learn it from us.
            self.stop()
            self.on_broken(text)
        raise Interrupted(f"a collective of generation {self.generation} broke: {text}") from error

    # What torch asks a process group about itself.

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return self.backend.name

    def name(self) -> str:
        return self.backend.name

    def get_group_store(self) -> dist.Store:
        return self.store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._raw.device.type)]

    def _get_backend(self, device: torch.device) -> Any:
        return self._raw.backend

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        self._raw.group.set_timeout(timeout)

    def abort(self) -> None:
        self.stop()

    def shutdown(self) -> None:
        """A script's `destroy_process_group()`. The group stays: the rank may still have to send its state."""


for _name in OPERATIONS:
    setattr(GuardedGroup, _name, _guarded(_name, in_thread=_name in _NO_SLICES))

_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[int, GuardedGroup] = weakref.WeakValueDictionary()


def alive() -> list[GuardedGroup]:
    """The groups in use, in the order in which they were made."""
    return [group for _, group in sorted(_alive.items()) if not group.stopped]


def expose(group: dist.ProcessGroup, raw: RawGroup, moves: int) -> int:
    """Have torch's C++ side take this for the group's backend, after so many others; returns how many there were."""
    kind = dist.ProcessGroup.BackendType(_FIRST_KIND + moves)
    for device in group._device_types:
        group._register_backend(device, kind, raw.backend)
    return moves + 1


def build(
    generation: int,
    rank: int,
    size: int,
    store: dist.Store,
    backend: Backend,
    timeout: float,
    cancelled: Cancellation,
    on_wait: Callable[[bool], None] = _ignore,
    on_broken: Callable[[str], None] = _ignore,
) -> GuardedGroup:
    """Build the group of a generation together with its other members.

    A member may die in the middle of it, which leaves the others blocked in the library; so a helper thread builds, and
    the caller leaves with Interrupted as soon as `cancelled` is set. Raises GroupError if the library fails.
    """
    raw = construct(backend, store, rank, size, timeout, cancelled)
    return GuardedGroup(generation, rank, size, store, backend, raw, timeout, on_wait, on_broken)


def construct(
    backend: Backend, store: dist.Store, rank: int, size: int, timeout: float, cancelled: Cancellation
) -> RawGroup:
    return _Construction(backend, store, rank, size, timeout).result(cancelled)


class _Construction:
    """A group being built by a thread, which cleans up after itself if nobody waits for it any more."""

    def __init__(self, backend: Backend, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._backend = backend
        self._arguments = (store, rank, size, timeout)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._abandoned = False
        self._raw: RawGroup | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._build, name="evertrain-build", daemon=True).start()

    def result(self, cancelled: Cancellation) -> RawGroup:
        # A cancelled link ends the builder's waits in the store by itself, and with them this one; the looks are for
        # the time in which gloo connects.
        try:
            while not self._done.wait(_LOOK):
                if cancelled.is_set():
                    break
        except BaseException:  # an interrupt: a script makes a group in its training function
            with self._lock:
                raw, self._abandoned = self._raw, True
            if raw is not None:
                self._discard(raw)
            raise
        with self._lock:
            raw = self._raw
            self._abandoned = raw is None or cancelled.is_set()
        if cancelled.is_set():
            if raw is not None:
                self._discard(raw)
            raise Interrupted("the building of a process group was cancelled")
        if raw is None:
            if isinstance(self._error, Interrupted):
                raise Interrupted(*self._error.args) from self._error
            raise GroupError(f"the process group could not be built: {self._error}") from self._error
        return raw

    def _build(self) -> None:
        try:
            raw = self._backend.create(*self._arguments)
        except BaseException as error:  # handed to the caller, or of no interest any more
            self._error = error
        else:
            with self._lock:
                self._raw = raw
                abandoned = self._abandoned
            if abandoned:
                self._discard(raw)
        self._done.set()

    def _discard(self, raw: RawGroup) -> None:
        self._backend.stop(raw)
        attic.keep(raw, self._timeout)
