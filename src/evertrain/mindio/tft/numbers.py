"""Numbers and names that callers, frameworks and the platform depend on. They never change."""

from __future__ import annotations

from enum import Enum, IntEnum

RET_OK, RET_ERROR, RET_K8S, RET_PASS, RET_EXCEPTION = range(5)
"""Return codes of the Python interface. RET_K8S is the exit code of a process that gives up, for Kubernetes to see."""

MAX_WORLD = 100_000
MAX_KINDS = 1000
MAX_PARAM = 1023
MAX_ERROR_CODE = 15
MAX_ERROR = 300
MAX_STEP = 2**63 - 2


def is_int(value: object) -> bool:
    """A number, and not a truth value, which Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool)


class ReportState(Enum):
    """What a framework reports about itself."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(Enum):
    """What a rank is told to do in a repair."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class OptimizerType(Enum):
    ATTENTION = 0
    MOE = 1


class Action(Enum):
    RETRY = 0
    EXIT = 1


class ControllerRepairType(IntEnum):
    DUMP = 0
    RETRY = 1
    ARF = 2
    UPGRADE = 3
    DOWNGRADE = 4
    NONE = 5


class TrainState(IntEnum):
    """Values of `run_status`, `npu_status` and `data_aval`."""

    NORMAL = 0
    ABNORMAL = 1
    UCE_HIGH = 2
    UCE_LOW = 3
    UCE_CORRUPTED = 4
    OFFLINE = 5
    ISOLATE = 6
    INIT_FINISH = 7
    PREREPAIR_FINISH = 8
    PRECISION_ERROR = 9
    STEP_FINISH = 10
    EXIT = 11
    HCCL_FAILED = 12


class DataStatus(IntEnum):
    UPDATED = 0
    UPDATING = 1
    COPYING = 2


class Result(IntEnum):
    """How an action ended on a rank."""

    OK = 0
    ERROR = 1
    WAIT_CHECK = 2
    STOP_SERVICE = 3
    TIMEOUT = 4
    NEED_RETRY = 5
    DOWNGRADE = 6
    REPAIR = 7
    PAUSE = 8
    SWITCH = 9
    RERUN = 10


class FaultType(IntEnum):
    """As the platform numbers them."""

    UCE = 0
    PROCESS = 1
    HCCL = 2


class ReportCode(IntEnum):
    """What the platform is told about an operation."""

    SUCCESS = 0
    ISOLATED = 201
    NOT_INITIALISED = 404
    RETRY_FAILED = 405
    """But `recover` is still possible."""
    FAILED = 406
    """But dump or exit are still possible."""
    EXIT_ONLY = 499
