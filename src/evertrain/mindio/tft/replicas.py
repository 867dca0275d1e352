"""Who holds which shard of the optimizer state, who saves it, and who repairs whom. Plain arithmetic.

A data-parallel group of n ranks keeps its state c times over. Its ranks are taken in ascending order; with k = n / c
the ranks at positions i, i+k, i+2k, … hold the same shard i. With c = n every rank holds everything.

In the variant `x1` (environment TTP_FRAMEWORK_TYPE=1) the framework says the stride: of the first shift·c positions
those a stride apart hold the same shard, and the ranks after them form one more whole copy, split in another way. That
copy can be saved, but no single rank of it can repair another.

Every function that can say no returns None or an empty result; `insane` gives the reason in words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from evertrain.mindio.tft.numbers import RepairType


class Copy(Enum):
    """What a rank's share of the state is worth."""

    USABLE = "usable"
    KEEP = "keep"
    """Intact, but nobody relies on it: a memory error outside of the state. Gives nothing and needs nothing."""
    BAD = "bad"
    REBUILD = "rebuild"
    """Bad, and the memory under it as well: model and optimizer have to be built again before anything is received."""


@dataclass(frozen=True, slots=True)
class Group:
    """One data-parallel group of one kind of state."""

    ranks: tuple[int, ...]
    """Ascending."""
    copies: int
    shift: int = 0

    @classmethod
    def of(cls, ranks: Iterable[int], copies: int, shift: int = 0) -> Group:
        return cls(tuple(sorted(ranks)), copies, shift)

    def shards(self, x1: bool = False) -> list[tuple[int, ...]]:
        """For each shard, the ranks that hold it."""
        if x1:
            replicated = self.ranks[: self.shift * self.copies]
            return [replicated[first :: self.shift] for first in range(self.shift)]
        stride = len(self.ranks) // self.copies
        return [self.ranks[first::stride] for first in range(stride)]

    def extra(self, x1: bool = False) -> tuple[int, ...]:
        """The ranks of the additional copy that is split in another way."""
        return self.ranks[self.shift * self.copies :] if x1 else ()


@dataclass(frozen=True, slots=True)
class Unit:
    """One transfer, or for a load (source = target) one rank's share of it."""

    source: int
    target: int
    kind: int
    repair_type: RepairType


Kinds = Sequence[Sequence[Group]]
"""For each kind of optimizer state, all its groups."""

Plan = dict[int, list[Unit]]
"""For each rank that has something to do, what it does. All units of a rank are of one type."""


def insane(kinds: Kinds, world_size: int, x1: bool = False) -> str | None:
    """Why these groups can't be those of one job, or None if they can."""
    if not kinds or not all(kinds):
        return "no replica groups were reported"
    for kind, groups in enumerate(kinds):
        sizes = {len(group.ranks) for group in groups}
        if len(sizes) > 1:
            return f"the groups of kind {kind} differ in size: {', '.join(map(str, sorted(sizes)))}"
        members = [rank for group in groups for rank in group.ranks]
        if len(members) != world_size or len(set(members)) != world_size:
            found = f"{len(set(members))} ranks in {len(members)} places"
            return f"the groups of kind {kind} have {found}, the job has {world_size}"
        for group in groups:
            if not 1 <= group.copies <= len(group.ranks):
                return f"{group.copies} copies can't be kept by {len(group.ranks)} ranks"
            if x1 and not 1 <= group.shift * group.copies <= len(group.ranks):
                return f"{group.copies} copies at stride {group.shift} don't fit into {len(group.ranks)} ranks"
    return None


def savers(group: Group, usable: Collection[int], x1: bool = False) -> list[int] | None:
    """One usable rank for each shard, or None if a shard is lost."""
    chosen = [next((rank for rank in holders if rank in usable), None) for holders in group.shards(x1)]
    whole = [rank for rank in chosen if rank is not None]
    if len(whole) == len(chosen):
        return whole
    extra = group.extra(x1)
    return list(extra) if extra and all(rank in usable for rank in extra) else None


Savers = dict[int, list[tuple[int, list[int]]]]
"""For each saving rank its (kind, ranks that save together)."""


def dump_choice(kinds: Kinds, usable: Collection[int], x1: bool = False) -> Savers | None:
    """Who saves what; None if something can't be saved."""
    orders: Savers = {}
    for kind, groups in enumerate(kinds):
        for group in groups:
            chosen = savers(group, usable, x1)
            if chosen is None:
                return None
            for rank in chosen:
                orders.setdefault(rank, []).append((kind, chosen))
    return orders


def full_copy(kinds: Kinds, usable: Collection[int], x1: bool = False) -> bool:
    """Whether every shard of every group is still held by a usable rank."""
    return dump_choice(kinds, usable, x1) is not None


def sources(group: Group, bad: Collection[int], usable: Collection[int], x1: bool = False) -> dict[int, int] | None:
    """For each bad rank of the group the rank it gets its state from; None if one has no such rank.

    It is the next usable holder of the same shard, cyclically; so the load spreads.
    """
    pairs: dict[int, int] = {}
    for holders in group.shards(x1):
        for place, rank in enumerate(holders):
            if rank in bad:
                source = next((peer for peer in holders[place + 1 :] + holders[:place] if peer in usable), None)
                if source is None:
                    return None
                pairs[rank] = source
    if any(rank in bad for rank in group.extra(x1)):
        return None
    return dict(sorted(pairs.items()))


def repair_plan(kinds: Kinds, copies: Mapping[int, Copy], x1: bool = False) -> Plan | None:
    """Who sends to whom so that every bad rank gets its state.

    Empty if nobody is bad, None if the replicas don't suffice.
    """
    usable = {rank for rank, copy in copies.items() if copy is Copy.USABLE}
    bad = {rank for rank, copy in copies.items() if copy in (Copy.BAD, Copy.REBUILD)}
    plan: Plan = {}
    if not bad:
        return plan
    for kind, groups in enumerate(kinds):
        for group in groups:
            pairs = sources(group, bad, usable, x1)
            if pairs is None:
                return None
            for target, source in pairs.items():
                rebuild = copies[target] is Copy.REBUILD
                receive = RepairType.RT_UCE_HIGHLEVEL if rebuild else RepairType.RT_RECV_REPAIR
                plan.setdefault(source, []).append(Unit(source, target, kind, RepairType.RT_SEND))
                plan.setdefault(target, []).append(Unit(source, target, kind, receive))
    return plan


def load_plan(kinds: Kinds, rebuild: Collection[int] = ()) -> Plan:
    """Every rank loads the last periodic checkpoint; those in `rebuild` build model and optimizer again first."""
    plan: Plan = {}
    for kind, groups in enumerate(kinds):
        for group in groups:
            for rank in group.ranks:
                how = RepairType.RT_LOAD_REBUILD if rank in rebuild else RepairType.RT_LOAD_CKPT
                plan.setdefault(rank, []).append(Unit(rank, rank, kind, how))
    return plan


def participants(plan: Plan) -> list[int]:
    return sorted(plan)


def isolate(kinds: Kinds, faulty: Collection[int], data_parallel: Sequence[Sequence[int]] = ()) -> set[int]:
    """The ranks that leave when the job shrinks: whole data-parallel indices.

    In every kind of groups the positions of faulty ranks are given up, in all groups of that kind, so that all groups
    stay of one size. `data_parallel` are the original groups if the framework reported them besides.
    """
    leaving = set(faulty)
    layers: list[list[tuple[int, ...]]] = [[group.ranks for group in groups] for groups in kinds]
    if data_parallel:
        layers.append([tuple(sorted(ranks)) for ranks in data_parallel])
    for layer in layers:
        positions = {place for ranks in layer for place, rank in enumerate(ranks) if rank in faulty}
        leaving.update(rank for ranks in layer for place, rank in enumerate(ranks) if place in positions)
    return leaving
