"""Online stress test: the named workers run it, and ClusterD gets the result of each. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from evertrain.taskd import frames
from evertrain.taskd.codes import ACTION, STRESS_SILENCE, Code
from evertrain.taskd.frames import Body
from evertrain.taskd.manager.orders import Order, StressReply, ToWorker

LIMIT = 15 * 60.0
SILENCE = STRESS_SILENCE
TIMED_OUT = "3"


class _OpResult(msgspec.Struct, frozen=True):
    code: str
    result: str = ""


class _Result(msgspec.Struct, frozen=True):
    rankResult: dict[str, _OpResult]  # noqa: N815  the name on the wire


@dataclass(slots=True)
class _Test:
    uuid: str
    job: str
    ops: Mapping[int, Sequence[int]]
    deadline: float
    untold: set[int]
    """Workers that the order has not reached yet: of a large job not all can be told at once."""
    heard: dict[int, float] = field(default_factory=dict)
    """By worker that was told and has not finished: when it was last heard. The one silent for the longest time is the
    first."""
    results: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    @property
    def waiting(self) -> set[int]:
        return self.untold | self.heard.keys()

    def done(self, rank: int) -> None:
        self.untold.discard(rank)
        self.heard.pop(rank, None)

    def give_up(self, rank: int, text: str) -> None:
        self.done(rank)
        self.results[str(rank)] = {str(op): (TIMED_OUT, text) for op in self.ops[rank]}


class StressTests:
    def __init__(self) -> None:
        self._running: dict[str, _Test] = {}

    def order(
        self, uuid: str, job: str, ops: Mapping[int, Sequence[int]], workers: Collection[int], now: float
    ) -> list[Order]:
        test = _Test(uuid, job, ops, now + LIMIT, set(ops))
        for rank in [rank for rank in ops if rank not in workers]:
            test.give_up(rank, "worker is not registered")
        params = {str(rank): {"ops": list(ops[rank])} for rank in sorted(test.untold)}
        extension = {"StressTestRankOPStr": json.dumps(params, separators=(",", ":")), "stressTestUUID": uuid}
        body = frames.body(ACTION, Code.STRESS_TEST, "", extension)
        self._running[uuid] = test
        return [*(ToWorker(rank, body) for rank in sorted(test.untold)), *self._finished()]

    def told(self, rank: int, body: Body, now: float) -> None:
        """The order has arrived: from now on the worker has to show that it lives."""
        test = self._running.get((body.extension or {}).get("stressTestUUID", ""))
        if test is not None and rank in test.untold:
            test.untold.discard(rank)
            test.heard[rank] = now

    def alive(self, rank: int, now: float) -> None:
        for test in self._running.values():
            if test.heard.pop(rank, None) is not None:
                test.heard[rank] = now

    def result(self, rank: int, body: Body) -> list[Order]:
        test = self._running.get((body.extension or {}).get("stressTestUUID", ""))
        if test is None or rank not in test.waiting:
            return []
        try:
            result = msgspec.json.decode(body.message, type=_Result)
            test.results[str(rank)] = {op: (each.code, each.result) for op, each in result.rankResult.items()}
        except (msgspec.DecodeError, UnicodeError):
            test.results[str(rank)] = {str(op): ("1", "the result could not be read") for op in test.ops[rank]}
        test.done(rank)
        return self._finished()

    def lost(self, rank: int) -> list[Order]:
        """The worker can't be reached, or a new process has its rank."""
        for test in self._running.values():
            if rank in test.waiting:
                test.give_up(rank, "worker is lost")
        return self._finished()

    @property
    def deadline(self) -> float | None:
        silent = [next(iter(test.heard.values())) + SILENCE for test in self._running.values() if test.heard]
        return min([*silent, *(test.deadline for test in self._running.values())], default=None)

    def tick(self, now: float) -> list[Order]:
        for test in self._running.values():
            for rank, at in list(test.heard.items()):
                if now >= at + SILENCE:
                    test.give_up(rank, "worker heartbeat timeout")
            for rank in test.waiting if now >= test.deadline else ():
                test.give_up(rank, "stress test timeout")
        return self._finished()

    def _finished(self) -> list[Order]:
        done = [test for test in self._running.values() if not test.waiting]
        for test in done:
            del self._running[test.uuid]
        return [StressReply(test.job, test.results) for test in done]
