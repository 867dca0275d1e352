"""The manager at work: carries messages to the decisions and their orders out. One asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import traceback
import uuid as uuids
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evertrain import aio
from evertrain.taskd import environment, files, frames
from evertrain.taskd.codes import AGENT, MANAGER, REGISTER, WORKER, Code
from evertrain.taskd.frames import BadFrame, Body
from evertrain.taskd.manager import reports
from evertrain.taskd.manager.alone import Alone
from evertrain.taskd.manager.bridge import Bridge
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.decide import Decisions, Ended
from evertrain.taskd.manager.delivery import Delivery
from evertrain.taskd.manager.orders import End, NicReply, Order, Signal, StressReply, ToAgent, ToController, ToWorker
from evertrain.taskd.manager.plugins import Plugins
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from evertrain.taskd.net.server import position

log = logging.getLogger(__name__)

FAREWELL = 3.0
"""Seconds for the last orders and reports of a manager that ends."""
RESET_FILE = Path("/user/restore/reset/config/reset.json")
UNSEEN = 15.0
"""Seconds that the controller has to report what an agent has reported."""
SOON = 0.1
ENDS = 2.0
"""Seconds that an agent has to tell how a process has ended that the controller misses."""
LOOK = 1.0
"""Seconds between looks at the files that the cluster mounts: a mount announces nothing."""
_REPORT_LIMIT = 600.0
_DECIDED = frozenset({"change_strategy", "save_and_exit", "restart_controller", "destroy_controller"})
"""Calls of the controller that end its conversation with ClusterD about a fault."""


@dataclass(frozen=True, slots=True)
class Config:
    job: str
    nodes: int
    per_node: int
    recovers_processes: bool = False
    enabled: bool = True
    """The MindIO controller runs, and ClusterD's signals are asked for."""
    listen: str = "127.0.0.1:9601"
    clusterd: str = ""
    no_clusterd: str = ""
    """Why the ClusterD that the job names can't be asked."""
    security: Security = field(default_factory=Security)
    plugins: Plugins = field(default_factory=Plugins)
    reset_file: Path = RESET_FILE
    trace_file: Path = field(default_factory=environment.trace_file)


class Manager:
    def __init__(self, config: Config) -> None:
        self.config = config
        self._mind = Decisions(config.job, config.nodes, config.recovers_processes, self._processes_ended)
        self._node = Node(
            Position(MANAGER, "0"), listen=config.listen, security=config.security, announced=self._announced
        )
        self._over: dict[Position, set[Position]] = {}
        """By member: the proxies that have led to it."""
        self._bridge: Bridge | None = None
        self._clusterd: ClusterD | None = None
        self._alone: Alone | None = None
        self._ends_told = asyncio.Event()
        """An agent has told how processes have ended."""
        self._open_faults: dict[int, int] = {}
        """That ClusterD has not decided about."""
        self._discussed = False
        """It has heard of some of them."""
        self._delivery = Delivery(self._send, self._lost, self._arrived)
        self._background: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[End] | None = None
        self._leaves = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen = frames.Seen(65536)
        self.listening = asyncio.Event()

    @property
    def port(self) -> int:
        return self._node.port

    async def run(self) -> End:
        """Until the job is over or `stop` is called, be it while this starts. OSError if nobody can be listened to."""
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        starting = asyncio.ensure_future(self._start())
        try:
            first: set[asyncio.Future[Any]] = {starting, self._end}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            end = await self._end
            await self._finish()
            return end
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._close()

    async def _start(self) -> None:
        await self._node.start()
        log.info("manager init success! listening on %s", self.config.listen)
        self._spawn(self._receive())
        if self.config.enabled:
            self._bridge = Bridge(self._reported_in_thread)
            await self._bridge.start()
        await self._start_judge()
        self._spawn(self._watch_files())
        self.listening.set()

    async def _start_judge(self) -> None:
        config = self.config
        if config.clusterd:
            self._clusterd = ClusterD(
                config.clusterd,
                config.job,
                security=config.security,
                name=environment.clusterd_name(),
                signal=self._signal if config.enabled else None,
                nics=self._switch_nics,
                stress=self._stress_test,
                profile=self._profile,
                leads=self._led,
            )
            await self._clusterd.start()
        elif config.no_clusterd:
            # Somebody else leads this job, by another policy than ours; two who decide would be worse than none.
            log.error("%s: ClusterD can't be asked, and nobody decides about faults of this job", config.no_clusterd)
        elif config.enabled and config.recovers_processes:
            world = config.nodes * config.per_node
            self._alone = Alone(config.job, world, config.per_node, environment.strategies())
            log.info("there is no ClusterD to ask (MINDX_SERVER_IP names none): the manager decides by itself")

    def stop(self, reason: str) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(End(reason, ok=True))

    def leave(self, reason: str) -> None:
        """This process ends, which need not be the end of the job: its pod may be replaced.

        So nobody is told that it is over. Processes that are in a recovery wait for the next manager's controller;
        those of a job that ends are ended by their own pods.
        """
        self._leaves = True
        self.stop(reason)

    async def _finish(self) -> None:
        """What is on its way shall arrive, if that is a matter of seconds."""
        await self._delivery.flush(FAREWELL)
        if self._clusterd is not None:
            await self._clusterd.flush(FAREWELL)

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._delivery.close()
        if self._clusterd is not None:
            await self._clusterd.close()
        if self._bridge is not None:
            await self._bridge.close(self._leaves)
        await self._node.close()

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_tell_failure)
        return task

    # What comes in.

    async def _receive(self) -> None:
        while True:
            message = await self._node.received.get()
            if self._seen.again(message.header.uuid):
                continue
            who = position(message.header.src)
            try:
                body = frames.decode(message.body)
            except BadFrame as error:
                log.warning("%s: %s", who, str(error))
                continue
            with _contained(f"a message of {who}"):
                self._heard(who, body)

    def _announced(self, who: Position, proxy: Position) -> None:
        known = self._over.setdefault(who, {proxy})
        if proxy not in known:  # that is somebody else, for whom no order was meant
            known.add(proxy)
            self._delivery.forget(who)
        self._mind.announced(who)

    def _heard(self, who: Position, body: Body) -> None:
        if body.msg_type == REGISTER:
            self._delivery.forget(who)
        orders = self.config.plugins.ask("message", who, body)
        self._carry_out(self._mind.heard(who, body, self._now) if orders is None else orders)
        if self._alone is not None:
            signals, why = self._alone.grow(self._mind.runs)
            if signals:
                self._follow(signals, why)

    def _signal(self, signal: Signal) -> None:
        if signal.type != "keep-alive":
            log.info("signal: %s", signal)
        orders = self.config.plugins.ask("signal", signal)
        self._carry_out(self._mind.signal(signal, self._now) if orders is None else orders)

    def _led(self, led: bool) -> None:
        """ClusterD leads the job, from now on and as if nothing had been; or it does not, and pods are the unit."""
        self._mind.pods.recovers_processes = led and self.config.recovers_processes
        self._mind.subscribed(self._now)
        self._set_timer()
        if led and self._discussed:
            log.warning("ClusterD is told again of the faults of ranks %s", sorted(self._open_faults))
            assert self._clusterd is not None
            self._clusterd.forget_reports()
            self._clusterd.report(Report(reports.PROCESS_FAULT, dict(self._open_faults)))

    def _decided(self) -> None:
        self._open_faults.clear()
        self._discussed = False

    def _reported_in_thread(self, report: Report) -> None:
        """Returns when ClusterD has it: the controller's patience with the answer begins then."""
        assert self._loop is not None
        taken = threading.Event()

        def begin() -> None:
            self._spawn(self._report(report)).add_done_callback(lambda _: taken.set())

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(begin)
            if taken.wait(_REPORT_LIMIT):
                return
        log.error("controller_send_to_backend send message failed, res: 1: %s", report)

    async def _report(self, report: Report) -> None:
        if self._alone is not None and self._bridge is not None:
            await self._learn(self._alone, self._bridge, report)
        taken = self._reported(report)
        if taken is not None:
            await taken

    def _reported(self, report: Report) -> asyncio.Future[None] | None:
        if report.action == reports.PROCESS_FAULT:
            report = replace(report, faults=self._mind.types_of(report.faults))
        log.info("the controller reports: %s", report)
        with _contained(f"the report {report.action}"):
            return self._judge(report)
        return None

    def _judge(self, report: Report) -> asyncio.Future[None] | None:
        orders = self.config.plugins.ask("report", report)
        if orders is not None:
            self._carry_out(orders)
            return None
        if report.action == reports.RECOVER_STATUS:
            self._decided()
            if report.code == 0:
                self._mind.recovered()
        if self._clusterd is not None:
            taken = self._clusterd.report(report)
            if report.action == reports.PROCESS_FAULT:
                self._open_faults.update(report.faults)
                taken.add_done_callback(self._heard_of_faults)
            return taken
        if self._alone is not None:
            self._follow(*self._alone.report(report))
        return None

    def _heard_of_faults(self, taken: asyncio.Future[None]) -> None:
        self._discussed = bool(self._open_faults)

    def _follow(self, signals: list[Signal], why: str) -> None:
        log.info("decided: %s", why)
        for signal in signals:
            self._signal(signal)

    def _processes_ended(self, ended: Ended) -> None:
        if self._alone is not None and self._bridge is not None:
            self._alone.ended(ended.ends, ended.max_restarts, ended.restarts_left)
            self._ends_told.set()
            self._spawn(self._make_sure(self._alone, self._bridge, ended.ranks, self._alone.turn))

    async def _make_sure(self, alone: Alone, bridge: Bridge, ranks: Collection[int], turn: int) -> None:
        """That somebody deals with the end of these processes: who never met the controller is not missed by it."""
        protected = await bridge.linked() or (self._mind.inherited and await self._is_found(bridge))
        progress = bridge.progress()
        if protected and (progress is None or progress.known.intersection(ranks)):
            await asyncio.sleep(UNSEEN)
        if alone.turn == turn:
            alone.learn(bridge.progress())
            self._follow(*alone.unseen(ranks, protected))

    async def _is_found(self, bridge: Bridge) -> bool:
        """By the processes of a job that another manager has led before: they look for the new controller."""
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(UNSEEN):
                while not await bridge.linked():
                    await asyncio.sleep(SOON)
                return True
        return False

    async def _learn(self, alone: Alone, bridge: Bridge, report: Report) -> None:
        """What a good decision needs, as far as it can be known."""
        alone.learn(bridge.progress())
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(ENDS):
                while alone.lacks(report):
                    self._ends_told.clear()
                    await self._ends_told.wait()

    def _switch_nics(self, ranks: list[str], ops: list[bool], job: str) -> None:
        log.info("link failover of ranks %s: %s", ranks, ops)
        if self._is_ours(job):
            self._carry_out(self._mind.switch_nics(str(uuids.uuid4()), self.config.job, ranks, ops, self._now))

    def _stress_test(self, ops: dict[int, list[int]], job: str) -> None:
        log.info("stress test of ranks %s", sorted(ops))
        if self._is_ours(job):
            self._carry_out(self._mind.stress_test(str(uuids.uuid4()), self.config.job, ops, self._now))

    def _is_ours(self, job: str) -> bool:
        if job and job != self.config.job:
            log.warning("that is for another job, %s", job)
        return not job or job == self.config.job

    def _profile(self, values: dict[str, str]) -> None:
        self._carry_out(self._mind.profile(values, self._now))

    async def _watch_files(self) -> None:
        times: object = 0  # where there is no file, nothing was counted yet
        while True:
            reset = _read_json(self.config.reset_file, files.LARGE)
            times = reset.get("RetryTime", 0) if reset else times  # a job's YAML brings a file without it
            with _contained("the files of the cluster"):
                if isinstance(times, int) and not isinstance(times, bool) and times >= 0:
                    self._carry_out(self._mind.retried(times, self._by_our_clock((reset or {}).get("UpdateTime"))))
                if self._clusterd is None or not self._clusterd.traced:
                    trace = _read_json(self.config.trace_file, files.SMALL)
                    if trace:
                        self._profile({str(key): str(value) for key, value in trace.items()})
            await asyncio.sleep(LOOK)

    # What goes out.

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _by_our_clock(self, seconds: object) -> float | None:
        """A time in full seconds since 1970: the latest that it can be. None for anything else."""
        if not isinstance(seconds, int) or isinstance(seconds, bool):
            return None
        return self._now + (seconds + 1 - time.time())

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case ToAgent(node):
                    self._delivery.put(Position(AGENT, str(node)), self._mind.addressed(order))
                case ToWorker(rank, body):
                    who = self._mind.worker(rank)
                    if who is not None:
                        self._delivery.put(who, body)
                    else:
                        receiver = f"{WORKER}{rank}"
                        log.warning("cannot decide witch to send, according to receiver %s: %d", receiver, body.code)
                case ToController():
                    if order.action in _DECIDED:
                        self._decided()
                    if self._bridge is not None:
                        self._spawn(self._call(self._bridge, order))
                    else:
                        log.info("controller callback is nil: %s is for nobody", order.action)
                case NicReply():
                    if order.result:
                        log.info("all rank switch success")
                    else:
                        log.error("link failover failed: %s", order.why)
                    if self._clusterd is not None:
                        self._clusterd.reply_nics(order)
                case StressReply():
                    log.info("all stress test finish: %s", order.results)
                    if self._clusterd is not None:
                        self._clusterd.reply_stress(order)
                case End():
                    if self._end is not None and not self._end.done():
                        self._end.set_result(order)
        self._set_timer()

    async def _call(self, bridge: Bridge, order: ToController) -> None:
        await bridge.call(order)

    async def _send(self, who: Position, text: str, uuid: str) -> int:
        return await self._node.send(who, text, mtype="default", uuid=uuid)

    def _arrived(self, who: Position, body: Body) -> None:
        if who.role == WORKER and body.code == Code.STRESS_TEST:
            self._mind.stress_test_told(int(who.process), body, self._now)
            self._set_timer()

    def _lost(self, who: Position, body: Body) -> None:
        if who.role == WORKER:
            self._carry_out(self._mind.unreachable(int(who.process)))
        elif who.role == AGENT:
            self._carry_out(self._mind.not_told(int(who.server), body, self.config.per_node))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._mind.deadline
        if deadline is not None and self._loop is not None:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        with _contained("what was due"):
            self._carry_out(self._mind.tick(self._now))


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the manager failed at something: %s", "".join(traceback.format_exception(error)))


@contextlib.contextmanager
def _contained(what: str) -> Iterator[None]:
    """Something that can't be dealt with is told, and the manager goes on with the next."""
    try:
        yield
    except Exception:
        log.error("the manager could not deal with %s: %s", what, traceback.format_exc())


def _read_json(path: Path, limit: int) -> dict[str, object]:
    """Empty if there is no such file, or if it is anything but a regular one with a JSON object in it."""
    try:
        value = json.loads(files.read_text(path, limit, whole_path=True))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
