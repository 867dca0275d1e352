"""What a program of the drop-in directory says, line by line. Pure.

    {"kind": "chip", "code": "80E01801", "chip": 3}              this fault is there
    {"kind": "node", "code": "E8000001", "device": "Storage"}    so is this one
    {"kind": "node", "code": "E8000001", "device": "Storage", "state": "clear"}    it is over
    {"kind": "node", "code": "E8000002", "state": "once"}        an event: shown for a minute
    {"kind": "clear"}                                            nothing that I told of is there any more

Whatever else a program prints is passed over and counted: it can't harm noded, nor what it said before.
"""

from __future__ import annotations

import json
from dataclasses import replace

from evertrain.noded.faults import AnyFault, Key, Malformed, decode

LONGEST = 16_384
MOST = 256
"""Faults of one program at a time."""
ONCE_MS = 60_000
STATES = ("fault", "clear", "once")


class Lines:
    """The faults that a program has told of."""

    def __init__(self) -> None:
        self._faults: dict[Key, AnyFault] = {}
        self._named: set[Key] = set()
        """Those of this run of the program."""
        self.bad = 0

    def take(self, line: bytes, now_ms: int) -> None:
        """Malformed if it is nothing that we understand."""
        try:
            self._take(line, now_ms)
        except Malformed:
            self.bad += 1
            raise

    def _take(self, line: bytes, now_ms: int) -> None:
        if len(line) > LONGEST:
            raise Malformed(f"a line of more than {LONGEST} bytes")
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise Malformed("not a JSON object")
        state = entry.pop("state", "fault")
        if state not in STATES:
            raise Malformed(f"state {state!r} is none of {', '.join(STATES)}")
        if entry.get("kind") == "clear":
            self._faults.clear()
            self._named.clear()
            return
        fault = decode(entry, now_ms)
        if state == "clear":
            self._faults.pop(fault.key, None)
            self._named.discard(fault.key)
            return
        if state == "once":
            fault = replace(fault, since_ms=now_ms, until_ms=fault.until_ms or now_ms + ONCE_MS)
        if fault.key not in self._faults and len(self._faults) >= MOST:
            raise Malformed(f"more than {MOST} faults at a time")
        self._faults[fault.key] = fault
        self._named.add(fault.key)

    def ended(self, good: bool) -> None:
        """The program has ended. What a run that went well didn't name is over; a crash cures nothing."""
        if good:
            self._faults = {key: fault for key, fault in self._faults.items() if key in self._named}
        self._named = set()

    def faults(self, now_ms: int) -> list[AnyFault]:
        for key in [key for key, f in self._faults.items() if f.until_ms is not None and f.until_ms <= now_ms]:
            del self._faults[key]
        return list(self._faults.values())
