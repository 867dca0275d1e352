"""Chips whose faults come often are isolated, until somebody or time clears them. Pure.

A fault counts half a minute after it came: the same code on another chip of the same job within that time is the
job's own doing, and none of them counts. Chips that are isolated stand in a ConfigMap (clusterd-manual-info-cm), where
an administrator takes them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import yaml

from evertrain.clusterd.faults.seen import Seen, number
from evertrain.faultcodes.levels import HARMLESS, MANUAL
from evertrain.wire.faultinfo import ChipFault, Int64, go_json

CONFIG_MAP, POLICY_KEY = "clusterd-config-cm", "manually_separate_policy.conf"
INFO_CONFIG_MAP = "clusterd-manual-info-cm"
KEPT = "the policy before stays in force"
SETTLE_MS = 30_000
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Policy:
    enabled: bool = False
    window_hours: int = 24
    threshold: int = 3
    free_hours: int = 48
    """Without the fault, after which a chip is released; -1: never."""


def read_policy(text: str) -> tuple[Policy | None, list[str]]:
    """What the ConfigMap says, or what is wrong with it. A typo must not put every isolated chip back to work: what
    can't be used changes nothing."""
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, [f"{POLICY_KEY} can't be read, {KEPT}: {error}"]
    if not isinstance(found, dict):
        return None, [f"{POLICY_KEY} is no mapping, {KEPT}"]
    separate, release = found.get("separate") or {}, found.get("release") or {}
    if not isinstance(separate, dict) or not isinstance(release, dict):
        return None, [f"{POLICY_KEY}: separate and release must be mappings; {KEPT}"]
    window, threshold = separate.get("fault_window_hours", 24), separate.get("fault_threshold", 3)
    free = release.get("fault_free_hours", 48)
    wrong = [text for good, text in (
        (isinstance(found.get("enabled", False), bool), "enabled must be true or false"),
        (_within(window, 1, 720), "separate.fault_window_hours must be 1 to 720"),
        (_within(threshold, 1, 50), "separate.fault_threshold must be 1 to 50"),
        (_within(free, 1, 240) or free == -1, "release.fault_free_hours must be 1 to 240, or -1"),
    ) if not good]  # fmt: skip
    if wrong:
        return None, [f"{POLICY_KEY}: {each}; {KEPT}" for each in wrong]
    return Policy(found.get("enabled", False), window, threshold, free), []


class Count(msgspec.Struct):
    """A code on a chip."""

    times: list[int] = []
    last: int = 0
    """When it came last, counted or not."""


class Waiting(msgspec.Struct):
    """A fault that may yet turn out to be the job's own doing."""

    node: str
    chip: str
    code: str
    level: str
    job: str
    came: int
    due: int
    software: bool = False


class Isolated(msgspec.Struct):
    """A code for which a chip is isolated."""

    code: str
    level: str
    time_ms: int


class State(msgspec.Struct):
    counts: dict[str, dict[str, dict[str, Count]]] = {}
    """By node, chip and code."""
    waiting: list[Waiting] = []
    isolated: dict[str, dict[str, list[Isolated]]] = {}
    """By node and chip."""
    listed: dict[str, list[str]] = {}
    """Chips that the ConfigMap was seen to list: who is missing there later was taken out by hand."""


class Manual:
    def __init__(self) -> None:
        self.policy = Policy()
        self._told = False
        """The policy is what somebody said, not only what is assumed until then."""
        self.state = State()
        self._waiting: deque[Waiting] = deque()
        """In the order in which they are due."""
        self._together: dict[tuple[str, str], list[Waiting]] = {}
        """The same, by job and code."""
        self._pruned = 0
        self.version = 0
        """Grows with each change of what is isolated."""

    def set_policy(self, policy: Policy) -> set[str]:
        """The nodes that this changes."""
        if policy == self.policy and self._told:
            return set()
        self.policy, self._told = policy, True
        if policy.enabled:
            return set()
        nodes = set(self.state.isolated)
        self.version += bool(nodes)
        self.load(State())
        return nodes

    def dump(self) -> State:
        self.state.waiting = list(self._waiting)
        return self.state

    def load(self, state: State) -> None:
        self.state = state
        self._waiting = deque(sorted(state.waiting, key=lambda each: each.due))
        self._together = {}
        for each in self._waiting:
            self._together.setdefault((each.job, each.code), []).append(each)

    def see(self, node: str, seen: Iterable[Seen], now: int) -> None:
        """The faults of a node that are visible now."""
        if not self.policy.enabled:
            return
        for each in seen:
            fault, place = each.fault, each.place
            if each.hidden or place is None or fault.level in HARMLESS or fault.code == MANUAL:
                continue
            count = self.state.counts.setdefault(node, {}).setdefault(fault.chip, {}).setdefault(fault.code, Count())
            if fault.time_ms <= count.last:
                continue
            count.last = fault.time_ms
            new = Waiting(node, fault.chip, fault.code, fault.level, place.job, fault.time_ms, now + SETTLE_MS)
            together = self._together.setdefault((new.job, new.code), [])
            for other in together:
                if (other.node, other.chip) != (new.node, new.chip):
                    other.software = new.software = True
            together.append(new)
            self._waiting.append(new)

    def advance(self, now: int) -> set[str]:
        """What time alone changes. The nodes whose isolated chips are others now."""
        changed: set[str] = set()
        if not self.policy.enabled:
            return changed
        while self._waiting and self._waiting[0].due <= now:
            each = self._waiting.popleft()
            together = self._together[each.job, each.code]
            together.remove(each)
            if not together:
                del self._together[each.job, each.code]
            if not each.software and self._counted(each, now):
                changed.add(each.node)
        for node, chip, cause in self._causes():
            when = self._release_ms(node, chip, cause)
            if when is not None and when <= now:
                self._release(node, chip, cause)
                changed.add(node)
        self.version += bool(changed)
        if now - self._pruned >= HOUR_MS or now < self._pruned:
            self._pruned = now
            self._prune(now)
        return changed

    def next_ms(self) -> int | None:
        if not self.policy.enabled:
            return None
        whens = [self._waiting[0].due] if self._waiting else []
        for node, chip, cause in self._causes():
            when = self._release_ms(node, chip, cause)
            if when is not None:
                whens.append(when)
        return min(whens, default=None)

    def listed(self, data: Mapping[str, str] | None) -> set[str]:
        """The ConfigMap of isolated chips, as it stands. The nodes whose isolated chips are others now."""
        now_listed = {node: chips for node, text in (data or {}).items() if (chips := _chips(text))}
        changed: set[str] = set()
        for node, before in self.state.listed.items():
            for chip in set(before) - set(now_listed.get(node, ())):
                if chip in self.state.isolated.get(node, {}):
                    self._release(node, chip, None)
                    changed.add(node)
        if self.policy.enabled:
            for node, details in now_listed.items():
                known = self.state.listed.get(node, ())
                for chip, causes in details.items():
                    # Listed by one that was here before, or put there by hand.
                    if chip not in known and chip not in self.state.isolated.get(node, {}):
                        self.state.isolated.setdefault(node, {})[chip] = causes
                        changed.add(node)
        self.state.listed = {node: sorted(details) for node, details in now_listed.items()}
        self.version += bool(changed)
        return changed

    def clock_set(self, by: int) -> None:
        codes = (codes for chips in self.state.counts.values() for codes in chips.values())
        for count in (count for each in codes for count in each.values()):
            count.times, count.last = [then + by for then in count.times], count.last + by
        for each in self._waiting:
            each.came, each.due = each.came + by, each.due + by
        for _, _, cause in self._causes():
            cause.time_ms += by if cause.time_ms else 0
        self._pruned += by
        self.version += bool(self.state.isolated)

    def faults(self, node: str) -> list[ChipFault]:
        return [
            ChipFault(chip, MANUAL, MANUAL, max((cause.time_ms for cause in causes), default=0))
            for chip, causes in self.state.isolated.get(node, {}).items()
        ]

    def info(self) -> dict[str, str]:
        """What the ConfigMap of isolated chips shall hold; empty: it shall not be."""
        found = {}
        for node, chips in sorted(self.state.isolated.items()):
            detail = {
                chip: [{"FaultCode": each.code, "FaultLevel": each.level, "LastSeparateTime": each.time_ms}
                       for each in causes]
                for chip, causes in chips.items()
            }  # fmt: skip
            # "Total" stands before "Detail"; go_json would sort them.
            total = go_json(sorted(chips, key=lambda chip: (len(number(chip)), number(chip), chip)))
            found[node] = f'{{"Total":{total},"Detail":{go_json(detail)}}}'
        return found

    def _counted(self, each: Waiting, now: int) -> bool:
        count = self.state.counts.setdefault(each.node, {}).setdefault(each.chip, {}).setdefault(each.code, Count())
        since = now - self.policy.window_hours * HOUR_MS
        count.times = [then for then in (*count.times, each.came) if then > since][-self.policy.threshold :]
        if len(count.times) < self.policy.threshold:
            return False
        causes = self.state.isolated.setdefault(each.node, {}).setdefault(each.chip, [])
        causes[:] = [cause for cause in causes if cause.code != each.code]
        causes.append(Isolated(each.code, each.level, now))
        count.times = []
        return True

    def _causes(self) -> list[tuple[str, str, Isolated]]:
        return [(node, chip, cause) for node, chips in self.state.isolated.items() for chip, causes in chips.items()
                for cause in causes]  # fmt: skip

    def _release_ms(self, node: str, chip: str, cause: Isolated) -> int | None:
        if self.policy.free_hours < 0 or not cause.time_ms:
            return None  # one that was put into the ConfigMap by hand is taken out by hand
        count = self.state.counts.get(node, {}).get(chip, {}).get(cause.code)
        return max(cause.time_ms, count.last if count else 0) + self.policy.free_hours * HOUR_MS

    def _release(self, node: str, chip: str, cause: Isolated | None) -> None:
        """None: for whatever cause."""
        chips = self.state.isolated[node]
        chips[chip] = [each for each in chips[chip] if cause is not None and each is not cause]
        if not chips[chip]:
            del chips[chip]
        if not chips:
            del self.state.isolated[node]
        for code, count in self.state.counts.get(node, {}).get(chip, {}).items():
            if cause is None or code == cause.code:
                count.times = []

    def _prune(self, now: int) -> None:
        """Counts of faults that came too long ago to matter."""
        since = now - max(self.policy.window_hours, self.policy.free_hours, 1) * HOUR_MS
        waiting = {(each.node, each.chip, each.code) for each in self._waiting}
        for node, chips in list(self.state.counts.items()):
            for chip, codes in list(chips.items()):
                for code in [code for code, count in codes.items() if count.last <= since]:
                    if (node, chip, code) not in waiting:
                        del codes[code]
                if not codes:
                    del chips[chip]
            if not chips:
                del self.state.counts[node]


class _Detail(msgspec.Struct):
    FaultCode: str = ""
    FaultLevel: str = ""
    LastSeparateTime: Int64 = 0


class _Info(msgspec.Struct):
    Total: list[str] | None = None
    Detail: dict[str, list[_Detail]] | None = None


def _chips(text: str) -> dict[str, list[Isolated]]:
    """A chip that has no details is isolated all the same; one that is not in Total is not."""
    try:
        info = msgspec.json.decode(text, type=_Info)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    details = info.Detail or {}
    return {
        chip: [Isolated(each.FaultCode, each.FaultLevel, each.LastSeparateTime) for each in details.get(chip) or ()]
        or [Isolated("", MANUAL, 0)]
        for chip in info.Total or ()
    }


def _within(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
