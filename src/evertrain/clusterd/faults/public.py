"""Public faults: what others than noded have found out about nodes and chips. Pure.

A fault that occurs stays for 5 s at least, so that nobody misses it: one that recovers earlier, and one that only
occurs once, go after that time. A recovery that comes before its fault waits 5 s for it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection

import msgspec

from evertrain.clusterd.faults.public_check import ONCE, RECOVER, Influence, NodeOf, PublicFault, Refused, check
from evertrain.faultcodes.table import Codes
from evertrain.wire.faultinfo import PUBLIC, ChipFault, go_json

LABEL, DATA_KEY = "mc-consumer-publicfault", "PublicFault"
"""ConfigMaps that have this label are read, whatever their name and namespace."""
STAY_MS = 5_000
MOST = 50_000
MOST_DETAILS = 4_500
"""More are only counted in the statistics."""
MOST_STATISTICS = 900 * 1024
"""Bytes of them that go into a ConfigMap."""
MOST_TEXTS, DIGEST = 5_000, 16
"""ConfigMaps whose text is remembered, and hex digits of each: with names of 50 characters 0.2 MiB of what is kept,
which has room for less than 1 MiB. Of more the oldest would be read once more after a restart."""
STATISTICS = "statistic-fault-info"
STATISTICS_LABELS = {"mc-statistic-fault": "true"}


class Entry(msgspec.Struct):
    resource: str
    id: str
    type: str
    code: str
    level: str
    time_ms: int
    devices: list[int]
    added: int
    ends: int | None = None


class Recovery(msgspec.Struct):
    """One that came before its fault."""

    node: str
    key: str
    due: int


class State(msgspec.Struct):
    nodes: dict[str, dict[str, Entry]] = {}
    """By node, then resource and id."""
    early: list[Recovery] = []
    texts: dict[str, str] = {}
    """Digests of ConfigMaps that were read and are there, so that they are not taken for news after a restart. The one
    that changed last is the last."""


class PublicFaults:
    def __init__(self, codes: Codes) -> None:
        self.codes = codes
        self.count = 0
        self.version = 0
        """Grows with each change."""
        self.changed: set[str] = set()
        """Nodes; who has read it clears it."""
        self._ends: dict[tuple[str, str], int] = {}
        self._frozen: str | None = None
        self.load(State())

    def receive(self, message: object, node_of: NodeOf, now: int) -> tuple[str, tuple[str, ...]]:
        """Why it is refused, empty if it isn't; and what was left out of it."""
        try:
            found = check(message, self.codes, node_of)
        except Refused as error:
            return str(error), ()
        for fault in found.faults:
            for influence in fault.influences:
                if not self._take(found.resource, fault, influence, now):
                    return f"there are {MOST} public faults already", found.left_out
        return "", found.left_out

    def config_map(self, name: str, text: str, node_of: NodeOf, now: int) -> tuple[str, tuple[str, ...]]:
        """As it is published in one. The same text again is no news."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST]
        if self.state.texts.get(name) == digest:
            return "", ()
        self.state.texts.pop(name, None)
        self.state.texts[name] = digest
        self._forget_oldest()
        try:
            message = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return f"it can't be read: {error}", ()
        return self.receive(message, node_of, now)

    def forget(self, name: str) -> None:
        """A ConfigMap that is gone: some make a new one for each message. What it said stays."""
        self.state.texts.pop(name, None)

    def retain(self, names: Collection[str]) -> None:
        self.state.texts = {name: digest for name, digest in self.state.texts.items() if name in names}

    def _forget_oldest(self) -> None:
        texts = self.state.texts
        for name in list(itertools.islice(texts, max(0, len(texts) - MOST_TEXTS))):
            del texts[name]

    def advance(self, now: int) -> None:
        """What time alone changes."""
        due = [each for each in self.state.early if each.due <= now]
        if due:
            self.state.early = [each for each in self.state.early if each.due > now]
            for each in due:
                self._recover(each.node, each.key, now, wait=False)
        ended = [key for key, when in self._ends.items() if when <= now]
        for node, key in ended:
            self._remove(node, key)

    def clock_set(self, by: int) -> None:
        for entry in (entry for entries in self.state.nodes.values() for entry in entries.values()):
            entry.added += by
            entry.ends = None if entry.ends is None else entry.ends + by
        for each in self.state.early:
            each.due += by
        self._ends = {key: when + by for key, when in self._ends.items()}

    def next_ms(self) -> int | None:
        return min((*self._ends.values(), *(each.due for each in self.state.early)), default=None)

    def on(self, node: str, chip_type: str) -> list[ChipFault]:
        return [
            ChipFault(f"{chip_type}-{device}", entry.code, entry.level, min(entry.time_ms, entry.added), PUBLIC)
            for entry in self.state.nodes.get(node, {}).values()
            for device in entry.devices
        ]

    def load(self, state: State) -> None:
        self.state = state
        state.texts = {name: digest[:DIGEST] for name, digest in state.texts.items()}
        self._forget_oldest()
        self.count = sum(map(len, state.nodes.values()))
        self._ends = {(node, key): entry.ends for node, entries in state.nodes.items()
                      for key, entry in entries.items() if entry.ends is not None}  # fmt: skip
        self.changed |= set(state.nodes)
        self.version += 1

    def statistics(self) -> dict[str, str]:
        """The data of statistic-fault-info. With too many faults the details stay as they were before."""
        number = go_json({"publicFaultNum": self.count})
        if self.count > MOST_DETAILS:
            return self._frozen_statistics(number, f"there are more than {MOST_DETAILS} public faults")
        details = {
            node: [
                _Statistic(each.resource, each.devices, each.id, each.type, each.code, each.level, each.time_ms)
                for each in entries.values()
            ]
            for node, entries in self.state.nodes.items()
        }
        text = go_json(details)
        if len(text) > MOST_STATISTICS:
            return self._frozen_statistics(number, "the public faults are too long for a ConfigMap")
        self._frozen = text
        return {"PublicFaults": text, "FaultNum": number}

    def _frozen_statistics(self, number: str, why: str) -> dict[str, str]:
        text = f"{why}, PublicFaults is no longer brought up to date"
        return {"PublicFaults": self._frozen or "{}", "FaultNum": number, "Description": text}

    def _take(self, resource: str, fault: PublicFault, influence: Influence, now: int) -> bool:
        """False: there are too many."""
        node, key = influence.node, f"{resource}/{fault.id}"
        if fault.assertion == RECOVER:
            self._recover(node, key, now, wait=True)
            return True
        if key in self.state.nodes.get(node, {}):
            return True
        if self.count >= MOST:
            return False
        level = self.codes.public_level(fault.code) or ""
        ends = now + STAY_MS if fault.assertion == ONCE else None
        self.state.nodes.setdefault(node, {})[key] = Entry(
            resource, fault.id, fault.type, fault.code, level, fault.time_ms, list(influence.devices), now, ends
        )
        if ends is not None:
            self._ends[node, key] = ends
        self.count += 1
        self.version += 1
        self.changed.add(node)
        return True

    def _recover(self, node: str, key: str, now: int, wait: bool) -> None:
        entry = self.state.nodes.get(node, {}).get(key)
        if entry is None:
            if wait and len(self.state.early) < MOST:
                self.state.early.append(Recovery(node, key, now + STAY_MS))
        elif now - entry.added >= STAY_MS or now < entry.added:
            self._remove(node, key)
        else:
            entry.ends = entry.added + STAY_MS
            self._ends[node, key] = entry.ends

    def _remove(self, node: str, key: str) -> None:
        del self.state.nodes[node][key]
        if not self.state.nodes[node]:
            del self.state.nodes[node]
        self._ends.pop((node, key), None)
        self.count -= 1
        self.version += 1
        self.changed.add(node)


class _Statistic(msgspec.Struct):
    resource: str
    devIds: list[int]
    faultId: str
    type: str
    faultCode: str
    level: str
    faultTime: int
