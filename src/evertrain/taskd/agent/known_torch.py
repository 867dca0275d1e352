"""Which torch we know how to change, and what is said about another one."""

from __future__ import annotations

from collections.abc import Iterable

KNOWN = ((2, 4), (2, 13))
"""The oldest and the newest whose source was read."""


class UnknownTorch(ImportError):
    """This torch is not one that we know how to change."""


NO_AGENT = "torchrun can't be turned into TaskD's agent"


def lacking(version: str, missing: Iterable[str], so: str = NO_AGENT) -> UnknownTorch:
    return UnknownTorch(f"{_known(version)}, and it lacks {', '.join(missing)}: {so}")


def unread(version: str) -> str | None:
    """What to say about a torch whose source nobody has read; None if it is a known one."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if KNOWN[0] <= numbers <= KNOWN[1]:
        return None
    used = "What TaskD needs of it is there, so it is used; should torchrun misbehave, try a known one"
    return f"{_known(version)}. {used}"


def _known(version: str) -> str:
    oldest, newest = (".".join(map(str, each)) for each in KNOWN)
    return f"TaskD knows torch {oldest} to {newest}; this is {version}"
