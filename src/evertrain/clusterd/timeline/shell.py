"""Keeps the timeline: in memory for recoveries that go on, on the disk for ever, in the cluster for whoever looks.

`note` only folds the note into its incident. A thread writes to the disk, tasks write to the cluster: a ConfigMap per
job, at most once a second and always with the newest state, and Events; both not too many at once, for when a whole
cluster has faults the API server has better to do. All of it informs; what can't be written is tried again or told in
the log, and no recovery waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from evertrain import aio
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.timeline.history import LABEL, History, Unreadable, config_map, decoded
from evertrain.clusterd.timeline.incident import Incident, milliseconds
from evertrain.clusterd.timeline.pace import Pace
from evertrain.clusterd.timeline.store import Damaged, Store
from evertrain.clusterd.timeline.words import event, words
from evertrain.clusterd.timeline.writer import Writer
from evertrain.kube.events import Correlator, Told, again
from evertrain.kube.port import CONFIG_MAP, EVENT, AlreadyExists, ApiError, Kube, NotFound, Object

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
AT_ONCE = 8
PUBLISH_RATE, PUBLISH_BURST = 10.0, 100
"""ConfigMaps a second, of all jobs, and how many may be written at once after a quiet time."""
EVENT_RATE, EVENT_BURST = 10.0, 100
MAX_EVENTS_WAITING = 500
"""The oldest are not written if there are more."""
CLOSE_SECONDS = 5.0

_TROUBLE = (ApiError, OSError, TimeoutError)


class Timeline:
    """`start`, then `note` as often as there is something, then `close`. Without a path nothing is kept on the disk."""

    def __init__(self, kube: Kube, path: Path | None = None, *, open_store: Callable[[Path], Store] = Store) -> None:
        self._kube = kube
        self._path = path
        self._writer = None if path is None else Writer(path, open_store=open_store)
        self._history = History()
        self._correlator = Correlator()
        self._jobs: dict[str, Job] = {}
        self._unpublished: set[str] = set()
        self._publishers: dict[str, asyncio.Task[None]] = {}
        self._told: deque[tuple[Job, Told]] = deque(maxlen=MAX_EVENTS_WAITING)
        self._teller: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(AT_ONCE)
        self._publishing_pace, self._event_pace = Pace(PUBLISH_RATE, PUBLISH_BURST), Pace(EVENT_RATE, EVENT_BURST)
        self._refusing = False
        self._ending = asyncio.Event()
        self.closed: Callable[[Incident], None] = lambda incident: None
        """Hears of each incident that ends while we are here."""

    @property
    def open(self) -> int:
        """How many incidents are."""
        return sum(not self._history.of(job)[-1].closed for job in self._history.jobs())

    async def start(self) -> None:
        """Goes on with what was open when ClusterD was last here, or another one was in charge."""
        for item in await self._published():
            try:
                self._history.restore(decoded(item.get("data")))
            except Unreadable as error:
                metadata = item["metadata"]
                logger.warning("timeline: ConfigMap %s/%s: %s", metadata["namespace"], metadata["name"], error)
        if self._writer is not None:
            opened = await asyncio.to_thread(self._writer.start, self._history.all())
            closed = self._history.restore(opened)
            left = {(each.job, each.id) for each in opened}
            self._writer.put(each for each in self._history.all() if each.closed and (each.job, each.id) in left)
            self._writer.put(closed)

    async def _published(self) -> list[Object]:
        """Who does not know it writes over it with the next incident: it is asked for until it is told or refused."""
        delay = PUBLISH_SECONDS
        while not self._ending.is_set():
            try:
                return (await self._kube.list(CONFIG_MAP, labels=LABEL)).items
            except _TROUBLE as error:
                logger.warning("timeline: what was published before can't be read: %s", error)
                if isinstance(error, ApiError) and error.code == 403:
                    break
            await self._wait(delay)
            delay = min(MAX_RETRY_SECONDS, 2 * delay)
        return []

    def end(self) -> None:
        """Nothing is waited for any more: `close` comes next."""
        self._ending.set()

    def note(self, job: Job, note: Note, now: float) -> None:
        changed = self._history.note(job, note, milliseconds(now))
        if not changed:
            return
        self._jobs[job.uid] = job
        if self._writer is not None:
            self._writer.put(changed)
        for incident in changed:
            if incident.closed:
                self.closed(incident)
        self._publish(job.uid)
        said = words(note, changed[-1])
        told = None if said is None else self._correlator.tell(job, said, now)
        if told is not None:
            self._told.append((job, told))
            if self._teller is None or self._teller.done():
                self._teller = asyncio.create_task(self._tell())

    def incidents(self, job: str) -> tuple[Incident, ...]:
        """The newest of a job, oldest first."""
        return self._history.of(job)

    def phase(self, job: str) -> str:
        """That its open incident is in; empty if none is open."""
        newest = self._history.of(job)[-1:]
        return newest[0].phases[-1].name if newest and not newest[0].closed else ""

    async def recorded(self, job: str = "", namespace: str = "") -> list[Incident]:
        """All that are on the disk, of a job by name or uid if one is given. Empty where nothing is kept."""
        path, writer = self._path, self._writer
        if path is None or writer is None:
            return []

        def read() -> list[Incident]:
            writer.flush(CLOSE_SECONDS)
            store = Store(path, read_only=True)
            try:
                return store.incidents(job, namespace)
            finally:
                store.close()

        try:
            return await asyncio.to_thread(read)
        except (Damaged, OSError) as error:
            logger.warning("timeline: %s can't be read: %s", path, error)
            return []

    def forget(self, job: str, now: float) -> None:
        """The job is gone, and with it its ConfigMap."""
        ended = self._history.forget(job, milliseconds(now))
        if ended is not None:
            if self._writer is not None:
                self._writer.put([ended])
            self.closed(ended)
        self._jobs.pop(job, None)
        self._unpublished.discard(job)
        self._correlator.forget(job)

    def retain(self, jobs: Collection[str], now: float) -> None:
        """These are all the jobs that there are: others went while nobody was here."""
        for job in self._history.jobs():
            if job not in jobs:
                self.forget(job, now)

    async def close(self) -> None:
        """Writes what waits, but not for long."""
        self.end()
        for job in list(self._unpublished):
            self._publish(job)
        waiting = [*self._publishers.values(), *([self._teller] if self._teller is not None else [])]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)

    def _publish(self, job: str) -> None:
        self._unpublished.add(job)
        if job not in self._publishers:
            task = self._publishers[job] = asyncio.create_task(self._publishing(job))
            task.add_done_callback(lambda _: self._publishers.pop(job, None))

    async def _publishing(self, job: str) -> None:
        """Until the cluster has the newest state."""
        delay = PUBLISH_SECONDS
        while job in self._unpublished:
            await self._turn(self._publishing_pace)
            self._unpublished.discard(job)
            if await self._written(job):
                delay = PUBLISH_SECONDS
            else:
                self._unpublished.add(job)
                delay = min(MAX_RETRY_SECONDS, 2 * delay)
                if self._ending.is_set():
                    return
            await self._wait(delay)

    async def _turn(self, pace: Pace) -> None:
        delay = pace.reserve(asyncio.get_running_loop().time())
        if delay:
            await self._wait(delay)

    async def _wait(self, seconds: float) -> None:
        """Not beyond the end."""
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(seconds):
                await self._ending.wait()

    async def _written(self, job: str) -> bool:
        about = self._jobs.get(job)
        if about is None:
            return True
        item = config_map(about, self._history.of(job))
        metadata = item["metadata"]
        patch = {"metadata": {key: metadata[key] for key in ("labels", "ownerReferences")}, "data": item["data"]}
        try:
            async with self._places:
                try:
                    await self._kube.patch(CONFIG_MAP, metadata["name"], metadata["namespace"], patch)
                except NotFound:
                    await self._kube.create(CONFIG_MAP, item)
        except NotFound:
            logger.info("timeline: the namespace of job %s/%s is gone", about.namespace, about.name)
        except _TROUBLE as error:
            if not self._refusing:
                self._refusing = True
                logger.warning(
                    "timeline: the incidents of job %s/%s can't be published, it is tried again: %s",
                    about.namespace,
                    about.name,
                    error,
                )
            return False
        self._refusing = False
        return True

    async def _tell(self) -> None:
        while self._told:
            await self._turn(self._event_pace)
            job, told = self._told.popleft()
            try:
                await self._write_event(job, told)
            except _TROUBLE as error:
                logger.info("event %s of job %s/%s is lost: %s", told.words.reason, job.namespace, job.name, error)

    async def _write_event(self, job: Job, told: Told) -> None:
        if told.count > 1:
            try:
                await self._kube.patch(EVENT, told.name, job.namespace, again(told))
                return
            except NotFound:
                pass  # it has expired, or its beginning was lost
        try:
            await self._kube.create(EVENT, event(job, told))
        except AlreadyExists:
            await self._kube.patch(EVENT, told.name, job.namespace, again(told))
