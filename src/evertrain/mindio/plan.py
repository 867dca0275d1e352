"""Which step the job goes on from, and who gives whom its state. Pure arithmetic on what the ranks reported.

Every rank that is out of the training code says how many steps its state contains and whether that state is clean,
that is, not half-way through an update. `choose` picks the newest step of which a clean copy lives; nothing is lost as
long as one rank has one. `repair` is asked later, when the ranks have hashed their copies: it settles which content is
the right one and lets every other rank receive it.

All ranks that are handed to one call hold the same state (data parallel). A job with sharded state has several such
sets of ranks; it is planned by one call for each set, with the step agreed over all sets first.

Every function returns its result together with the reason in words: the timeline shows them, and so do the tests.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank that is out of the training code said about its state."""

    step: int
    clean: bool
    fresh: bool = False
    checkpoint: int = -1


@dataclass(frozen=True, slots=True)
class Start:
    """The point that the next generation starts from."""

    step: int
    holders: tuple[int, ...]
    """Ranks with a clean copy of that step, ascending; empty if all load the checkpoint instead."""
    load: bool = False
    """True if every rank loads the checkpoint of that step."""
    fresh: bool = False
    """True if no process has trained yet, so that the copies are merely initial values."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Who sends its state to whom."""

    digest: str
    source_of: dict[int, int]
    targets_of: dict[int, tuple[int, ...]]

    @property
    def fan_out(self) -> int:
        """The longest queue at one source."""
        return max((len(targets) for targets in self.targets_of.values()), default=0)


def choose(reports: Mapping[int, Report], distrusted: Collection[int] = ()) -> tuple[Start | None, str]:
    """Pick the step to go on from. None if no state is left that all ranks could continue from.

    A process that has not trained holds initial values (or what its script loaded). They count only when nobody has
    anything better, for a replacement's initial values would silently throw the training away.
    """
    usable = {rank: report for rank, report in reports.items() if report.clean and rank not in distrusted}
    trained = {rank: report for rank, report in usable.items() if not report.fresh}
    if trained:
        step = max(report.step for report in trained.values())
        holders = _at(trained, step)
        return Start(step, holders), f"step {step}: the newest clean state, held by {_ranks(holders)}"

    checkpoint = min((report.checkpoint for report in reports.values()), default=-1)
    all_fresh = all(report.fresh for report in reports.values())
    beginnings = {rank: report for rank, report in usable.items() if all_fresh or report.step > 0}
    step = max((report.step for report in beginnings.values()), default=-1)
    if checkpoint > max(step, 0) or (checkpoint >= 0 and step < 0):
        why = "no process has trained yet" if all_fresh else "no rank has a clean state"
        return Start(checkpoint, (), load=True), f"step {checkpoint}: {why}, all ranks load the checkpoint"
    if step >= 0:
        holders = _at(beginnings, step)
        if all_fresh:
            return Start(step, holders, fresh=True), f"step {step}: no process has trained yet"
        return Start(step, holders), f"step {step}: what {_ranks(holders)} started with; nobody has a newer clean state"
    return None, "no rank has a clean state, and there is no checkpoint that all ranks can load"


def repair(start: Start, members: Iterable[int], digests: Mapping[int, str]) -> tuple[Transfers | None, str]:
    """Decide which copy is right and who receives it from whom. None if no holder could show a copy.

    The content held by most holders is right; if two are held by equally many, the one of the lowest rank. Initial
    values of a first start differ if the ranks were seeded differently; there the lowest rank's always win.
    """
    if start.load:
        return Transfers("", {}, {}), f"all ranks load the checkpoint of step {start.step}"
    shown = [rank for rank in start.holders if digests.get(rank)]
    if not shown:
        return None, f"no rank could show its copy of step {start.step}"
    digest, explanation = _right_digest(shown, digests, start.fresh)
    sources = [rank for rank in shown if digests[rank] == digest]
    held = set(sources)
    targets = [rank for rank in sorted(members) if rank not in held]
    source_of = _pair(targets, sources)
    queues: dict[int, list[int]] = {}
    for target, source in source_of.items():
        queues.setdefault(source, []).append(target)
    if targets:
        explanation += f"; {_ranks(sorted(queues))} to {_ranks(targets)}"
    return Transfers(digest, source_of, {source: tuple(queue) for source, queue in queues.items()}), explanation


def dump_source(reports: Mapping[int, Report], excluded: Collection[int] = ()) -> tuple[int | None, str]:
    """The rank that writes the dying-gasp checkpoint: the lowest one with the newest clean state."""
    able = [
        (report.step, -rank)
        for rank, report in reports.items()
        if report.clean and report.step > 0 and rank not in excluded
    ]
    if not able:
        return None, "no rank has a clean state worth writing"
    step, negative = max(able)
    return -negative, f"rank {-negative} has the newest clean state, step {step}"


def odd_ones_out(fingerprints: Mapping[int, str]) -> list[int]:
    """Ranks whose model or optimizer is not that of most ranks (ties: of the lowest rank)."""
    counts = Counter(fingerprints.values())
    if len(counts) < 2:
        return []
    most = max(counts.values())
    norm = next(fingerprints[rank] for rank in sorted(fingerprints) if counts[fingerprints[rank]] == most)
    return [rank for rank in sorted(fingerprints) if fingerprints[rank] != norm]


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


def _at(reports: Mapping[int, Report], step: int) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, report in reports.items() if report.step == step))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" if len(ranks) <= 8 else f"ranks {shown} and {len(ranks) - 8} more"
