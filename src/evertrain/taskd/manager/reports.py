"""What the MindIO controller reports, for ClusterD or for our own judgement. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PROCESS_FAULT, STOP_COMPLETE = "process_fault", "stop_complete"
RECOVER_STRATEGY, RECOVER_STATUS = "recover_strategy", "recover_status"


@dataclass(frozen=True, slots=True)
class Report:
    action: str
    faults: Mapping[int, int] = field(default_factory=dict)
    """By rank: 0 memory, 1 anything else, 2 network."""
    code: int = 0
    message: str = ""
    strategies: tuple[str, ...] = ()
    """That the controller offers."""
    strategy: str = ""
    """That this is the result of."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training is, as the controller sees it."""

    step: int
    """The newest that a rank has finished; 0 if none has."""
    known: frozenset[int] = frozenset()
    """Ranks whose end the controller will report."""
    raised: Mapping[int, str] = field(default_factory=dict)
    """By rank whose process lives and has left the training function by an exception: that exception."""
