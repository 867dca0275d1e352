"""A ConfigMap that is kept as it should be.

What is wanted is compared with what is there, whoever has written that: so nothing is written that is there already,
also after a restart, and what somebody deletes or spoils is written again. The first change is written at once, further
ones not within a second: a fault that comes and goes must not keep the API server busy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from evertrain import aio
from evertrain.kube.port import CONFIG_MAP, AlreadyExists, ApiError, Kube, NotFound, Object

logger = logging.getLogger(__name__)

GAP = 1.0
FIRST_DELAY, MAX_DELAY = 0.2, 10.0


class Content(Protocol):
    """What is to be in a ConfigMap."""

    def render(self, there: Mapping[str, str], now: float) -> Mapping[str, str | None]:
        """The data, over those that are there; None removes a key. Keys that are not in it are left as they are."""
        ...

    def annotations(self) -> Mapping[str, str]: ...

    def age(self, data: Mapping[str, str], now: float) -> float | None:
        """How long ago this very content was written; None if there is something else."""
        ...


class Sheet:
    def __init__(
        self,
        kube: Kube,
        name: str,
        namespace: str,
        *,
        every: float,
        gap: float = GAP,
        labels: Mapping[str, str] | None = None,
        mine: Callable[[Object], bool] = lambda _: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Written again after `every` seconds. One that is not `mine` is left alone."""
        self._kube = kube
        self.name, self.namespace = name, namespace
        self._every, self._gap = every, gap
        self._labels = dict(labels or {})
        self._mine = mine
        self._clock = clock
        self._wanted: Content | None = None
        self._decided = False
        self._owner: Object | None = {}
        self._may_own = True
        self._there: Object | None = None
        self._newest = 0
        self._news = asyncio.Event()
        self.writes = self.failures = 0
        self.written: float | None = None
        """When it was, by the clock."""

    def want(self, content: Content | None) -> None:
        """None: there should be no such ConfigMap."""
        if not self._decided or content != self._wanted:
            self._decided = True
            self._wanted = content
            self._news.set()

    def belongs(self, owner: Object | None) -> None:
        """To that object, by a reference to it, and goes when that goes. None: it has gone, and nothing is written for
        it any more."""
        if owner != self._owner:
            self._owner = owner
            self._news.set()

    def seen(self, item: Object | None) -> None:
        """As a watch shows it. What is older than what we wrote is no news."""
        if item is not None and _version(item) < self._newest:
            return
        self._there = item
        self._news.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        last, failures = -self._gap, 0
        while True:
            self._news.clear()
            due = self._due(self._clock())
            if due is None or due > 0:
                await self._wait(due)
                continue
            if (early := last + self._gap - loop.time()) > 0:
                await asyncio.sleep(early)
                continue
            try:
                await self._write()
                last, failures = loop.time(), 0
                self.written = self._clock()
            except (ApiError, OSError, TimeoutError) as error:
                delay = min(MAX_DELAY, FIRST_DELAY * 2**failures)
                failures = min(failures + 1, 16)
                self.failures += 1
                logger.warning(
                    "%s/%s could not be written: %s; again in %.1f s", self.namespace, self.name, error, delay
                )
                await asyncio.sleep(delay)

    def _due(self, now: float) -> float | None:
        """Seconds until something has to be written; None: never, if nothing changes."""
        if not self._decided or self._owner is None or self._there is not None and not self._mine(self._there):
            return None
        if self._wanted is None:
            return None if self._there is None else 0.0
        data = (self._there or {}).get("data") or {}
        age = self._wanted.age(data, now) if self._there is not None else None
        # One from the future was written before the clock was set back.
        return 0.0 if age is None or age < -1.0 else max(0.0, self._every - age)

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with aio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _write(self) -> None:
        wanted = self._wanted
        self.writes += 1
        if wanted is None:
            there, self._there = self._there, None
            try:
                await self._kube.delete(CONFIG_MAP, self.name, self.namespace)
            except NotFound:
                pass
            except BaseException:
                self._there = there
                raise
            return
        data = wanted.render((self._there or {}).get("data") or {}, self._clock())
        metadata = {"labels": self._labels, "annotations": dict(wanted.annotations())}
        owners = {"ownerReferences": [self._owner]} if self._owner else {}
        try:
            written = await self._patched({"metadata": metadata, "data": dict(data)}, owners)
        except NotFound:
            item = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": self.name, "namespace": self.namespace, **metadata, **owners},
                "data": {key: text for key, text in wanted.render({}, self._clock()).items() if text is not None},
            }
            try:
                written = await self._kube.create(CONFIG_MAP, item)
            except AlreadyExists:  # somebody was faster; see what it is
                written = await self._kube.get(CONFIG_MAP, self.name, self.namespace)
        self._newest = max(self._newest, _version(written))
        self._there = written

    async def _patched(self, patch: Object, owners: Object) -> Object:
        """Who may not delete a ConfigMap may not give one that is there an owner, on clusters with the admission plugin
        OwnerReferencesPermissionEnforcement. One that was made with it has it."""
        there = ((self._there or {}).get("metadata") or {}).get("ownerReferences")
        if self._may_own and owners and there != owners["ownerReferences"]:
            try:
                owned = {**patch, "metadata": {**patch["metadata"], **owners}}
                return await self._kube.patch(CONFIG_MAP, self.name, self.namespace, owned)
            except ApiError as error:
                if error.code != 403:
                    raise
                self._may_own = False
        return await self._kube.patch(CONFIG_MAP, self.name, self.namespace, patch)


def _version(item: Object) -> int:
    version = str(item["metadata"].get("resourceVersion") or "")
    return int(version) if version.isascii() and version.isdecimal() else 0
