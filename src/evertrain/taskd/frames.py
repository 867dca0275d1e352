"""What is in a message of TaskNet: the body, JSON in a string. Pure."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec


class BadFrame(ValueError):
    """Not a body."""


class Body(msgspec.Struct, frozen=True):
    msg_type: str
    code: int
    message: str
    extension: dict[str, str] | None

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def decode(text: str) -> Body:
    """All four keys are needed; what else there is, is ignored."""
    try:
        return msgspec.json.decode(text, type=Body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadFrame(f"not a body of TaskD: {error}") from None


def body(msg_type: str, code: int, message: str = "", extension: Mapping[str, str] | None = None) -> Body:
    return Body(msg_type, int(code), message, dict(extension) if extension is not None else None)


class FaultReport(msgspec.Struct, frozen=True):
    """What an agent says about its processes, in the `message` of 202 and of its keep-alives."""

    fault_ranks: list[int] = []
    restart_times: int = -1
    """Of ours: the restarts left when the fault happened, so that a report which crossed with a restart is known."""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def fault_report(text: str) -> FaultReport:
    try:
        return msgspec.json.decode(text, type=FaultReport)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadFrame(f"not a report of faults: {error}") from None


FAULT_TYPES = "FAULT_TYPES"
"""Of ours, in the extension of 202: JSON, the types of those faults that are not ordinary, by rank."""


def fault_types_text(types: Mapping[int, int]) -> str:
    return msgspec.json.encode({str(rank): kind for rank, kind in types.items()}).decode()


def fault_types(extension: Mapping[str, str] | None) -> dict[int, int]:
    """Empty if there are none, or none that make sense."""
    try:
        return msgspec.json.decode((extension or {}).get(FAULT_TYPES, "{}"), type=dict[int, int], strict=False)
    except (msgspec.DecodeError, UnicodeError):
        return {}


class ProcessEnd(msgspec.Struct, frozen=True):
    """How a process has ended, as its agent saw it."""

    code: int
    """Negative for a signal."""
    cause: str = ""


PROCESS_ENDS = "PROCESS_ENDS"
"""Of ours, in the extension of 202: JSON, by rank how its process has ended."""
MAX_RESTARTS = "MAX_RESTARTS"
"""Of ours, in the extension of 202: what torchrun was given as --max_restarts."""
REPLACED = "REPLACED"
"""Of ours, in the extension of 202: how many orders to replace processes (209) the agent had obeyed by then."""
AGENT_ID = "AGENT_ID"
"""Of ours, in the extension of all that an agent says that stood by, and of 203 to it: which one of those that have had
its place."""
REASON = "Reason"
"""Of ours, in the extension of 203: why the agent is to exit, in words."""


def ends_text(ends: Mapping[int, ProcessEnd]) -> str:
    return msgspec.json.encode({str(rank): end for rank, end in ends.items()}).decode()


def process_ends(extension: Mapping[str, str] | None) -> dict[int, ProcessEnd]:
    """Empty if there are none, or none that make sense."""
    text = (extension or {}).get(PROCESS_ENDS, "{}")
    try:
        return msgspec.json.decode(text, type=dict[int, ProcessEnd], strict=False)
    except (msgspec.DecodeError, UnicodeError):
        return {}


def max_restarts(extension: Mapping[str, str] | None) -> int | None:
    return _count(extension, MAX_RESTARTS)


def replaced(extension: Mapping[str, str] | None) -> int | None:
    return _count(extension, REPLACED)


def _count(extension: Mapping[str, str] | None, name: str) -> int | None:
    text = (extension or {}).get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def rank_list(text: str) -> list[int]:
    """Of 209 and 213: a JSON list of ranks, as strings or numbers."""
    try:
        ranks = msgspec.json.decode(text, type=list[int], strict=False)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadFrame(f"not a list of ranks: {error}") from None
    if any(rank < 0 for rank in ranks):
        raise BadFrame(f"not a list of ranks: {text[:100]}")
    return ranks


def ranks_text(ranks: Sequence[int]) -> str:
    return msgspec.json.encode([str(rank) for rank in ranks]).decode()


_UUID = 64
"""Characters; of what is longer, only a digest is kept."""


ALIVE_SECONDS = "KEEP_ALIVE_SECONDS"
"""Of ours, in the extension of 210: how often the manager of a large job wants to hear from an agent."""


def alive_seconds(order: Body) -> int:
    """0 if nothing is said about it."""
    text = (order.extension or {}).get(ALIVE_SECONDS, "")
    return min(int(text), 60) if text.isascii() and text.isdigit() and len(text) < 5 else 0


RUNNING = "RUNNING"
"""Of ours, in the extension of a sign of life: the processes have been started; the message tells with which count."""
UNDER_WAY = "UNDER_WAY"
"""Of ours, in the extension of 210: the other nodes have met and train; the number of all nodes."""


def is_running(sign: Body) -> bool:
    return (sign.extension or {}).get(RUNNING) == "true"


def under_way(order: Body) -> int:
    """How many nodes the job has that is under way; 0 if it is not."""
    text = (order.extension or {}).get(UNDER_WAY, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


class Seen:
    """Tells what came twice, for a while: a sender that missed an ack sends again."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._uuids: OrderedDict[str, None] = OrderedDict()

    def again(self, uuid: str) -> bool:
        if not uuid:
            return False
        if len(uuid) > _UUID:
            uuid = hashlib.sha256(uuid.encode(errors="surrogatepass")).hexdigest()
        if uuid in self._uuids:
            return True
        self._uuids[uuid] = None
        if len(self._uuids) > self._size:
            self._uuids.popitem(last=False)
        return False
