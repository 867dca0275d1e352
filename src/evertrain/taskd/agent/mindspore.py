"""The agent for MindSpore: inside msrun, which starts and ends its processes by four callbacks."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from evertrain.taskd import environment, frames
from evertrain.taskd.agent import common
from evertrain.taskd.agent.msrun import Msrun, Process, StartFailed
from evertrain.taskd.codes import Code
from evertrain.taskd.frames import BadFrame, Body

log = logging.getLogger(__name__)

RESTARTS = 1
"""What a MindSpore agent says about its restarts when it starts; it has as many as are needed."""
LOOK = 0.5
"""Seconds between looks at processes whose ends nobody announces."""


class _Leave(Exception):
    """The agent's work is over, without success."""


class MsAgent:
    def __init__(self, server_rank: str, upstream: str) -> None:
        self._msrun = Msrun()
        self._reporter = common.Reporter(server_rank, upstream, self._msrun.wake)
        self._faulty: set[int] = set()
        self._reported_at: float | None = None
        self._started = False

    def register_func(self, operator: str, function: Callable[..., Any]) -> bool:
        self._msrun.register(operator, function)
        return True

    def start(self) -> None:
        """Ends the process: with 0 when all of its processes have succeeded, with 1 on order."""
        self._msrun.require_all()
        with self._open():
            self._reporter.start()
            self._reporter.starts(RESTARTS)
            try:
                while not self._msrun.succeeded:
                    self._wait()
            except (_Leave, StartFailed) as why:
                log.error("the agent exits: %s", str(why))
                print(f"taskd: the agent exits: {why}", file=sys.stderr, flush=True)
                self._msrun.kill_all()
                self._reporter.leaves()
                sys.exit(1)
            self._msrun.kill_all()
            self._reporter.ends(0)
        self._msrun.wait_for_scheduler()
        sys.exit(0)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._reporter.close()
            self._msrun.close()

    # Waiting.

    def _wait(self) -> None:
        if self._msrun.wait(LOOK if self._started else None):
            if self._faulty:
                common.tell_unchanged(self._faulty)
            self._messages()
        if self._started and self._msrun.look():
            self._tell_faults()

    def _tell_faults(self) -> None:
        new = [each for each in self._msrun.processes if each.failed and each.rank not in self._faulty]
        if new:
            causes = {each.rank: common.told(each.rank, each.pid, self._msrun.cause(each)) for each in new}
            self._faulty |= causes.keys()
            self._reported_at = time.monotonic()
            log.info("New fault process detected, fault_rank: %s", sorted(self._faulty))
            self._reporter.faults(self._faulty, causes)
        limit = environment.report_fault_timeout()
        if limit and self._faulty and time.monotonic() - (self._reported_at or 0.0) > limit:
            raise _Leave(f"agent report fault rank timeout, exiting... nobody handled {sorted(self._faulty)}")

    # Orders.

    def _messages(self) -> None:
        orders: dict[int, Callable[[Body], None]] = {
            Code.START_AGENT: self._start,
            Code.RESTART_AGENT: self._restart,
            Code.RESTART_WORKERS: self._replace,
            Code.STOP_WORKERS: self._stop,
            Code.EXIT_AGENT: self._exit,
        }
        while (body := self._reporter.order()) is not None:
            common.tell_order(body)
            order = orders.get(body.code)
            try:
                if order is None:
                    raise ValueError("an unknown command")
                order(body)
            except (BadFrame, ValueError) as error:
                log.error("command %d: %s", body.code, str(error))

    def _start(self, body: Body) -> None:
        if self._started:
            log.info("the processes have been started already")
        else:
            self._start_all(body)

    def _start_all(self, body: Body) -> None:
        with contextlib.suppress(ValueError):
            # Not a limit, but what the manager knows later reports by: those from before this start mean nothing.
            self._reporter.starts_again(int(body.message))
        self._faulty.clear()
        self._msrun.start_all()
        self._started = True
        self._reporter.stands(())

    def _restart(self, body: Body) -> None:
        self._msrun.kill_all()
        self._start_all(body)

    def _named(self, body: Body) -> list[Process]:
        wanted = set(frames.rank_list(body.message))
        self._msrun.look()  # an order before this one may have changed something
        return [each for each in self._msrun.processes if each.rank in wanted]

    def _stop(self, body: Body) -> None:
        self._msrun.kill(self._named(body))

    def _replace(self, body: Body) -> None:
        self._reporter.replaced += 1
        named = self._named(body)
        if not named:
            return
        self._msrun.kill(named)
        self._faulty -= {each.rank for each in named}
        self._reporter.stands(self._faulty)
        self._msrun.start([each.local_rank for each in named])

    def _exit(self, body: Body) -> None:
        raise _Leave(common.why(body))
