"""What of the fault centre must survive a restart. Values."""

from __future__ import annotations

import msgspec

from evertrain.clusterd.faults import manual, public, relations, retry
from evertrain.clusterd.model import Job

VERSION = 1


class State(msgspec.Struct):
    version: int = VERSION
    reports: dict[str, dict[int, dict[str, int]]] = {}
    retries: dict[str, dict[str, retry.Remembered]] = {}
    manual: manual.State = msgspec.field(default_factory=manual.State)
    relations: dict[str, relations.JobRelations] = {}
    public: public.State = msgspec.field(default_factory=public.State)
    exposed: list[str] = []
    tables: dict[str, Job] = {}
    """Where the pods of jobs were that have not all of their places now."""


def encode(state: State) -> bytes:
    return msgspec.json.encode(state)


def decode(data: bytes) -> State:
    """Raises ValueError if it is no such state, or one of another version."""
    try:
        state = msgspec.json.decode(data, type=State)
    except (UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if state.version != VERSION:
        raise ValueError(f"version {state.version} of the fault centre's state is not known")
    return state
