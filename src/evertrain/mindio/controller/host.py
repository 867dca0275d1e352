"""A controller's place: one address, at which a controller is in charge or stands by, and may change from one to the
other and back."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from evertrain.mindio import protocol
from evertrain.mindio.asynclink import AsyncLink, LinkError, NotNow
from evertrain.mindio.controller.leader import Leader
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Link, refuse_open_door
from evertrain.mindio.controller.standby import Standby

log = logging.getLogger(__name__)

_CALL = 0.3
"""Seconds between two calls to where a standby may come back."""


class ControllerHost:
    """`start`, then `close`. `peer` is where the other controller is, as far as known; without one, or with `leads`,
    this one is in charge from the start."""

    def __init__(
        self,
        make_machine: Callable[[], Machine],
        token: str,
        host: str,
        port: int,
        *,
        leads: bool,
        peer: str = "",
        tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        allow_remote: bool = False,
        on_role: Callable[[bool], None] = lambda leads: None,
        on_lead: Callable[[str], None] = lambda address: None,
    ) -> None:
        """`on_role` is told when this controller has taken over (True) or stepped down (False); `on_lead` gets its
        address when it is in charge of a job that has begun."""
        refuse_open_door(token, host, tls, allow_remote)
        self._make_machine, self._token = make_machine, token
        self._host, self._port = host, port
        self._leads, self._peer = leads, peer
        self._tls, self._client_tls = tls, client_tls
        self._on_role, self._on_lead = on_role, on_lead
        self._listener: asyncio.Server | None = None
        self._caller: asyncio.Task[None] | None = None
        self._ended: list[asyncio.Task[None]] = []
        self.answering: Leader | Standby
        self.over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        """The job's exit code and the reason for it."""

    @property
    def address(self) -> str:
        assert self._listener is not None, "not started"
        host, port = self._listener.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def leads(self) -> bool:
        return isinstance(self.answering, Leader)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._link, self._host, self._port, backlog=4096, start_serving=False)
        if self._leads:
            self.answering = self._leader(0)
        else:
            self.answering = self._standby(0)
            self.answering.start()
        await self._listener.start_serving()

    async def close(self) -> None:
        if self._caller is not None:
            self._caller.cancel()
        if self._listener is not None:
            self._listener.close()
        await self.answering.close()
        for task in self._ended:
            await asyncio.gather(task, return_exceptions=True)

    def _link(self) -> Link:
        return Link(self.answering)

    def _leader(self, epoch: int) -> Leader:
        leader = Leader(
            self._make_machine(), self._token, self.address, epoch=epoch, on_deposed=self._step_down,
            on_started=lambda: self._on_lead(self.address), tls=self._tls, allow_remote=True,
        )  # fmt: skip
        leader.prepare()
        leader.when_over(self._on_over)
        return leader

    def _standby(self, epoch: int) -> Standby:
        machine = self._make_machine()
        return Standby(
            self.address, self._peer, self._token, timing=machine.timing, world_size=machine.world_size,
            nnodes=machine.nnodes, node_loss=machine.node_loss, tls=self._tls, client_tls=self._client_tls, epoch=epoch,
            on_take_over=self._take_over, on_over=self._on_over,
        )  # fmt: skip

    def _on_over(self, code: int, reason: str) -> None:
        if not self.over.done():
            self.over.set_result((code, reason))

    def _take_over(self, reason: str) -> None:
        standby = self.answering
        assert isinstance(standby, Standby) and standby.memo is not None
        waiting = standby.hand_over()
        epoch = max([standby.epoch, *(link.hello.epoch for link in waiting if link.hello)]) + 1
        log.error("%s; the controller at %s takes over", reason or "the controller is gone", self.address)
        standby.stop()
        leader = self.answering = self._leader(epoch)
        for link in list(standby.links):
            link.move_to(leader)
        self._on_role(True)
        leader.take_over(standby.memo, standby.notes, waiting, reason)
        for link, messages in waiting.items():
            for message in messages:
                leader.received(link, message)
        self._caller = asyncio.create_task(self._call_the_other(leader))

    def _step_down(self, successor: str, epoch: int) -> None:
        leader = self.answering
        assert isinstance(leader, Leader)
        log.error("the controller at %s steps down; its successor is at %s", self.address, successor or "?")
        if self._caller is not None:
            self._caller.cancel()
        self._peer = successor or self._peer
        standby = self.answering = self._standby(epoch)
        standby.start()
        self._on_role(False)
        # Whoever is linked here looks for the new one.
        self._ended.append(asyncio.create_task(leader.close()))

    async def _call_the_other(self, leader: Leader) -> None:
        """Where the old controller was, a new one may start and take itself for the first: tell it who is in charge."""
        while leader.machine.ended is None:
            if not leader.standbys:
                await self._call(leader)
            await asyncio.sleep(_CALL)

    async def _call(self, leader: Leader) -> None:
        host, _, port = self._peer.rpartition(":")
        hello = protocol.Hello(
            version=protocol.VERSION, token=self._token, role="controller", address=self.address, epoch=leader.epoch
        )
        try:
            link, _ = await AsyncLink.open(
                (host, int(port)), hello, lambda message: None, lambda reason: None, 1.0, self._client_tls
            )
            link.close()
        except NotNow:
            pass  # nobody is there, or it has understood
        except LinkError as error:
            log.error("the controller at %s does not step down: %s", self._peer, error)
