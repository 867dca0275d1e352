"""Online stress test: the named workers run it, and ClusterD gets the result of each. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from evertrain.taskd import frames
from evertrain.taskd.codes import ACTION, Code
from evertrain.taskd.frames import Body
from evertrain.taskd.manager.orders import Order, StressReply, ToWorker

LIMIT = 15 * 60.0
SILENCE = 30.0
"""Seconds without a sign of life after which a worker that runs the test is given up."""
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
    heard: dict[int, float]
    """By worker that has not finished: when it was last heard. The one silent for the longest time is the first."""
    results: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    def give_up(self, rank: int, text: str) -> None:
        self.heard.pop(rank, None)
        self.results[str(rank)] = {str(op): (TIMED_OUT, text) for op in self.ops[rank]}


class StressTests:
    def __init__(self) -> None:
        self._running: dict[str, _Test] = {}

    def order(
        self, uuid: str, job: str, ops: Mapping[int, Sequence[int]], workers: Collection[int], now: float
    ) -> list[Order]:
        test = _Test(uuid, job, ops, now + LIMIT, {rank: now for rank in ops})
        for rank in [rank for rank in ops if rank not in workers]:
            test.give_up(rank, "worker is not registered")
        params = {str(rank): {"ops": list(ops[rank])} for rank in test.heard}
        extension = {"StressTestRankOPStr": json.dumps(params, separators=(",", ":")), "stressTestUUID": uuid}
        body = frames.body(ACTION, Code.STRESS_TEST, "", extension)
        self._running[uuid] = test
        return [*(ToWorker(rank, body) for rank in sorted(test.heard)), *self._finished()]

    def alive(self, rank: int, now: float) -> None:
        for test in self._running.values():
            if test.heard.pop(rank, None) is not None:
                test.heard[rank] = now

    def result(self, rank: int, body: Body) -> list[Order]:
        test = self._running.get((body.extension or {}).get("stressTestUUID", ""))
        if test is None or rank not in test.heard:
            return []
        try:
            result = msgspec.json.decode(body.message, type=_Result)
            test.results[str(rank)] = {op: (each.code, each.result) for op, each in result.rankResult.items()}
        except (msgspec.DecodeError, UnicodeError):
            test.results[str(rank)] = {str(op): ("1", "the result could not be read") for op in test.ops[rank]}
        del test.heard[rank]
        return self._finished()

    def lost(self, rank: int) -> list[Order]:
        """The worker can't be reached, or a new process has its rank."""
        for test in self._running.values():
            if rank in test.heard:
                test.give_up(rank, "worker is lost")
        return self._finished()

    @property
    def deadline(self) -> float | None:
        tests = self._running.values()
        return min((min(test.deadline, next(iter(test.heard.values())) + SILENCE) for test in tests), default=None)

    def tick(self, now: float) -> list[Order]:
        for test in self._running.values():
            for rank, at in list(test.heard.items()):
                if now >= at + SILENCE:
                    test.give_up(rank, "worker heartbeat timeout")
                elif now >= test.deadline:
                    test.give_up(rank, "stress test timeout")
        return self._finished()

    def _finished(self) -> list[Order]:
        done = [test for test in self._running.values() if not test.heard]
        for test in done:
            del self._running[test.uuid]
        return [StressReply(test.job, test.results) for test in done]
