"""Moves the process groups of a paused training to the other network link and back, without anybody noticing.

The group objects that a script, DDP or a device mesh hold stay what they are. Behind them, the library's group is built
anew on the other link, and takes the place of the old one when all ranks have theirs: a rank whose link is down, or
that can't reach the others over it, keeps everybody where they are.

All gloo groups are moved, whoever made them: those of torch.distributed and the guarded ones of this package. Each
rank listens on its link; a connection that it opens itself leaves by the route to the peer's, so a link is free of
traffic when the ranks at both ends of it are told to leave it. The store through which ranks meet is not moved.

The ranks agree in the store of the largest group: a training has one that all ranks are in.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evertrain.torch import attic, groups, nics
from evertrain.torch.backends import Gloo, RawGroup
from evertrain.torch.errors import UsageError
from evertrain.torch.interrupt import Interrupted

LIMIT = 30.0
"""Seconds that the ranks have for each of: to come, and to connect."""
_GRACE = 5.0
"""Seconds for a word that has been decided and is on its way."""
_LOOKS = (0.005, 0.1)
_OK = "ok"

_moved: weakref.WeakKeyDictionary[Any, tuple[RawGroup, int]] = weakref.WeakKeyDictionary()
"""By group of torch's that was moved: what we put behind it, and how often."""


class LinkError(RuntimeError):
    """The groups are where they were."""


class Movable(Protocol):
    store: dist.Store
    timeout: float
    moves: int

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def replace(self, raw: RawGroup) -> bool: ...


class _Plain:
    """A group of torch's own."""

    def __init__(self, group: Any, store: dist.Store) -> None:
        self._group, self.store = group, store
        self.rank, self.size = group.rank, group.size
        self.timeout = _timeout(group)
        self._old: RawGroup | None
        self._old, self.moves = _moved.get(group, (None, 0))

    def libraries(self) -> set[str]:
        return {backend.name() for backend in _backends(self._group)}

    def replace(self, raw: RawGroup) -> bool:
        _moved[self._group] = raw, groups.expose(self._group, raw, self.moves)
        attic.watch(raw)
        if self._old is not None:
            attic.keep(self._old, self.timeout)
            Gloo().stop(self._old)
        # Connections that torch made itself are closed with the group: which ones they are is known to it alone.
        return True


def move(rank: int, name: str, ranks: Sequence[int], ops: Sequence[bool], ended: Callable[[], bool]) -> None:
    """Together with all other ranks, who are called with the same: `ops` says for each of `ranks` whether it goes to
    its backup link or to its primary one. LinkError with the reason if that is not done.

    The training thread must be paused; `ended` tells that it is about to go on. `name` is that of this move alone.
    """
    movable = _all_groups()
    if not movable:
        raise LinkError("there is no process group that could be moved")
    largest = max(movable, key=lambda group: group.size())
    store = dist.PrefixStore(f"links/{name}/", largest.store)
    reason, link, backup = _target(dict(zip(ranks, ops, strict=True)).get(rank))
    _agree(store, "ready", largest.size(), rank, reason or _why_not(movable), ended)
    built: list[tuple[Movable, RawGroup]] = []
    try:
        for group in movable:
            built.append((group, _build(group, name, link, ended)))
    except (groups.GroupError, Interrupted) as error:
        reason = f"{link}: {error}"
    try:
        _agree(store, "built", largest.size(), rank, reason, ended)
    except LinkError:
        for group, raw in built:
            Gloo().stop(raw)
            attic.keep(raw, group.timeout)
        raise
    for group, raw in built:
        if not group.replace(raw):
            Gloo().stop(raw)
            attic.keep(raw, group.timeout)
    nics.use(backup)


def _target(backup: bool | None) -> tuple[str, str, bool]:
    """Why it can't be used, which link it is, and whether that is the backup; None for the one that is in use."""
    try:
        links = nics.pair()
        if links is None:
            return f"{nics.VARIABLE} is not set: there is no other link", "", False
        chosen = nics.on_backup() if backup is None else backup
    except (UsageError, ValueError) as error:
        return str(error), "", False
    return nics.why_down(links[chosen]), links[chosen], chosen


def _all_groups() -> list[Movable]:
    plain: list[Movable] = []
    if dist.is_available():
        plain = [_Plain(group, store) for group, (_, store) in c10d._world.pg_map.items()
                 if type(group) is dist.ProcessGroup]  # fmt: skip
    return [*plain, *groups.alive()]


def _why_not(movable: Sequence[Movable]) -> str:
    for group in movable:
        names = group.libraries() if isinstance(group, _Plain) else {group.backend.name}  # type: ignore[attr-defined]
        if names - {Gloo.name}:
            return f"{', '.join(sorted(names))}: only gloo can change its link in a running process"
        if group.moves >= groups.MOST_MOVES:
            return f"torch can't exchange the inside of a group more than {group.moves} times"
    return ""


def _backends(group: Any) -> list[Any]:
    found = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in found]  # TORCH_DISTRIBUTED_DEBUG wraps them


def _timeout(group: Any) -> float:
    options = getattr(_backends(group)[0], "options", None)
    timeout = getattr(options, "_timeout", None) or c10d.default_pg_timeout
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def _build(group: Movable, name: str, link: str, ended: Callable[[], bool]) -> RawGroup:
    store = dist.PrefixStore(f"links/{name}/group/", group.store)
    patience = _Patience(ended)
    try:
        return groups.construct(Gloo(link), store, group.rank(), group.size(), group.timeout, patience)
    except Interrupted:
        raise groups.GroupError(patience.why) from None


class _Patience:
    """Ends when the time is up, or the training thread is about to go on."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._ended = ended
        self._until = time.monotonic() + LIMIT
        self.why = ""

    def is_set(self) -> bool:
        if self._ended():
            self.why = "the pause has ended"
        elif time.monotonic() > self._until:
            self.why = f"not all ranks were there within {LIMIT:g} s"
        return bool(self.why)


def _agree(store: dist.Store, what: str, size: int, rank: int, reason: str, ended: Callable[[], bool]) -> None:
    """Return when all ranks have come without a reason against it. LinkError with the first reason that there is.

    All ranks end with the same word: it is written once, by whoever is the first to know it.
    """
    if reason:
        _decide(store, what, f"rank {rank}: {reason}")
    elif store.add(f"{what}/yes", 1) == size:
        _decide(store, what, _OK)
    patience = _Patience(ended)
    if not _said(store, what, patience.is_set):
        _decide(store, what, f"rank {rank}: {patience.why}")
        until = time.monotonic() + _GRACE
        if not _said(store, what, lambda: time.monotonic() > until):
            raise LinkError(f"{patience.why}; whoever was about to say how it goes on is gone")
    word = store.get(f"{what}/word").decode()
    if word != _OK:
        raise LinkError(word)


def _said(store: dist.Store, what: str, too_late: Callable[[], bool]) -> bool:
    look = _LOOKS[0]
    while not store.check([f"{what}/word"]):
        if too_late():
            return False
        time.sleep(look)
        look = min(look * 2, _LOOKS[1])
    return True


def _decide(store: dist.Store, what: str, word: str) -> None:
    if store.add(f"{what}/decided", 1) == 1:
        store.set(f"{what}/word", word)
