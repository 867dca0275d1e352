"""Which strategy: the finest that the job wants, its training offers and the faults allow. Pure.

A decision comes with its reason, and with the reason why each finer strategy was not taken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover.config import Config


@dataclass(frozen=True, slots=True)
class Situation:
    config: Config
    offered: Collection[str] = ()
    """What the training says that it can do."""
    retryable: bool = False
    """No fault is known that running the step again could not mend."""
    in_place: bool = False
    """Starting processes again where they are may help."""
    first_pod: bool = False
    """The pod with rank 0 is at fault."""
    spare: bool = False
    """Replacements have their place."""
    platform: str = ""
    """What a platform decided; only looked at where the job has one."""
    after: str = ""
    """The strategy that came to nothing."""
    unscheduled: bool = False
    """It came to nothing because replacements did not come, or have failed: the training still waits for them."""


@dataclass(frozen=True, slots=True)
class Decision:
    strategy: str
    explanation: str


REASONS = {
    n.RETRY: "the step is run again, nobody restarts",
    n.IN_PLACE: "only the processes at fault start again, where they are",
    n.RECOVER: "the pods at fault are replaced, the others wait",
    n.ELASTIC: "training goes on smaller, there is no replacement",
    n.DUMP: "a checkpoint is written, then all start again from it",
    n.EXIT: "all start again from the last checkpoint",
}


def decide(situation: Situation) -> Decision:
    refused: list[str] = []
    for strategy in _candidates(situation):
        against = _against(strategy, situation)
        if not against:
            because = f" ({'; '.join(refused)})" if refused else ""
            return Decision(strategy, f"{REASONS[strategy]}{because}")
        refused.append(f"{strategy}: {against}")
    return Decision(n.EXIT, f"{REASONS[n.EXIT]} ({'; '.join(refused)})")


def _candidates(situation: Situation) -> tuple[str, ...]:
    """What may follow on what came to nothing: a client that failed in one of them only takes some others."""
    match situation.after:
        case "":
            return n.LADDER
        case n.RETRY:
            return n.LADDER[1:]
        case n.RECOVER | n.IN_PLACE if situation.unscheduled:
            return (n.ELASTIC, n.DUMP, n.EXIT)
        case n.RECOVER | n.IN_PLACE | n.ELASTIC | n.DOWNGRADE | n.UPGRADE:
            return (n.DUMP, n.EXIT)
    return (n.EXIT,)


_OFFERS = {n.IN_PLACE: n.RECOVER, n.ELASTIC: n.DOWNGRADE}
"""What the training calls it."""
_PLATFORM = {n.RETRY: n.RETRY, n.IN_PLACE: n.RECOVER, n.RECOVER: n.RECOVER, n.DUMP: n.DUMP}
"""What a platform has to have said for it."""


def _against(strategy: str, situation: Situation) -> str:
    """Why not; empty if nothing is against it."""
    if strategy == n.EXIT:
        return ""
    config = situation.config
    if not config.has(strategy):
        return "not configured"
    if strategy == n.RETRY and not situation.retryable:
        return "running the step again does not mend these faults"
    if strategy == n.IN_PLACE and not situation.in_place:
        return "starting the processes again does not mend these faults"
    if config.platform and strategy in _PLATFORM and situation.platform != _PLATFORM[strategy]:
        return f"the platform wants {situation.platform or 'something else'}"
    if _OFFERS.get(strategy, strategy) not in situation.offered:
        return "the training does not offer it"
    if strategy == n.ELASTIC and situation.first_pod:
        return "the pod with rank 0 is at fault"
    if strategy == n.ELASTIC and situation.spare:
        return "the pods at fault have been replaced"
    return ""


def only_dump(config: Config, platform: str) -> bool:
    """Nothing finer than a checkpoint is wanted."""
    if not config.enabled:
        return False
    if config.platform:
        return platform == n.DUMP and config.has(n.DUMP)
    return config.strategies[0] == n.DUMP
