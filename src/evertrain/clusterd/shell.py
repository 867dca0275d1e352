"""All of ClusterD in one: hub, timeline, rescheduler and the gRPC server, for a cluster that somebody names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from evertrain.clusterd.faulting import Faults
from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.hub import Hub
from evertrain.clusterd.observe import SYSTEM, Observer
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.recover.machine import Recovery
from evertrain.clusterd.resched.shell import Rescheduler
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.server import Server
from evertrain.clusterd.timeline.shell import Timeline
from evertrain.kube import namespaces
from evertrain.kube.port import ApiError, Kube
from evertrain.wire import clusterinfo

logger = logging.getLogger(__name__)

PORT = 8899
DATABASE = "timeline.db"
FORGET_SECONDS = 60.0


class ClusterD:
    """Of one use: `run` until it is cancelled."""

    def __init__(
        self,
        kube: Kube,
        places: Sequence[str | socket.socket],
        security: Security,
        *,
        timeline: Path | None = None,
        chips: bool = False,
    ) -> None:
        """Serves at each of the places: addresses (HOST:PORT), or sockets that are bound. The timeline is a file;
        without one it is kept in the cluster only. `chips`: the scheduler itself keeps pods off chips with faults."""
        self._kube, self._places, self._security = kube, tuple(places), security
        self.observer = Observer(kube)
        self.faults = Faults(kube, FaultCentre(), self.observer)
        self.timeline = Timeline(kube, timeline)
        self.rescheduler = Rescheduler(
            kube,
            shared=self.observer,
            chips=chips,
            leads=lambda job: self.hub.leads(job),
            note=self._note,
            phase=self.timeline.phase,
        )
        self.rescheduler.reports.listen(self.faults.report_seen)
        self.hub = Hub(
            kube,
            machine=Recovery,
            rescheduler=self.rescheduler,
            timeline=self.timeline,
            observer=self.observer,
            faults=self.faults,
        )
        self.port = 0
        """Where it listens, at the first of the places."""
        self.ready = asyncio.Event()
        """Set once it serves."""

    @property
    def looks_on(self) -> asyncio.Event:
        """Set once not much is missing to lead."""
        return self.hub.looks_on

    def _note(self, uid: str, note: Note) -> None:
        job = self.hub.job(uid)
        if job is not None:
            self.timeline.note(job, note, time.time())

    async def _close_timeline(self, starting: asyncio.Future[None]) -> None:
        """A thread opens the file, and can't be told not to."""
        self.timeline.end()
        await asyncio.gather(starting, return_exceptions=True)
        await self.timeline.close()

    async def _forget_jobs(self) -> None:
        """Those that are gone, also while nobody was here: their incidents are on the disk, if anywhere."""
        while True:
            self.timeline.retain(self.hub.jobs, time.time())
            await asyncio.sleep(FORGET_SECONDS)

    async def run(self, leads: asyncio.Event | None = None) -> None:
        """Only looks on until `leads` is set, if that is given. Raises OSError or ValueError if it can't listen."""
        server, prepared = Server(self.hub, self._security), asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            hub = asyncio.ensure_future(self.hub.run(prepared))
            stack.push_async_callback(_cancelled, hub)
            if leads is not None:
                await _either(leads.wait(), hub)
            await _make_namespaces(self._kube)
            starting = asyncio.ensure_future(self.timeline.start())
            stack.push_async_callback(self._close_timeline, starting)
            await asyncio.shield(starting)
            # At the end, who has lost the lead stops to act before anything else: calls under way are given their time.
            stack.push_async_callback(server.close)
            stack.push_async_callback(_cancelled, hub)
            prepared.set()
            # Nobody is let in before it is known what was left, else reports would come too early.
            await _either(self.hub.ready.wait(), hub)
            forgetting = asyncio.ensure_future(self._forget_jobs())
            stack.push_async_callback(_cancelled, forgetting)
            self.port = await server.start(*self._places)
            server.health.set(True)
            self.ready.set()
            await hub


async def _either(wait: object, other: asyncio.Future[None]) -> None:
    """Until the first is done; what the second raises, if that comes first."""
    waiting = asyncio.ensure_future(wait)  # type: ignore[call-overload]
    try:
        await asyncio.wait({waiting, other}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancelled(waiting)
    if other.done():
        other.result()


async def _cancelled(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _make_namespaces(kube: Kube) -> None:
    """Ours, where nobody has made them. Without them nothing is missed but what we write there."""
    for name in (SYSTEM, clusterinfo.NAMESPACE):
        try:
            await namespaces.make(kube, name)
        except ApiError as error:
            logger.warning("namespace %s can't be made: %s", name, error)
