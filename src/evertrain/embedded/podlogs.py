"""Logs of pods: what the API server asks of whoever runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from evertrain.kube.port import Object


@dataclass(frozen=True)
class LogRequest:
    container: str
    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: datetime | None = None
    """Lines older than that are left out."""
    limit: int | None = None
    """In bytes."""


class LogsUnavailable(Exception):
    """There are none, or not yet; the message is for the user."""


class LogSource(Protocol):
    """Whoever runs the pods. The iterator yields pieces of text as they come; with `follow` it ends with the container.
    Raises LogsUnavailable before the first piece."""

    def __call__(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]: ...
