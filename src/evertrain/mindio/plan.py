"""Which step the job goes on from, and who gives whom its state. Pure arithmetic on what the ranks reported.

A rank's state consists of named *parts*, and ranks that hold a part of the same name hold the same bits. With plain
data parallelism there is one part, `state`, on every rank; with a sharded optimizer every rank has `state` and one of
`shard:0`, `shard:1`, ...

Every rank that is out of the training code says how many steps its state contains and whether that state is clean,
that is, not half-way through an update. `choose` picks the newest step of which every part has a clean copy somewhere;
nothing is lost as long as there is one. `repair` is asked later, when the ranks have hashed their copies: it settles
for each part which content is the right one and lets every other rank that is to hold the part receive it.

Every function returns its result together with the reason in words: the timeline shows them, and so do the tests.
All of them are linear in the number of copies.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from evertrain.mindio.protocol import STATE

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank that is out of the training code said about its state."""

    step: int
    clean: bool
    fresh: bool = False
    checkpoint: int = -1
    parts: tuple[str, ...] = (STATE,)
    """What it is to hold; if it is clean, it does hold all of them at `step`."""
    also: Sequence[tuple[str, int]] = ()
    """(part, step) of further clean copies: at another step, or although the rest is not clean."""

    def copies(self) -> Iterator[tuple[str, int]]:
        """(part, step) of every clean copy."""
        if self.clean:
            for part in self.parts:
                yield part, self.step
        yield from self.also


@dataclass(frozen=True, slots=True)
class Start:
    """The point that the next generation starts from."""

    step: int
    holders: tuple[int, ...]
    """Ranks with a clean copy of a part of that step, ascending; empty if all load the checkpoint instead."""
    load: bool = False
    """True if every rank loads the checkpoint of that step."""
    fresh: bool = False
    """True if no process has trained yet, so that the copies are merely initial values."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Who sends which part to whom."""

    digests: dict[str, str] = field(default_factory=dict)
    """The right content of each part."""
    sends: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """By source: (part, target)."""
    receives: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """By target: (part, source)."""

    @property
    def fan_out(self) -> int:
        """The longest queue at one source."""
        return max((len(queue) for queue in self.sends.values()), default=0)


def choose(
    reports: Mapping[int, Report], distrusted: Collection[int] = (), parts: Collection[str] = ()
) -> tuple[Start | None, str]:
    """Pick the step to go on from. None if no state is left that all ranks could continue from.

    A process that has not trained holds initial values (or what its script loaded). They count only when nobody has
    anything better, for a replacement's initial values would silently throw the training away. `parts` are those that
    are known to exist beyond the reported ones.
    """
    wanted = _wanted(reports, parts)
    usable = {rank: report for rank, report in reports.items() if rank not in distrusted}
    trained = {rank: report for rank, report in usable.items() if not report.fresh}
    step = _newest(trained, wanted)
    what = "clean state" if len(wanted) == 1 else f"step of which all {len(wanted)} parts are clean"
    if step >= 0:
        holders = _holders(trained, step)
        return Start(step, holders), f"step {step}: the newest {what}, held by {_ranks(holders)}"

    checkpoint = min((report.checkpoint for report in reports.values()), default=-1)
    all_fresh = all(report.fresh for report in reports.values())
    beginnings = {rank: report for rank, report in usable.items() if all_fresh or not report.fresh or report.step > 0}
    step = _newest(beginnings, wanted)
    nobody = _what_is_missing(trained, wanted)
    if checkpoint > max(step, 0) or (checkpoint >= 0 and step < 0):
        why = "no process has trained yet" if all_fresh else nobody
        return Start(checkpoint, (), load=True), f"step {checkpoint}: {why}, all ranks load the checkpoint"
    if step >= 0:
        holders = _holders(beginnings, step)
        if all_fresh:
            return Start(step, holders, fresh=True), f"step {step}: no process has trained yet"
        if any(rank in trained for rank in holders):  # and a replacement that was repaired but not told to go yet
            return Start(step, holders), f"step {step}: the newest {what}, held by {_ranks(holders)}"
        return Start(step, holders), f"step {step}: what {_ranks(holders)} started with; nobody has a newer clean state"
    return None, f"{nobody}, and there is no checkpoint that all ranks can load"


def repair(
    start: Start, parts: Mapping[int, Sequence[str]], digests: Mapping[int, Mapping[str, str]]
) -> tuple[Transfers | None, str]:
    """Decide which copies are right and who receives them from whom. None if no holder could show a copy of a part.

    `parts` says what each member is to hold, `digests` what each could show. The content held by most holders is right;
    if two are held by equally many, the one of the lowest rank. Initial values of a first start differ if the ranks
    were seeded differently; there the lowest rank's always win.
    """
    if start.load:
        return Transfers(), f"all ranks load the checkpoint of step {start.step}"
    members: dict[str, list[int]] = {}
    for rank in sorted(parts):
        for part in parts[rank]:
            members.setdefault(part, []).append(rank)
    trusted = set(start.holders)
    transfers = Transfers()
    told: list[str] = []
    for part in sorted(members, key=order):
        shown = [rank for rank in members[part] if rank in trusted and digests.get(rank, {}).get(part)]
        if not shown:
            copy = "its copy" if len(members) == 1 else f"a copy of {part}"
            return None, f"no rank could show {copy} of step {start.step}"
        copies = {rank: digests[rank][part] for rank in shown}
        digest, explanation = _right_digest(shown, copies, start.fresh)
        transfers.digests[part] = digest
        right = [rank for rank in shown if copies[rank] == digest]
        held = set(right)
        targets = [rank for rank in members[part] if rank not in held]
        pairs = _pair(targets, right)
        for target, source in pairs.items():
            transfers.sends.setdefault(source, []).append((part, target))
            transfers.receives.setdefault(target, []).append((part, source))
        if targets:
            explanation += f"; {_ranks(sorted(set(pairs.values())))} to {_ranks(targets)}"
        if len(members) == 1:
            told.append(explanation)
        elif targets:
            told.append(f"{part}: {explanation}")
    if not told:
        told.append(f"all copies of all {len(members)} parts are equal")
    more = f" | and {len(told) - _SHOWN} more parts" if len(told) > _SHOWN else ""
    return transfers, " | ".join(told[:_SHOWN]) + more


def dump_sources(
    reports: Mapping[int, Report], excluded: Collection[int] = (), parts: Collection[str] = ()
) -> tuple[int, dict[int, list[str]], str]:
    """(step, parts by rank, reason) of the dying-gasp checkpoint: the lowest ranks that hold the newest clean step.

    No ranks if there is no step of which every part is left.
    """
    able = {rank: report for rank, report in reports.items() if rank not in excluded}
    wanted = _wanted(reports, parts)
    step = _newest(able, wanted)
    if step <= 0:
        return -1, {}, "no rank has a clean state worth writing"
    writers: dict[int, list[str]] = {}
    written: set[str] = set()
    for rank in sorted(able):
        for part, at in able[rank].copies():
            if at == step and part not in written:
                written.add(part)
                writers.setdefault(rank, []).append(part)
    has = "has" if len(writers) == 1 else "have"
    return step, writers, f"{_ranks(sorted(writers))} {has} the newest clean state, step {step}"


def odd_ones_out(fingerprints: Mapping[int, str]) -> list[int]:
    """Ranks whose model or optimizer is not that of most ranks (ties: of the lowest rank)."""
    counts = Counter(fingerprints.values())
    if len(counts) < 2:
        return []
    most = max(counts.values())
    norm = next(fingerprints[rank] for rank in sorted(fingerprints) if counts[fingerprints[rank]] == most)
    return [rank for rank in sorted(fingerprints) if fingerprints[rank] != norm]


def order(part: str) -> tuple[str, int, str]:
    """`shard:2` before `shard:10`. All ranks carry transfers out in this order, so that none waits in a circle."""
    name, _, number = part.partition(":")
    return name, int(number) if number.isdecimal() else -1, part


def _wanted(reports: Mapping[int, Report], parts: Collection[str]) -> set[str]:
    return set(parts).union(*{report.parts for report in reports.values()})


def _newest(reports: Mapping[int, Report], wanted: set[str]) -> int:
    """The newest step of which every part has a clean copy; -1 if there is none."""
    found: dict[int, set[str]] = {}
    for report in reports.values():
        for part, step in report.copies():
            found.setdefault(step, set()).add(part)
    return max((step for step, parts in found.items() if len(parts) >= len(wanted) and parts >= wanted), default=-1)


def _holders(reports: Mapping[int, Report], step: int) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, report in reports.items() if any(at == step for _, at in report.copies())))


def _what_is_missing(trained: Mapping[int, Report], wanted: set[str]) -> str:
    left = {part for report in trained.values() for part, _ in report.copies()}
    if not left:
        return "no rank has a clean state"
    lost = sorted(wanted - left, key=order)
    if lost:
        return f"no rank has a clean copy of {', '.join(lost[:_SHOWN])}{' and more' if len(lost) > _SHOWN else ''}"
    return "there is no step of which every part has a clean copy"


def _right_digest(shown: Sequence[int], digests: Mapping[int, str], fresh: bool) -> tuple[str, str]:
    counts = Counter(digests[rank] for rank in shown)
    first = shown[0]
    if len(counts) == 1:
        return digests[first], f"all {len(shown)} copies are equal" if len(shown) > 1 else f"rank {first} has the copy"
    if fresh:
        return digests[first], f"initial values differ, those of rank {first} are taken"
    most = max(counts.values())
    digest = next(digests[rank] for rank in shown if counts[digests[rank]] == most)
    return digest, f"{most} of {len(shown)} copies agree, the others are overwritten"


def _pair(targets: Sequence[int], sources: Sequence[int]) -> dict[int, int]:
    """Every target's source: the first holder after it in the ring of ranks that is not busy with an earlier target."""
    pairs = {}
    free = 0
    for target in targets:
        index = max(free, bisect(sources, target))
        pairs[target] = sources[index % len(sources)]
        free = index + 1
    return pairs


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" if len(ranks) <= 8 else f"ranks {shown} and {len(ranks) - 8} more"
