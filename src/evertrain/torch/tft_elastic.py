"""torchrun kills processes 30 seconds after it asked them to end. A dying-gasp checkpoint may take longer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed.elastic.multiprocessing.api as api

_MARK = "_evertrain_patient"


def apply(limit: Callable[[], int]) -> None:
    """Give them at least `limit` seconds. Once per process."""
    for context in (getattr(api, name, None) for name in ("MultiprocessContext", "SubprocessContext")):
        close = getattr(context, "_close", None)
        if close is not None and not hasattr(close, _MARK):
            setattr(context, "_close", _patient(close, limit))  # noqa: B010


def _patient(close: Callable[..., Any], limit: Callable[[], int]) -> Callable[..., Any]:
    @functools.wraps(close)
    def patient(self: Any, death_sig: Any, timeout: int = 30) -> Any:
        return close(self, death_sig, timeout=max(timeout, limit()))

    setattr(patient, _MARK, True)
    return patient
