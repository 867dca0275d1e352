"""The operator at work: watches feed a queue of jobs, workers look at one job each and do what has to be done.

It keeps nothing that the cluster doesn't keep as well. Kill it at any point, start it again, and it goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from evertrain.kube.cache import Key, key_of
from evertrain.kube.port import ApiError, Kube
from evertrain.kube.queue import WorkQueue
from evertrain.operator.carry import Again, Carrier
from evertrain.operator.observe import Observer
from evertrain.operator.rankfile import RankFiles
from evertrain.operator.reconcile import reconcile

logger = logging.getLogger(__name__)

RANK_TABLES = Path("/user/mindx-dl/ranktable")
WORKERS = 8
RESYNC = 600.0
"""Every job is looked at this often, also if nothing was heard of it. Nothing depends on it."""


def utc_now() -> datetime:
    return datetime.now(UTC)


class Operator:
    def __init__(
        self,
        kube: Kube,
        *,
        gang: bool = True,
        namespace: str | None = None,
        rank_tables: Path = RANK_TABLES,
        workers: int = WORKERS,
        parallel: int = 32,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._files = RankFiles(rank_tables)
        self.observer = Observer(kube, self._files, gang=gang, namespace=namespace)
        self._carrier = Carrier(kube, self._files, self.observer.wrote, parallel=parallel)
        self._queue: WorkQueue[Key] = WorkQueue()
        self._workers = workers
        self._namespace = namespace
        self._clock = clock
        self.ready = asyncio.Event()
        """Set once all jobs are known and are being looked at."""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        self.observer.listen(self._queue.add)
        async with asyncio.TaskGroup() as tasks:
            for cache in self.observer.caches:
                tasks.create_task(cache.run())
            for cache in self.observer.caches:
                await cache.synced.wait()
            self._files.remove_others(self._may_exist)
            for _ in range(self._workers):
                tasks.create_task(self._work())
            tasks.create_task(self._resync())
            self.ready.set()

    def _may_exist(self, namespace: str, job: str) -> bool:
        """Jobs of namespaces that are none of our business may."""
        return self._namespace not in (None, namespace) or self.observer.jobs.get(job, namespace) is not None

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await self.look(key)
                self._queue.forget(key)
            except Again as reason:
                self._retry(key, str(reason))
            except (ApiError, OSError, TimeoutError) as error:
                self._retry(key, f"{type(error).__name__}: {error}")
            except Exception:
                # One job that we can't handle must not stop the others.
                logger.exception("job %s/%s", *key)
                self._retry(key, "see above")
            finally:
                self._queue.done(key)

    def _retry(self, key: Key, reason: str) -> None:
        self.observer.failed(key)
        delay = self._queue.retry(key)
        logger.info("job %s/%s: %s; again in %.3f s", *key, reason, delay)

    async def look(self, key: Key) -> None:
        """One look at one job."""
        now = self._clock()
        seen = await self.observer.observe(key, now)
        if seen is None:
            self._files.remove(*key)
            return
        outcome = reconcile(seen)
        await self._carrier.carry_out(seen, outcome)
        if outcome.wake is not None:
            self._queue.add_after(key, max(0.0, (outcome.wake - self._clock()).total_seconds()) + 0.01)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC)
            for job in self.observer.jobs:
                self._queue.add(key_of(job))
