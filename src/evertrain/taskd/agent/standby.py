"""A torchrun that waits for its place in the job: everything is ready but the rank.

A pod that stands by runs the same script as all others. It stops in torchrun, when torch is imported and before
anything of the job is touched, and makes as many processes ready as the pod will have. Which place it gets is written
into a file (an annotation of the pod, by the downward API). Then it goes on as the torchrun of that node, like one of a
pod that was just started, and its processes are warm.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import sys
from collections.abc import Sequence
from pathlib import Path

from evertrain.taskd import environment
from evertrain.taskd.agent.guardian import Guardian
from evertrain.taskd.agent.spares import Spares

LOOK = 1.0
"""Seconds between looks at a file whose changes nobody announces."""
_ANY_CHANGE = 0x00000100 | 0x00000080 | 0x00000002 | 0x00000008  # created, moved to, modified, closed after a write


class Reserve:
    """An agent's spares, and what they need."""

    def __init__(self, count: int | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        self.guardian = Guardian()
        count = environment.warm_spares() if count is None else count
        self.spares = Spares(count, environment.warm_imports(), self.selector, self.guardian.guard)


_reserve: Reserve | None = None


def inherited() -> Reserve | None:
    """What was made ready while this pod stood by, once: for the agent."""
    global _reserve
    found, _reserve = _reserve, None
    return found


def stand_by(command: Sequence[str], processes: int) -> str:
    """Wait for the pod's place; its rank. At once, and empty, in a pod that has its place from the beginning."""
    global _reserve
    file = environment.place_file()
    if not file:
        return ""
    if rank := _place(file):
        return rank
    print("taskd: this pod stands by", flush=True)
    _reserve = Reserve(processes)
    selector, spares = _reserve.selector, _reserve.spares
    spares.replenish(command, os.environ)
    announced = _watch(os.path.dirname(file))
    if announced is not None:
        selector.register(announced, selectors.EVENT_READ)
    told = False
    while not (rank := _place(file)):
        if not told and spares.ready >= processes:
            told = True
            print("taskd: this pod is ready to take a place", flush=True)
        limits = [LOOK] if announced is None else []
        limits += [left] if (left := spares.left) is not None else []
        for key, _ in selector.select(min(limits, default=None)):
            if key.fd == announced:
                os.read(announced, 65536)
            elif spares.knows(key.fd):
                spares.hear(key.fd)
        spares.tick()
    if announced is not None:
        selector.unregister(announced)
        os.close(announced)
    spares.keep(environment.warm_spares())
    print(f"taskd: this pod takes the place of rank {rank}", flush=True)
    return rank


def _place(file: str) -> str:
    """Empty if there is none yet."""
    try:
        text = Path(file).read_text().strip()
    except OSError:
        return ""
    if text and not (text.isascii() and text.isdigit()):
        print(f"taskd: {file}: {text[:100]!r} is no rank", file=sys.stderr, flush=True)
        return ""
    return text


def _watch(folder: str) -> int | None:
    """A descriptor that becomes readable when something in the directory changes; None if the system has no such."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), _ANY_CHANGE) < 0:
        os.close(descriptor)
        return None
    return descriptor
