"""The worker: a member of the tree in a training process, and a thread that carries out orders one after the other."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from evertrain.taskd import environment, files
from evertrain.taskd.codes import ACTION, KEEP_ALIVE, PROFILING_ORDERS, REGISTER, STATUS, STRESS_SILENCE, WORKER, Code
from evertrain.taskd.frames import Body
from evertrain.taskd.member import Member
from evertrain.taskd.native import crash, library
from evertrain.taskd.net.routing import Position
from evertrain.taskd.tracing import Switch, switch
from evertrain.taskd.worker import operations
from evertrain.taskd.worker.profiler import Profiler
from evertrain.taskd.worker.torch_marks import tell_steps

log = logging.getLogger(__name__)

RESULT = 60.0
"""Seconds for which it is tried to tell a result: a device of which none comes is taken for a faulty one."""
ALIVE, LOOK = 1.0, 1.0
"""Seconds between signs of life, and between looks at the file that says which timings are wanted."""
REFUSED = (operations.FAILED, operations.NO_RESULT)
_MOST = 1000
"""Orders that wait."""
LIMITS = {operations.AIC: 300.0, operations.P2P: 600.0}
"""Seconds that a stress test may take, by operation."""


class Worker:
    def __init__(self, rank: int, node: int, framework: str, limit_mb: int) -> None:
        self.rank, self._framework = rank, framework
        self._profiler = Profiler(rank, framework, limit_mb)
        upstream = f"{environment.proxy_host()}:{environment.proxy_port()}"
        own = Position(WORKER, str(node), str(rank))
        self._member = Member(own, upstream, security=environment.security(), notify=self._take)
        self._orders: queue.Queue[tuple[float, Body]] = queue.Queue(_MOST)
        """With the time at which each has come: the one before it may take long."""
        self._thread = threading.Thread(target=self._run, name="taskd-worker", daemon=True)
        self._ended = threading.Event()
        self._undo: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Returns at once; the manager is joined in the background, whenever it is there. Once is enough."""
        if self._thread.ident is not None:
            return
        if self._framework == "pt" and os.environ.get(crash.VARIABLE):
            self._undo = tell_steps(library.step_setter())
        self._thread.start()

    def close(self) -> None:
        self._undo()
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        self._member.start()
        try:
            self._profiler.start()
            if not self._register():
                return
            while not self._ended.is_set():
                try:
                    came, body = self._orders.get(timeout=0.5)
                except queue.Empty:
                    continue
                self._obey(body, came)
        finally:
            self._profiler.close()
            self._member.close()

    def _take(self) -> None:
        """An order has just come. In the loop's thread."""
        self._orders.put_nowait((time.monotonic(), self._member.received.get_nowait()))

    def _register(self) -> bool:
        """Until the manager knows us, which may never be; then a file says which timings to write."""
        wanted = Switch()
        while not self._ended.is_set():
            read = _in_file()
            if read is not None and read != wanted:
                wanted = read
                result = self._profiler.switch(wanted.default, wanted.communication)
                log.info("worker %d: %s says %s: %d", self.rank, environment.trace_file(), wanted, result)
            if self._member.wait_joined(LOOK) and self._member.send(REGISTER, Code.WORKER_REGISTER):
                log.info("worker %d register manager success, begin recv msg", self.rank)
                if wanted != Switch():
                    self._member.send(STATUS, self._profiler.state())
                return True
        return False

    def _obey(self, body: Body, came: float) -> None:
        try:
            if body.code == Code.SWITCH_NIC:
                self._switch_nic(body.extension or {})
            elif body.code == Code.STRESS_TEST:
                self._stress(body.extension or {}, came)
            elif body.code in PROFILING_ORDERS:
                default, communication = divmod(body.code - PROFILING_ORDERS.start, 10)
                result = self._profiler.switch(bool(default), bool(communication))
                log.info("worker %d: order %d, result %d", self.rank, body.code, result)
                self._member.send(STATUS, result)
            else:
                log.warning("worker %d: an unknown order: %s", self.rank, body)
        except Exception as error:  # whatever it is, the next order has to be heard
            reason = f"{type(error).__name__}: {error}"
            log.error("worker %d: order %d makes no sense: %s", self.rank, body.code, reason)

    def _tell(self, code: Code, message: str, extension: dict[str, str]) -> None:
        """A result, until the manager has it: it may be away for a while."""
        until = time.monotonic() + RESULT
        while not self._member.send(ACTION, code, message, extension):
            if self._ended.is_set() or time.monotonic() > until:
                log.error("worker %d: the manager did not get the result of order %d: %s", self.rank, code, message)
                return

    def _switch_nic(self, order: dict[str, str]) -> None:
        uuid, done = order["switchNicUUID"], False
        try:
            ranks = [int(rank) for rank in json.loads(order["globalRankIDs"])]
            ops = json.loads(order["globalOps"])
            if len(ranks) != len(ops) or not all(isinstance(op, bool) for op in ops):
                raise ValueError("as many operations as ranks are needed")
            done = operations.switch_nic(self._framework, self.rank, uuid, ranks, ops)
        finally:
            self._tell(Code.SWITCH_NIC, "switchOK" if done else "switchFail", {"switchNicUUID": uuid})

    def _stress(self, order: dict[str, str], came: float) -> None:
        uuid = order["stressTestUUID"]
        mine = json.loads(order["StressTestRankOPStr"]).get(str(self.rank))
        if mine is None:
            return
        ops = sorted({int(op) for op in mine["ops"]})
        if not set(ops) <= set(LIMITS):
            raise ValueError(f"unknown operations: {ops}")
        if time.monotonic() - came > STRESS_SILENCE:
            # It would hold up a training that goes on by now, for a result that nobody waits for.
            log.error("worker %d: the stress test has been given up before it could begin", self.rank)
            return
        results = {}
        with operations.paused() as ended:
            # A training that went on meanwhile would disturb the test, and the test the training.
            refused = ended is None and operations.can_be_paused()
            if refused:
                log.error("worker %d: no stress test, since the training is not paused", self.rank)
            for op in ops:
                test = functools.partial(operations.stress, self._framework, op)
                code, text = REFUSED if refused else self._alive_during(test, LIMITS[op])
                results[str(op)] = {"code": str(code), "result": text}
        self._tell(Code.STRESS_TEST, json.dumps({"rankResult": results}), {"stressTestUUID": uuid})

    def _alive_during(self, work: Callable[[], tuple[int, str]], limit: float) -> tuple[int, str]:
        """The result; signs of life go to the manager meanwhile."""
        done: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=lambda: done.put(work()), name="taskd-stress", daemon=True).start()
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            self._member.send(KEEP_ALIVE, 0)
            with contextlib.suppress(queue.Empty):
                result: tuple[int, str] = done.get(timeout=min(ALIVE, left))
                return result
        return operations.TIMED_OUT, operations.TEXTS[operations.TIMED_OUT]


def _in_file() -> Switch | None:
    """What the file wants; None if there is none, or nothing sensible in it."""
    try:
        values = json.loads(files.read_text(environment.trace_file(), whole_path=True))
    except (OSError, ValueError, RecursionError):
        return None
    return switch(values) if isinstance(values, dict) and values else None
