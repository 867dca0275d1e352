"""What a processor knows about its own rank."""

from __future__ import annotations

import threading
from enum import IntEnum

from evertrain.mindio.tft.mainthread import MainThread
from evertrain.mindio.tft.messages import Status
from evertrain.mindio.tft.numbers import MAX_ERROR, MAX_ERROR_CODE, ControllerRepairType, ReportState, TrainState
from evertrain.mindio.tft.steps import Steps


class Life(IntEnum):
    """Order matters: NORMAL and above means running."""

    BEGIN = 0
    INITING = 1
    INITED = 2
    START = 3
    RESTART = 4
    END = 5
    NORMAL = 6
    PAUSE = 7
    DUMP = 8


_NPU = {
    ReportState.RS_UCE: TrainState.UCE_HIGH,
    ReportState.RS_UCE_CORRUPTED: TrainState.UCE_CORRUPTED,
    ReportState.RS_HCCL_FAILED: TrainState.HCCL_FAILED,
    ReportState.RS_RETRY: TrainState.PRECISION_ERROR,
}
_RUN = {
    ReportState.RS_INIT_FINISH: TrainState.INIT_FINISH,
    ReportState.RS_PREREPAIR_FINISH: TrainState.PREREPAIR_FINISH,
    ReportState.RS_STEP_FINISH: TrainState.STEP_FINISH,
    ReportState.RS_UNKNOWN: TrainState.ABNORMAL,
}
_REPAIR_NAMES = {
    ControllerRepairType.DUMP: "dump",
    ControllerRepairType.RETRY: "retry",
    ControllerRepairType.ARF: "recover",
}
UNKNOWN_REPAIR = "unknow"
"""Spelled so in the interface that frameworks are written against."""


class Rank:
    def __init__(self, steps: Steps, main: MainThread) -> None:
        self._lock = threading.RLock()
        self._steps = steps
        self._main = main
        self.life = Life.BEGIN
        self.run_status = TrainState.NORMAL
        self.npu_status = TrainState.NORMAL
        self.error_code = self.error = ""
        self.uce = False
        """Its memory is faulty: clean is told so."""
        self.faulty = False
        """It reported a fault of its own: it has left the training function without being stopped."""
        self.env_clean = False
        self.repair_type = ControllerRepairType.NONE
        self.repair_step = 0
        self.repair_id = 0
        self.load_step = 0

    def report(self, state: ReportState, error_code: str, error: str = "") -> None:
        with self._lock:
            if state in _NPU:
                self.npu_status = _NPU[state]
                self.faulty = True
                self.uce = state in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)
            elif state in _RUN:
                self.run_status = _RUN[state]
                self.error = error[:MAX_ERROR]
            if error_code:
                self.error_code = error_code[:MAX_ERROR_CODE]
            if self.life == Life.NORMAL:
                self.life = Life.PAUSE

    def believe_uce(self) -> None:
        """Somebody else saw that the memory is faulty. The training may not have: it has to be stopped like others."""
        with self._lock:
            if self.npu_status == TrainState.NORMAL:
                self.npu_status = TrainState.UCE_HIGH
                self.uce = True

    def status(self) -> Status:
        with self._lock:
            return Status(
                step=self._steps.step,
                run_status=self.run_status,
                npu_status=self.npu_status,
                data_status=self._steps.data_status,
                backup_step=self._steps.backup_step,
                error_code=self.error_code,
                error=self.error,
                parked=self._main.parked,
            )

    def abnormal(self) -> bool:
        return self.run_status != TrainState.NORMAL or self.npu_status != TrainState.NORMAL

    def pause(self) -> bool:
        """Normal operation ends; False if there is none. One that has begun to save has come to its end for good."""
        with self._lock:
            if self.life == Life.DUMP:
                return True
            if self.life not in (Life.NORMAL, Life.PAUSE):
                return False
            self.life = Life.PAUSE
            return True

    def unlock(self) -> bool:
        """Back to normal operation from a lock that nothing followed; False if something did."""
        with self._lock:
            if self.life != Life.PAUSE or self.abnormal() or self._main.parked:
                return False
            self.life = Life.NORMAL
            return True

    def learn_repair_id(self, repair_id: int) -> None:
        with self._lock:
            self.repair_id = max(self.repair_id, repair_id)

    def cleaned(self, low_level: bool, done: bool) -> None:
        with self._lock:
            if low_level:
                self.npu_status = TrainState.UCE_LOW
            self.env_clean = self.env_clean or done
            self.uce = self.faulty = False

    def resume(self) -> int:
        """Back to normal operation. Returns the step of a checkpoint that was loaded on the way, or 0."""
        with self._lock:
            loaded, self.load_step = self.load_step, 0
            self.life = Life.NORMAL
            self.run_status = self.npu_status = TrainState.NORMAL
            self.error_code = self.error = ""
            self.uce = self.faulty = self.env_clean = False
            return loaded

    @property
    def repair_name(self) -> str:
        return _REPAIR_NAMES.get(self.repair_type, UNKNOWN_REPAIR)
