"""The controller in charge of a job that has a standby.

It tells the standby what that has to know (`Memo`, and what ranks agreed on before training), and everybody where the
standby is. It steps down when it hears of a controller with a higher number, and when it finds that it was frozen for
so long that others may have turned to the standby: it can't know what happened meanwhile, and handing over costs a job
that trains nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evertrain.mindio import protocol
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Link, Server
from evertrain.mindio.controller.states import Action, AgentLost, Event, Idle, ToAgent
from evertrain.mindio.protocol import PRELUDE, Controllers, Hello, Memo, Message, Refused, StoreSet, Welcome

log = logging.getLogger(__name__)

GROUP_KEYS = f"{PRELUDE}group/"
"""Keys by which the first processes found each other; a replacement never asks for them."""


class Leader(Server):
    def __init__(
        self,
        machine: Machine,
        token: str,
        address: str,
        *,
        epoch: int = 0,
        on_deposed: Callable[[str, int], None],
        on_started: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        """`on_deposed` gets the address of the successor, if it is known, and its number; `on_started` is called when
        this controller is in charge of a job that has begun."""
        host, _, port = address.rpartition(":")
        super().__init__(machine, token, host, int(port), **options)
        self.own_address = address
        self.epoch = epoch
        self._on_deposed, self._on_started = on_deposed, on_started
        self._started = False
        self._standbys: dict[str, Link] = {}
        self._memo: Memo | None = None
        self._memo_due = False
        self._notes: dict[str, bytes] = {}
        self._unsaid: deque[Message] = deque(maxlen=1000)
        self._awake: asyncio.TimerHandle | None = None
        self._awake_at = self._clock()
        self._deposed = False

    @property
    def standbys(self) -> list[str]:
        return list(self._standbys)

    def prepare(self) -> None:
        super().prepare()
        self._stay_awake()

    def when_over(self, tell: Callable[[int, str], None]) -> None:
        assert self._over is not None
        self._over.add_done_callback(lambda over: tell(*over.result()) if not over.cancelled() else None)

    # Taking over.

    def take_over(self, memo: Memo, notes: Mapping[str, bytes], links: Iterable[Link], reason: str) -> None:
        """Go on with a job whose controller is gone; `links` are those of its ranks and agents."""
        for key, value in notes.items():
            self._notes[key] = value
            self._store.handle(StoreSet(key=key, value=value), lambda reply: None)
        agents: dict[int, Hello] = {}
        ranks: dict[int, Hello] = {}
        current: dict[int, int] = {}
        known = [(link, link.hello) for link in links if link.hello is not None]
        for link, hello in sorted(known, key=lambda each: each[1].role):
            link.move_to(self)
            if hello.role == "agent":
                agents[hello.node] = hello
                current.update(hello.incarnations)
                self._link_agent(link, hello)
            elif hello.incarnation == current.setdefault(hello.rank, hello.incarnation):
                if hello.out is not None:
                    out = self._clocks.out(self.machine.node_of(hello.rank), hello.out)
                    hello = protocol.replace(hello, out=out)
                ranks[hello.rank] = hello
                self._ranks[hello.rank] = link
                link.send(self.welcome(running=memo.trained))
            else:
                # One that was prepared to take the rank's place; nobody here knows what for.
                link.refuse(Refused(reason="it is not the rank's current process"))
        actions = self.machine.take_over(memo, agents, ranks, reason, self._clock())
        self._carry_out(actions)
        self._schedule()
        for node in range(self.machine.nnodes):
            if node not in agents:
                # Its ranks are here without it; somebody has to look after them soon.
                delay = self.machine.timing.silence
                self._watches[node] = asyncio.get_running_loop().call_later(delay, self._miss_agent, node)
        self._follow_up()

    def _miss_agent(self, node: int) -> None:
        if node not in self._agents:
            self._feed(AgentLost("its agent did not come to the new controller", node))

    # Called by the links.

    def refusal(self, message: Message) -> str | Refused | None:
        reason = protocol.refusal(message, self._token)
        if reason is not None:
            return reason
        assert isinstance(message, Hello)
        if message.epoch > self.epoch:
            self._step_down(message.address if message.role == "controller" else "", message.epoch)
            return Refused(reason="this controller is of the past", retry=True)
        if message.role == "controller":
            return "this job has a newer controller"
        known = message.incarnations if message.role == "agent" else message.place
        if known and isinstance(self.machine.state, Idle):
            return Refused(reason="this controller knows nothing of that job", retry=True, new=True)
        if message.role == "standby":
            return None if message.address else "a standby must say where it listens"
        return super().refusal(message)

    def introduced(self, link: Link, hello: Hello) -> None:
        if hello.role != "standby":
            return super().introduced(link, hello)
        link.send(self.welcome())
        self._standbys[hello.address] = link
        for key, value in self._notes.items():
            link.send(StoreSet(key=key, value=value))
        link.send(self.machine.memo(self.epoch))
        self._tell_addresses()
        self._note_standbys()

    def _note_standbys(self) -> None:
        if self._started and self._standbys:
            self._carry_out(self.machine.standby_changed(self.standbys, self._clock()))

    def welcome(self, running: bool = False) -> Welcome:
        return Welcome(running=running, epoch=self.epoch, controllers=self._addresses())

    def received(self, link: Link, message: Message) -> None:
        if self._was_frozen():
            return
        if link.hello is not None and link.hello.role == "standby":
            return link.send(protocol.Beat()) if isinstance(message, protocol.Beat) else None
        if isinstance(message, StoreSet) and message.key.startswith(PRELUDE) and not message.key.startswith(GROUP_KEYS):
            self._notes[message.key] = message.value
            for standby in self._standbys.values():
                standby.send(message)
        super().received(link, message)

    def lost(self, link: Link) -> None:
        if self._was_frozen():
            self.links.discard(link)
            return
        if link.hello is not None and link.hello.role == "standby":
            self.links.discard(link)
            if self._standbys.get(link.hello.address) is link:
                del self._standbys[link.hello.address]
                self._tell_addresses()
            return
        super().lost(link)

    # Telling others.

    def _feed(self, event: Event) -> None:
        if not self._was_frozen():
            super()._feed(event)
            self._follow_up()

    def _follow_up(self) -> None:
        """Have the standbys told, once for all that happens in one round of the loop: a memo names every rank."""
        if not self._started and not isinstance(self.machine.state, Idle):
            self._started = True
            self._on_started()
            self._note_standbys()
        if self._standbys and not self._memo_due:
            self._memo_due = True
            asyncio.get_running_loop().call_soon(self._send_memo)

    def _send_memo(self) -> None:
        self._memo_due = False
        if self.machine.ended is None and not self._deposed and (memo := self.machine.memo(self.epoch)) != self._memo:
            self._memo = memo
            for standby in self._standbys.values():
                standby.send(memo)

    def _carry_out(self, actions: list[Action]) -> None:
        super()._carry_out(actions)
        for action in actions:
            if isinstance(action, ToAgent) and isinstance(action.message, protocol.End):
                for standby in self._standbys.values():
                    standby.send(action.message)

    def _order_agents(self, order: Message) -> None:
        """The timeline has no gap when nobody is there to write it down."""
        if isinstance(order, protocol.Incident) and not self._agents:
            self._unsaid.append(order)
        else:
            super()._order_agents(order)

    def _link_agent(self, link: Link, hello: Hello) -> None:
        super()._link_agent(link, hello)
        unsaid = list(self._unsaid)
        self._unsaid.clear()
        for order in unsaid:
            link.send(order)

    def _addresses(self) -> list[str]:
        return [self.own_address, *self._standbys] if self._standbys else []

    def _tell_addresses(self) -> None:
        message = Controllers(addresses=[self.own_address, *self._standbys])
        for link in (*self._agents.values(), *self._ranks.values(), *self._prepared.values()):
            link.send(message)

    # Stepping down.

    def _stay_awake(self) -> None:
        """Note that this loop runs. The gap is looked for when anything happens, before it can do any harm."""
        if not self._was_frozen():
            self._awake_at = self._clock()
            delay = self.machine.timing.silence / 8
            self._awake = asyncio.get_running_loop().call_later(delay, self._stay_awake)

    def _was_frozen(self) -> bool:
        if self._deposed:
            return True
        gap = self._clock() - self._awake_at
        if gap < self.machine.timing.silence / 2 or not self._standbys or self.machine.ended is not None:
            return False
        log.error("the controller did nothing for %.1f s: it hands over", gap)
        self._step_down("", self.epoch)
        return True

    def _step_down(self, successor: str, epoch: int) -> None:
        if not self._deposed:
            self._deposed = True
            if self._awake is not None:
                self._awake.cancel()
                self._awake = None
            known = successor or next(iter(self._standbys), "")
            asyncio.get_running_loop().call_soon(self._on_deposed, known, epoch)

    async def close(self, patience: float = 1.0) -> None:
        if self._awake is not None:
            self._awake.cancel()
            self._awake = None
        await super().close(patience)
