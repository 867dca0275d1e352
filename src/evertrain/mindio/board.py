"""The board: a few words of shared memory through which a rank shows its progress without a system call.

The agent creates one board (a memfd) for every process it starts and passes the descriptor on; it therefore outlives
the process. The rank writes a word in some 25 ns; the agent reads when it likes. That is all a heartbeat needs on one
host: there is no beating thread in the training process.

A second memfd, the fault board, is shared by all processes of a job and remembers which injected faults have fired,
so that a replayed step does not fire them again.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable

BOARD_FD = "EVERTRAIN_BOARD_FD"
STACK_FD = "EVERTRAIN_STACK_FD"
FAULT_BOARD_FD = "EVERTRAIN_FAULT_BOARD_FD"

# What the main thread is doing.
BOOT, DATA, COMPUTE, COLLECTIVE, UPDATE, OUTSIDE, FINISHED = range(7)
ACTIVITIES = ("boot", "data", "compute", "collective", "update", "outside", "finished")
"""boot: before the training function; data: in next(loader); compute: user code; collective: waits for peers in a
collective; update: between the optimizer's update and the end of the step; outside: out of user code, in recovery;
finished: the training function returned."""

_STEP, _MARK, _ACTIVITY, _SLOW, _PONG, _FAULT_AT, _STEPS_DONE, _HELD = range(8)
_EPOCH = 16  # after the lock
_HELPERS = 24
"""How many helpers were noted so far; a ring of the last of them follows."""
_RING = 128
_WORDS = _HELPERS + 1 + _RING
SIZE = _WORDS * 8
HELD_OFFSET = _HELD * 8
LOCK_OFFSET = 8 * 8
"""A C library's lock, up to 64 bytes: see `lifeline`."""


class Board:
    """One process's words. All are 64-bit; times are `time.monotonic_ns()`."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            self.fd = os.memfd_create("evertrain-board", 0)
            os.ftruncate(self.fd, SIZE)
        else:
            self.fd = fd
        self._map = mmap.mmap(self.fd, SIZE)
        self._words = memoryview(self._map).cast("q")

    # What the rank writes.

    def progress(self, step: int) -> None:
        """A step was completed: the state now contains `step` steps."""
        self._words[_STEP] = step
        self._words[_STEPS_DONE] += 1
        self._words[_MARK] = time.monotonic_ns()

    def mark(self, activity: int) -> None:
        """Another activity begins; counts as a sign of life."""
        self._words[_ACTIVITY] = activity
        self._words[_MARK] = time.monotonic_ns()

    def slow(self, depth: int) -> None:
        """Change the depth of announced slow sections by +1 or -1."""
        self._words[_SLOW] += depth
        self._words[_MARK] = time.monotonic_ns()

    def pong(self, number: int) -> None:
        self._words[_PONG] = number

    @property
    def epoch(self) -> int:
        """Written by the agent: controllers with a lower number are of the past."""
        return self._words[_EPOCH]

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._words[_EPOCH] = number

    def leave_imports(self, names: list[str]) -> None:
        """Modules that a process of this job needs; behind the words, because nobody reads them in a hurry."""
        text = "\n".join(names).encode()
        os.pwrite(self.fd, text, SIZE)
        os.ftruncate(self.fd, SIZE + len(text))

    def note_helpers(self, pids: Iterable[int]) -> None:
        """Processes that this one has started, such as a loader's workers: they may leave something behind, too."""
        for pid in pids:
            count = self._words[_HELPERS]
            self._words[_HELPERS + 1 + count % _RING] = pid
            self._words[_HELPERS] = count + 1

    def fault_now(self) -> None:
        """An injected fault happens now; lets the timeline show the true time of detection."""
        self._words[_FAULT_AT] = time.monotonic_ns()

    # What the agent reads.

    @property
    def step(self) -> int:
        return self._words[_STEP]

    @property
    def steps_done(self) -> int:
        """Steps completed by this very process."""
        return self._words[_STEPS_DONE]

    @property
    def imports(self) -> list[str]:
        return os.pread(self.fd, os.fstat(self.fd).st_size - SIZE, SIZE).decode().split()

    @property
    def helpers(self) -> set[int]:
        """The last processes that the rank has noted, most of them long gone."""
        ring = self._words[_HELPERS + 1 : _HELPERS + 1 + min(self._words[_HELPERS], _RING)]
        return set(ring.tolist())

    @property
    def marked_at(self) -> float:
        return self._words[_MARK] / 1e9

    @property
    def activity(self) -> int:
        return self._words[_ACTIVITY]

    @property
    def is_slow(self) -> bool:
        return self._words[_SLOW] > 0

    @property
    def last_pong(self) -> int:
        return self._words[_PONG]

    @property
    def fault_at(self) -> float:
        """When an injected fault hit this process, or 0.0."""
        return self._words[_FAULT_AT] / 1e9

    @property
    def is_held(self) -> bool:
        """The process holds the lock that tells of its death."""
        return self._words[_HELD] != 0

    def drop(self) -> None:
        """The lock was released although the process lives: it has become another program."""
        self._words[_HELD] = 0

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


class FaultBoard:
    """One byte for every injected fault of the job: how often has it fired?"""

    def __init__(self, count: int = 0, fd: int | None = None) -> None:
        if fd is None:
            self.fd = os.memfd_create("evertrain-faults", 0)
            os.ftruncate(self.fd, max(count, 1))
        else:
            self.fd = fd
        self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)

    def fire(self, index: int, times: int = 1) -> bool:
        """True for the first `times` calls only."""
        if self._map[index] >= times:
            return False
        self._map[index] += 1
        return True

    def fired(self, index: int) -> int:
        return self._map[index]

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
