"""What comes into the callback interface's controller, what goes out, and what its flows ask for while they run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evertrain.mindio.tft.messages import AnyMessage, Reply
from evertrain.mindio.tft.numbers import Result

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromLink:
    """A message of the process at the other end of a link. The first one is its `Hello`."""

    link: int
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class LinkLost:
    link: int


@dataclass(frozen=True, slots=True)
class PlatformDone:
    """A callback of the platform has returned; `ok` is False if it raised."""

    call: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Signal:
    """Something the platform wants.

    Kinds: stop, global, strategy, invalid are the platform's part of a conversation about a fault; dump, pause,
    hot switch and stop switch are wishes of its own and wait until they can be fulfilled; ended and not replaced are
    only news.
    """

    kind: str
    faults: dict[int, int] = field(default_factory=dict)
    limit: float = 0.0
    text: str = ""
    """The strategy's name."""
    param: str = ""


CHOICES = frozenset({"global", "strategy", "invalid"})
CONVERSATION = CHOICES | {"stop"}


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has come."""


Event = FromLink | LinkLost | PlatformDone | Signal | Tick

# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """One message to many links; it is encoded once."""

    links: Sequence[int]
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Close:
    link: int
    why: str


@dataclass(frozen=True, slots=True)
class CallPlatform:
    call: int
    name: str
    args: tuple[Any, ...]


Action = Send | Close | CallPlatform

# --- what flows ask for ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Act:
    """Have ranks carry something out. Either one order for all or one for each."""

    ranks: Sequence[int]
    make: Callable[[int, int], AnyMessage]
    """The order, from serial number and rank. Called once if `same`."""
    limit: float
    same: bool = True
    blame: bool = True
    """A rank that does not answer in time counts as lost."""
    together: bool = False
    """The ranks need each other for it: when one fails or is lost, the others are not waited for."""
    healthy: bool = False
    """Only healthy ranks come to it: when one is found faulty, nobody is waited for."""


@dataclass(slots=True)
class Outcome:
    """The result of an `Act`."""

    replies: dict[int, Reply] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    """Ranks that were lost meanwhile or did not answer in time."""
    stranded: set[int] = field(default_factory=set)
    """Ranks that were not waited for: their callback may wait for a peer that will not come."""

    @property
    def failed(self) -> dict[int, Reply]:
        return {rank: reply for rank, reply in self.replies.items() if reply.result != Result.OK}

    @property
    def ok(self) -> bool:
        return not self.silent and not self.failed

    def of(self, ranks: Iterable[int]) -> Outcome:
        """What became of these ranks."""
        own = set(ranks)
        replies = {rank: reply for rank, reply in self.replies.items() if rank in own}
        return Outcome(replies, self.silent & own, self.stranded & own)

    @property
    def load_step(self) -> int:
        return max((reply.load_step for reply in self.replies.values()), default=0)

    def why(self) -> str:
        parts = [f"rank {rank} answered {reply.result} {reply.detail}".rstrip() for rank, reply in self.failed.items()]
        if self.silent:
            parts.append("no answer of " + ", ".join(map(str, sorted(self.silent)[:20])))
        return "; ".join(parts[:20])


@dataclass(slots=True)
class Tell:
    """Call one of the platform's callbacks. The result says whether it worked."""

    name: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class Wait:
    """Go on when `check` returns something that is not None, or with None when the time is over.

    It is asked after every event, so it has to be cheap.
    """

    check: Callable[[], Any]
    limit: float | None = None


Request = Act | Tell | Wait
Flow = Generator[Request, Any, Any]


class Over(Exception):
    """The job can't go on; everybody exits."""
