"""Looks at the dates of the certificates of a running job from time to time, and warns before they are over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timezone

from evertrain.mindio.tls import Lookout, TlsError, TlsInfo, expiring


class DateWatch:
    """Looks at once and then periodically, until it is closed. Links that are open outlive their certificates."""

    def __init__(self, info: TlsInfo, lookout: Lookout, warn: Callable[[str], object]) -> None:
        self._info, self._lookout, self._warn = info, lookout, warn
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        try:
            for warning in expiring(self._info, datetime.now(timezone.utc), self._lookout.ahead):
                self._warn(warning)
        except TlsError as error:
            self._warn(str(error))
        period = self._lookout.period.total_seconds()
        self._timer = asyncio.get_running_loop().call_later(period, self._look)
