"""What the agents of all frameworks share: their place in the tree, and what they say to the manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from evertrain import aio
from evertrain.taskd import environment, frames
from evertrain.taskd import log as logs
from evertrain.taskd.codes import AGENT, KEEP_ALIVE, REGISTER, STATUS, Code
from evertrain.taskd.frames import Body, FaultReport, ProcessEnd
from evertrain.taskd.ip import with_brackets
from evertrain.taskd.member import Member
from evertrain.taskd.native.crash import NORMAL_FAULT, Cause
from evertrain.taskd.net.background import shared
from evertrain.taskd.net.routing import Position
from evertrain.taskd.proxy import Proxy

log = logging.getLogger(__name__)

ALIVE = 1.0
"""Seconds between signs of life."""
JOIN_LIMIT = 180.0
SILENT = 5.0
"""Seconds after which somebody who looks at a torchrun that does nothing is told what it waits for."""
LAST_TRIES = 8
_WORK: dict[int, str] = {
    Code.START_AGENT: "start all workers",
    Code.RESTART_AGENT: "restart all workers",
    Code.RESTART_WORKERS: "restart workers",
    Code.STOP_WORKERS: "stop workers",
    Code.EXIT_AGENT: "exit",
}
CAUSE = 500
"""Characters of the cause of a failure that the manager is told."""


class Reporter:
    """The link to the manager. `notify` is called, in another thread, when a message has come."""

    def __init__(self, server_rank: str, upstream: str, notify: Callable[[], None]) -> None:
        own = Position(AGENT, server_rank)
        self.member = Member(own, upstream, security=environment.security(), notify=notify)
        # One that stood by takes a place while the agent before it may still speak. Others say what they always said.
        self._id = {frames.AGENT_ID: secrets.token_hex(8)} if environment.place_file() else {}
        self.restarts = -1
        self.most: int | None = None
        """Restarts that the job may have, if this agent was told."""
        self.replaced = 0
        """Orders to replace processes that were obeyed: what is reported later is about those that came after."""
        self._ends: dict[int, ProcessEnd] = {}
        """How the processes have ended that have failed."""
        self._standing: Body | None = None
        """What a manager that takes over has to hear: that we wait for our start, or which processes have failed."""
        self._missed = asyncio.Event()
        """That could not be sent."""
        self._failed: list[int] = []
        """Ranks that signs of life name, from when they were reported: there may be another manager by now."""
        self.running = False
        """The processes have been started: with those of the other nodes, they are the job."""
        self._alive: Future[None] | None = None
        self._every = ALIVE
        self.heard = True
        """Whether the manager has heard the last sign of life."""

    def start(self) -> None:
        """Join the tree and register. ConnectionError if the manager can't be reached."""
        until = time.monotonic() + JOIN_LIMIT
        self.member.start()
        question = f"is manager.py running on the first node, and is its port {environment.manager_port()} reachable?"
        if not self.member.wait_joined(SILENT):
            log.warning("the manager is waited for: %s", question)
            print(f"taskd: the manager is waited for: {question}", file=sys.stderr, flush=True)
            if not self.member.wait_joined(JOIN_LIMIT - SILENT):
                raise ConnectionError(
                    f"failed to initialized agent network, initialization message_manager timeout: {question}"
                )
        log.info("init message manager success")
        while not self.member.send(REGISTER, Code.AGENT_REGISTER, "", self._id):
            if time.monotonic() > until:
                raise ConnectionError(f"the manager could not be told of this agent in {JOIN_LIMIT:g} s: {question}")
        log.info("message manager is ready")
        self._alive = shared().submit(self._keep_alive())

    async def _keep_alive(self) -> None:
        while True:
            await self._until_next()
            try:
                await self._show_life()
            except Exception as error:  # whatever it is, it must not be the last sign
                log.error("a sign of life could not be given: %s: %s", type(error).__name__, str(error))

    async def _show_life(self) -> None:
        before, self.heard = self.heard, await self.member.deliver(self._sign(), tries=1)
        if self.heard != before:
            heard = "hears us again" if self.heard else "does not hear us; the training goes on"
            log.warning("the manager %s", heard)
        if self.heard and (not before or self._missed.is_set()):
            self._missed.clear()
            if (standing := self._standing) is not None and not await self.member.deliver(standing):
                self._missed.set()

    async def _until_next(self) -> None:
        """In a large job that is long; who has something to say that was missed does not wait for so long."""
        if self._missed.is_set():
            await asyncio.sleep(ALIVE)
            return
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(self._every):
                await self._missed.wait()

    def _sign(self) -> Body:
        """It says again what has failed, with all that is known of it: a manager that was killed after the report and
        is back before the next sign is not missed by anybody, and knows nothing."""
        restarts, failed = self.restarts, self._failed  # in this order: `starts_again` changes them in the other
        extension = dict(self._id)
        if failed and self._standing is not None:
            extension |= self._standing.extension or {}
        if self.running:
            extension[frames.RUNNING] = "true"
        return frames.body(KEEP_ALIVE, 0, FaultReport(failed, restarts).encode(), extension or None)

    def order(self) -> Body | None:
        """The next one of the manager, None if there is none."""
        while True:
            try:
                body = self.member.received.get_nowait()
            except queue.Empty:
                return None
            if self._is_for_the_one_before(body):
                log.info("an order to exit for the agent that had this place before")
                continue
            self._every = frames.alive_seconds(body) or self._every
            return body

    def _is_for_the_one_before(self, body: Body) -> bool:
        """It was on its way when this one took the place."""
        named = (body.extension or {}).get(frames.AGENT_ID, "")
        return bool(self._id) and body.code == Code.EXIT_AGENT and named != self._id[frames.AGENT_ID]

    def starts(self, restarts: int) -> None:
        self.restarts = restarts
        self._standing = frames.body(STATUS, Code.RESTART_TIMES, str(restarts), self._id)
        self._send(self._standing)

    def starts_again(self, restarts: int) -> None:
        """All processes are about to be started: what has failed before is nobody's concern."""
        self.running, self._failed = False, []
        self.restarts = restarts

    def faults(self, ranks: Iterable[int], causes: Mapping[int, Cause] | None = None) -> None:
        """`causes` are those of the ranks that have just failed."""
        known = {rank: cause for rank, cause in (causes or {}).items() if cause.code is not None}
        self._ends |= {rank: ProcessEnd(cause.code or 0, cause.words[:CAUSE]) for rank, cause in known.items()}
        self._stand(ranks := sorted(ranks))
        types = {rank: cause.fault_type for rank, cause in (causes or {}).items() if cause.fault_type != NORMAL_FAULT}
        if self._standing is not None:
            if types and self._standing.extension is not None:
                self._standing.extension[frames.FAULT_TYPES] = frames.fault_types_text(types)
            self._send(self._standing)
        self._failed = ranks

    def stands(self, faulty: Iterable[int]) -> None:
        """The processes have been started, but these have failed. The manager knows, unless it is another one."""
        self._stand(ranks := sorted(faulty))
        self._failed = ranks

    def _stand(self, ranks: list[int]) -> None:
        report = FaultReport(ranks, self.restarts).encode()
        self._ends = {rank: end for rank, end in self._ends.items() if rank in ranks}
        extension = {**self._id, "REPORT_FAULT_TIME": str(int(time.time())), frames.REPLACED: str(self.replaced)}
        if self._ends:
            extension[frames.PROCESS_ENDS] = frames.ends_text(self._ends)
        if self.most is not None:
            extension[frames.MAX_RESTARTS] = str(self.most)
        self._standing = frames.body(STATUS, Code.FAULT_RANKS, report, extension) if ranks else None

    def _send(self, body: Body, tries: int = 3) -> None:
        shared().run(self._deliver(body, tries))

    async def _deliver(self, body: Body, tries: int) -> None:
        if not await self.member.deliver(body, tries) and body is self._standing:
            self._missed.set()

    def leaves(self) -> None:
        """It was told to exit, and does."""
        self._standing, self._failed = None, []
        self.member.send(STATUS, Code.FAULT_RANKS, FaultReport([], self.restarts).encode(), self._id)

    def ends(self, code: int) -> None:
        """Its last word; a manager that is just being started again is waited for."""
        self._standing = None
        self._send(frames.body(STATUS, Code.EXIT_AGENT, str(code), self._id), LAST_TRIES)

    def close(self) -> None:
        if self._alive is not None:
            self._alive.cancel()
        self.member.close()


def told(rank: int, pid: int | None, cause: Cause) -> Cause:
    """The cause of a failure; who reads the log and who looks at the launcher's output knows it now."""
    log.error("rank %d (process %s) failed: %s", rank, pid, cause.words)
    print(f"taskd: rank {rank} (process {pid}) failed: {cause.words}", file=sys.stderr, flush=True)
    return cause


def tell_order(order: Body) -> None:
    work = _WORK.get(order.code, "do nothing, as nobody knows it")
    log.info("receive %d command, start to %s: %s", order.code, work, order.message)


def tell_unchanged(faulty: Iterable[int]) -> None:
    """Something has come while these wait to be dealt with."""
    log.info("no additional fault process, fault_rank: %s", sorted(faulty))


def why(order: Body) -> str:
    """The reason of an order to exit."""
    extension = order.extension or {}
    if reason := extension.get(frames.REASON):
        return reason
    kind = extension.get("SignalType", "")
    return f"the manager orders it{f' ({kind})' if kind else ''}"


def start_proxy(server_rank: str, upstream_host: str) -> Proxy:
    """The proxy of this pod. OSError if its address is taken."""
    if environment.through_local_proxy():
        upstream_host = "127.0.0.1"
    listen = f"{environment.proxy_host()}:{environment.proxy_port()}"
    upstream = f"{with_brackets(upstream_host)}:{environment.manager_port()}"
    proxy = Proxy(server_rank, listen, upstream, security=environment.security())
    logs.open_part(f"taskd-proxy-{proxy.own.server}-{proxy.own.process}", logs.NETWORK)
    proxy.start()
    return proxy


def server_rank(*variables: str, given: object = None) -> str:
    """The node's rank: the given one, or the first variable that is set, or "0". ValueError if it is no number."""
    if given is not None and given != "":
        rank, name = str(given), "ServerRank"
    else:
        rank, name = next((value for name in variables if (value := os.environ.get(name))), "0"), "default_rank"
    if not (rank.isascii() and rank.isdigit()):
        raise ValueError(f"{name} {rank} is not a digit")
    return rank
