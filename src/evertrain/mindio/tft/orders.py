"""Carrying out the controller's orders: what each needs, which callback it runs, what it answers.

Orders run one after the other in a worker thread; the link's thread stays free. A newer order means that the
controller has given up the earlier one: waits on its behalf end, and what is left of it is not answered. Stopping is
special. If a callback is stuck, in a repair whose peer died for one, then the stop callback is what gets it unstuck;
so it runs beside it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from evertrain.mindio.tft import environment, messages
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.mainthread import MainThread
from evertrain.mindio.tft.numbers import RET_OK, ControllerRepairType, RepairType, Result, TrainState
from evertrain.mindio.tft.rank import Life, Rank
from evertrain.mindio.tft.saving import Saving
from evertrain.mindio.tft.steps import Steps

IDLE_LIMIT = 25.0
"""Seconds in which the training thread must have become idle before a repair."""


class Orders:
    def __init__(
        self,
        number: int,
        rank: Rank,
        steps: Steps,
        main: MainThread,
        callbacks: Callbacks,
        send: Callable[[messages.Message], Any],
        on_status: Callable[[], None],
        mindspore: bool,
    ) -> None:
        self._number = number
        self._rank, self._steps, self._main, self._callbacks = rank, steps, main, callbacks
        self._send = send
        self._on_status = on_status
        self._mindspore = mindspore
        self._saving = Saving(callbacks)
        self._lock = threading.Lock()
        self._last = 0
        self._answer: messages.Reply | None = None
        self._busy = False
        self._queue: queue.SimpleQueue[messages.Order | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="tft-worker", daemon=True).start()

    def begin_anew(self) -> None:
        """Another controller leads, with serial numbers of its own."""
        with self._lock:
            self._last, self._answer = 0, None

    def close(self) -> None:
        self._queue.put(None)

    @property
    def saving(self) -> bool:
        return self._saving.under_way

    # The link's thread.

    def take(self, order: messages.Order) -> None:
        with self._lock:
            if order.sn < self._last:
                return
            if order.sn == self._last:
                if self._answer is not None:
                    self._send(self._answer)
                return
            self._last, self._answer = order.sn, None
            busy = self._busy
        self._main.begin_order(order.sn)
        self._steps.forget_locks()
        if isinstance(order, messages.Collect):
            self._reply(order.sn, Result.OK)
        elif isinstance(order, messages.Prelock):
            self._prelock(order)
        elif isinstance(order, messages.Pause) or (busy and isinstance(order, messages.DeviceStop)):
            self._beside(self._carry_out, order)
        else:
            self._queue.put(order)

    def _beside(self, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, name="tft-order", daemon=True).start()

    def _prelock(self, order: messages.Prelock) -> None:
        if not self._rank.pause():
            self._reply(order.sn, Result.ERROR, f"no lock in state {self._rank.life.name}")
            return
        request = self._steps.lock(order.step)
        result = self._steps.locked(request, 0, self._rank.abnormal)
        if result == Result.TIMEOUT:
            self._beside(self._wait_locked, order, request)
        elif result is not None:
            self._reply(order.sn, result)

    def _wait_locked(self, order: messages.Prelock, request: int) -> None:
        result = self._steps.locked(request, order.limit, self._rank.abnormal)
        if result is not None:
            self._reply(order.sn, result)

    def _reply(self, sn: int, result: int, detail: str = "", load_step: int = 0) -> None:
        reply = messages.Reply(
            sn=sn, result=int(result), status=self._rank.status(), load_step=load_step, detail=detail[:500]
        )
        if result != Result.OK:
            logger.warning("order %d ended with %d %s", sn, result, detail)
        with self._lock:
            if sn != self._last:
                return
            self._answer = reply
        self._send(reply)

    # The worker thread.

    def _work(self) -> None:
        while (order := self._queue.get()) is not None:
            with self._lock:
                if order.sn < self._last:
                    continue
                self._busy = True
            try:
                self._carry_out(order)
            finally:
                with self._lock:
                    self._busy = False

    def _carry_out(self, order: messages.Order) -> None:
        name = type(order).__name__
        logger.info("order %d: %s", order.sn, name)
        try:
            getattr(self, "_do_" + name)(order)
        except BaseException as error:
            logger.exception("order %d, %s, failed", order.sn, name)
            self._reply(order.sn, Result.ERROR, f"{type(error).__name__}: {error}")

    def _refuses(self, order: messages.Order, *lives: Life) -> bool:
        if self._rank.life in lives:
            return False
        if self._rank.life == Life.END:
            return True  # it says goodbye, which is answer enough; an error before that would be taken for a fault
        self._reply(order.sn, Result.ERROR, f"{type(order).__name__} is not possible in state {self._rank.life.name}")
        return True

    def _do_DeviceStop(self, order: messages.DeviceStop) -> None:
        if self._refuses(order, Life.PAUSE):
            return
        self._rank.repair_type = ControllerRepairType(order.repair_type)
        if order.uce:
            self._rank.believe_uce()
        result = self._stop(order.sn)
        self._reply(order.sn, result, "" if result == Result.OK else "the training thread could not be stopped")

    def _stop(self, sn: int) -> int:
        faulty = self._rank.faulty
        self._main.end_pause()
        result = self._callbacks.stop()
        self._steps.lift()
        if result != RET_OK:
            return Result.ERROR
        if faulty or self._main.wait_out(sn, environment.action_limit()):
            return Result.OK
        return Result.ERROR

    def _do_DeviceClean(self, order: messages.DeviceClean) -> None:
        if self._refuses(order, Life.PAUSE):
            return
        self._reply(order.sn, self._clean())

    def _clean(self) -> int:
        result = self._callbacks.clean(self._rank.uce)
        low_level = result == 2
        self._rank.cleaned(low_level, result in (0, 2))
        if low_level:
            self._on_status()
            result = RET_OK
        if not self._mindspore:
            self._main.release_cleaned()
        return result

    def _do_RebuildGroup(self, order: messages.RebuildGroup) -> None:
        self._rank.learn_repair_id(order.repair_id)
        if order.upgrade:
            result = self._callbacks.zit_upgrade_rebuild(order.fault_ranks, order.param)
        else:
            result = self._callbacks.rebuild_group(order.fault_ranks)
        if self._rank.run_status == TrainState.INIT_FINISH:
            self._main.release_cleaned()
        self._reply(order.sn, result)

    def _do_Repair(self, order: messages.Repair) -> None:
        if self._refuses(order, Life.PAUSE) or not self._idle(order.sn):
            return
        self._rank.learn_repair_id(order.repair_id)
        self._rank.repair_step, self._rank.repair_type = order.step, ControllerRepairType(order.repair_type)
        sends = any(unit.repair_type == RepairType.RT_SEND.value for unit in order.units)
        if sends and not self._steps.matches(order.step):
            self._reply(order.sn, Result.ERROR, f"asked to send step {order.step}, this is step {self._steps.step}")
            return
        if not sends:
            self._rank.load_step = 0  # what an attempt that failed has loaded does not count
            self._steps.begin_repair()
        if order.upgrade:
            result = self._callbacks.zit_upgrade_repair(order.step, order.units, order.rank_list, order.param)
        else:
            result = self._callbacks.repair(order.step, order.units, order.rank_list)
        if not sends and result == RET_OK:
            self._steps.end_repair(self._rank.load_step or order.step)
        self._reply(order.sn, result)

    def _idle(self, sn: int) -> bool:
        """MindSpore's main thread waits only once, so there is nothing to wait for."""
        if self._mindspore or self._main.wait_idle(sn, IDLE_LIMIT):
            return True
        self._reply(sn, Result.TIMEOUT, "the training thread is not idle")
        return False

    def _do_Rollback(self, order: messages.Rollback) -> None:
        if self._refuses(order, Life.PAUSE):
            return
        self._rank.learn_repair_id(order.repair_id)
        self._rank.repair_step, self._rank.repair_type = order.step, ControllerRepairType(order.repair_type)
        self._steps.roll_back(order.step)
        if order.upgrade:
            result = self._callbacks.zit_upgrade_rollback(order.step, order.param)
        else:
            result = self._callbacks.rollback(order.step)
        self._reply(order.sn, result)

    def _do_DowngradeRebuild(self, order: messages.DowngradeRebuild) -> None:
        if self._refuses(order, Life.PAUSE) or not self._idle(order.sn):
            return
        self._rank.learn_repair_id(order.repair_id)
        if any(self._number not in group for group in (order.world_ranks, *order.groups)):
            self._reply(order.sn, Result.ERROR, f"rank {self._number} is not in the groups that it is to build")
            return
        result = self._callbacks.zit_downgrade_rebuild(order.groups, order.world_ranks, order.param)
        self._reply(order.sn, result)

    def _do_NotifyNormal(self, order: messages.NotifyNormal) -> None:
        if self._refuses(order, Life.PAUSE):
            return
        loaded = self._rank.resume()
        self._steps.resume(loaded or self._steps.lock_step)
        # Answered first: the next thing that the controller hears of this rank may be a step or a fault.
        self._reply(order.sn, Result.OK, load_step=loaded)
        self._main.release_resumed(both=self._mindspore)

    def _do_Pause(self, order: messages.Pause) -> None:
        if self._refuses(order, Life.NORMAL):
            return
        if not self._main.ask_pause(order.sn, order.step):
            self._reply(order.sn, Result.NEED_RETRY, f"the end of step {order.step} is past")
            return
        logger.info("training is to halt at the end of step %d", order.step)
        if not self._main.wait_paused(order.sn, environment.action_limit()):
            self._main.end_pause(order.sn)
            self._reply(order.sn, Result.TIMEOUT, f"the training thread did not come to step {order.step}")
            return
        self._reply(order.sn, self._callbacks.stream_sync())

    def _do_Continue(self, order: messages.Continue) -> None:
        if order.unlock and self._rank.unlock():
            self._steps.lift(force_stop=False)
        if self._refuses(order, Life.NORMAL):
            return
        self._main.end_pause(leave=order.leave)
        self._reply(order.sn, Result.OK)

    def _do_SaveCheckpoint(self, order: messages.SaveCheckpoint) -> None:
        if self._rank.life < Life.NORMAL:
            self._reply(order.sn, Result.ERROR, f"no checkpoint in state {self._rank.life.name}")
            return
        self._rank.learn_repair_id(order.repair_id)
        self._rank.repair_type = ControllerRepairType.DUMP
        self._rank.life = Life.DUMP
        self._steps.begin_dump()
        if environment.stop_clean_before_dump() and not self._rank.env_clean:
            for action, name in ((lambda: self._stop(order.sn), "stopped"), (self._clean, "cleaned")):
                if action() != RET_OK:
                    self._reply(order.sn, Result.ERROR, f"the device could not be {name} before the checkpoint")
                    return
        if any(self._number not in group.ranks for group in order.groups):
            self._reply(order.sn, Result.ERROR, f"rank {self._number} is not among the ranks that save")
        elif not self._steps.matches(order.step):
            self._reply(order.sn, Result.ERROR, f"step {order.step} is wanted, this is step {self._steps.step}")
        else:
            self._saving.begin(order.step, order.groups, lambda result: self._reply(order.sn, result))

    def _do_Rename(self, order: messages.Rename) -> None:
        self._reply(order.sn, self._callbacks.rename(order.step))
