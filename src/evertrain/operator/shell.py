"""The operator at work: watches feed a queue of jobs, workers look at one job each and do what has to be done.

It keeps nothing that the cluster doesn't keep as well. Kill it at any point, start it again, and it goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from evertrain import aio
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
TROUBLES = UNFINISHED, API, DEFECT = "unfinished", "api", "defect"
"""Why a look is repeated: something was in the way, the API server said no or nothing, or we have made a mistake."""


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


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
        token_of: Callable[[str], str] = lambda uid: "",
        job_tls: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`token_of` makes the token that a job, by its uid, shows to ClusterD; empty where that wants none. `job_tls`
        has the certificates that jobs get, as they are now, by the names of their files; none where that is empty."""
        self._files = RankFiles(rank_tables)
        self.observer = Observer(kube, self._files, gang=gang, namespace=namespace, token_of=token_of, job_tls=job_tls)
        self._carrier = Carrier(kube, self._files, self.observer.wrote, parallel=parallel)
        self._queue: WorkQueue[Key] = WorkQueue()
        self._workers = workers
        self._namespace = namespace
        self._clock = clock
        self.ready = asyncio.Event()
        """Set once all jobs are known and are being looked at."""
        self.looked: Callable[[float, str], None] = lambda seconds, trouble: None
        """Hears of each look: how long it took, and which of the troubles there was, if any."""

    @property
    def waiting(self) -> int:
        """How many jobs wait to be looked at."""
        return len(self._queue)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        self.observer.listen(self._queue.add)
        async with aio.TaskGroup() as tasks:
            for cache in self.observer.caches:
                tasks.create_task(cache.run())
            await self.observer.synced()
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
            began, trouble = time.monotonic(), ""
            try:
                await self.look(key)
                self._queue.forget(key)
            except Again as reason:
                trouble = UNFINISHED
                self._retry(key, str(reason))
            except (ApiError, OSError, TimeoutError) as error:
                trouble = API
                self._retry(key, f"{type(error).__name__}: {error}")
            except Exception:
                # One job that we can't handle must not stop the others.
                trouble = DEFECT
                logger.exception("job %s/%s", *key)
                self._retry(key, "see above")
            finally:
                self._queue.done(key)
            self.looked(time.monotonic() - began, trouble)

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
