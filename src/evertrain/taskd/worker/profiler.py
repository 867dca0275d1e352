"""Switches marks on and off, and writes them while they are on."""

from __future__ import annotations

import contextlib
import logging
import threading

from evertrain.taskd.codes import PROFILING_RESULTS
from evertrain.taskd.worker.marks import marks
from evertrain.taskd.worker.torch_marks import TorchMarks
from evertrain.taskd.worker.traces import Traces

log = logging.getLogger(__name__)

WRITE, CHECK = 5.0, 60.0
"""Seconds between writes, and between looks at the disk."""
FAILED = 2


class Profiler:
    def __init__(self, rank: int, framework: str, limit_mb: int) -> None:
        self._traces = Traces(rank, limit_mb)
        self._torch = TorchMarks() if framework == "pt" else None
        """Of MindSpore nobody knows where to put marks."""
        self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="taskd-profiler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.switch(False, False)
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def switch(self, default: bool, communication: bool) -> int:
        """The code of the answer."""
        self._failed = False
        marks.default, marks.communication = default, communication
        try:
            self._mark(default or communication)
        except Exception as error:
            log.error("the timings can't be taken: %s", str(error))
            marks.default = marks.communication = False
            self._failed = True
            with contextlib.suppress(Exception):
                self._mark(False)
        return self.state()

    def _mark(self, wanted: bool) -> None:
        if self._torch is not None:
            self._torch.put_in() if wanted else self._torch.take_out()
        elif wanted:
            raise RuntimeError("there are none of MindSpore")

    def state(self) -> int:
        """What is on, as the manager is told it."""
        if self._failed:
            return PROFILING_RESULTS.start + 10 * FAILED + FAILED
        return PROFILING_RESULTS.start + 10 * int(marks.default) + int(marks.communication)

    def _write(self) -> None:
        since = 0.0
        while not self._ended.wait(WRITE):
            self._traces.write(marks.take())
            since += WRITE
            if since >= CHECK and (marks.default or marks.communication):
                since = 0.0
                self._traces.keep_limit()
        self._traces.write(marks.take())
