"""What a script says to its peers before training: real at the first start, replayed in a replacement.

Scripts call `dist.init_process_group()` first thing and then agree on something: rank 0 broadcasts a run id or a seed,
sizes are added up, a barrier lets rank 0 download the data. When a process is replaced in the middle of training, its
peers are long past that and will never answer; a replacement that waited for them would wait for ever, and one that
got nothing would build another dataset or another model than its predecessor.

So the first processes do it for real, in a group of their own, and every result is noted at the controller under the
rank and the number of the operation. A replacement reads its predecessor's results instead of communicating: what runs
before training sees the same values in every incarnation. Results above `LIMIT` are not noted, and the replacement
keeps what it has: that is the broadcast of a whole model, and the repair brings the weights anyway.

The same holds for groups that the script makes with `dist.new_group` or a device mesh. They are `lasting` groups, which
mean the groups of a generation when training begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from evertrain.mindio.protocol import PRELUDE
from evertrain.torch import groups
from evertrain.torch.backends import Backend, Gloo, best_device, pick
from evertrain.torch.default_group import check_torch, default_installed, replace_init_process_group
from evertrain.torch.lasting import WORLD, keeper
from evertrain.torch.store import LinkStore, StoreLink

LIMIT = 1024 * 1024
"""Bytes of one operation's result that are noted."""
PREFIX = PRELUDE
_PATIENCE = 5.0
"""Seconds that a note may take to arrive. It was written before the predecessor began to train, or never."""


class PreludeError(RuntimeError):
    """A replacement's script did something before training that its predecessor had not done."""


class _Note(msgspec.Struct, array_like=True):
    operation: str
    results: list[bytes] | None


class PreludeWork(dist.Work):
    """An operation before training; its result is noted or replayed when it is waited for."""

    def __init__(self, finish: Callable[[timedelta | None], None]) -> None:
        super().__init__()
        self._finish = finish
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            self._finish(timeout)
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done


def _operation(name: str) -> Callable[..., PreludeWork]:
    def operation(self: Prelude, *args: Any, **options: Any) -> PreludeWork:
        return self._start(name, args, options)

    operation.__name__ = name
    operation.__doc__ = f"torch's `{name}`, noted or replayed."
    return operation


class Prelude(dist.ProcessGroup):
    """A process group before training. Without an inner group it replays. `notes` is where this member's notes are."""

    def __init__(
        self, rank: int, size: int, link: StoreLink, inner: groups.GuardedGroup | None, notes: str = ""
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._link = link
        self._notes = notes or f"{PREFIX}{rank}/"
        self._inner = inner
        self._count = 0
        # Held here: torch's C++ side does not keep the Python part of a store alive.
        self._store = inner.get_group_store() if inner else _NoStore()
        self._backend = inner.backend if inner else Gloo()

    def _start(self, name: str, args: tuple, options: dict[str, Any]) -> PreludeWork:
        number, self._count = self._count, self._count + 1
        key = f"{self._notes}{number}"
        # Every operation but a send and a barrier has its results in its first argument.
        first = next(iter((*args, *options.values())), None)
        results = [] if name in ("send", "barrier") else list(_flatten(first))
        if self._inner is None:
            return PreludeWork(lambda _: self._replay(key, number, name, results))
        work = getattr(self._inner, name)(*args, **options)

        def finish(timeout: timedelta | None) -> None:
            work.wait(timeout)
            self._link.store_set(key, msgspec.msgpack.encode(_Note(name, _encode(results))))

        return PreludeWork(finish)

    def _replay(self, key: str, number: int, name: str, results: list[torch.Tensor]) -> None:
        try:
            note = msgspec.msgpack.decode(self._link.store_get([key], _PATIENCE)[0], type=_Note)
        except TimeoutError:
            raise PreludeError(
                f"this replacement of rank {self._rank} called {name} before training, as its collective operation "
                f"number {number + 1}; the process it replaces had not done that. Collectives before training must "
                "be the same ones at every start"
            ) from None
        if note.operation != name or (note.results is not None and len(note.results) != len(results)):
            raise PreludeError(
                f"collective operation number {number + 1} before training was {note.operation} in the process that "
                f"this one replaces, and is {name} here: what a script says to its peers before training must be the "
                "same at every start"
            )
        for tensor, data in zip(results, note.results or [], strict=False):
            if tensor.numel():
                value = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
                tensor.detach().copy_(value.view(tensor.shape))

    def retire(self) -> None:
        """Training begins, with a group of its own."""
        if self._inner is not None:
            self._inner.stop()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return self._backend.name

    def name(self) -> str:
        return self._backend.name

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return self._inner._device_types if self._inner else [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if self._inner is None:
            raise PreludeError("a replacement has no collective library before it has joined its peers")
        return self._inner._get_backend(device)

    def shutdown(self) -> None:
        self.retire()


for _name in groups.OPERATIONS:
    setattr(Prelude, _name, _operation(_name))


class _NoStore(dist.Store):
    """What a replacement meets its peers in before training: nobody is there."""

    def set(self, key: str, value: bytes) -> None:
        self._refuse()

    def get(self, key: str) -> bytes:
        self._refuse()
        return b""

    def add(self, key: str, amount: int) -> int:
        self._refuse()
        return 0

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._refuse()

    def _refuse(self) -> None:
        raise PreludeError(
            "the store of before training can't be used in a process that replaces another: its peers are in the "
            "middle of their training"
        )


def patch_init_process_group(
    place: Callable[[], tuple[int, int]],
    connect: Callable[[], StoreLink],
    first: Callable[[], bool],
    timeout: float,
    cancelled: groups.Cancellation | None = None,
) -> Callable[[], None]:
    """Make a script's own `init_process_group` install a `Prelude`; returns a function that takes the patch back.

    `place` gives rank and size; `first` says whether all ranks are at their first start and can therefore really meet.
    Neither is asked before the script makes the group: a parked spare has no rank until then. Names that a script
    imported from torch before this call still mean the original.
    """

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: dist.Store | None = None,
        **options: Any,
    ) -> None:
        if default_installed():
            raise ValueError("trying to initialize the default process group twice!")
        own_rank, size = place()
        for name, given, actual in (("rank", rank, own_rank), ("world_size", world_size, size)):
            if given not in (-1, actual):
                raise ValueError(f"init_process_group got {name}={given}, but this process was launched with {actual}")
        link, all_meet = connect(), first()
        check_torch()
        chosen = _backend_named(backend)

        def build(name: str, ranks: list[int]) -> Prelude:
            index, inner = ranks.index(own_rank), None
            if all_meet:
                store = LinkStore(link, f"{PREFIX}group/{name}/", patience)
                inner = groups.build(0, index, len(ranks), store, chosen, patience, never)
            return Prelude(index, len(ranks), link, inner, f"{PREFIX}{own_rank}/{'' if name == WORLD else name + '/'}")

        keeper.open(own_rank, size, build)

    patience, never = timeout, cancelled or threading.Event()
    return replace_init_process_group(init_process_group)


def _backend_named(name: str | None) -> Backend:
    """The library that a script asked for; with several, that of the accelerator."""
    for part, device in (("hccl", "npu"), ("nccl", "cuda")):
        if name and part in name.lower():
            return pick(device)
    return pick("cpu" if name else best_device())


def _flatten(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)


def _encode(results: list[torch.Tensor]) -> list[bytes] | None:
    if sum(tensor.numel() * tensor.element_size() for tensor in results) > LIMIT:
        return None
    return [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in results]
