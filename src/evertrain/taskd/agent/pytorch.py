"""The agent for PyTorch: torchrun's place, with the manager's orders.

Everything happens in torchrun's main thread, when something happens: a process has ended (its descriptor tells), or a
message has come.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from evertrain.taskd import environment, frames
from evertrain.taskd import log as logs
from evertrain.taskd.agent import common, standby
from evertrain.taskd.agent.standby import Reserve
from evertrain.taskd.agent.torch_private import Elastic, Terminated, Unmet
from evertrain.taskd.codes import Code
from evertrain.taskd.frames import BadFrame, Body
from evertrain.taskd.native import crash

log = logging.getLogger(__name__)

RESTART_TYPE = "RESTART_FAULT_PROCESS_TYPE"
"""Tells a process whether its whole pod is new, or only itself."""
POD, WORKER = "pod", "worker"


class _Leave(Exception):
    """The agent's work is over, without success."""


class _Superseded(BaseException):
    """A newer order makes what is under way pointless. No Exception: torchrun only logs those where it ends."""


_NEW_STARTS = (Code.START_AGENT, Code.RESTART_AGENT, Code.EXIT_AGENT)


class PtAgent:
    def __init__(self, agent: Any, server_rank: str, upstream: str) -> None:
        self._elastic = Elastic(agent, int(server_rank), self._pause)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reporter = common.Reporter(server_rank, upstream, self._wake)
        reserve = standby.inherited() or Reserve()
        self._selector, self._guardian, self._spares = reserve.selector, reserve.guardian, reserve.spares
        self._watched: dict[int, int] = {}
        """Local ranks by the descriptors of their processes."""
        self._started: dict[int, int] = {}
        """By local rank: when, in nanoseconds."""
        self._done: set[int] = set()
        """Local ranks whose process has ended with success."""
        self._faulty: set[int] = set()
        """Global ranks whose process has failed, that were reported and not replaced yet."""
        self._reported_at: float | None = None
        self._most, self._faults = 0, 0
        """How many faults this container may have (--max_restarts), and for how many processes were replaced."""
        self._crashes = crash.Directory()
        self._elastic.take = self._spares.take
        self._elastic.enough_for = lambda count: self._spares.ready >= count
        self._ordered: collections.deque[Body] = collections.deque()
        """Orders that are still to be carried out."""

    def register_func(self, operator: str, function: Callable[..., Any]) -> bool:
        """torchrun's own functions are known; those that are handed over are not needed."""
        return True

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def run(self) -> Any:
        """torchrun's result. Ends the process with code 1 on order, or when nobody handles a fault."""
        with self._open():
            self._reporter.start()
            self._reporter.most = self._most = self._elastic.restarts
            self._reporter.starts(self._elastic.restarts)
            try:
                result = self._work()
            except _Leave as why:
                log.error("the agent exits: %s", str(why))
                print(f"taskd: the agent exits: {why}", file=sys.stderr, flush=True)
                self._elastic.stop()
                self._reporter.leaves()
                self._elastic.leave()
                sys.exit(1)
            except Terminated as death:
                self._end(death.sigval)
                raise
            self._reporter.ends(0)
            return result

    def _end(self, number: signal.Signals) -> None:
        """Processes that handle the signal are given their time; those that wait for others, who can do without them by
        now, are not: the manager's order to exit ends them at once."""

        ended = threading.Event()  # a thread is alive for a moment after its last word

        def end() -> None:
            try:
                self._elastic.end(number)
            finally:
                ended.set()
                self._wake()

        self._unwatch()
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        while not ended.is_set():
            self._select(None)
            if any(body.code == Code.EXIT_AGENT for body in self._ordered):
                self._elastic.kill()
                break
        ending.join()

    def _work(self) -> Any:
        """Until the processes of all nodes have succeeded."""
        while True:
            while not (self._elastic.pids and len(self._done) == len(self._elastic.ranks)):
                self._wait()
            log.info("all processes of this node have succeeded")
            try:
                return self._elastic.succeeded()
            except _Superseded:
                self._obey()  # others failed, and all start again

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._elastic.extra = {RESTART_TYPE: POD, **self._crashes.environment()}
        try:
            yield
        finally:
            self._unwatch()
            self._spares.close()
            self._reporter.close()
            self._selector.close()
            self._guardian.close()
            self._crashes.close()
            os.close(self._wakeup)

    # Waiting.

    def _wait(self) -> None:
        limit = environment.report_fault_timeout()
        end = None
        if limit and self._faulty and self._reported_at is not None:
            end = self._reported_at + limit
            if end <= time.monotonic():
                raise _Leave(f"agent report fault rank timeout, exiting... nobody handled {sorted(self._faulty)}")
        ended = [self._watched[fd] for fd in self._select(end) if fd in self._watched]
        if ended:
            self._ended(ended)
        elif self._faulty:
            common.tell_unchanged(self._faulty)
        self._obey()

    def _select(self, end: float | None) -> list[int]:
        """Wait for something to happen; descriptors that are ready. What concerns spares is done."""
        spares = self._spares.deadline
        ends = [each for each in (end, spares) if each is not None]
        timeout = max(0.0, min(ends) - time.monotonic()) if ends else None
        ready = [key.fd for key, _ in self._selector.select(timeout)]
        for fd in ready:
            if self._spares.knows(fd):
                self._spares.hear(fd)
        self._spares.tick()
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
            self._listen()
        return ready

    def _pause(self, seconds: float) -> None:
        """Of the wait for other nodes."""
        end = time.monotonic() + seconds
        while not any(body.code in _NEW_STARTS for body in self._ordered):
            self._select(end)
            if time.monotonic() >= end:
                return
        raise _Superseded

    def _watch(self) -> None:
        """Begin to wait for all processes that are there now."""
        self._unwatch()
        there = self._there()
        ended = [each for each in there if self._elastic.ended(each) is not None]  # by an order just before this one
        self._ended(ended)
        there = {local_rank: pid for local_rank, pid in there.items() if local_rank not in ended}
        self._guardian.guard(there.values())
        for local_rank, pid in there.items():
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                self._watched[descriptor] = local_rank
                self._selector.register(descriptor, selectors.EVENT_READ)
            self._started.setdefault(local_rank, time.time_ns())

    def _there(self) -> dict[int, int]:
        """Process ids by local ranks, without those that have ended: the ids of these may be somebody else's by now."""
        ranks = self._elastic.ranks
        gone = {local for local, rank in ranks.items() if rank in self._faulty} | self._done
        return {local: pid for local, pid in self._elastic.pids.items() if local not in gone}

    def _unwatch(self) -> None:
        for descriptor in self._watched:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._watched.clear()

    # Processes.

    def _ended(self, local_ranks: list[int]) -> None:
        codes = {each: code for each in local_ranks if (code := self._elastic.ended(each)) is not None}
        causes = {self._elastic.ranks[each]: self._cause(each, code) for each, code in codes.items() if code != 0}
        if causes.keys() - self._faulty:
            # The others are blocked until somebody acts: everything else comes after.
            self._faulty |= causes.keys()
            self._reported_at = time.monotonic()
            log.info("New fault process detected, fault_rank: %s", sorted(self._faulty))
            self._reporter.faults(self._faulty, causes)
        for local_rank, code in codes.items():
            self._forget(local_rank)
            self._elastic.tidy(local_rank)
            if code == 0:
                self._done.add(local_rank)
            else:
                rank = self._elastic.ranks[local_rank]
                common.told(rank, self._elastic.pids[local_rank], causes[rank])

    def _cause(self, local_rank: int, code: int) -> crash.Cause:
        return self._crashes.cause(self._elastic.pids[local_rank], code, self._started.pop(local_rank, 0))

    def _forget(self, local_rank: int) -> None:
        for descriptor, each in list(self._watched.items()):
            if each == local_rank:
                self._selector.unregister(descriptor)
                os.close(descriptor)
                del self._watched[descriptor]

    def _start_all(self, restarts: int, under_way: int = 0) -> None:
        self._unwatch()
        self._reporter.running = False
        if restarts < 0:
            raise _Leave("no restarts are left (--max_restarts)")
        self._reporter.starts_again(restarts)
        self._elastic.restarts = restarts
        self._clear()
        try:
            self._elastic.start_all(under_way)
        except _Superseded:
            log.info("another order has come while the other nodes were waited for")
            return
        except Unmet as error:
            raise _Leave(str(error)) from error
        self._reporter.stands(())
        self._reporter.running = True
        self._watch()
        self._replenish()

    def _replenish(self) -> None:
        """Have spares for the next time."""
        self._spares.replenish(self._elastic.command, {**os.environ, **self._elastic.extra})

    def _clear(self) -> None:
        self._done.clear()
        self._faulty.clear()
        self._started.clear()
        self._reported_at = None

    def _local(self, text: str) -> list[int]:
        """Those of the given global ranks that are here, as local ranks."""
        wanted = set(frames.rank_list(text))
        return [local for local, rank in self._elastic.ranks.items() if rank in wanted]

    # Orders.

    def _listen(self) -> None:
        while (body := self._reporter.order()) is not None:
            self._ordered.append(body)

    def _obey(self) -> None:
        while self._ordered:
            body = self._ordered.popleft()
            common.tell_order(body)
            order = self._orders().get(body.code)
            if order is None:
                log.warning("an unknown command: %s", body)
                continue
            try:
                order(body)
            except (BadFrame, ValueError) as error:
                log.error("command %d: %s", body.code, str(error))

    def _orders(self) -> dict[int, Callable[[Body], None]]:
        return {
            Code.START_AGENT: self._start,
            Code.RESTART_AGENT: self._restart,
            Code.RESTART_WORKERS: self._replace,
            Code.STOP_WORKERS: self._stop,
            Code.EXIT_AGENT: self._exit,
        }

    def _start(self, body: Body) -> None:
        if self._elastic.pids:
            log.info("the processes have been started already")
        else:
            self._start_all(int(body.message), frames.under_way(body))

    def _restart(self, body: Body) -> None:
        restarts = int(body.message)
        self._unwatch()
        self._elastic.stop()
        self._start_all(restarts)

    def _replace(self, body: Body) -> None:
        self._reporter.replaced += 1
        local_ranks = [each for each in self._local(body.message) if each in self._elastic.pids]
        if not local_ranks:
            return
        if self._faults >= self._most:
            raise _Leave(f"more faults in this container than --max_restarts {self._most} allows")
        self._faults += 1
        for local_rank in local_ranks:
            self._done.discard(local_rank)
            self._started.pop(local_rank, None)
            self._faulty.discard(self._elastic.ranks[local_rank])
        self._reporter.stands(self._faulty)
        self._unwatch()
        self._elastic.replace(local_ranks, {RESTART_TYPE: WORKER})
        self._watch()
        self._replenish()

    def _stop(self, body: Body) -> None:
        self._elastic.stop(self._local(body.message))  # their ends are reported like any other

    def _exit(self, body: Body) -> None:
        raise _Leave(common.why(body))


def invoke_run(agent: Any, role: str, original: Callable[..., Any]) -> Any:
    """In the place of torchrun's loop. A torchrun that is not part of a job of the cluster stays as it is."""
    if not environment.job_id():
        return original(agent, role)
    rank = common.server_rank("RANK")
    logs.open_part(f"agent-{rank}")
    proxy = common.start_proxy(rank, os.environ.get("MASTER_ADDR") or "127.0.0.1")
    try:
        upstream = f"{environment.proxy_host()}:{environment.proxy_port()}"
        return PtAgent(agent, rank, upstream).run()
    finally:
        proxy.close()
