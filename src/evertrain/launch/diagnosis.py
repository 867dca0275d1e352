"""Is a rank stuck, and in what? Pure: samples and evidence in, suspects and verdicts out.

A rank that makes no progress is first suspected (`suspects`), by its board alone. Then it is looked at from outside
(`evertrain.launch.stalls` gathers the evidence) and the verdict tells what holds it:

    frozen   it does not react at all: stopped, in the kernel, or its control group is frozen
    gil      C code holds the interpreter lock: signals are taken, Python threads can't run
    syscall  it sleeps in a system call; Python threads run
    busy     it computes: an endless loop looks like a long computation, so it gets more time

A rank inside a collective waits for the others and is not to blame, unless all ranks wait there.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from evertrain.mindio import board
from evertrain.mindio.timing import Timing

FROZEN, GIL, SYSCALL, BUSY = "frozen", "gil", "syscall", "busy"

STEPS_OF_PATIENCE = 5
"""A step may take this many times the longest one so far."""
_RUNNING = 0.1
"""Share of the time that a thread must get on a CPU to count as running; cores may be shared by many."""
_WORKING = 0.3
"""The same for other threads: a library's own threads wake up now and then."""
_EXEMPT = (board.BOOT, board.OUTSIDE, board.FINISHED)
"""Activities for which the controller has deadlines of its own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rank's board at one moment."""

    activity: int
    step: int
    steps_done: int
    marked_at: float
    is_slow: bool = False


@dataclass(slots=True)
class StepClock:
    """The longest step of the job, learned from samples.

    Samples are taken about ten times within the detection bound, so shorter steps are not resolved; they don't matter,
    because the bound is the lower limit of all patience anyway. A step that was interrupted by a recovery or contained
    a section announced as slow is left out. The first step of a process is not typical (compilation, caches); it counts
    only as long as there is no other. A single outlier among the recent ones (the machine was busy with something else)
    does not count either: five times as long would be a long time to leave a hang unnoticed.
    """

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    _first: float = 0.0
    _steps: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def longest(self) -> float:
        if not self._recent:
            return self._first
        return heapq.nlargest(2, self._recent)[-1]

    def feed(self, process: int, sample: Sample, now: float) -> None:
        if sample.is_slow or sample.activity in _EXEMPT:
            self._steps.pop(process, None)
            return
        done, since = self._steps.setdefault(process, (sample.steps_done, now))
        if sample.steps_done > done:
            took = (now - since) / (sample.steps_done - done)
            if done == 0:
                self._first = max(self._first, took)
            else:
                self._recent.append(took)
            self._steps[process] = (sample.steps_done, now)

    def forget(self, process: int) -> None:
        self._steps.pop(process, None)


def limit(sample: Sample, timing: Timing, longest: float, alarms: int = 0) -> float:
    """How long this rank may go without a sign of progress. Each earlier alarm at the same step doubles it, so that a
    slow but honest step is not run for ever."""
    if sample.is_slow or sample.activity in _EXEMPT:
        return math.inf
    seconds = max(timing.bound, STEPS_OF_PATIENCE * longest)
    if sample.activity == board.DATA:
        seconds = max(seconds, timing.data_stall)
    if sample.steps_done == 0:
        seconds = max(seconds, timing.first_step)
    return seconds * 2.0**alarms


@dataclass(frozen=True, slots=True)
class Suspicion:
    rank: int
    silence: float
    patience: float
    """How much silence is too much."""
    collective: bool = False
    """Every rank waits in a collective; this one stands for all."""


def suspects(
    samples: Mapping[int, Sample],
    now: float,
    timing: Timing,
    longest: float,
    alarms: Counter[int],
    awake_since: float = 0.0,
) -> list[Suspicion]:
    """The ranks without progress for too long. Time before `awake_since` does not count: nobody was watching."""
    found: list[Suspicion] = []
    training = {rank: sample for rank, sample in samples.items() if sample.activity != board.FINISHED}
    all_wait = bool(training) and all(sample.activity == board.COLLECTIVE for sample in training.values())
    for rank, sample in sorted(training.items()):
        silence = now - max(sample.marked_at, awake_since)
        patience = limit(sample, timing, longest, alarms[sample.step])
        overdue = silence > patience
        if all_wait and not overdue:
            return []
        if overdue and (all_wait or sample.activity != board.COLLECTIVE):
            found.append(Suspicion(rank, silence, patience, collective=all_wait))
    return found[:1] if all_wait else found


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of a suspect within a short time."""

    states: str
    """The main thread's state, one letter a sample."""
    window: float
    thread_cpu: float
    """Seconds of CPU time of the main thread in the window."""
    process_cpu: float
    answered: bool
    """A Python thread of it answered the ping."""
    stacks: tuple[str, ...] = ()
    """The stack dumps that it delivered when asked; a process needs no interpreter lock for that."""
    children_cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    words: str
    patient: bool
    """It visibly does something: give it `Timing.busy_stall` before it counts as hung."""


def diagnose(evidence: Evidence) -> Verdict:
    running = evidence.thread_cpu >= _RUNNING * evidence.window
    dumped = any(evidence.stacks)
    children_work = evidence.children_cpu >= _RUNNING * evidence.window
    last = evidence.states[-1:]
    if last == "T":
        return Verdict(FROZEN, "frozen: the process is stopped", False)
    if not running and set(evidence.states) == {"D"}:
        return Verdict(FROZEN, "frozen: it waits in the kernel for a device or a file system", False)
    if not running and set(evidence.states) == {"R"}:
        # Another of its threads may have had the luck to answer.
        return Verdict(BUSY, "starved: it wants to run and gets no CPU time", True)
    if not running and not evidence.answered and not dumped:
        return Verdict(FROZEN, "frozen: it does not react to anything", False)
    if not evidence.answered:
        words = "C code holds the GIL and " + ("computes" if running else "sleeps")
        return Verdict(GIL, words, patient=children_work or _moves(evidence.stacks))
    if running:
        return Verdict(BUSY, "busy: Python runs, an endless loop or a long computation", True)
    if evidence.process_cpu >= _WORKING * evidence.window:
        return Verdict(BUSY, "busy: its main thread waits for other threads that compute", True)
    if children_work:
        return Verdict(SYSCALL, "blocked in a system call while its child processes compute", True)
    return Verdict(SYSCALL, "blocked in a system call", False)


def _moves(stacks: tuple[str, ...]) -> bool:
    """Did the main thread's stack change from one dump to the next?"""
    return len({main_thread(stack) for stack in stacks if stack}) > 1


def main_thread(stack: str) -> str:
    """The main thread's part of a dump of all threads: the oldest thread comes last."""
    parts = [part for part in stack.split("\n\n") if part.strip()]
    # Its first line says "Thread" or "Current thread", depending on which thread took the signal.
    return parts[-1].strip().partition("\n")[2] if parts else ""
