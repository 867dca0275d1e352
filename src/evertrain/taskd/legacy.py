"""ClusterD's client of jobs that have no manager: inside msrun on the first node, with the MindIO controller beside it.

    Init → the controller starts → a training process has found it → Register → signals of ClusterD

It only passes on what the controller can do. Processes are started and ended by the launcher, which reads of faults in
mounted files (`agent.reset_files`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from evertrain import aio
from evertrain.taskd import environment
from evertrain.taskd.ip import host_problem
from evertrain.taskd.manager import reports
from evertrain.taskd.manager.bridge import Bridge
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import KILL_MASTER, SIGNAL_ALIVE, Signal, ToController
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.manager.signals import SCALING
from evertrain.taskd.manager.translate import request
from evertrain.taskd.net.background import shared
from evertrain.wire import recover_pb2

log = logging.getLogger(__name__)

ROLE = "master agent"
INIT_LIMIT = 10.0
"""Seconds that the controller waits for ClusterD. Training processes that find no controller end."""
LINK_LIMIT = 600.0
"""Seconds within which a training process has to find the controller."""
LAST_REPORTS = 3.0
"""Seconds that ClusterD has to take the last reports of a launcher that ends."""
_LOOK = 0.2
"""Seconds between questions whether it has: the controller announces nothing."""

Faults = dict[int, int]


class DLRecoverManager:
    """One for each process; whoever makes another gets the first."""

    _only: DLRecoverManager | None = None
    _lock = threading.Lock()

    def __new__(cls, *args: Any, **kwargs: Any) -> DLRecoverManager:
        with cls._lock:
            if cls._only is None:
                cls._only = super().__new__(cls)
                cls._only._prepared = False
            return cls._only

    _prepared: bool

    def __init__(self, info: recover_pb2.ClientInfo, server_addr: str) -> None:
        if self._prepared:
            return
        self._job = info.jobId
        self._link = ClusterD(
            server_addr, info.jobId, role=info.role or ROLE, security=environment.security(),
            name=environment.clusterd_name(), signal=self._signal,
        )  # fmt: skip
        self._bridge = Bridge(self._reported)
        self._orders: asyncio.Queue[ToController] = asyncio.Queue()
        self._work: list[Future[None]] = []
        self._over = threading.Event()
        self.killed = threading.Event()
        """ClusterD wants the job to end."""
        self.on_kill: Callable[[], None] = lambda: None
        shared().run(self._link.open())
        self._prepared = True

    # As the original's callers use it.

    def register(self, request: recover_pb2.ClientInfo) -> recover_pb2.Status:
        return shared().run(self._link.register(request))

    def init_clusterd(self) -> bool:
        """Blocks until ClusterD is ready. False if it has no process-level recovery for this job."""
        return shared().run(self._link.init())

    def start_subscribe(self, frame: str = "pytorch") -> None:
        """Follow ClusterD's signals, until `close`. Blocks meanwhile."""
        self._submit(self._follow())
        self._over.wait()

    def report(self, report: Report) -> int:
        """ClusterD's answer. An exception if it can't be reached."""
        return shared().run(self._link.call(*request(self._job, report))).code

    def close(self) -> None:
        """End everything, the controller too; another one can be made then."""
        with DLRecoverManager._lock:
            if DLRecoverManager._only is self:
                DLRecoverManager._only = None
        shared().run(self._close())
        self._over.set()

    async def _close(self) -> None:
        for work in self._work:
            work.cancel()
        await self._bridge.close()
        await self._link.flush(LAST_REPORTS)
        await self._link.close()

    # As our launcher uses it.

    def start(self) -> None:
        """The whole sequence, in the background."""
        self._submit(self._start())

    def restart_controller(self) -> None:
        """All processes of the job begin anew."""
        self._order(ToController("restart_controller"))

    def stop_controller(self) -> None:
        """All processes of the job are ended, and that is no fault."""
        self._order(ToController("destroy_controller"))

    def _submit(self, work: Any) -> None:
        future = shared().submit(work)
        future.add_done_callback(_tell_failure)
        self._work.append(future)

    def _order(self, order: ToController) -> None:
        shared().run(self._bridge.call(order))

    async def _start(self) -> None:
        try:
            async with aio.timeout(INIT_LIMIT):
                if not await self._link.init():
                    log.warning("ClusterD has no process-level recovery for this job")
                    return
        except TimeoutError:
            log.warning("ClusterD has not answered for %g s: the training begins without it", INIT_LIMIT)
        os.environ["TORCH_AGENT_START"] = "0"
        if not await self._bridge.start():
            return
        try:
            async with aio.timeout(LINK_LIMIT):
                while not await self._bridge.linked():
                    await asyncio.sleep(_LOOK)
        except TimeoutError:
            log.warning("no training process has found the controller within %g s: it is given up", LINK_LIMIT)
            await self._bridge.call(ToController("destroy_controller"))
            return
        await self._follow()

    async def _follow(self) -> None:
        await self._link.start()
        while True:
            await self._bridge.call(await self._orders.get())

    # In the loop.

    def _signal(self, signal: Signal) -> None:
        if signal.type == SIGNAL_ALIVE:
            return
        if signal.job and signal.job != self._job:
            log.warning("a signal for another job, %s", signal.job)
            return
        log.info("signal: %s", signal)
        if signal.type == KILL_MASTER:
            self._orders.put_nowait(ToController("destroy_controller"))
            self.killed.set()
            self.on_kill()
            return
        params = signal.extra if signal.strategy in SCALING else ""
        for action in dict.fromkeys(signal.actions):
            self._orders.put_nowait(ToController(action, signal.faults, signal.strategy, params, signal.timeout))

    # In a thread of the controller.

    def _reported(self, report: Report) -> None:
        log.info("the controller reports: %s", report)
        shared().submit(self._report(report))

    async def _report(self, report: Report) -> None:
        self._link.report(report)


def _tell_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("the client of ClusterD has failed: %s", str(error), exc_info=error)


def from_environment() -> DLRecoverManager:
    """ValueError if the environment doesn't tell which job this is, or where ClusterD is."""
    address, job = environment.clusterd(), environment.job_id()
    if not job:
        raise ValueError("MINDX_TASK_ID is not set: which job is it?")
    if not address:
        raise ValueError("MINDX_SERVER_IP is not set: where is ClusterD?")
    problem = host_problem(address.rpartition(":")[0])
    if problem:
        raise ValueError(f"MINDX_SERVER_IP: {problem}")
    return DLRecoverManager(recover_pb2.ClientInfo(jobId=job, role=ROLE), address)


def init_grpc_process(frame: str = "pytorch") -> DLRecoverManager:
    """Begin to follow ClusterD, in the background."""
    manager = from_environment()
    manager.start()
    return manager


def _manager() -> DLRecoverManager:
    return DLRecoverManager._only or from_environment()


def report_stop_complete(code: int, msg: str, fault_ranks: Faults) -> int:
    """The training has stopped."""
    return _manager().report(Report(reports.STOP_COMPLETE, fault_ranks, code, msg))


def report_recover_strategy(fault_ranks: Faults, strategy_list: Sequence[str]) -> int:
    """What could be done."""
    return _manager().report(Report(reports.RECOVER_STRATEGY, fault_ranks, strategies=tuple(strategy_list)))


def report_recover_status(code: int, msg: str, fault_ranks: Faults, strategy: str) -> int:
    """How it went."""
    return _manager().report(Report(reports.RECOVER_STATUS, fault_ranks, code, msg, strategy=strategy))


def report_process_fault(fault_ranks: Faults, fault_codes: object = None) -> int:
    """Processes have failed."""
    return _manager().report(Report(reports.PROCESS_FAULT, fault_ranks))
