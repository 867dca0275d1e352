"""Threads that wait in a caller's place where the library offers no wait with a way out.

One thread for every wait at the same time, kept for the next one: a repair waits for hundreds of tensors, one after
the other. A thread that got stuck is left behind and ends when its operation does.
"""

from __future__ import annotations

import queue
import threading
from typing import Any


class _Ticket:
    def __init__(self, work: Any) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: Exception | None = None


class Waiters:
    """The waiting threads of one group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Ticket | None]] = []
        self._waiting: set[_Ticket] = set()
        self._stopped = False

    def wait(self, work: Any) -> Exception | None:
        """Wait for a raw operation; returns its error. Returns early, without one, if `stop` is called."""
        ticket = _Ticket(work)
        with self._lock:
            if self._stopped:
                return None
            self._waiting.add(ticket)
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="evertrain-waiter", daemon=True).start()
        inbox.put(ticket)
        try:
            ticket.done.wait()
        finally:
            with self._lock:
                self._waiting.discard(ticket)
        return ticket.error

    def stop(self) -> None:
        """Let everybody go who waits, and end the threads that are not stuck."""
        with self._lock:
            self._stopped = True
            tickets, idle = list(self._waiting), list(self._idle)
            self._idle.clear()
        for ticket in tickets:
            ticket.done.set()
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: queue.SimpleQueue[_Ticket | None]) -> None:
        while (ticket := inbox.get()) is not None:
            try:
                ticket.work.wait()
            except Exception as error:
                ticket.error = error
            with self._lock:
                if not self._stopped:
                    self._idle.append(inbox)
                stopped = self._stopped
            ticket.done.set()
            del ticket
            if stopped:
                return
