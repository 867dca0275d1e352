"""Carries incidents to the disk in a thread of its own, for a disk may take its time.

Only the newest version of an incident waits, so nothing piles up behind a slow disk. Trouble is told once, and once
more when it is over; nothing else depends on the file.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from evertrain.clusterd.timeline.incident import Incident
from evertrain.clusterd.timeline.store import Damaged, Store, put_aside

logger = logging.getLogger(__name__)

MAX_WAITING = 20_000
RETRY_SECONDS = 10.0
PRUNE_EVERY = 200
CLOSE_SECONDS = 10.0


class Writer:
    def __init__(
        self,
        path: Path,
        *,
        open_store: Callable[[Path], Store] = Store,
        retry_seconds: float = RETRY_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._open_store = open_store
        self._retry_seconds = retry_seconds
        self._wall_clock = wall_clock
        self._store: Store | None = None
        self._news = threading.Condition()
        self._waiting: OrderedDict[tuple[str, str], Incident] = OrderedDict()
        self._writing = 0
        self._closing = False
        self._failing = False
        self._dropped = False
        self._unpruned = PRUNE_EVERY
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def start(self, elsewhere: Sequence[Incident] = ()) -> list[Incident]:
        """Opens the file, and adds what is known from elsewhere. The incidents that were open when it was last written:
        by us, while another one with a file of its own may have been in charge since."""
        found: list[Incident] = []

        def begin(store: Store) -> None:
            found[:] = store.open_incidents()
            if elsewhere:
                store.add(elsewhere)

        self._guarded(begin)
        self._thread.start()
        return found

    def put(self, incidents: Iterable[Incident]) -> None:
        with self._news:
            for incident in incidents:
                self._waiting.pop((incident.job, incident.id), None)
                self._waiting[incident.job, incident.id] = incident
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
                if not self._dropped:
                    self._dropped = True
                    logger.warning("timeline: the disk is too slow, the oldest incidents that wait for it are dropped")
            self._news.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until all that was put is on the disk, or can't be; whether it is."""
        with self._news:
            self._news.wait_for(lambda: self._failing or not (self._waiting or self._writing), seconds)
            return not (self._waiting or self._writing)

    def close(self) -> None:
        """Writes what waits, if the disk lets it."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("timeline: the disk did not take the last incidents within %g s", CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closing or self._waiting)
                if self._failing and not self._closing:
                    self._news.wait_for(lambda: self._closing, self._retry_seconds)
                batch = dict(self._waiting)
                self._waiting.clear()
                self._writing = len(batch)
                closing = self._closing
            written = not batch or self._guarded(partial(self._write, tuple(batch.values())))
            with self._news:
                if not written:
                    self._put_back(batch)
                self._writing = 0
                self._news.notify_all()
                if closing and (not written or not self._waiting):
                    break
        if self._store is not None:
            self._store.close()

    def _put_back(self, batch: dict[tuple[str, str], Incident]) -> None:
        newer = self._waiting
        self._waiting = OrderedDict(batch)
        self._waiting.update(newer)

    def _write(self, rows: tuple[Incident, ...], store: Store) -> None:
        store.save(rows)
        self._unpruned += len(rows)
        if self._unpruned >= PRUNE_EVERY:
            store.prune(round(self._wall_clock() * 1000))
            self._unpruned = 0

    def _guarded(self, work: Callable[[Store], object]) -> bool:
        """Does the work with the file, a new one if it is damaged. False if it couldn't be done now."""
        for _ in range(2):
            try:
                if self._store is None:
                    self._store = self._open_store(self._path)
                work(self._store)
            except Damaged as error:
                if not self._begin_anew(str(error)):
                    return False
            except (sqlite3.Error, OSError) as error:
                self._fail(f"{error}")
                return False
            else:
                if self._failing:
                    self._failing = False
                    logger.warning("timeline: incidents are written to %s again", self._path)
                return True
        self._fail("the new file is damaged, too")
        return False

    def _begin_anew(self, why: str) -> bool:
        if self._store is not None:
            self._store.close()
            self._store = None
        try:
            aside = put_aside(self._path)
        except OSError as error:
            self._fail(f"it is damaged ({why}) and can't be moved aside: {error}")
            return False
        logger.error("timeline: %s is damaged (%s): it was moved to %s, a new one is begun", self._path, why, aside)
        return True

    def _fail(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            logger.error(
                "timeline: incidents can't be written to %s (%s): recovery goes on without, and it is tried again every"
                " %g s",
                self._path,
                why,
                self._retry_seconds,
            )
        if self._store is not None:
            self._store.close()
            self._store = None
