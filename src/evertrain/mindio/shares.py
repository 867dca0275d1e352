"""Who takes over the data of ranks that are missing. Pure; every rank computes it for itself and gets the same.

Every rank of the full job stands for a share of each step's samples. While some ranks are missing, their shares are
dealt out to those that are there, one by one, so that nobody carries more than one share more than anybody else.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal(world_size: int, members: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The shares of every member, its own among them. Share 0 comes last with whoever has it.

    What a model keeps in buffers is share 0's in every step, so its carrier ends the step with it.
    """
    if not members:
        raise ValueError("nobody is there to take over")
    present = sorted(members)
    if present[0] < 0 or present[-1] >= world_size or len(set(present)) < len(present):
        raise ValueError(f"{present} are not different ranks of a job of {world_size}")
    missing = sorted(set(range(world_size)).difference(present))
    shares = {rank: [rank] for rank in present}
    for number, share in enumerate(missing):
        shares[present[number % len(present)]].append(share)
    return {rank: tuple(sorted(carried, key=lambda share: (share == 0, share))) for rank, carried in shares.items()}


def rounds(world_size: int, members: Sequence[int]) -> int:
    """How many shares the busiest member has."""
    return -(-world_size // len(members))
