"""Starting and ending the worker processes of a loader, with an interrupt possible at any moment."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from evertrain.mindio import segments
from evertrain.torch import link
from evertrain.torch.interrupt import SIGNAL


def rebuilt(loader: DataLoader, generator: torch.Generator, *, persistent: bool, **order: Any) -> DataLoader:
    """A loader with the same settings and another order. Batches always come in order, also if the user allowed
    otherwise: the order would depend on the workers' speed."""
    settings: dict[str, Any] = {}
    if loader.num_workers > 0:
        settings.update(
            timeout=loader.timeout,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=persistent,
        )
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=getattr(loader, "pin_memory_device", ""),
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        **settings,
        **order,
    )


class Workers:
    """Holds the iterator in use, and ends the worker processes of iterators that were given up.

    Ending workers takes 100 ms, and seconds if one of them is busy; a recovery doesn't wait for it.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()
        """For the loaders we build: their draw for the workers' seed disturbs nobody."""
        self._loader: Any = None
        self._iterator: Any = None
        self._ending: list[threading.Thread] = []

    def start(self, build: Callable[[], Any], key: int) -> Iterator[Any]:
        """Iterate anew. The loader is kept from one epoch to the next, for its persistent workers."""
        if self._loader is None:
            self._loader = build()
        self.generator.manual_seed(key)
        workers = getattr(self._loader, "num_workers", 0)
        # A worker process that was started just when the interrupt came would be in no list yet and never be ended.
        with _interrupts_deferred() if workers else contextlib.nullcontext():
            self._iterator = iter(self._loader)
        if workers and link.is_launched():
            link.board().note_helpers(_pids(self._iterator))
        return self._iterator

    def drop(self) -> None:
        iterator, self._iterator, self._loader = self._iterator, None, None
        if getattr(iterator, "_workers", None):
            thread = threading.Thread(target=_end_workers, args=(iterator,), name="evertrain-loader-end", daemon=True)
            self._ending = [*(ending for ending in self._ending if ending.is_alive()), thread]
            thread.start()

    def close(self) -> None:
        self.drop()
        for thread in self._ending:
            thread.join()
        self._ending.clear()


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    # At the level of the kernel: the workers inherit the mask, and nobody sends them this signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_workers(iterator: Any) -> None:
    # The iterator's own way, because it first tells torch's SIGCHLD handler to expect the end of these processes.
    try:
        iterator._shutdown_workers()
    finally:
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
        segments.remove(_pids(iterator))


def _pids(iterator: Any) -> list[int]:
    return [worker.pid for worker in getattr(iterator, "_workers", ())]
