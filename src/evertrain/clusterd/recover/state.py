"""What is known of a job's recovery, as it is kept. Pure.

Kept as JSON. Everything in it is plain data, so that a ClusterD that takes over goes on where another one was.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from evertrain.clusterd.recover.events import Signal
from evertrain.clusterd.recover.names import INIT, OFFERS, STATES, STOPPED, STOPPING

VERSION = 1


class Unreadable(ValueError):
    """What was kept is no state of a recovery, or one of a newer version. The text says why."""


class Fresh(msgspec.Struct):
    """A pod that has taken the place of another."""

    before: str
    """Uid of the one before."""
    born: float


class Data(msgspec.Struct, omit_defaults=True):
    version: int = VERSION
    state: str = INIT
    id: str = ""
    """Of the recovery, through all its rounds."""
    began: float = 0.0
    cause: str = ""
    """What began it, in words."""
    choice: str = ""
    """The strategy that was decided last,"""
    reason: str = ""
    """and why. All this for the timeline of whoever takes over."""
    uuid: str = ""
    """Of its signals; a new one whenever training is stopped."""
    clock: float = 0.0
    """The newest time seen."""
    until: float | None = None
    not_before: float | None = None
    """The recovery is not over before."""
    lonely: float | None = None
    """Since when nobody listens who is needed, and could."""
    deserted: float | None = None
    """Since when nobody listens who is needed."""

    returned: bool = False
    """The client came back. If it is a new one and reports the faults anew, it knows nothing of what it was told."""
    anew: str = ""
    """All was begun anew for such a report. If the client was the old one, the result of this may still come."""

    faults: dict[int, str] = {}
    """Type by rank: all that belong to this round."""
    fault_at: float = 0.0
    """When the newest of them became known."""
    pods: dict[int, str] = {}
    """At fault: uid at that time, by pod rank."""
    origin: dict[int, str] = {}
    """Uids of all pods when the recovery began, by pod rank."""
    hardware: dict[int, bool] = {}
    """Pods in which the cluster saw the fault: whether starting the process again may help."""
    unreported: set[int] = set()
    """Ranks whose fault only the cluster has seen so far."""
    later: dict[int, str] = {}
    """Reported when it was too late for this round: type by rank."""
    later_pods: dict[int, str] = {}
    handled: set[str] = set()
    """Faults of the cluster that a recovery has dealt with, as long as they last."""

    labelled: dict[str, str] = {}
    """Pods that were labelled for the scheduler, by name: uid."""
    in_place: bool = False
    must_exit: set[int] = set()
    """Pods that can't stay, where others do."""
    mended: bool = False
    """Chips have had their time to mend."""
    replaced: set[str] = set()
    """Uids of pods that the rescheduler was told to replace."""
    unheard: bool = False
    """That all processes shall start again was said when nobody listened."""
    schedule_until: float | None = None
    scheduled: bool = False
    """The replacements have their places, and everybody was told."""
    offered: list[str] = []
    after: str = ""
    """The strategy that came to nothing in this round."""
    tried: list[str] = []
    decided: str = ""
    waiting: str = ""
    """What has to happen before the next step, where that is not a report."""
    unscheduled: bool = False
    """The training waits for replacements that did not come, or have failed."""
    retry_over: bool = False
    """Running the step again did not help."""
    in_place_over: bool = False
    """Nor did starting processes again where they are."""
    sent: list[Signal] = []
    """Of the present step: repeated to a client that comes back."""

    platform: str = ""
    confirmed: bool = False
    """The platform was asked about the faults."""

    order: str = ""
    """nic or stress, while somebody's order is carried out."""
    nics: dict[int, bool] = {}
    stress: dict[int, tuple[int, ...]] = {}
    released: bool = False
    """Agents that were held back from starting were let go: a client that comes back may not have heard so."""
    answered: bool = False
    spoilt: bool = False
    """A fault came while it was carried out."""
    answer: str = ""
    """To be given at the end."""
    nic_round: bool = False
    """This recovery began in a link failover."""

    hot_pod: int = -1
    hot_name: str = ""
    hot_uid: str = ""
    backup_name: str = ""
    backup_uid: str = ""
    hot_off: str = ""
    """Why hot switching is off for this job; until it is healthy again or all its pods are new."""

    fresh: dict[int, Fresh] = {}
    """By pod rank, for as long as a report may be about the pod before."""
    label_at: float | None = None
    """When the label that says that this job recovers has to be set back (again)."""


class _Idle(msgspec.Struct):
    state: str = INIT


_ASKED = frozenset({STOPPING, STOPPED, OFFERS})
"""Who takes over in one of them stops the training once more, as soon as its client is back."""
_ASKED_AGAIN = frozenset({
    "state", "clock", "until", "lonely", "deserted", "waiting", "sent", "offered", "in_place", "must_exit", "mended",
    "schedule_until", "handled",
})  # fmt: skip


def alike(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Whoever takes over does the same whichever of the two it finds: the later one need not be kept at once."""
    states = {before.get("state", INIT), after.get("state", INIT)}
    if states <= _ASKED and not (after.get("platform") or after.get("confirmed")):
        unimportant = _ASKED_AGAIN
    elif states == {INIT}:
        unimportant = frozenset({"clock", "handled"})
    else:
        return False
    return all(before.get(name) == after.get(name) for name in (before.keys() | after.keys()) - unimportant)


def encode(data: Data) -> bytes:
    return msgspec.json.encode(data)


def decode(raw: bytes) -> Data:
    """Raises Unreadable."""
    try:
        data = msgspec.json.decode(raw, type=Data)
    except msgspec.MsgspecError as error:
        raise Unreadable(f"no state of a recovery: {error}") from None
    if data.version > VERSION:
        raise Unreadable(f"the state has version {data.version}, {VERSION} is the newest known here")
    if data.state not in STATES:
        raise Unreadable(f"{data.state!r} is no state of a recovery")
    return data


def is_idle(raw: bytes) -> bool:
    """What can't be decoded says nevertheless that no recovery was going on."""
    try:
        return msgspec.json.decode(raw, type=_Idle).state == INIT
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
