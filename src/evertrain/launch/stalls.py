"""The watch over progress: samples all boards, looks closely at a suspect, reports what hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from evertrain import aio
from evertrain.launch import diagnosis, procfs
from evertrain.launch.diagnosis import Evidence, Sample, StepClock, Suspicion
from evertrain.launch.processes import Process
from evertrain.mindio import board
from evertrain.mindio.protocol import Fault
from evertrain.mindio.timing import Timing

STACK_SIGNAL = signal.SIGRTMIN + 8
_IN_RECOVERY = Sample(activity=board.OUTSIDE, step=0, steps_done=0, marked_at=0.0)
_LOOK = 0.05
"""Seconds between two looks at a suspect; there are three."""
_LATE = 0.2
"""Seconds more for one that has not reacted at all: where many want to run, each waits for its turn."""


class StallWatcher:
    def __init__(
        self,
        timing: Timing,
        processes: Mapping[int, Process],
        *,
        ping: Callable[[int, int], None],
        report: Callable[[Process, Fault], None],
    ) -> None:
        """`ping(rank, number)` has the rank write the number on its board."""
        self._timing = timing
        self._processes = processes
        self._ping = ping
        self._report = report
        self._clock = StepClock()
        self._alarms: Counter[int] = Counter()
        self._judged: dict[int, tuple[float, float]] = {}
        """By pid: the mark that was judged and when to look again if it is still the same."""
        self._numbers = 0
        self._awake_since = 0.0

    async def run(self) -> None:
        interval = min(max(self._timing.bound / 10, 0.02), 0.25)
        last = time.monotonic()
        async with aio.TaskGroup() as investigations:
            while True:
                await asyncio.sleep(interval)
                now = time.monotonic()
                if now - last > interval + self._timing.bound / 2:
                    # The launcher itself was stopped or the machine slept; nobody's silence proves anything.
                    self._awake_since = now
                last = now
                # Looking closely takes a moment; begun this much early, the verdict is there when the time is up.
                for suspicion in self._look(now, early=interval + 3 * _LOOK):
                    process = self._processes[suspicion.rank]
                    self._judged[process.pid] = (process.board.marked_at, float("inf"))
                    investigations.create_task(self._investigate(process, suspicion))

    def _look(self, now: float, early: float) -> list[Suspicion]:
        samples: dict[int, Sample] = {}
        for rank, process in self._processes.items():
            if process.reported or process.doomed or process.code is not None:
                self._clock.forget(process.pid)
                if process.code != 0:
                    # About to be replaced. Those who wait for it in a collective don't wait for each other.
                    samples[rank] = _IN_RECOVERY
                continue
            words = process.board
            sample = Sample(words.activity, words.step, words.steps_done, words.marked_at, words.is_slow)
            self._clock.feed(process.pid, sample, now)
            samples[rank] = sample
        longest, since = self._clock.longest, self._awake_since
        found = diagnosis.suspects(samples, now + early, self._timing, longest, self._alarms, since)
        return [suspicion for suspicion in found if self._is_new(self._processes[suspicion.rank], now)]

    def _is_new(self, process: Process, now: float) -> bool:
        mark, again = self._judged.get(process.pid, (-1.0, 0.0))
        return mark != process.board.marked_at or now >= again

    async def _investigate(self, process: Process, suspicion: Suspicion) -> None:
        mark, step = process.board.marked_at, process.board.step
        self._numbers += 1
        number = self._numbers

        def has_answered() -> bool:
            return process.code is None and process.board.last_pong == number

        evidence = await gather(process, lambda: self._ping(process.rank, number), has_answered)
        await asyncio.sleep(max(mark, self._awake_since) + suspicion.patience - time.monotonic())
        evidence = await wait_for_reaction(process, evidence, has_answered)
        if process.reported or process.doomed or process.code is not None or process.board.marked_at != mark:
            self._judged.pop(process.pid, None)
            return
        verdict = diagnosis.diagnose(evidence)
        now = time.monotonic()
        silence = now - max(mark, self._awake_since)
        patience = self._timing.busy_stall * 2.0 ** self._alarms[step]
        if verdict.patient and not suspicion.collective and silence < patience:
            self._judged[process.pid] = (mark, mark + patience)
            return
        self._judged[process.pid] = (mark, float("inf"))
        self._alarms[step] += 1
        stack = next((stack for stack in reversed(evidence.stacks) if stack), "")
        if suspicion.collective:
            kind, detail = "hccl", f"all ranks wait in a collective, for {silence:.1f} s"
        else:
            kind, detail = "hang", f"no progress for {silence:.1f} s; {verdict.words}"
            process.reported = True
        self._report(
            process,
            Fault(
                kind=kind,
                rank=process.rank,
                incarnation=process.incarnation,
                detail=detail,
                stack=stack,
                at=happened_at(process, now),
            ),
        )


def happened_at(process: Process, now: float) -> float:
    """When a fault hit this process: known exactly if it was injected and nothing has happened there since."""
    at = process.board.fault_at
    return at if at and at >= process.board.marked_at else now


async def gather(process: Process, ping: Callable[[], None], has_answered: Callable[[], bool]) -> Evidence:
    """Look at a process for a tenth of a second."""
    ping()
    children = await asyncio.to_thread(procfs.descendants_cpu, process.pid)
    begin = time.monotonic()
    first, thread_cpu = procfs.read_stat(process.stat_fd), procfs.thread_cpu(process.pid) or 0.0
    states = first.state if first else "Z"
    stacks = []
    for _ in range(2):
        can_dump = ask_for_stack(process)
        await asyncio.sleep(_LOOK)
        stacks.append(read_stack(process) if can_dump else "")
        stat = procfs.read_stat(process.stat_fd)
        states += stat.state if stat else "Z"
    window = time.monotonic() - begin
    last = procfs.read_stat(process.stat_fd)
    return Evidence(
        states=states,
        window=window,
        thread_cpu=(procfs.thread_cpu(process.pid) or 0.0) - thread_cpu,
        process_cpu=last.cpu - first.cpu if first and last else 0.0,
        answered=has_answered(),
        stacks=tuple(stacks),
        children_cpu=await asyncio.to_thread(procfs.descendants_cpu, process.pid) - children,
    )


async def wait_for_reaction(process: Process, evidence: Evidence, has_answered: Callable[[], bool]) -> Evidence:
    """With what came after the look, if nothing had. One that is stopped or waits in the kernel won't react later."""
    end = time.monotonic() + _LATE
    while not evidence.answered and not any(evidence.stacks) and evidence.states[-1:] in ("R", "S"):
        evidence = replace(evidence, answered=has_answered(), stacks=(read_stack(process),))
        if time.monotonic() >= end:
            break
        await asyncio.sleep(_LOOK)
    return evidence


def ask_for_stack(process: Process) -> bool:
    """False if the process would not survive the question."""
    if process.code is not None or not procfs.catches(process.pid, STACK_SIGNAL):
        return False
    # The offset is shared with the process, which writes wherever it stands.
    os.ftruncate(process.stack_fd, 0)
    os.lseek(process.stack_fd, 0, os.SEEK_SET)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, STACK_SIGNAL)
    return True


def read_stack(process: Process) -> str:
    if process.code is not None:
        return ""
    return os.pread(process.stack_fd, 1 << 20, 0).decode(errors="replace")
