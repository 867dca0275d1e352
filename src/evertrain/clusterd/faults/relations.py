"""Faults that mean something only together: a link that is down, and communication that fails. Pure.

A rule names a trigger and the faults that must be pending (came lately, in the same job) when the trigger is there.
The pods where those are then get a verdict: Separate, which stays with the pod, or SubHealth, while the fault is
there. A fault whose trigger doesn't come in its time is judged by its kind. A trigger is remembered for a moment, so
that it doesn't matter which of two nodes is heard first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from evertrain.clusterd.faults.wellknown import (
    COMMUNICATION_ERRORS,
    LINK_DOWN,
    RETRY_FAILED,
    SWITCH_LINK_DOWN,
    is_any,
)

SEPARATE, SUB_HEALTH = "Separate", "SubHealth"
TRIGGER_MS = 10_000
LINK_DOWN_MS = 180_000
"""How long a link that went down may be what a failed retry of communication is about."""


@dataclass(frozen=True, slots=True)
class Rule:
    trigger: str
    relations: tuple[str, ...]
    verdict: str


@dataclass(frozen=True, slots=True)
class Rules:
    rules: tuple[Rule, ...]
    intervals: dict[str, int]
    """Milliseconds by code."""


DEFAULT = Rules(
    (
        Rule(RETRY_FAILED, (LINK_DOWN,), SEPARATE),
        *(Rule(code, (LINK_DOWN,), SEPARATE) for code in COMMUNICATION_ERRORS),
        Rule(RETRY_FAILED, (SWITCH_LINK_DOWN,), SEPARATE),
        Rule("8C1F8609", (LINK_DOWN,), SUB_HEALTH),
    ),
    {LINK_DOWN: 300_000, SWITCH_LINK_DOWN: 300_000},
)


class _Rule(msgspec.Struct):
    TriggerFault: str
    RelationFaults: list[str]
    FaultStrategy: str


class _Interval(msgspec.Struct):
    FaultCode: str
    TimeOutInterval: int
    FaultType: str = ""


def read_rules(relations: str, durations: str) -> tuple[Rules, list[str]]:
    """relationFaultCustomization.json and faultDuration.json; what can't be used of them is as shipped."""
    rules, intervals, wrong = DEFAULT.rules, DEFAULT.intervals, []
    if relations:
        try:
            found = msgspec.json.decode(relations, type=list[_Rule])
            if any(each.FaultStrategy not in (SEPARATE, SUB_HEALTH) or not each.RelationFaults or not each.TriggerFault
                   for each in found):  # fmt: skip
                raise ValueError("a rule lacks its trigger or its faults, or its strategy is not known")
            rules = tuple(Rule(each.TriggerFault, tuple(each.RelationFaults), each.FaultStrategy) for each in found)
        except (ValueError, RecursionError) as error:
            wrong.append(f"the rules of related faults can't be used: {error}")
    if durations:
        try:
            times = msgspec.json.decode(durations, type=list[_Interval])
            if any(not 0 < each.TimeOutInterval <= 86_400 or not each.FaultCode for each in times):
                raise ValueError("TimeOutInterval must be 1 to 86400")
            intervals = {each.FaultCode: each.TimeOutInterval * 1000 for each in times}
        except (ValueError, RecursionError) as error:
            wrong.append(f"the durations of related faults can't be used: {error}")
    return Rules(rules, intervals), wrong


class Pending(msgspec.Struct):
    node: str
    chip: str
    """Empty: the node's switch."""
    code: str
    time_ms: int
    until: int


class Verdict(msgspec.Struct):
    node: str
    chip: str
    code: str
    time_ms: int
    verdict: str
    pods: list[str]
    """Their uids."""


class JobRelations(msgspec.Struct):
    """Keys are node, chip and code, put together."""

    pending: dict[str, Pending] = {}
    judged: dict[str, int] = {}
    """When faults came that were pending once and are over."""
    triggers: dict[str, int] = {}
    """When each was there last."""
    verdicts: dict[str, Verdict] = {}


class Relations:
    def __init__(self) -> None:
        self.rules = DEFAULT
        self.jobs: dict[str, JobRelations] = {}

    def see(self, job: str, node: str, chip: str, code: str, time_ms: int, now: int) -> bool:
        """A fault of a job that may be related to another. Whether it is new, and pending now."""
        interval = next((ms for each, ms in self.rules.intervals.items() if each in code), None)
        if interval is None or now - time_ms >= interval:
            return False
        mine = self.jobs.get(job) or self.jobs.setdefault(job, JobRelations())
        key = _key(node, chip, code)
        known = mine.pending.get(key)
        if (known is not None and known.time_ms == time_ms) or mine.judged.get(key) == time_ms:
            return False
        mine.pending[key] = Pending(node, chip, code, time_ms, time_ms + interval)
        return True

    def clock_set(self, by: int) -> None:
        """The times of a switch are its own, and known by what it says."""
        for mine in self.jobs.values():
            for each in mine.pending.values():
                each.time_ms, each.until = each.time_ms + (by if each.chip else 0), each.until + by
            for outcome in mine.verdicts.values():
                outcome.time_ms += by if outcome.chip else 0
            chips = {key for key in mine.judged if key.split("/")[1]}
            mine.judged = {key: then + (by if key in chips else 0) for key, then in mine.judged.items()}
            mine.triggers = {trigger: then + by for trigger, then in mine.triggers.items()}

    def links_down(self, job: str) -> int:
        """Until when there is something that a failed retry of communication may be about."""
        mine = self.jobs.get(job)
        if mine is None:
            return 0
        codes = [code for rule in self.rules.rules if RETRY_FAILED in rule.trigger for code in rule.relations]
        there = [(each.code, each.time_ms) for each in mine.pending.values()]
        there += [(each.code, each.time_ms) for each in mine.verdicts.values()]
        return max((time + LINK_DOWN_MS for code, time in there if is_any(code, tuple(codes))), default=0)

    def judge(
        self,
        job: str,
        codes: Iterable[str],
        present: Callable[[str, str, str], bool],
        pods: Callable[[str, str], list[str]],
        super_pod: Callable[[str], bool],
        created_ms: int,
        now: int,
    ) -> None:
        """`codes`: all faults of the job that are visible now. `present`: whether a fault (node, chip, code) is still
        there. `pods`: uids of the job's pods that have a chip, or are on a node. `super_pod`: the node is in one."""
        mine = self.jobs.get(job)
        there = {rule.trigger for rule in self.rules.rules for code in codes if rule.trigger in code}
        if there:
            mine = mine or self.jobs.setdefault(job, JobRelations())
            mine.triggers.update(dict.fromkeys(there, now))
        if mine is None:
            return
        for trigger, then in list(mine.triggers.items()):
            if now - then >= max((*self.rules.intervals.values(), TRIGGER_MS)):
                del mine.triggers[trigger]
        self._match(mine, pods, now)
        for key, each in list(mine.pending.items()):
            if each.until <= now:
                verdict = self._alone(mine, each, super_pod(each.node)) if each.time_ms >= created_ms else ""
                self._close(mine, key, verdict, pods)
        for key, outcome in list(mine.verdicts.items()):
            here = set(pods(outcome.node, outcome.chip))
            outcome.pods = [uid for uid in outcome.pods if uid in here]
            gone = outcome.verdict != SEPARATE and not present(outcome.node, outcome.chip, outcome.code)
            if not outcome.pods or gone:
                del mine.verdicts[key]
        for key, then in list(mine.judged.items()):
            if key not in mine.verdicts and now - then >= 2 * max((*self.rules.intervals.values(), TRIGGER_MS)):
                del mine.judged[key]
        if not (mine.pending or mine.judged or mine.triggers or mine.verdicts):
            del self.jobs[job]

    def next_ms(self, job: str, now: int) -> int | None:
        mine = self.jobs.get(job)
        if mine is None:
            return None
        return min((each.until for each in mine.pending.values() if each.until > now), default=None)

    def verdicts(self, job: str) -> list[Verdict]:
        mine = self.jobs.get(job)
        return list(mine.verdicts.values()) if mine is not None else []

    def _match(self, mine: JobRelations, pods: Callable[[str, str], list[str]], now: int) -> None:
        found: dict[str, str] = {}
        for rule in self.rules.rules:
            then = mine.triggers.get(rule.trigger)
            if then is None or now - then >= TRIGGER_MS:
                continue
            matching = [[key for key, each in mine.pending.items() if code in each.code] for code in rule.relations]
            if all(matching):
                for key in (key for keys in matching for key in keys):
                    found[key] = SEPARATE if SEPARATE in (rule.verdict, found.get(key)) else SUB_HEALTH
        for key, verdict in found.items():
            self._close(mine, key, verdict, pods)

    def _alone(self, mine: JobRelations, each: Pending, super_pod: bool) -> str:
        """Its time is over, and no rule spoke of it."""
        if not each.chip:
            return SUB_HEALTH
        failed = any(each.time_ms <= mine.triggers.get(code, -1) <= each.until for code in COMMUNICATION_ERRORS)
        return SEPARATE if super_pod and failed else ""

    def _close(self, mine: JobRelations, key: str, verdict: str, pods: Callable[[str, str], list[str]]) -> None:
        each = mine.pending.pop(key)
        mine.judged[key] = each.time_ms
        uids = pods(each.node, each.chip)
        before = mine.verdicts.get(key)
        if verdict and uids and not (before is not None and before.verdict == SEPARATE):
            mine.verdicts[key] = Verdict(each.node, each.chip, each.code, each.time_ms, verdict, uids)


def _key(node: str, chip: str, code: str) -> str:
    return f"{node}/{chip}/{code}"
