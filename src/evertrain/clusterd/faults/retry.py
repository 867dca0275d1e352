"""Faults that running the step again may cure: withheld from schedulers while the job tries. Pure.

A memory error (UCE) or a failed retry of communication (HCCL) is first seen by the chip or by the training process,
which reports it. The job has 10 s to report what the chip has seen, and then 30 s to cure it.

The failed retry is an event: it leaves the list of faults soon, whatever came of it. So it is remembered, and if the
job has not reported it after a minute (or it is still listed when its time is over) it is shown again, worse than it
was, for then the job hangs. Unless links are down: those are what is wrong then (`relations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec

from evertrain.clusterd.faults.jobview import JobView
from evertrain.clusterd.faults.seen import NO_FAULT, RETRIED, Look, Seen
from evertrain.clusterd.faults.wellknown import ACCOMPANYING, MEMORY_ERROR, RETRY_FAILED, is_any
from evertrain.clusterd.model import MEMORY, NETWORK, OTHER
from evertrain.faultcodes.levels import RESTART_BUSINESS
from evertrain.wire.faultinfo import CARD, ChipFault

ACCOMPANY_MS = 5_000
REPORT_MS = 10_000
"""To report what the chip has seen."""
CURE_MS = 30_000
"""From the report on."""
SILENCE_MS = 60_000
"""After which a job that has not reported a failed retry of its chip hangs."""
SHOWN_MS = 60_000
"""How long an event that is shown again is shown, if the pod is not replaced before."""
KEEP_REPORT_MS = 60_000


class Remembered(msgspec.Struct):
    """A failed retry of communication that was withheld."""

    chip: str
    code: str
    level: str
    kind: str
    time_ms: int
    job: str
    pod_uid: str


class Reports:
    """What training processes have reported lately, by job."""

    def __init__(self) -> None:
        self.by_job: dict[str, dict[int, dict[str, int]]] = {}
        """When, by job, rank and type."""

    def add(self, job: str, faults: Mapping[int, str], now: int) -> None:
        ranks = self.by_job.setdefault(job, {})
        for rank, type_ in faults.items():
            if type_ in (MEMORY, NETWORK):
                ranks.setdefault(rank, {})[type_] = now
        if not ranks:
            del self.by_job[job]

    def drop(self, job: str, ranks: Iterable[int]) -> None:
        """Of processes that are others now."""
        reported = self.by_job.get(job, {})
        for rank in ranks:
            reported.pop(rank, None)

    def when(self, job: str, rank: int, type_: str, now: int) -> int | None:
        then = self.by_job.get(job, {}).get(rank, {}).get(type_)
        return then if then is not None and now - then < KEEP_REPORT_MS else None

    def of(self, job: str, now: int) -> list[tuple[int, str, int]]:
        """Rank, type and time."""
        ranks = self.by_job.get(job, {})
        return [(rank, type_, then) for rank, types in ranks.items() for type_, then in types.items()
                if now - then < KEEP_REPORT_MS]  # fmt: skip

    def prune(self, job: str, now: int) -> None:
        ranks = self.by_job.get(job, {})
        for rank, types in list(ranks.items()):
            for type_, then in list(types.items()):
                if now - then >= KEEP_REPORT_MS:
                    del types[type_]
            if not types:
                del ranks[rank]
        if not ranks:
            self.by_job.pop(job, None)

    def clock_set(self, by: int) -> None:
        for types in (types for ranks in self.by_job.values() for types in ranks.values()):
            types.update({type_: then + by for type_, then in types.items()})


def type_of(code: str) -> str:
    return MEMORY if MEMORY_ERROR in code else NETWORK if RETRY_FAILED in code else OTHER


def may_retry(fault_ms: int, reported_ms: int | None, now: int) -> bool:
    """Running the step again may still help."""
    return reported_ms is not None and (now - reported_ms < REPORT_MS or reported_ms <= fault_ms + REPORT_MS)


class Retries:
    def __init__(self, reports: Reports) -> None:
        self.reports = reports
        self.memory: dict[str, dict[str, Remembered]] = {}
        """By node and chip."""
        self.accompanied: dict[str, dict[str, list[int]]] = {}
        """By node and chip: when there were memory errors lately."""

    def accompany(self, look: Look, seen: list[Seen]) -> None:
        """Withholds what may only accompany a memory error, until it is clear whether there is one."""
        errors = self.accompanied.get(look.node, {})
        for each in seen:
            if MEMORY_ERROR in each.fault.code:
                times = errors.setdefault(each.fault.chip, [])
                if each.fault.time_ms not in times:
                    times.append(each.fault.time_ms)
        listed = {each.fault.chip for each in seen}
        for chip in list(errors):
            if chip not in listed:
                del errors[chip]
            else:
                errors[chip] = errors[chip][-10:]
        for each in seen:
            if each.hidden or each.view is None or each.place is None or not each.view.retries:
                continue
            if not is_any(each.fault.code, ACCOMPANYING):
                continue
            came = each.fault.time_ms
            reported = self.reports.when(each.view.uid, each.place.rank, MEMORY, look.now)
            known = [*errors.get(each.fault.chip, ()), *([] if reported is None else [reported])]
            if any(abs(time - came) <= ACCOMPANY_MS for time in known) or look.until(came + ACCOMPANY_MS):
                each.hidden = NO_FAULT
        if errors:
            self.accompanied[look.node] = errors
        else:
            self.accompanied.pop(look.node, None)

    def apply(self, look: Look, seen: list[Seen], links_down: Callable[[JobView], int]) -> None:
        """`links_down`: until when links of the job count as down; a moment that is over if none is known to be."""
        memory = self.memory.setdefault(look.node, {})
        listed = set()
        for each in seen:
            view, place, fault = each.view, each.place, each.fault
            type_ = type_of(fault.code)
            if view is None or place is None or not view.retries or type_ == OTHER or each.hidden:
                continue
            reported = self.reports.when(view.uid, place.rank, type_, look.now)
            if self._withheld(look, fault.time_ms, reported):
                each.hidden = RETRIED
            if reported is not None:
                look.until(reported + REPORT_MS)  # from then on it may be no more of use to try
                look.until(reported + KEEP_REPORT_MS)
            if type_ != NETWORK:
                continue
            listed.add(fault.chip)
            known = memory.get(fault.chip)
            if known is not None and known.pod_uid != place.pod_uid:  # it was another one that failed
                del memory[fault.chip]
            heard = self._heard(view.uid, fault.time_ms, look.now)
            if each.hidden and not heard and (known is None or known.time_ms != fault.time_ms):
                memory[fault.chip] = Remembered(
                    fault.chip, fault.code, fault.level, fault.kind, fault.time_ms, view.uid, place.pod_uid
                )
            if not each.hidden and fault.chip in memory and not look.until(links_down(view)):
                each.fault, each.added = replace(fault, level=RESTART_BUSINESS), True
        for chip, event in list(memory.items()):
            if chip in listed:
                continue
            again = look.see(ChipFault(chip, event.code, event.level, event.time_ms, event.kind or CARD), added=True)
            over = event.time_ms + SILENCE_MS + SHOWN_MS
            if again.view is None or again.place is None or again.place.pod_uid != event.pod_uid or over <= look.now:
                del memory[chip]
            elif not look.until(event.time_ms + SILENCE_MS):
                look.until(over)
                if not look.until(links_down(again.view)):
                    again.fault = replace(again.fault, level=RESTART_BUSINESS)
                seen.append(again)
        if not memory:
            del self.memory[look.node]

    def nodes_of(self, job: str) -> set[str]:
        """Where failed retries of the job are remembered."""
        return {node for node, memory in self.memory.items() if any(event.job == job for event in memory.values())}

    def forget(self, job: str) -> set[str]:
        """The job has reported a failure of its communication: it lives. The nodes that this concerns."""
        nodes = set()
        for node, memory in list(self.memory.items()):
            for chip in [chip for chip, event in memory.items() if event.job == job]:
                del memory[chip]
                nodes.add(node)
            if not memory:
                del self.memory[node]
        return nodes

    def clock_set(self, by: int) -> None:
        self.reports.clock_set(by)
        for event in (event for memory in self.memory.values() for event in memory.values()):
            event.time_ms += by
        for times in (times for chips in self.accompanied.values() for times in chips.values()):
            times[:] = [time + by for time in times]

    def _withheld(self, look: Look, came: int, reported: int | None) -> bool:
        if look.until(came + REPORT_MS):
            return True
        return reported is not None and reported - came <= REPORT_MS and look.until(reported + CURE_MS)

    def _heard(self, job: str, since: int, now: int) -> bool:
        return any(type_ == NETWORK and then >= since - REPORT_MS for _, type_, then in self.reports.of(job, now))
