"""Warm spares: processes that have done everything slow before anybody needs them.

Warming up takes seconds of CPU time beside the training ranks, so a spare starts only when the ranks train, and again
when a recovery is over. It begins at the lowest priority: where cores are idle, that costs nobody anything. If it is
not ready after a few seconds, all cores are taken, and waiting politely would mean to have no spare for a long time, so
it goes on like any other process. A fault before it is ready is answered with a cold start. Becoming a rank costs one
line on a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable

from evertrain.launch.processes import SpareProcess, Spawner
from evertrain.mindio import priority

_MAX_FAILURES = 3
_POLITE_SECONDS = 3.0


class Spares:
    def __init__(
        self,
        spawner: Spawner,
        count: int,
        *,
        watch: Callable[[SpareProcess], None],
        on_ready: Callable[[SpareProcess], None],
        say: Callable[[str], None],
    ) -> None:
        self._spawner = spawner
        self._count = count
        self._watch = watch
        self._on_ready = on_ready
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._spares: list[SpareProcess] = []
        self._failures = 0

    @property
    def ready(self) -> int:
        return sum(spare.is_ready and not spare.reported for spare in self._spares)

    def replenish(self) -> None:
        """Start as many as are missing."""
        while len(self._spares) < self._count and self._failures < _MAX_FAILURES:
            try:
                spare = self._spawner.spare()
            except OSError as error:
                self._failures += 1
                self._say(f"a warm spare could not be started: {error.strerror}")
                return
            priority.lower(spare.pid)
            self._loop.call_later(_POLITE_SECONDS, self._insist, spare)
            self._spares.append(spare)
            self._loop.add_reader(spare.link, self._on_line, spare)
            self._watch(spare)

    def _insist(self, spare: SpareProcess) -> None:
        if spare in self._spares and not spare.is_ready:
            raise_priority(spare.pid, self._loop)

    def take(self) -> SpareProcess | None:
        """A warm process, if there is one; it belongs to the caller."""
        for spare in self._spares:
            if spare.is_ready and not spare.reported:  # one that is dying or stopped would never get to the training
                self._spares.remove(spare)
                return spare
        return None

    def lost(self, spare: SpareProcess) -> None:
        """A spare has ended by itself."""
        if spare not in self._spares:
            return
        self._spares.remove(spare)
        self._loop.remove_reader(spare.link)
        if spare.doomed:
            return
        self._failures += 1
        for stream in spare.streams.values():
            stream.drain()
        words = spare.streams[2].last_words()
        if self._spawner.park:
            # A script that can't be run without a rank; waiting in front of it is the second best.
            self._spawner.park = False
            more = "spares will not run the script any more"
        else:
            more = "it is started again" if self._failures < _MAX_FAILURES else "replacements will start cold"
        self._say(f"a warm spare ended with code {spare.code}{f' ({words})' if words else ''}; {more}")
        self._loop.call_later(1.0, self.replenish)

    def end(self) -> list[SpareProcess]:
        """Kill them all; they are still to be reaped."""
        self._failures = _MAX_FAILURES
        for spare in self._spares:
            self._loop.remove_reader(spare.link)
            spare.kill()
        ended, self._spares = self._spares, []
        return ended

    def _on_line(self, spare: SpareProcess) -> None:
        try:
            data = spare.link.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        # Its only line is short; the end of the link is followed by the end of the process.
        self._loop.remove_reader(spare.link)
        with contextlib.suppress(ValueError):
            spare.is_ready = bool(json.loads(data).get("ready"))
        if spare.is_ready:
            self._failures = 0
            raise_priority(spare.pid, self._loop)
            self._on_ready(spare)


def raise_priority(pid: int, loop: asyncio.AbstractEventLoop, tries: int = 10) -> None:
    if not priority.restore(pid) and tries:
        loop.call_later(priority.AGAIN, raise_priority, pid, loop, tries - 1)
