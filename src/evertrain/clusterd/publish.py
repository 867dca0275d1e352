"""Writes the ConfigMaps by which ClusterD tells others what it knows: when they change, and not too often.

Only the newest content of a ConfigMap waits to be written, so a cluster in which much happens costs as many writes as
the limit allows, and what is written last is right. What somebody else deletes or changes is written again: at once
where who publishes it watches it (`seen`), else in the next round (`upkeep`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from evertrain import aio
from evertrain.kube.cache import Key
from evertrain.kube.port import CONFIG_MAP, AlreadyExists, ApiError, Kube, NotFound, Object
from evertrain.kube.queue import WorkQueue

logger = logging.getLogger(__name__)

RATE, BURST = 20.0, 100
"""Writes a second, and how many may come at once after a quiet time."""
AT_ONCE = 4
ROUND, LEAST_GAP = 60.0, 0.2
"""Seconds in which all that is written is looked at again, and at least between two looks."""


class Publisher:
    def __init__(
        self, kube: Kube, *, rate: float = RATE, burst: int = BURST, workers: int = AT_ONCE, upkeep: float | None = None
    ) -> None:
        """`upkeep`: the seconds of a round, if there shall be any. Not where others are to change what is written."""
        self._kube, self._upkeep = kube, upkeep
        self._rate, self._burst, self._workers = rate, float(burst), workers
        self._left, self._at = float(burst), 0.0
        self._wanted: dict[Key, Object | None] = {}
        """None: it shall not be there."""
        self._written: dict[Key, Object] = {}
        self._puts = 0
        self._numbers: dict[Key, int] = {}
        """The number of the newest that was put, as long as that is not written."""
        self._waiting: dict[Key, list[tuple[int, asyncio.Future[None]]]] = {}
        """Who waits until what has that number, or a newer, is written."""
        self._queue: WorkQueue[Key] = WorkQueue(max_delay=10.0)

    def put(self, item: Object) -> None:
        """The ConfigMap shall be so: its labels and its data."""
        key = _key(item)
        if key not in self._wanted and self._written.get(key) == item:
            return
        self._want(key, item)

    def remove(self, namespace: str, name: str) -> None:
        self._want((namespace, name), None)

    def _want(self, key: Key, item: Object | None) -> None:
        self._puts += 1
        self._wanted[key], self._numbers[key] = item, self._puts
        self._queue.add(key)

    def seen(self, namespace: str, name: str, there: Object | None) -> None:
        """So it is, or was a moment ago; None: it is not there."""
        key = namespace, name
        item = self._written.get(key)
        if item is None or key in self._wanted or (there is not None and _says(there, item)):
            return
        self._want(key, item)

    def written(self, item: Object) -> bool:
        """Is it so, as far as we know?"""
        return self._written.get(_key(item)) == item

    async def until_written(self, namespace: str, name: str) -> None:
        """Until the ConfigMap is as it was put last, or can't be because its namespace is not there. What is put from
        now on is not waited for."""
        key = namespace, name
        number = self._numbers.get(key)
        if number is None:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append((number, done))
        await done

    async def run(self) -> None:
        async with aio.TaskGroup() as tasks:
            for _ in range(self._workers):
                tasks.create_task(self._work())
            if self._upkeep is not None:
                tasks.create_task(self._look_after(self._upkeep))

    async def _look_after(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(LEAST_GAP if self._written else seconds)
            for key in list(self._written):
                await asyncio.sleep(max(LEAST_GAP, seconds / max(1, len(self._written))))
                if key not in self._written:
                    continue
                try:
                    self.seen(*key, await self._kube.get(CONFIG_MAP, key[1], key[0]))
                except NotFound:
                    self.seen(*key, None)
                except (ApiError, OSError, TimeoutError) as error:
                    logger.debug("ConfigMap %s/%s can't be looked at: %s", *key, error)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                if key in self._wanted:
                    await self._turn()
                    await self._write(key)
                self._queue.forget(key)
            except (ApiError, OSError, TimeoutError) as error:
                delay = self._queue.retry(key)
                logger.warning("ConfigMap %s/%s is not written: %s; again in %.2f s", *key, error, delay)
            except Exception:
                # One that can't be dealt with, whoever has made it so, must not stop the others.
                logger.exception("ConfigMap %s/%s is not written; again in %.2f s", *key, self._queue.retry(key))
            finally:
                self._queue.done(key)

    async def _turn(self) -> None:
        """Waits until another write is allowed."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            self._left = min(self._burst, self._left + (now - self._at) * self._rate) if self._at else self._left
            self._at = now
            if self._left >= 1:
                self._left -= 1
                return
            await asyncio.sleep((1 - self._left) / self._rate)

    async def _write(self, key: Key) -> None:
        """Until it is done, newer content may come: that is then wanted, and this is not."""
        item, number = self._wanted.pop(key, None), self._numbers[key]
        self._written.pop(key, None)  # who wants it as it was before must not be told that it is so
        try:
            await self._make(key, item)
        except NotFound:
            # Its namespace is not there, or was deleted: nobody could read it.
            logger.info("ConfigMap %s/%s: there is no such namespace", *key)
        except BaseException:
            self._wanted.setdefault(key, item)
            raise
        if self._numbers[key] == number:
            del self._numbers[key]
        waiting = self._waiting.pop(key, [])
        for due, done in waiting:
            if due <= number and not done.done():
                done.set_result(None)
        if left := [each for each in waiting if not each[1].done()]:
            self._waiting[key] = left

    async def _make(self, key: Key, item: Object | None) -> None:
        if item is None:
            with contextlib.suppress(NotFound):
                await self._kube.delete(CONFIG_MAP, key[1], key[0])
            return
        try:
            there = await self._kube.get(CONFIG_MAP, key[1], key[0])
        except NotFound:
            try:
                await self._kube.create(CONFIG_MAP, item)
                self._written[key] = item
                return
            except AlreadyExists:
                there = await self._kube.get(CONFIG_MAP, key[1], key[0])
        if not _says(there, item):
            metadata = there["metadata"]
            labels = {**(metadata.get("labels") or {}), **(item["metadata"].get("labels") or {})}
            await self._kube.replace(
                CONFIG_MAP, there | {"metadata": metadata | {"labels": labels}, "data": item.get("data") or {}}
            )
        self._written[key] = item


def config_map(namespace: str, name: str, data: dict[str, str], labels: dict[str, str] | None = None) -> Object:
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "data": data,
    }


def surplus(before: Iterable[Object], now: Iterable[Object]) -> list[Key]:
    """ConfigMaps that were needed before, and aren't any more."""
    kept = {_key(item) for item in now}
    return [_key(item) for item in before if _key(item) not in kept]


def _key(item: Object) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _says(there: Object, item: Object) -> bool:
    labels = there["metadata"].get("labels") or {}
    wanted = item["metadata"].get("labels") or {}
    return (there.get("data") or {}) == (item.get("data") or {}) and all(
        labels.get(name) == value for name, value in wanted.items()
    )
