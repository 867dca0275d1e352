"""The MindIO controller in the manager's process: its calls, and its reports.

The functions are those of `mindio_ttp.controller_ttp`, ours or the original's; so an image may bring either. They may
block, and so each runs in one thread, one after the other. One that never returns does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from evertrain import aio
from evertrain.taskd import environment
from evertrain.taskd.manager.orders import ToController
from evertrain.taskd.manager.reports import (
    PROCESS_FAULT,
    RECOVER_STATUS,
    RECOVER_STRATEGY,
    STOP_COMPLETE,
    Progress,
    Report,
)

log = logging.getLogger(__name__)

FAULT_TYPES = frozenset({0, 1, 2})
"""Of memory, any other, of the network."""
CLOSING = 5.0
"""Seconds that the controller has to end."""

T = TypeVar("T")


class _Thread:
    """Runs calls in their order. It does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                tell: Callable[[], None] = functools.partial(_resolve, result, function(*args))
            except BaseException as error:  # it belongs to who waits
                tell = functools.partial(_reject, result, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended, nobody waits
                loop.call_soon_threadsafe(tell)

        self._calls.put(call)
        return await result

    def end(self) -> None:
        self._calls.put(None)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class Bridge:
    """`reported` is called in a thread of the controller."""

    def __init__(self, reported: Callable[[Report], None]) -> None:
        self._reported = reported
        self._unheard: frozenset[int] = frozenset()
        """Ranks for whose faults a new controller was told to stop the training before they had come to it."""
        self._world_size = 0
        self._thread = _Thread("taskd-controller")
        self._tft: Any = None

    async def start(self) -> bool:
        """Start the controller; False, with the reason in the log, if that can't be."""
        return await self._thread.run(self._start)

    def _start(self) -> bool:
        try:
            self._tft = importlib.import_module("mindio_ttp.controller_ttp")
            self._register()
            self._init()
        except ImportError as error:
            log.error("mindio not found, process-rescheduling checkpoint-saving DO NOT work! (%s)", str(error))
        except (Exception, SystemExit) as error:
            log.error(
                "register switch controller failed, error: %s; processes that ask MindIO for protection wait for it in "
                "vain",
                str(error),
            )
        else:
            log.info("Successfully register controller callback")
            return True
        self._tft = None
        return False

    def _register(self) -> None:
        callbacks: dict[str, Callable[..., None]] = {
            "report_fault_ranks": lambda faults, codes=None: self._faults(dict(faults)),
            "report_stop_complete": lambda code, message, faults: self._reported(
                Report(STOP_COMPLETE, dict(faults), code, message)
            ),
            "report_strategies": lambda faults, strategies: self._reported(
                Report(RECOVER_STRATEGY, dict(faults), strategies=tuple(strategies))
            ),
            "report_result": lambda code, message, faults, strategy: self._reported(
                Report(RECOVER_STATUS, dict(faults), code, message, strategy=strategy)
            ),
        }
        for name, callback in callbacks.items():
            code = self._tft.tft_register_mindx_callback(name, callback)
            if code != 0:
                log.error("register mindx callback %s failed, code: %s", name, code)

    def _faults(self, faults: dict[int, int]) -> None:
        self._reported(Report(PROCESS_FAULT, faults))
        if self._unheard & faults.keys():
            log.info("the training was to stop before the controller knew its ranks: now it does")
            self._tft.tft_notify_controller_stop_train(faults, "stop")
        self._unheard = frozenset()

    def _can_be(self, faults: dict[int, int]) -> bool:
        """Faults of this job, of types that there are."""
        return all(0 <= rank < self._world_size and kind in FAULT_TYPES for rank, kind in faults.items())

    def _init(self) -> None:
        world_size = os.environ.get("WORLD_SIZE") or os.environ.get("MS_WORKER_NUM")
        host, port = os.environ.get("POD_IP"), os.environ.get("TTP_PORT")
        missing = [
            name
            for name, value in (("WORLD_SIZE or MS_WORKER_NUM", world_size), ("POD_IP", host), ("TTP_PORT", port))
            if not value
        ]
        if missing or world_size is None or port is None:
            raise ValueError(f"the controller needs {', '.join(missing)} in the environment")
        for name, text in (("WORLD_SIZE or MS_WORKER_NUM", world_size), ("TTP_PORT", port)):
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"{name}: a number is needed, not {text!r}")
        recover, elastic = environment.process_recover(), environment.elastic_training()
        self._world_size = int(world_size)
        self._tft.tft_init_controller(-1, self._world_size, False, recover, elastic)
        self._tft.tft_start_controller(host, int(port), False, "")

    async def linked(self) -> bool:
        """Whether processes of the training have found the controller."""
        return await self._thread.run(self._linked)

    def _linked(self) -> bool:
        query = getattr(self._tft, "tft_query_high_availability_switch", None)
        return self._tft is not None and (query is None or bool(query()))

    def progress(self) -> Progress | None:
        """How far the training is; None if this MindIO does not tell. Does not wait for calls that are under way."""
        query = getattr(self._tft, "tft_query_progress", None)
        if query is None:
            return None
        found = query()
        return Progress(found["step"], frozenset(found["known"]), dict(found["raised"]))

    async def call(self, order: ToController) -> bool:
        """False, with the reason in the log, if the controller could not be told."""
        return await self._thread.run(self._call, order)

    def _call(self, order: ToController) -> bool:
        tft = self._tft
        if tft is None:
            log.warning("controller callback is nil: there is no controller to tell %s", order.action)
            return False
        try:
            code = self._act(tft, order)
        except (Exception, SystemExit) as error:
            log.error("do action %s err, err=%s,  data=%s", order.action, str(error), order)
            return False
        if code:
            log.error("do action %s err, err=the controller returned %s,  data=%s", order.action, code, order)
            return False
        log.info("do action %s finish,  data=%s", order.action, order)
        return True

    def _act(self, tft: Any, order: ToController) -> Any:
        faults = dict(order.faults)
        match order.action:
            case "save_and_exit":
                return tft.tft_notify_controller_dump()
            case "stop_train":
                code = tft.tft_notify_controller_stop_train(faults, "stop")
                self._unheard = frozenset(faults) if code and self._can_be(faults) else frozenset()
                return code
            case "pause_train":
                timeout = order.timeout or environment.pause_timeout()
                return tft.tft_notify_controller_stop_train(faults, "pause", timeout)
            case "on_global_rank":
                limit = (order.timeout,) if order.timeout else ()
                return tft.tft_notify_controller_on_global_rank(faults, *limit)
            case "change_strategy":
                return tft.tft_notify_controller_change_strategy(order.strategy, order.params)
            case "process_ended" | "not_replaced":
                # Ours alone has these; the original waits for a broken link to come back, and needs no more than time.
                tell = getattr(tft, f"tft_notify_controller_{order.action}", None)
                return 0 if tell is None else tell(sorted(faults))
            case "hot switch" | "stop switch":
                if not hasattr(tft, "tft_notify_controller_prepare_action"):
                    log.warning("this MindIO has no hot switch")
                    return 0
                return tft.tft_notify_controller_prepare_action(order.action, faults)
            case "restart_controller":
                tft.tft_destroy_controller()
                self._register()
                self._init()
                return 0
            case "destroy_controller":
                return tft.tft_destroy_controller()
            case "new pod running":
                return 0
        log.info("action %s is not registered, nothing is done", order.action)
        return 0

    async def close(self, leave: bool = False) -> None:
        """`leave`: this process ends, and its controller with it, without a word: processors look for another."""
        self._reported = _ignore  # the controller's module keeps our callbacks
        self._unheard = frozenset()
        if leave:
            self._thread.end()
            return
        try:
            async with aio.timeout(CLOSING):
                await self._thread.run(self._destroy)
        except TimeoutError:
            log.error("the controller does not end within %g s: it is left alone", CLOSING)
        self._thread.end()

    def _destroy(self) -> None:
        if self._tft is not None:
            self._call(ToController("destroy_controller"))


def _ignore(report: Report) -> None:
    pass
