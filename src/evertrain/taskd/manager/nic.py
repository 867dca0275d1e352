"""Link failover: all workers are told which ranks change their link, and ClusterD hears whether all could. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from evertrain.taskd import frames
from evertrain.taskd.codes import ACTION, Code
from evertrain.taskd.frames import Body
from evertrain.taskd.manager.orders import NicReply, Order, ToWorker

LIMIT = 120 * 60.0
OK, FAILED = "switchOK", "switchFail"
_NAMED = 10
"""Ranks in a line of the log."""


@dataclass(slots=True)
class _Switch:
    uuid: str
    job: str
    waiting: set[int]
    deadline: float


class NicSwitches:
    def __init__(self) -> None:
        self._running: dict[str, _Switch] = {}

    def order(
        self, uuid: str, job: str, ranks: Sequence[str], ops: Sequence[bool], workers: Iterable[int], now: float
    ) -> list[Order]:
        waiting = set(workers)
        if not ranks or len(ranks) != len(ops):
            return [NicReply(job, False, f"{len(ranks)} ranks and {len(ops)} operations were named")]
        if not waiting:
            return [NicReply(job, False, "no worker has registered")]
        self._running[uuid] = _Switch(uuid, job, waiting, now + LIMIT)
        extension = {
            "globalRankIDs": json.dumps(list(ranks), separators=(",", ":")),
            "globalOps": json.dumps(list(ops), separators=(",", ":")),
            "switchNicUUID": uuid,
        }
        body = frames.body(ACTION, Code.SWITCH_NIC, "", extension)
        return [ToWorker(rank, body) for rank in sorted(waiting)]

    def result(self, rank: int, body: Body) -> list[Order]:
        switch = self._running.get((body.extension or {}).get("switchNicUUID", ""))
        if switch is None or rank not in switch.waiting:
            return []
        switch.waiting.discard(rank)
        if body.message == OK and switch.waiting:
            return []
        del self._running[switch.uuid]
        if body.message == OK:
            return [NicReply(switch.job, True)]
        return [NicReply(switch.job, False, f"worker {rank} answers {body.message[:100]!r}")]

    def lost(self, rank: int) -> list[Order]:
        """A worker can't be reached, or a new process has its rank: it will never say that it has changed over."""
        failed = [switch for switch in self._running.values() if rank in switch.waiting]
        for switch in failed:
            del self._running[switch.uuid]
        return [NicReply(switch.job, False, f"worker {rank} can't be told, or was replaced") for switch in failed]

    @property
    def deadline(self) -> float | None:
        return min((switch.deadline for switch in self._running.values()), default=None)

    def tick(self, now: float) -> list[Order]:
        over = [switch for switch in self._running.values() if switch.deadline <= now]
        for switch in over:
            del self._running[switch.uuid]
        return [NicReply(switch.job, False, _silent(switch.waiting)) for switch in over]


def _silent(ranks: Collection[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:_NAMED]))
    return f"{len(ranks)} workers did not answer within {LIMIT:g} s: {first}{', ...' if len(ranks) > _NAMED else ''}"
