"""What the actors ask of the pure machine that leads a recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from evertrain.clusterd.recover.events import Effect, Event


class Machine(Protocol):
    """recover.machine.Recovery."""

    @property
    def state(self) -> str: ...
    @property
    def deadline(self) -> float | None: ...
    def handle(self, event: Event, now: float) -> list[Effect]: ...
    def clock_set(self, by: float) -> None:
        """The clock that `handle` is told of was set forward by so many seconds, or back: nothing has become due."""

    def dump(self) -> bytes: ...
    @property
    def worth_keeping(self) -> bool: ...
    def may_start_om(self) -> bool: ...
    @property
    def tested(self) -> Iterable[int]:
        """The ranks of a stress test that goes on."""


class MakeMachine(Protocol):
    """The class recover.machine.Recovery."""

    def __call__(self, job: str, *, make_uuid: Callable[[], str]) -> Machine: ...

    def load(self, data: bytes, job: str, *, make_uuid: Callable[[], str]) -> Machine: ...
