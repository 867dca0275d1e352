"""The machine's vocabulary: what can happen, what it can order, and the states of a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from evertrain.mindio import plan
from evertrain.mindio.controller.roster import Member
from evertrain.mindio.protocol import Message

# --- events and actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromRank:
    rank: int
    incarnation: int
    message: Message


@dataclass(frozen=True, slots=True)
class FromAgent:
    message: Message
    node: int = 0


@dataclass(frozen=True, slots=True)
class FromControl:
    """`link` is the number under which the answer finds its way back."""

    link: int
    message: Message


@dataclass(frozen=True, slots=True)
class LinkLost:
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    reason: str = "the link to the agent broke"
    node: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = FromRank | FromAgent | FromControl | LinkLost | AgentLost | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """To this incarnation of the rank only; if it is not linked any more, the message is void."""

    rank: int
    incarnation: int
    message: Message


@dataclass(frozen=True, slots=True)
class ToAgent:
    """To the agent of the node that the message's rank is on, or to all agents if it names no rank."""

    message: Message


@dataclass(frozen=True, slots=True)
class ToControl:
    link: int
    message: Message


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """Accept store keys with this prefix."""

    prefix: str


@dataclass(frozen=True, slots=True)
class CloseGeneration:
    """Forget the keys with this prefix and answer who waits for one with an error."""

    prefix: str


Action = Send | ToAgent | ToControl | OpenGeneration | CloseGeneration

# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Idle:
    """Not all agents are there yet."""

    deadline: float | None = None


@dataclass(slots=True)
class Gathering:
    """Waits until every rank is out; each one has its own expiry in the roster."""


@dataclass(slots=True)
class Building:
    """The ranks connect to each other and hash their copies."""

    start: plan.Start
    deadline: float
    waiting: set[int]
    digests: dict[int, dict[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class Repairing:
    """Copies travel."""

    start: plan.Start
    deadline: float
    waiting: set[int]


@dataclass(slots=True)
class Running:
    waiting: set[int]
    """Ranks that have not completed a step since `Go`."""
    unfinished: set[int]
    pausing: bool = False
    """All ranks were told to wait at the end of a step."""
    at: dict[int, int] = field(default_factory=dict)
    """The steps that they have completed, as far as they have answered."""
    paused: set[int] = field(default_factory=set)
    """Ranks that wait there."""


@dataclass(slots=True)
class Releasing:
    """The training is over; the scripts run to their ends."""


@dataclass(slots=True)
class Closing:
    """Everybody who can gets out, so that somebody can write the last checkpoint."""

    purpose: str
    """restart, exit or terminate."""
    code: int
    reason: str
    deadline: float
    last_deadline: float
    """How long to wait on if nobody with a clean state is out yet."""
    dump_deadline: float
    mark: str = ""
    """Of the checkpoint, once somebody was told to write it."""
    overdue: bool = False
    """The first deadline has passed without anybody to write the checkpoint."""


@dataclass(slots=True)
class Dumping:
    closing: Closing
    step: int
    waiting: dict[int, set[str]]
    """By rank: the parts of the checkpoint that it has yet to write."""
    deadline: float
    tried: set[int]
    """Ranks that could not write theirs."""
    written: set[tuple[int, str]]
    """(step, part) of what is on the disk already."""


@dataclass(slots=True)
class Over:
    code: int
    reason: str


@dataclass(slots=True)
class Hold:
    """Somebody wants the job to pause."""

    seconds: float
    exit_after: bool
    asker: tuple[int, int]
    """Link and request of the command, for its answer."""
    deadline: float | None = None
    """When the pause is over; None until all ranks wait."""


@dataclass(slots=True)
class Shadow:
    """A process that is prepared to take a rank's place."""

    member: Member
    asker: tuple[int, int]
    expires: float | None
    """Until when it has to be ready; None when it is."""


State = Idle | Gathering | Building | Repairing | Running | Releasing | Closing | Dumping | Over

CONSEQUENCES = frozenset({"link", "disconnected"})
"""What survivors see of somebody else's fault. During a recovery these are not faults of their own."""
