"""Leader election by a Lease: of several that could act, one does.

Who holds the lease renews it. Who doesn't watches how long it stands unchanged, by its own clock: clocks of different
machines are never compared. A leader that can't renew in time stops acting before anybody else may begin.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timezone

from evertrain import aio
from evertrain.kube import namespaces
from evertrain.kube.port import LEASE, AlreadyExists, ApiError, Conflict, Kube, NotFound, Object
from evertrain.kube.thread import beside

logger = logging.getLogger(__name__)

DURATION, DEADLINE, PERIOD = 15.0, 10.0, 2.0
"""Seconds: a lease is free when it wasn't renewed for so long; a leader gives up after so long; it renews so often."""

HANGS = 60.0
"""Seconds for which the event loop of the work may be held up while a thread renews the lease."""


class LostLeadership(Exception):
    """Somebody else may lead now."""


class CannotLead(Exception):
    """Nobody ever will, as things are here. The text is for the user."""


@dataclass
class Sighting:
    """The lease as it was last seen to change, and when by our clock."""

    record: Object | None = None
    at: float = 0.0

    def look(self, lease: Object, now: float) -> None:
        spec = lease.get("spec") or {}
        if spec != self.record:
            self.record, self.at = copy.deepcopy(spec), now

    def is_free(self, me: str, now: float) -> bool:
        holder = (self.record or {}).get("holderIdentity") or ""
        return holder in ("", me) or self.left(now) <= 0

    def left(self, now: float) -> float:
        """Seconds until it is free if it stays as it is."""
        return self.at + float((self.record or {}).get("leaseDurationSeconds") or DURATION) - now


def taken(lease: Object, me: str, now: datetime, duration: float) -> Object:
    """The lease after `me` has taken or renewed it."""
    lease = copy.deepcopy(lease)
    spec = lease.setdefault("spec", {})
    at = now.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if spec.get("holderIdentity") != me:
        had = spec.get("holderIdentity")
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if had is not None else 0)
        spec["acquireTime"] = at
    spec |= {"holderIdentity": me, "leaseDurationSeconds": max(1, round(duration)), "renewTime": at}
    return lease


class Leader:
    def __init__(
        self,
        kube: Kube,
        name: str,
        namespace: str,
        me: str,
        *,
        duration: float = DURATION,
        deadline: float = DEADLINE,
        period: float = PERIOD,
        connect: Callable[[], AbstractAsyncContextManager[Kube]] | None = None,
    ) -> None:
        """`connect`: another way to the server. With it the lease is renewed on a thread, for work that holds the event
        loop up for longer than a renewal may take."""
        if not period < deadline < duration:
            raise ValueError("a lease is renewed more often than its holder gives up, and that is before it is free")
        self._kube = kube
        self._name, self._namespace, self.me = name, namespace, me
        self._duration, self._deadline, self._period = duration, deadline, period
        self._connect = connect
        self._sighting = Sighting()
        self._lived = 0.0
        """When the event loop of the work was last seen to run, by the monotonic clock."""
        self._asked = 0.0
        """When the server was last asked, by the loop's clock."""
        self.leads = False
        """Is the work under way, or does somebody else do it?"""

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Waits for leadership, then runs `work`. Raises LostLeadership when it is lost and the work, cancelled, is at
        its end; then it may be called again. Raises CannotLead."""
        while not await self._try(self._kube):
            left = self._sighting.left(asyncio.get_running_loop().time())
            await asyncio.sleep(left if 0 < left < self._period else self._period)
        logger.info("%s leads (%s)", self.me, self._name)
        self.leads = True
        working = asyncio.ensure_future(work())
        keeping = asyncio.ensure_future(self._keep())
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, keeping):
                task.cancel()
            await asyncio.gather(working, keeping, return_exceptions=True)
            self.leads = False
            if not keeping.done() or keeping.cancelled():
                await self._release()
        for task in (working, keeping):
            if not task.cancelled():
                task.result()

    async def _keep(self) -> None:
        connect = self._connect
        if connect is None:
            await self._renew(self._kube)
            return

        async def renew() -> None:
            async with connect() as kube:
                await self._renew(kube, self._lives)

        self._lived = time.monotonic()
        living = asyncio.ensure_future(self._live())
        try:
            await beside(renew, f"lease {self._name}")
        finally:
            living.cancel()

    async def _live(self) -> None:
        while True:
            self._lived = time.monotonic()
            await asyncio.sleep(self._period)

    def _lives(self) -> bool:
        """Who hangs for good must not lead for ever."""
        return time.monotonic() - self._lived < HANGS

    async def _renew(self, kube: Kube, lives: Callable[[], bool] = lambda: True) -> None:
        """Time counts from before the request on: when the server has dealt with it nobody here knows."""
        renewed = self._asked
        while True:
            try:
                async with aio.timeout_at(renewed + self._deadline):
                    await asyncio.sleep(self._period)
                    while not (lives() and await self._try(kube, leads=True)):
                        await asyncio.sleep(self._period)
            except TimeoutError:
                text = f"{self.me} could not renew {self._name} for {self._deadline:g} s"
                raise LostLeadership(text) from None
            renewed = self._asked

    async def _try(self, kube: Kube, *, leads: bool = False) -> bool:
        """Takes or renews the lease; False if it is another's or can't be reached. Who leads and finds that somebody
        else has or had it meanwhile has lost it, however free it is by now."""
        loop = asyncio.get_running_loop()
        self._asked, now = loop.time(), datetime.now(timezone.utc)
        try:
            async with aio.timeout(self._period):
                try:
                    lease = await kube.get(LEASE, self._name, self._namespace)
                except NotFound:
                    metadata = {"name": self._name, "namespace": self._namespace}
                    fresh = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata}
                    await self._create(kube, taken(fresh, self.me, now, self._duration))
                    return True
                self._sighting.look(lease, loop.time())
                holder = (lease.get("spec") or {}).get("holderIdentity")
                if leads and holder != self.me:
                    raise LostLeadership(f"{self.me} does not lead any more: {self._name} is {holder or 'nobody'}'s")
                if not self._sighting.is_free(self.me, loop.time()):
                    return False
                await kube.replace(LEASE, taken(lease, self.me, now, self._duration))
                return True
        except (AlreadyExists, Conflict):
            return False
        except (ApiError, OSError, TimeoutError) as error:
            logger.info("lease %s: %s", self._name, error)
            return False

    async def _create(self, kube: Kube, lease: Object) -> None:
        try:
            await kube.create(LEASE, lease)
        except NotFound:  # of its namespace
            try:
                await namespaces.make(kube, self._namespace)
            except ApiError as error:
                if error.code != 403:
                    raise
                text = f"namespace {self._namespace}, where the lease {self._name} has to be, is missing; make it"
                raise CannotLead(f"{text} ({error})") from None
            await kube.create(LEASE, lease)

    async def _release(self) -> None:
        """So that the next one needn't wait."""
        try:
            async with aio.timeout(self._period):
                lease = await self._kube.get(LEASE, self._name, self._namespace)
                if (lease.get("spec") or {}).get("holderIdentity") == self.me:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._kube.replace(LEASE, lease)
        except (ApiError, OSError, TimeoutError) as error:
            logger.info("lease %s is not released: %s", self._name, error)
