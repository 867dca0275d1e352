"""The dying-gasp checkpoint of one process, written in a thread of its own and at most once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from evertrain.mindio.tft import device
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.messages import SaveGroup
from evertrain.mindio.tft.numbers import RET_ERROR


class Saving:
    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._step = -1
        self._result: int | None = None
        self._waiting: list[Callable[[int], None]] = []

    @property
    def under_way(self) -> bool:
        with self._lock:
            return self._step >= 0 and self._result is None

    def begin(self, step: int, groups: list[SaveGroup], on_done: Callable[[int], None]) -> None:
        """Save, and tell the result. Asked again for the same step, it tells the result of the first time: a standby
        that took over may not know that the old controller had asked."""
        with self._lock:
            first = self._step < 0
            if first:
                self._step = step
            if self._step == step and self._result is None:
                self._waiting.append(on_done)
                result = None
            else:
                result = self._result if self._step == step else RET_ERROR
        if first:
            threading.Thread(target=self._save, args=(step, groups), name="tft-save", daemon=True).start()
        elif result is not None:
            on_done(result)

    def _save(self, step: int, groups: list[SaveGroup]) -> None:
        result = RET_ERROR
        try:
            self._callbacks.use_device()
            with device.port().save_stream():
                result = self._callbacks.save_ckpt(step, groups)
        finally:
            with self._lock:
                self._result = result
                waiting, self._waiting = self._waiting, []
            for on_done in waiting:
                on_done(result)
