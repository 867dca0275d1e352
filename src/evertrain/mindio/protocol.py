"""What controller, processors and agents say to each other; `framing` says how it travels.

The first frame on a link is a `Hello` with the protocol version and the job token; nothing else is read before it is
accepted.

Times named `at` are seconds of the sender's CLOCK_MONOTONIC, which all processes of one host share. The shell of the
controller translates those of other hosts into its own before the machine sees them.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any

import msgspec

from evertrain.mindio import framing
from evertrain.mindio.framing import MAX_FRAME

VERSION = 1
PRELUDE = "prelude/"
"""Prefix of the store's keys that belong to no generation and stay for the life of the job: what ranks agreed on
before training."""
STATE = "state"
"""The part of the training state that every rank holds; the only one unless the state is sharded."""
_Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""What fits into a word of a board."""


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of everything on the wire; the class name is the tag."""


# --- opening a link ------------------------------------------------------------------------------------------------


class Hello(Message):
    """First frame of every link. `role` is "rank" (a training process), "agent" (what starts and watches those of one
    node), "standby" (a passive controller, which wants to be told what it needs for taking over), "controller" (one
    that has taken over and says so to its predecessor) or "control" (somebody who asks for a pause or a switch).

    Who was linked to a controller before says what has become of it since: a new controller knows nothing else.
    """

    version: int
    token: str
    role: str
    rank: int = -1
    incarnation: int = 0
    pid: int = 0
    ranks: list[int] = []
    """An agent's ranks."""
    world_size: int = 0
    """An agent's idea of the job's size."""
    node: int = 0
    address: str = ""
    """Of an agent: the host under which other nodes reach its ranks. Of a controller: where it listens, HOST:PORT."""
    master_port: int = 0
    """A port that is free on the agent's node, for the script's own rendezvous; 0 if nobody will ask for it."""
    records: bool = True
    """An agent that writes the timeline down; the others are told only of its incidents."""
    at: float = 0.0
    epoch: int = 0
    """The highest number of a controller that the sender has been linked to; an older one has no say any more."""
    incarnations: dict[int, int] = {}
    """An agent's ranks that have a living process."""
    booting: list[int] = []
    """Those of them that have not got to the training yet."""
    left: list[int] = []
    """An agent's ranks whose process ended with code 0."""
    place: str = ""
    """Of a rank that was linked before: starting, out, inside, finished or leaving. Of a standby: begun, if it knows
    that the job has."""
    generation: int = 0
    attempt: int = -1
    """Of the newest Stop that this rank has heard."""
    step: int = -1
    out: Out | None = None
    """What a rank that is out last said."""
    pause: int = 0
    """Of the newest `Pause` that this rank has heard."""


class Welcome(Message):
    running: bool = False
    """Other ranks hold a trained state, which this one will receive: there is no need to load a checkpoint."""
    epoch: int = 0
    controllers: list[str] = []
    """Where to look for a controller when this link breaks; empty if there is no other."""


class Refused(Message):
    reason: str
    retry: bool = False
    """Not here or not now: another controller, or this one later, may accept."""
    new: bool = False
    """This controller has just been started and knows of no job: the one that was here before is gone."""
    over: bool = False
    """There is nothing left to do: the job has ended."""
    controllers: list[str] = []


# --- what went wrong -------------------------------------------------------------------------------------------------


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault as its observer saw it. `kind` is one of `FAULT_KINDS`."""

    kind: str
    rank: int
    incarnation: int = 0
    detail: str = ""
    stack: str = ""
    exit_code: int | None = None
    """As `subprocess` has it: negative for a signal."""
    at: float = 0.0
    """When it happened, as exactly as the observer can tell."""


FAULT_KINDS = (
    "exit",  # the process ended, by itself or by a signal
    "stopped",  # the process was stopped (SIGSTOP) or frozen
    "hang",  # no progress: in a system call, with the GIL held, or in an endless loop; the detail says which
    "unresponsive",  # told to stop or to act, did not
    "exception",  # the training function raised
    "script",  # the training function uses Evertrain in a way that can't work; trying again is of no use
    "uce",  # uncorrectable memory error: the rank's own state is lost
    "hccl",  # a collective failed although all processes live
    "link",  # a collective broke; most likely because a peer died
    "disconnected",  # the rank's link to the controller broke
    "start",  # a replacement failed before it got to the training function
    "repair",  # a repair failed or delivered a state with the wrong hash
    "agent",  # the agent is gone or silent, and with it all processes of its node
    "controller",  # the controller was replaced in the middle of a recovery
    # Not faults, but reasons to interrupt the training that get into the timeline in the same way:
    "rejoin",  # a rank that the job went on without is back
    "hot-switch",  # a rank's process is exchanged on request
)


# --- processor to controller -----------------------------------------------------------------------------------------


class Out(Message):
    """The main thread is out of the training code and waits; sent at first entry, after `Stop`, and on an own fault."""

    step: int
    """Number of completed steps that this rank's state contains."""
    clean: bool
    """False when the state is between two steps or lost: this rank can only receive."""
    attempt: int = -1
    """The attempt of the newest `Stop` that this process has seen; -1 for none."""
    fresh: bool = False
    """True for a process that has not trained yet."""
    fault: Fault | None = None
    fingerprint: str = ""
    summary: str = ""
    """The model and optimizer in words, for the error when fingerprints differ."""
    state_bytes: int = 0
    checkpoint: int = -1
    """Step of the newest checkpoint that this rank can load; -1 for none."""
    parts: tuple[str, ...] = (STATE,)
    """The parts of the state that this rank is to hold; ranks with a part of the same name hold the same bits."""
    also: list[tuple[str, int]] = []
    """(part, step) of further clean copies: at another step than `step`, or although the rest is not clean."""


class Updating(Message):
    """A `Stop` was heard inside an optimizer update, which is not left half-way: `Out` comes at the end of the step."""

    attempt: int
    """Of the newest `Stop`."""


class Joined(Message):
    """This rank is in the new generation's group, and these are the hashes of the parts that it holds cleanly."""

    generation: int
    digests: dict[str, str] = {}
    error: str = ""


class Repaired(Message):
    generation: int
    ok: bool
    source: int = -1
    """On failure: the rank whose data had the wrong hash, or -1 if nobody in particular is to blame."""
    detail: str = ""
    step: int = -1


class Resumed(Message):
    """The first step after `Go` is complete."""

    generation: int
    step: int
    elastic: bool = False
    """This rank could take over the data of other ranks."""


class At(Message):
    """Answer to `Pause`, at once: how many steps the state contains."""

    number: int
    step: int


class Paused(Message):
    """The rank has completed the step that all ranks agreed on and waits for `Continue` or `Stop`."""

    generation: int
    step: int


class Finished(Message):
    """The training function returned; the rank stays available as a source until `Release`."""

    step: int


class Dumped(Message):
    ok: bool
    step: int
    parts: tuple[str, ...] = (STATE,)
    path: str = ""
    detail: str = ""


class Log(Message):
    """Something for the timeline: a checkpoint written or failed, a warning."""

    name: str
    fields: dict[str, Any] = {}


class StoreSet(Message):
    key: str
    value: bytes


class StoreGet(Message):
    """Ask for keys; answered by one `StoreReply` when all of them exist."""

    request: int
    keys: list[str]


class StoreAdd(Message):
    request: int
    key: str
    amount: int


# --- controller to processor -----------------------------------------------------------------------------------------


class Stop(Message):
    """Leave the training code, wherever you are, and send `Out`. Never obeyed inside an optimizer update (`Updating`).

    Attempts count up over the life of the job. Every `Stop` is answered by one `Out` with the same attempt, also by a
    rank that is already out: an `Out` may cross with a `Stop`, and by the time it is read the rank may have begun to
    receive another state, so an `Out` of an older attempt says nothing about the present one.
    """

    attempt: int = 0
    incident: str = ""


class Join(Message):
    """Build the process group of this generation. Its store keys start with `prefix`.

    Members may be fewer than the job has ranks; they then share the data of the missing ones (see `shares`).
    """

    generation: int
    spans: list[tuple[int, int]]
    """First and last of each unbroken run of members: every rank gets this list, so it must not grow with the job."""
    step: int
    prefix: str
    need_digest: bool = True

    @property
    def members(self) -> list[int]:
        return [rank for first, last in self.spans for rank in range(first, last + 1)]


class Repair(Message):
    """What to do about the state: nothing, load the checkpoint of this step, or pass parts on and receive some.

    Every rank goes through the parts in the order of the lists; there it is the same on all ranks, so that no two wait
    for each other.
    """

    generation: int
    step: int
    load: bool = False
    sends: list[tuple[str, int]] = []
    """(part, target)"""
    receives: list[tuple[str, int, str]] = []
    """(part, source, hash of the right content)"""


class Go(Message):
    generation: int
    step: int
    pauses: int = 0
    """Pauses up to this number are void."""


class Pause(Message):
    """Say where you are (`At`), and wait at the end of the step that you are in until you know which step is meant."""

    number: int
    """Counts up over the life of the job."""


class PauseAt(Message):
    """Wait when your state contains this many steps. It is one more than anybody had when asked, so everybody gets
    there and nobody is beyond; in a step that some have begun and others have not, all would wait for each other."""

    number: int
    step: int


class Continue(Message):
    """Go on after the pause of this number."""

    number: int


class Dump(Message):
    """Write these parts of the dying-gasp checkpoint now."""

    step: int
    parts: tuple[str, ...] = (STATE,)
    mark: str = ""
    """The same for all parts of one checkpoint, and for no other."""


class Release(Message):
    """Everybody has finished; leave."""


class Exit(Message):
    """Leave at once: the job has ended or is about to be restarted."""

    reason: str = ""


class Ping(Message):
    """Write this number to the board, to show that Python code can run."""

    number: _Word


class StoreReply(Message):
    request: int
    values: list[bytes] = []
    error: str = ""


class Controllers(Message):
    """To ranks and agents: the addresses (HOST:PORT) of the controllers, the one in charge first."""

    addresses: list[str]


# --- agent to controller ---------------------------------------------------------------------------------------------


class Started(Message):
    rank: int
    incarnation: int
    pid: int
    warm: bool


class Observed(Message):
    """A fault that the agent saw in one of its processes."""

    fault: Fault
    step: int = -1
    """The step that the process had completed, as its board shows; -1 if it had completed none itself."""
    partial: bool = False
    """A judgement about all ranks that this agent can only make for its own: it counts when every agent makes it."""


class Ended(Message):
    """A process ended with exit code 0."""

    rank: int
    incarnation: int


class Suspect(Message):
    """Have this rank answer a `Ping` on its board."""

    rank: int
    number: _Word


class Terminate(Message):
    """End the job: dying-gasp checkpoint, then exit."""

    reason: str
    grace: float


class Spares(Message):
    """How many warm spares wait at the agent."""

    ready: int


class Beat(Message):
    """The agent lives; answered by a `Beat` of the controller."""

    at: float = 0.0
    step: int = -1
    """The newest step that a rank of this agent has completed; -1 for none."""


# --- controller to agent ---------------------------------------------------------------------------------------------


class Spawn(Message):
    """Start this rank's process (a warm spare if there is one); an older incarnation is killed first."""

    rank: int
    incarnation: int
    restart: int = 0
    """How often all processes were restarted before."""
    master: str = ""
    """HOST:PORT for the script's own rendezvous; empty on one node, where the agent picks it."""


class Kill(Message):
    rank: int
    incarnation: int
    reason: str


class Prepare(Message):
    """Start a process for this rank beside the one that it has, and leave that one alone."""

    rank: int
    incarnation: int


class Promote(Message):
    """The prepared process is the rank's process from now on; the one before it is told to leave."""

    rank: int
    incarnation: int


class Incident(Message):
    """One entry of the timeline, to be written to the events file."""

    record: dict[str, Any]


class End(Message):
    """The job is over. The agent ends what still runs and exits with `code`."""

    code: int
    reason: str
    cause: str = ""


# --- controller to standby -------------------------------------------------------------------------------------------


class Memo(Message):
    """What a standby can't learn from ranks and agents: sent when it links and after each change. The store's keys
    from before training follow as `StoreSet`."""

    epoch: int
    started: bool = False
    generation: int = 0
    attempt: int = 0
    restarts: int = 0
    incidents: int = 0
    """How many there were; the open one included."""
    open_faults: list[Fault] = []
    """Of the open incident, the first few; empty if there is none. Times are those of the wall clock here: another
    host's CLOCK_MONOTONIC means nothing to the successor."""
    step: int = 0
    furthest: int = 0
    protected: bool = False
    trained: bool = False
    issued: list[int] = []
    """By rank: its newest incarnation."""
    aside: list[int] = []
    can_share: bool | None = None
    pauses: int = 0
    hold: tuple[float, bool] | None = None
    """Of the pause that somebody wants: its seconds, and whether the job ends after them."""
    parts: list[str] = []
    master: str = ""


# --- control ---------------------------------------------------------------------------------------------------------


class Command(Message):
    """What somebody wants: `order` is one of `ORDERS`. Every command gets one `Answer`, when it is done or refused."""

    request: int
    order: str
    rank: int = -1
    timeout: float = 0.0
    """Of a pause: seconds until the job goes on by itself."""
    exit_after: bool = False
    """Of a pause: end the job after the timeout instead."""


ORDERS = ("pause", "continue", "hot-switch", "cancel-switch", "status")


class Answer(Message):
    request: int
    ok: bool
    text: str
    fields: dict[str, Any] = {}


AnyMessage = (
    Hello | Welcome | Refused
    | Out | Updating | Joined | Repaired | Resumed | At | Paused | Finished | Dumped | Log
    | StoreSet | StoreGet | StoreAdd
    | Stop | Join | Repair | Go | Pause | PauseAt | Continue | Dump | Release | Exit | Ping | StoreReply | Controllers
    | Started | Observed | Ended | Suspect | Terminate | Spares | Beat
    | Spawn | Kill | Prepare | Promote | Incident | End | Memo
    | Command | Answer
)  # fmt: skip


def spans(ranks: list[int]) -> list[tuple[int, int]]:
    """Ascending ranks as first and last of each unbroken run."""
    result: list[tuple[int, int]] = []
    for rank in ranks:
        if result and rank == result[-1][1] + 1:
            result[-1] = result[-1][0], rank
        else:
            result.append((rank, rank))
    return result


_decoder = msgspec.msgpack.Decoder(tuple[int, AnyMessage])


class FrameReader(framing.FrameReader):
    """Reads these messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any] = _decoder, limit: int = MAX_FRAME) -> None:
        super().__init__(decoder, limit)


def address(text: str) -> tuple[str, int]:
    """The `host:port` of a controller."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise framing.ProtocolError(f"{text!r} is no address of a controller")
    return host, int(port)


def replace(hello: Hello, **changes: Any) -> Hello:
    return msgspec.structs.replace(hello, **changes)


def refusal(hello: Message, token: str) -> str | None:
    """Why a link that opened with this message is not accepted, or None if it is."""
    if not isinstance(hello, Hello):
        return "the first message must be a Hello"
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        return "wrong job token"
    if hello.version != VERSION:
        return f"protocol version {hello.version} is not spoken here; this is version {VERSION}"
    if hello.role not in ("rank", "agent", "control", "standby", "controller"):
        return f"unknown role {hello.role!r}"
    return None
