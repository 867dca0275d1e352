"""The one processor of a training process and what belongs to it, behind the functions of the interface."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from evertrain.mindio.tft import device, environment, log
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.numbers import RET_K8S
from evertrain.mindio.tft.processor import Processor, Settings

FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")


def _nothing(_: bool) -> None:
    pass


class Runtime:
    def __init__(self) -> None:
        self.callbacks = Callbacks()
        self.processor: Processor | None = None
        self.framework_type: str | None = None
        self.decrypt: Callable[[str], str] | None = None
        self.device: Any = None
        self.shield: Callable[[bool], None] = _nothing
        """Called with True and False around the library's own code in the training thread: whoever interrupts that
        thread must not do it there."""
        self.close_standby: Callable[[], None] = lambda: None
        self._signals: dict[int, Any] = {}

    # The processor.

    def init_processor(self, settings: Settings, on_standby: Callable[..., Any]) -> None:
        if self.processor is not None:
            raise Exception("tft_init_processor was called before in this process")
        log.start()
        port = device.port()
        self.device = port.current()
        self.callbacks.use_device = lambda: device.port().use(self.device)
        self._mute_signals()
        self.processor = Processor(settings, self.callbacks, on_exit=self.exit, on_standby=on_standby)

    def current(self) -> Processor:
        if self.processor is None or not self.processor.running:
            raise Exception("the processor is not running: call tft_init_processor and tft_start_processor first")
        return self.processor

    def destroy_processor(self, done: bool = True) -> None:
        processor, self.processor = self.processor, None
        if processor is not None:
            processor.destroy(done)
        self.close_standby()
        self._restore_signals()

    def exit(self) -> None:
        """The controller ends this process. MindSpore ends it by its own exit handler, if it has one."""
        if not (environment.mindspore() and self.callbacks.has("exit")):
            give_up("the controller ended the job")

    # Interruptions.

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        self.shield(True)
        try:
            yield
        finally:
            self.shield(False)

    def _mute_signals(self) -> None:
        """The platform's SIGTERM must not end a process that others still need for a repair or a checkpoint."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._signals[number] = signal.signal(number, _ignore)

    def _restore_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._signals.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._signals.clear()


def _ignore(*_: object) -> None:
    pass


_leaving = threading.Lock()


def give_up(reason: str) -> NoReturn:
    """End this process, at once, with an exit code that the platform takes for a failure.

    A controller that lives in it gets the time to say what it has to say to the others.
    """
    if _leaving.acquire(blocking=False):
        logger.error("this process ends: %s", reason)
        print(f"mindio_ttp: this process ends: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            before_exit()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        log.stop()
        os._exit(RET_K8S)
    threading.Event().wait()  # another thread ends the process
    raise AssertionError


def before_exit() -> None:
    """Replaced where a controller may live in the same process."""


runtime = Runtime()


def reset() -> None:
    """A process as new; for tests."""
    global runtime
    runtime.destroy_processor()
    runtime.__init__()  # type: ignore[misc]
