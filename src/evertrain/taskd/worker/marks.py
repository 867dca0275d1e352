"""Marks in time: when a step, a forward pass, a collective, a fetch of data or a checkpoint began and ended.

Off, a mark costs a look at a boolean. On, it is a line of JSON in the format of the original's profiler, kept in memory
until the worker writes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator

DEFAULT, COMMUNICATION = "default", "communication"
_BEGIN, _END = 2, 4
_KEPT = 200_000
"""Marks that wait to be written; beyond that the oldest are dropped."""


class Marks:
    def __init__(self) -> None:
        self.default = False
        self.communication = False
        self.dropped = 0
        self._lines: deque[str] = deque()
        self._lock = threading.Lock()
        self._ids = 0

    def on(self, domain: str) -> bool:
        return self.communication if domain == COMMUNICATION else self.default

    @contextlib.contextmanager
    def span(self, name: str, domain: str = DEFAULT) -> Iterator[None]:
        if not self.on(domain):
            yield
            return
        number = self.begin(name, domain)
        try:
            yield
        finally:
            self.end(number, name, domain)

    def begin(self, name: str, domain: str = DEFAULT) -> int:
        number = self._number()
        self._put(_BEGIN, number, name, domain)
        return number

    def end(self, number: int, name: str, domain: str = DEFAULT) -> None:
        self._put(_END, number, name, domain)

    def past(self, began: int, ended: int, name: str, domain: str = DEFAULT) -> None:
        """Of what somebody else has timed, in ns since 1970."""
        number = self._number()
        self._put(_BEGIN, number, name, domain, began)
        self._put(_END, number, name, domain, ended)

    def _number(self) -> int:
        with self._lock:
            self._ids += 1
            return self._ids

    def _put(self, flag: int, number: int, name: str, domain: str, at: int | None = None) -> None:
        mark = {
            "Kind": 1,
            "Flag": flag,
            "SourceKind": 0,
            "Timestamp": time.time_ns() if at is None else at,
            "Id": number,
            "MsptiObjectId": {
                "Pt": {"ProcessId": os.getpid(), "ThreadId": threading.get_native_id()},
                "Ds": {"DeviceId": 0, "StreamId": 0},
            },
            "Name": name,
            "Domain": domain,
        }
        line = json.dumps(mark, separators=(",", ":"))
        with self._lock:
            if len(self._lines) >= _KEPT:
                self._lines.popleft()
                self.dropped += 1
            self._lines.append(line)

    def take(self) -> list[str]:
        with self._lock:
            lines, self._lines = list(self._lines), deque()
        return lines


marks = Marks()
"""Of this process."""
