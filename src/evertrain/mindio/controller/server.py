"""The controller's shell: TCP links around the pure machine.

Every link belongs to a rank or to a node's agent. What arrives becomes an event for the machine, what the machine
returns is sent at once, and a timer brings its deadlines back as ticks. The loop does nothing else, so an order leaves
in the same moment in which the event that caused it was read.

A link that says something unreadable, or nothing, is closed; the job does not notice unless it was a rank's or an
agent's. The token is never logged. With certificates every link is TLS; who comes without, or with the wrong ones, is
told so and refused. Times that another host has measured are translated here (`clocks`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from evertrain.mindio import framing, protocol
from evertrain.mindio.acceptedlink import AcceptedLink
from evertrain.mindio.controller.clocks import Clocks
from evertrain.mindio.controller.machine import (
    Action,
    AgentLost,
    CloseGeneration,
    Event,
    FromAgent,
    FromControl,
    FromRank,
    LinkLost,
    Machine,
    OpenGeneration,
    Send,
    Tick,
    ToAgent,
    ToControl,
)
from evertrain.mindio.controller.store import GenerationStore
from evertrain.mindio.protocol import (
    PRELUDE,
    Hello,
    Message,
    Refused,
    StoreAdd,
    StoreGet,
    StoreSet,
    Welcome,
)

log = logging.getLogger(__name__)


class Host(Protocol):
    """What a link needs of the one that answers it."""

    links: set[Link]
    tls: ssl.SSLContext | None
    hello_timeout: float

    def refusal(self, message: Message) -> str | Refused | None: ...

    def introduced(self, link: Link, hello: Hello) -> None: ...

    def received(self, link: Link, message: Message) -> None: ...

    def lost(self, link: Link) -> None: ...


class Link(AcceptedLink):
    """One accepted connection. Who is at the other end is known after its `Hello`."""

    log = log

    def __init__(self, server: Host) -> None:
        super().__init__(protocol.FrameReader(limit=framing.MAX_HELLO), server.tls, server.hello_timeout)
        self._server = server
        self.hello: Hello | None = None
        self.number = 0
        """Of a control link: where its answers go."""
        self.closed = asyncio.get_running_loop().create_future()

    def keep_alive(self, seconds: float) -> None:
        """Have the kernel find out about a machine that is gone; heartbeats may be far apart."""
        if self._transport is not None:
            link, interval = self._transport.get_extra_info("socket"), max(int(seconds), 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, interval), (socket.TCP_KEEPINTVL, interval)):
                link.setsockopt(socket.IPPROTO_TCP, option, value)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    @property
    def name(self) -> str:
        if self.hello is None:
            return super().name
        match self.hello.role:
            case "rank":
                return f"rank {self.hello.rank}"
            case "agent":
                return f"the agent of node {self.hello.node}" if self.hello.node else "the agent"
            case "control":
                return "a control"
            case role:
                return f"the {role}"

    def _opened(self) -> None:
        self._server.links.add(self)

    def _lost(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self._server.lost(self)

    def _refusal(self, reason: str, tls_wanted: bool) -> Refused:
        how = "give it certificates" if tls_wanted else "it was started without certificates"
        return Refused(reason=f"{reason}: {how}")

    def _take(self, message: Message) -> None:
        if self.hello is not None:
            self._server.received(self, message)
        else:
            self._introduce(message)

    def _introduce(self, message: Message) -> None:
        self._heard_hello()
        refusal = self._server.refusal(message)
        if refusal is not None:
            return self.refuse(refusal if isinstance(refusal, Refused) else Refused(reason=refusal))
        assert isinstance(message, Hello)
        self.hello = message
        self._welcome()
        self._server.introduced(self, message)

    def refuse(self, refusal: Refused) -> None:
        self.send(refusal)
        # Who is sent elsewhere or comes too late has done nothing wrong.
        self.close("" if refusal.retry or refusal.over else refusal.reason)

    def move_to(self, server: Host) -> None:
        """Somebody else answers this link from now on."""
        self._server.links.discard(self)
        self._server = server
        server.links.add(self)


class Server:
    """Runs a machine on a TCP port. `start`, then `serve_until_ended`, then `close`."""

    def __init__(
        self,
        machine: Machine,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: ssl.SSLContext | None = None,
        allow_remote: bool = False,
        hello_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        refuse_open_door(token, host, tls, allow_remote)
        self.machine = machine
        self.links: set[Link] = set()
        self.tls = tls
        self.hello_timeout = max(machine.timing.bound, 5.0) if hello_timeout is None else hello_timeout
        self._token, self._host, self._port, self._clock = token, host, port, clock
        self._ranks: dict[int, Link] = {}
        self._prepared: dict[int, Link] = {}
        """Processes that are to take a rank's place later."""
        self._controls: dict[int, Link] = {}
        self._numbers = itertools.count(1)
        self._agents: dict[int, Link] = {}
        self._heard: dict[int, float] = {}
        self._clocks = Clocks()
        self._store = GenerationStore()
        self._store.open(PRELUDE)
        self._listener: asyncio.Server | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = 0.0
        self._announced = ""
        """The newest incident that all agents have heard of."""
        self._watches: dict[int, asyncio.TimerHandle] = {}
        self._over: asyncio.Future[tuple[int, str]] | None = None

    def prepare(self) -> None:
        """Be ready for links that somebody else accepts."""
        self._over = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.prepare()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Link(self), self._host, self._port, backlog=4096)

    @property
    def address(self) -> tuple[str, int]:
        assert self._listener is not None, "not started"
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def serve_until_ended(self) -> tuple[int, str]:
        """The job's exit code and the reason for it."""
        assert self._over is not None, "not started"
        return await asyncio.shield(self._over)

    async def close(self, patience: float = 1.0) -> None:
        """Let the last messages out and close every link."""
        for timer in (self._tick, *self._watches.values()):
            if timer is not None:
                timer.cancel()
        self._tick = None
        self._watches.clear()
        if self._listener is not None:
            self._listener.close()
        links = list(self.links)
        for link in links:
            link.close()
        if links:
            _, late = await asyncio.wait([link.closed for link in links], timeout=patience)
            if late:
                log.warning("%d links did not take their last messages", len(late))

    # Called by the links.

    def refusal(self, message: Message) -> str | Refused | None:
        reason = protocol.refusal(message, self._token)
        if reason is not None:
            return reason
        assert isinstance(message, Hello)
        if self.machine.ended is not None:
            return Refused(reason="the job is over", over=True)
        if message.role == "agent":
            if message.node in self._agents:
                if message.incarnations:
                    # It has lost its link, and that is not known here yet.
                    return Refused(reason=f"the old link of node {message.node}'s agent is still open", retry=True)
                if self.machine.nnodes == 1:
                    return "the job has an agent already"
                return f"node {message.node} has an agent already; each node needs a --node-rank of its own"
            return self.machine.agent_refusal(message)
        if message.role == "control":
            return None
        reason = self.machine.refusal(message.rank, message.incarnation)
        if reason is None and message.rank in self._ranks:
            linked = self._ranks[message.rank].hello
            if linked is not None and linked.incarnation >= message.incarnation:
                return f"rank {message.rank} is linked already"
        return reason

    def introduced(self, link: Link, hello: Hello) -> None:
        if hello.role == "agent":
            self._link_agent(link, hello)
            self._feed(FromAgent(hello, hello.node))
            return
        if hello.role == "control":
            link.number = next(self._numbers)
            self._controls[link.number] = link
            return link.send(self.welcome())
        if self.machine.is_prepared(hello.rank, hello.incarnation):
            self._prepared[hello.rank] = link
        else:
            older = self._ranks.get(hello.rank)
            self._ranks[hello.rank] = link
            if older is not None:
                older.close("a newer incarnation has come")
        link.send(self.welcome(self.machine.running_for(hello.rank)))
        self._feed(FromRank(hello.rank, hello.incarnation, hello))

    def welcome(self, running: bool = False) -> Welcome:
        return Welcome(running=running)

    def _link_agent(self, link: Link, hello: Hello) -> None:
        self._agents[hello.node] = link
        link.send(self.welcome())
        self._heard[hello.node] = self._clock()
        self._clocks.sample(hello.node, hello.at, self._clock())
        self._watch_agent(hello.node)
        link.keep_alive(self.machine.timing.bound)

    def received(self, link: Link, message: Message) -> None:
        hello = link.hello
        assert hello is not None
        if hello.role == "agent":
            if self._agents.get(hello.node) is link:
                self._from_agent(link, hello.node, message)
        elif hello.role == "control":
            self._feed(FromControl(link.number, message))
        elif isinstance(message, StoreSet | StoreGet | StoreAdd):
            if self._link_of(hello.rank, hello.incarnation) is link:
                self._store.handle(message, link.send)
        else:
            if isinstance(message, protocol.Out):
                message = self._clocks.out(self.machine.node_of(hello.rank), message)
            self._feed(FromRank(hello.rank, hello.incarnation, message))

    def _from_agent(self, link: Link, node: int, message: Message) -> None:
        self._heard[node] = self._clock()
        if isinstance(message, protocol.Beat):
            self._clocks.sample(node, message.at, self._clock())
            link.send(protocol.Beat())
            if message.step >= 0:
                self.machine.saw_step(node, message.step)
        else:
            if isinstance(message, protocol.Observed):
                message = self._clocks.observed(node, message)
            self._feed(FromAgent(message, node))

    def lost(self, link: Link) -> None:
        self.links.discard(link)
        hello = link.hello
        if hello is None:
            return
        if hello.role == "agent":
            if self._agents.get(hello.node) is link:
                self._forget_agent(hello.node)
                self._feed(AgentLost(node=hello.node))
        elif hello.role == "control":
            self._controls.pop(link.number, None)
        elif hello.role == "rank":
            for links in (self._ranks, self._prepared):
                if links.get(hello.rank) is link:
                    del links[hello.rank]
            self._feed(LinkLost(hello.rank, hello.incarnation))

    # Around the machine.

    def _feed(self, event: Event) -> None:
        self._carry_out(self.machine.handle(event, self._clock()))
        self._schedule()

    def _schedule(self) -> None:
        if self._over is not None and self.machine.ended is not None:
            self._note_end()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        """For the machine's deadline. One that is set for an earlier time stays: most events move the deadline away."""
        deadline = self.machine.deadline
        if deadline is None or (self._tick is not None and self._tick_at <= deadline):
            return
        if self._tick is not None:
            self._tick.cancel()
        delay = max(deadline - self._clock(), 0.0)
        self._tick, self._tick_at = asyncio.get_running_loop().call_later(delay, self._on_timer), deadline

    def _on_timer(self) -> None:
        self._tick = None
        deadline = self.machine.deadline
        if deadline is not None and deadline <= self._clock():
            self._feed(Tick())
        else:
            self._set_timer()

    def _note_end(self) -> None:
        assert self._over is not None and self.machine.ended is not None
        if not self._over.done():
            self._over.set_result(self.machine.ended)

    def _carry_out(self, actions: list[Action]) -> None:
        message: Message | None = None
        prepared: msgspec.Raw | None = None
        for action in actions:
            match action:
                case Send(rank, incarnation, order):
                    link = self._link_of(rank, incarnation)
                    if link is None:
                        continue
                    if order is not message or prepared is None:
                        # Most orders go to all ranks, and the list of members in them is as long as the job is big.
                        message, prepared = order, framing.prepare(order)
                    link.send(prepared)
                case ToControl(number, order):
                    if number in self._controls:
                        self._controls[number].send(order)
                case ToAgent(order):
                    if isinstance(order, protocol.Promote) and order.rank in self._prepared:
                        self._ranks[order.rank] = self._prepared.pop(order.rank)
                    self._order_agents(order)
                case OpenGeneration(prefix):
                    self._store.open(prefix)
                case CloseGeneration(prefix):
                    self._store.close(prefix)

    def _order_agents(self, order: Message) -> None:
        """What concerns one rank is for the agent of its node. Of the timeline an agent that does not write it down
        gets what it acts on: a job of many nodes would drown in copies."""
        concerned = getattr(order, "rank", None)
        if concerned is not None:
            agent = self._agents.get(self.machine.node_of(concerned))
            return agent.send(order) if agent is not None else None
        for_all = True
        if isinstance(order, protocol.Incident):
            event, incident = order.record.get("event"), order.record.get("incident", "")
            for_all = event in ("incident", "warning") or (event == "fault" and incident != self._announced)
            self._announced = incident if event == "fault" else self._announced
        prepared = framing.prepare(order)
        for agent in self._agents.values():
            if for_all or (agent.hello is not None and agent.hello.records):
                agent.send(prepared)

    def _link_of(self, rank: int, incarnation: int) -> Link | None:
        for links in (self._ranks, self._prepared):
            link = links.get(rank)
            if link is not None and link.hello is not None and link.hello.incarnation == incarnation:
                return link
        return None

    def _watch_agent(self, node: int, warned: bool = False) -> None:
        """A frozen agent keeps its link. The second look is for the case that this very loop was the frozen one."""
        if node not in self._agents or self.machine.ended is not None:
            return
        bound = self.machine.timing.bound
        patience = self.machine.timing.silence
        silent = self._clock() - self._heard[node]
        loop = asyncio.get_running_loop()
        if silent < patience:
            self._watches[node] = loop.call_later(patience - silent, self._watch_agent, node)
        elif not warned:
            self._watches[node] = loop.call_later(min(bound, 1.0), self._watch_agent, node, True)
        else:
            self._feed(AgentLost(f"the agent has been silent for {silent:.1f} s", node))
            self._forget_agent(node).close()

    def _forget_agent(self, node: int) -> Link:
        if (watch := self._watches.pop(node, None)) is not None:
            watch.cancel()
        return self._agents.pop(node)


def refuse_open_door(token: str, host: str, tls: ssl.SSLContext | None, allow_remote: bool) -> None:
    if not token:
        raise ValueError("the controller needs a job token")
    if tls is None and not allow_remote and not is_loopback(host):
        raise ValueError(
            f"{host} can be reached from other machines and the links are not encrypted; give certificates, "
            "or allow it explicitly (--ft-insecure) if that is what you want"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
