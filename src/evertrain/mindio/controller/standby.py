"""A controller that stands by.

It keeps a link to the controller in charge, which tells it what it needs for taking over. When that link breaks or
falls silent, ranks and agents come here by themselves, because they have lost theirs too. They are kept waiting until
there are enough of them: more than half of the ranks, so that no two controllers can ever have enough. Exactly half
will do if nobody listens at the old address any more, that is, if the controller there is dead and not just cut off, or
if the new one will not train without the other half anyway.

If the old controller answers again before that, everybody is sent back to it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable

from evertrain.mindio import framing, protocol
from evertrain.mindio.asynclink import AsyncLink, LinkError, NotNow
from evertrain.mindio.controller.nodes import SHRINK
from evertrain.mindio.controller.server import Link
from evertrain.mindio.protocol import Hello, Memo, Message, Refused
from evertrain.mindio.timing import Timing

log = logging.getLogger(__name__)

_RETRY = 0.1
"""Seconds between two attempts to reach the controller in charge: nothing announces that it begins to listen."""
_LATE = 4.0
"""Seconds to wait for a rank that is known to live; a training that it takes part in need not be interrupted then."""
_TOGETHER = 0.01
_MAX_KEPT = 1000
"""Messages kept of one rank or agent that waits here."""


class Standby:
    """Answers the links of a controller that is not in charge (see `server.Host`)."""

    def __init__(
        self,
        address: str,
        peer: str,
        token: str,
        *,
        timing: Timing,
        world_size: int,
        nnodes: int,
        node_loss: str,
        tls: ssl.SSLContext | None,
        client_tls: ssl.SSLContext | None,
        epoch: int = 0,
        on_take_over: Callable[[str], None],
        on_over: Callable[[int, str], None] = lambda code, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links: set[Link] = set()
        self.tls = tls
        self.hello_timeout = max(timing.bound, 5.0)
        self.epoch = epoch
        self.memo: Memo | None = None
        self.notes: dict[str, bytes] = {}
        self.over: protocol.End | None = None
        self._address, self._peer, self._token = address, peer, token
        self._timing, self._world_size, self._nnodes, self._node_loss = timing, world_size, nnodes, node_loss
        self._client_tls, self._clock = client_tls, clock
        self._on_take_over, self._on_over = on_take_over, on_over
        self._link: AsyncLink | None = None
        self._heard = 0.0
        self._lost_at = 0.0
        self._reason = ""
        self._peer_is_dead = False
        self._waiting: dict[Link, list[Message]] = {}
        self._places: dict[tuple[str, int, int, int], Link] = {}
        self._enough_since: float | None = None
        self._look: asyncio.TimerHandle | None = None
        self._done = False
        self._chore: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._lost_at = self._clock()
        self._chore = asyncio.create_task(self._follow())

    async def close(self, patience: float = 1.0) -> None:
        self.stop()
        links = list(self.links)
        for link in links:
            link.close()
        if links:
            await asyncio.wait([link.closed for link in links], timeout=patience)

    def stop(self) -> None:
        """Follow nobody any more and let the links be."""
        self._done = True
        if self._chore is not None:
            self._chore.cancel()
        if self._look is not None:
            self._look.cancel()
        if self._link is not None:
            self._link.close()

    # The link to the controller in charge.

    @property
    def _following(self) -> bool:
        return self._link is not None

    async def _follow(self) -> None:
        """Keep the link, or try to get it back, for as long as this is a standby."""
        while not self._done:
            if self._link is not None:
                self._link.send(protocol.Beat(at=time.monotonic()))
                await asyncio.sleep(self._timing.heartbeat)
                if self._link is not None and self._clock() - self._heard > self._timing.silence:
                    self._link.close()
                    self._lost(f"the controller has been silent for {self._timing.silence:g} s")
                continue
            try:
                await self._dial()
            except LinkError as error:
                self._peer_is_dead = isinstance(error, NotNow) and error.nobody
                self._consider()
                await asyncio.sleep(_RETRY)

    async def _dial(self) -> None:
        try:
            peer = protocol.address(self._peer)
        except framing.ProtocolError:
            raise NotNow("nobody has said yet where the controller is") from None
        hello = Hello(
            version=protocol.VERSION,
            token=self._token,
            role="standby",
            address=self._address,
            epoch=self.epoch,
            place="begun" if self.memo is not None and self.memo.started else "",
        )
        timeout = max(self._timing.bound, 1.0)
        link, welcome = await AsyncLink.open(peer, hello, self._on_message, self._lost, timeout, self._client_tls)
        if welcome.epoch < self.epoch:
            link.close()
            raise NotNow("that controller is of the past")
        self._link, self._heard, self.epoch = link, self._clock(), welcome.epoch
        self._enough_since = None
        link.listen()
        for waiting in list(self._waiting):
            self._send_away(waiting)

    def _on_message(self, message: Message) -> None:
        self._heard = self._clock()
        match message:
            case Memo():
                self.memo = message
            case protocol.StoreSet(key=key, value=value):
                self.notes[key] = value
            case protocol.End():
                self.over = message
                self._on_over(message.code, message.reason)

    def _lost(self, reason: str) -> None:
        if self._link is not None:
            self._link = None
            self._lost_at, self._reason = self._clock(), reason
            log.warning("standby: %s", reason)

    # The links of ranks and agents.

    def refusal(self, message: Message) -> str | Refused | None:
        reason = protocol.refusal(message, self._token)
        if reason is not None:
            return reason
        assert isinstance(message, Hello)
        if self.over is not None:
            return Refused(reason="the job is over", over=True)
        if message.role == "controller":
            if message.epoch >= self.epoch and message.address:
                self._peer, self.epoch = message.address, message.epoch
                return Refused(reason="this controller stands by", retry=True)
            return "this job has a newer controller"
        if message.role in ("standby", "control"):
            return Refused(reason="this controller stands by", retry=True, controllers=[self._peer])
        return self._elsewhere() if self._following else self._no_place(message)

    def _no_place(self, hello: Hello) -> str | None:
        """Who is not of this job must not be counted."""
        if hello.role == "rank" and not 0 <= hello.rank < self._world_size:
            return f"rank {hello.rank} is not in a job of {self._world_size}"
        if hello.role == "agent" and hello.world_size not in (0, self._world_size):
            return f"the agent starts {hello.world_size} ranks, the job has {self._world_size}"
        if hello.role == "agent" and not 0 <= hello.node < self._nnodes:
            return f"node {hello.node} is not in a job of {self._nnodes}"
        return None

    def _elsewhere(self) -> Refused:
        return Refused(reason=f"the controller is at {self._peer}", retry=True, controllers=[self._peer])

    def _send_away(self, link: Link) -> None:
        self._waiting.pop(link, None)
        link.refuse(self._elsewhere())

    def introduced(self, link: Link, hello: Hello) -> None:
        who = (hello.role, hello.rank, hello.incarnation, hello.node)
        if (older := self._places.get(who)) is not None:
            self._waiting.pop(older, None)
            older.close()
        self._places[who] = link
        self._waiting[link] = []
        if self._look is None:
            # Not for each of thousands that come at once.
            self._look = asyncio.get_running_loop().call_later(_TOGETHER, self._look_again)

    def received(self, link: Link, message: Message) -> None:
        kept = self._waiting.get(link)
        if kept is not None and len(kept) < _MAX_KEPT:
            kept.append(message)

    def lost(self, link: Link) -> None:
        self.links.discard(link)
        self._waiting.pop(link, None)

    # Enough?

    def _consider(self) -> None:
        memo = self.memo
        if self._done or self._following or self.over is not None or memo is None or not memo.started:
            return
        now = self._clock()
        if not self._enough():
            return
        if self._enough_since is None:
            # From the first time on: whoever is kept waiting looks elsewhere for a moment now and then.
            self._enough_since = now
        patience = min(self._timing.bound, 1.0) if self._living_there() else _LATE
        settled = max(self._enough_since, self._lost_at) + patience
        if now >= settled or (self._living_there() and self._nodes_there()):
            self._done = True
            self._on_take_over(self._reason)
            return
        if self._look is not None:
            self._look.cancel()
        self._look = asyncio.get_running_loop().call_later(settled - now + 0.01, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._consider()

    def _hellos(self, role: str) -> list[Hello]:
        return [link.hello for link in self._waiting if link.hello is not None and link.hello.role == role]

    def _enough(self) -> bool:
        ranks = {hello.rank for hello in self._hellos("rank")}
        for agent in self._hellos("agent"):
            ranks |= set(agent.ranks)
        aside = set(self.memo.aside) if self.memo is not None else set()
        number, needed = len(ranks - aside), self._world_size - len(aside)
        if 2 * number > needed:
            return True
        half = 2 * number == needed
        return half and (self._peer_is_dead or self._node_loss != SHRINK)

    def _nodes_there(self) -> bool:
        return len({agent.node for agent in self._hellos("agent")}) == self._nnodes

    def _living_there(self) -> bool:
        """Has every rank come that is known to live, or may be because others of its node are here?"""
        linked = {(hello.rank, hello.incarnation) for hello in self._hellos("rank")}
        agents = {agent.node: agent for agent in self._hellos("agent")}
        per_node = self._world_size // self._nnodes
        numbers = Counter(rank // per_node for rank, _ in linked)
        if any(count < per_node for node, count in numbers.items() if node not in agents):
            return False
        return all(
            (rank, incarnation) in linked or rank in agent.booting
            for agent in agents.values()
            for rank, incarnation in agent.incarnations.items()
        )

    def hand_over(self) -> dict[Link, list[Message]]:
        """The links that wait here, with what came on them since."""
        waiting, self._waiting = self._waiting, {}
        return waiting
