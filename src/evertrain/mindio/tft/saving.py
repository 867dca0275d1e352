"""The dying-gasp checkpoint of one process, written in a thread of its own.

Once, unless a rank with which this one saves is lost: then it is written again, together with another holder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from evertrain.mindio.tft import device
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.messages import SaveGroup
from evertrain.mindio.tft.numbers import RET_ERROR

_Wanted = tuple[int, list[SaveGroup]]


class Saving:
    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._wanted: _Wanted | None = None
        self._result: int | None = None
        self._writing = False
        self._waiting: list[Callable[[int], None]] = []

    @property
    def under_way(self) -> bool:
        with self._lock:
            return self._writing

    def begin(self, step: int, groups: list[SaveGroup], on_done: Callable[[int], None]) -> None:
        """Save, and tell the result. Asked again for the same, it tells the result of the first time: a standby that
        took over may not know that the old controller had asked."""
        with self._lock:
            known = self._wanted
            if known is not None and known[0] != step:
                result: int | None = RET_ERROR
            elif known == (step, groups):
                result = self._result
            else:
                # What is being written goes on to its end, and is then written anew. Nobody waits for it any more.
                self._wanted, self._result, self._waiting, result = (step, groups), None, [], None
            if result is None:
                self._waiting.append(on_done)
                if not self._writing:
                    self._writing = True
                    threading.Thread(target=self._save, name="tft-save", daemon=True).start()
        if result is not None:
            on_done(result)

    def _save(self) -> None:
        while True:
            wanted = self._wanted
            assert wanted is not None
            result = self._write(*wanted)
            with self._lock:
                if wanted != self._wanted:
                    continue
                self._result, self._writing = result, False
                waiting, self._waiting = self._waiting, []
            for on_done in waiting:
                on_done(result)
            return

    def _write(self, step: int, groups: list[SaveGroup]) -> int:
        try:
            self._callbacks.use_device()
            with device.port().save_stream():
                return self._callbacks.save_ckpt(step, groups)
        except Exception:
            logger.exception("the checkpoint of step %d could not be written", step)
            return RET_ERROR
