"""Recoveries of several jobs kept in one ConfigMap: a page.

Where many jobs have faults at the same time, a write for each step of each of them is more than an API server can take.
So a recovery that begins while others are being written is kept on a page together with them. While one write of a
page is under way, all that is to be kept on it gathers for the next: the slower the server, the more go together, and
each of them is acknowledged when the write that it was part of has succeeded.

A page belongs to the ClusterD that made it, or to the one that has found it. Each write is only valid for the version
that the last one has made: whoever finds somebody else's writing on its page leads no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterator

from evertrain.kube.port import CONFIG_MAP, AlreadyExists, Conflict, Kube, NotFound, Object

logger = logging.getLogger(__name__)

PREFIX = "clusterd-recoveries-"
LABEL = "evertrain.dev/clusterd-recovery"
CROWD = 2
"""So many others are being written when a recovery is put on a page."""
LARGEST, GROWN, PAGE, TOO_LARGE = 16 * 1024, 64 * 1024, 64 * 1024, 400 * 1024
"""Bytes: of a record that comes to a page, of one that may stay there, of a page on which there is room, and of one
that records are taken from."""
AT_ONCE = 2
"""Pages written at the same time."""
MOST_TRIED = 100
LATER = 1.0
"""Seconds until what is no longer kept leaves its page, if nothing else is written there."""


class Overtaken(Exception):
    """Somebody else has written what is kept of a recovery since we have: another ClusterD leads it by now."""


class Page:
    def __init__(self, kube: Kube, namespace: str, name: str, places: asyncio.Semaphore) -> None:
        self._kube, self.namespace, self.name, self._places = kube, namespace, name, places
        self._there: dict[str, str] = {}
        """As it was written last."""
        self._exists, self._version = False, ""
        self._tried: list[dict[str, str]] = []
        """What may be there instead, because nobody has answered whether it was written."""
        self._changed: dict[str, str | None] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.lost = False
        """Somebody else has written to it."""
        self.gone = False
        """There is nothing on it any more, and it is deleted."""

    def adopt(self, item: Object) -> None:
        """It is another one's. Our first write is valid for any version, and no later one of the other is."""
        self._there, self._exists = dict(item.get("data") or {}), True

    @property
    def size(self) -> int:
        return sum(map(len, self._now().values()))

    @property
    def is_too_large(self) -> bool:
        return self.size > TOO_LARGE

    def _now(self) -> dict[str, str]:
        return {job: text for job, text in {**self._there, **self._changed}.items() if text is not None}

    async def put(self, job: str, text: str) -> None:
        """Returns when it is kept. Raises what the write raised, or Overtaken."""
        if self.lost:
            raise Overtaken("another ClusterD leads the recovery of this job")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed[job] = text
        self._waiting.append(done)
        self._start()
        await done

    def drop(self, job: str) -> None:
        """Soon: who finds it until then would only see that there is nothing left to do."""
        if job in self._there or job in self._changed:
            self._changed[job] = None
            if self._timer is None and not self.lost:
                self._timer = asyncio.get_running_loop().call_later(LATER, self._due)

    def close(self) -> None:
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _due(self) -> None:
        self._timer = None
        self._start()

    def _start(self) -> None:
        if self._task is None and not self.lost:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            while self._changed and not self.lost:
                async with self._places:
                    if not await self._write():
                        break
        finally:
            self._task = None
            if self._changed and self._timer is None and not self.lost:
                self._timer = asyncio.get_running_loop().call_later(LATER, self._due)

    async def _write(self) -> bool:
        """All that has changed. Whether it was."""
        changed, self._changed = self._changed, {}
        waiting, self._waiting = self._waiting, []
        wanted = {job: text for job, text in {**self._there, **changed}.items() if text is not None}
        try:
            while not await self._is_written(changed, wanted, bool(waiting)):
                pass
        except BaseException as error:
            # What came meanwhile is newer.
            self._changed = {**changed, **self._changed}
            self.lost = self.lost or isinstance(error, Overtaken)
            for done in waiting + (self._waiting if self.lost else []):
                if not done.done():
                    done.set_exception(error if isinstance(error, Exception) else ConnectionError("ClusterD ends"))
            if not isinstance(error, Exception):
                raise
            if not waiting:
                logger.info("page %s/%s is not written: %s", self.namespace, self.name, error)
            return False
        self._there, self._tried = wanted, []
        for done in waiting:
            if not done.done():
                done.set_result(None)
        return True

    async def _is_written(self, changed: dict[str, str | None], wanted: dict[str, str], needed: bool) -> bool:
        """False: somebody has only labelled it, or we have written it unheard; then again."""
        if not wanted and not needed and not self._changed:
            self.gone = True
            try:
                await self._kube.delete(CONFIG_MAP, self.name, self.namespace, version=self._version)
            except NotFound:
                pass
            except Conflict:
                await self._look()
                return False
            self._exists, self._version = False, ""
            return True
        if wanted not in self._tried:
            self._tried = [*self._tried[-MOST_TRIED:], wanted]
        try:
            if not self._exists:
                written = await self._kube.create(CONFIG_MAP, self._item(wanted))
            else:
                patch: Object = {"data": changed}
                if self._version:
                    patch["metadata"] = {"resourceVersion": self._version}
                written = await self._kube.patch(CONFIG_MAP, self.name, self.namespace, patch)
        except (Conflict, AlreadyExists):
            await self._look()
            return False
        except NotFound:
            if not self._exists:  # there is no such namespace
                raise
            self._exists, self._version, self._there = False, "", {}
            return False
        self._exists, self._version = True, _version(written)
        return True

    async def _look(self) -> None:
        try:
            item = await self._kube.get(CONFIG_MAP, self.name, self.namespace)
        except NotFound:
            self._exists, self._version = False, ""
            return
        found = dict(item.get("data") or {})
        if found != self._there and found not in self._tried:
            raise Overtaken("another ClusterD leads the recovery of this job")
        self._exists, self._version = True, _version(item)

    def _item(self, texts: dict[str, str]) -> Object:
        metadata = {"name": self.name, "namespace": self.namespace, "labels": {LABEL: "true"}}
        return {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.kind, "metadata": metadata, "data": texts}


class Pages:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._places = asyncio.Semaphore(AT_ONCE)
        self._pages: list[Page] = []
        self._where: dict[str, Page] = {}
        """By job."""
        self._writing = 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While what belongs to a recovery is being written, wherever it is kept."""
        self._writing += 1
        try:
            yield
        finally:
            self._writing -= 1

    def adopt(self, item: Object) -> Page:
        """It was there before us."""
        page = Page(self._kube, item["metadata"]["namespace"], item["metadata"]["name"], self._places)
        page.adopt(item)
        self._pages.append(page)
        return page

    def found(self, job: str, page: Page | None) -> None:
        """What is kept of the job is there; None: in a ConfigMap of its own."""
        self._where.pop(job, None)
        if page is not None:
            self._where[job] = page

    def page_of(self, job: str) -> Page | None:
        return self._where.get(job)

    def place(self, job: str, namespace: str, size: int) -> Page | None:
        """For a recovery that begins. None: it gets a ConfigMap of its own."""
        if size > LARGEST or self._writing < CROWD:
            return None
        self._pages = [page for page in self._pages if not (page.gone or page.lost)]
        for page in self._pages:
            if page.namespace == namespace and page.size + size <= PAGE:
                break
        else:
            page = Page(self._kube, namespace, PREFIX + secrets.token_hex(6), self._places)
            self._pages.append(page)
        self._where[job] = page
        return page

    def forget(self, job: str) -> None:
        """It is kept no longer, or elsewhere."""
        page = self._where.pop(job, None)
        if page is not None:
            page.drop(job)

    def close(self) -> None:
        for page in self._pages:
            page.close()


def _version(item: Object) -> str:
    return str(item["metadata"].get("resourceVersion") or "")
