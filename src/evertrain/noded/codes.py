"""The node fault codes of our own detectors, and how bad each is if no configuration says otherwise. Pure.

The original's codes begin with the number of a part of the server (00 processor, 01 memory, 02 disk, …), 62 being its
highest. Ours begin with E: no code of the original can be taken for one of them. E8 is free for programs of users.
"""

from __future__ import annotations

from evertrain.faultcodes.levels import NOT_HANDLE, PRE_SEPARATE_NODE, SEPARATE_NODE

LINK_DOWN, LINK_FLAPS = "E1000001", "E1000002"
MEMORY_CORRECTED, MEMORY_UNCORRECTED = "E2000001", "E2000002"
READ_ONLY, FILE_SYSTEM_ERRORS, DISK_FULL, DISK_HANGS = "E3000001", "E3000002", "E3000003", "E3000004"
MEMORY_PRESSURE, PID_PRESSURE = "E4000001", "E4000002"
CLOCK_JUMP = "E5000001"
GPU_LOST, GPU_MEMORY, GPU_REMAP_FAILED, GPU_REMAP_PENDING = "E6010001", "E6010002", "E6010003", "E6010004"
GPU_DRIVER = "E6020001"
NPU_TOOL = "E7000001"
PROGRAM_FAILS = "E8000000"

_XID = 0xE6000000

XID_LEVELS = {
    # The program's own mistakes, and what only tells of others' faults.
    8: NOT_HANDLE, 13: NOT_HANDLE, 31: NOT_HANDLE, 43: NOT_HANDLE, 45: NOT_HANDLE, 68: NOT_HANDLE, 92: NOT_HANDLE,
    # The GPU goes on, but is to be reset before the next job.
    63: PRE_SEPARATE_NODE, 94: PRE_SEPARATE_NODE,
    # Nothing more can be run on it.
    48: SEPARATE_NODE, 62: SEPARATE_NODE, 64: SEPARATE_NODE, 74: SEPARATE_NODE, 79: SEPARATE_NODE, 95: SEPARATE_NODE,
    109: SEPARATE_NODE, 119: SEPARATE_NODE, 120: SEPARATE_NODE, 140: SEPARATE_NODE,
}  # fmt: skip
"""By the number that NVIDIA's driver gives an error; others don't matter to us."""


def xid_code(number: int) -> str:
    return f"{_XID + number:08X}"


LEVELS = {
    LINK_DOWN: PRE_SEPARATE_NODE,
    LINK_FLAPS: PRE_SEPARATE_NODE,
    MEMORY_CORRECTED: NOT_HANDLE,
    MEMORY_UNCORRECTED: PRE_SEPARATE_NODE,
    READ_ONLY: SEPARATE_NODE,
    FILE_SYSTEM_ERRORS: PRE_SEPARATE_NODE,
    DISK_FULL: PRE_SEPARATE_NODE,
    DISK_HANGS: PRE_SEPARATE_NODE,
    MEMORY_PRESSURE: PRE_SEPARATE_NODE,
    PID_PRESSURE: PRE_SEPARATE_NODE,
    CLOCK_JUMP: NOT_HANDLE,
    GPU_LOST: SEPARATE_NODE,
    GPU_MEMORY: PRE_SEPARATE_NODE,
    GPU_REMAP_FAILED: SEPARATE_NODE,
    GPU_REMAP_PENDING: PRE_SEPARATE_NODE,
    GPU_DRIVER: NOT_HANDLE,
    NPU_TOOL: NOT_HANDLE,
    PROGRAM_FAILS: NOT_HANDLE,
    **{xid_code(number): level for number, level in XID_LEVELS.items()},
}


_TELLERS = {
    "E1": "links", "E2": "memory", "E3": "storage", "E4": "pressure", "E5": "clock", "E6": "nvidia", "E7": "ascend",
}  # fmt: skip
_CHIPS, _OTHERS = "ascend", "programs"


def may_tell(detector: str, code: str, *, of_node: bool) -> bool:
    """Could the detector by that name have found this? A name that is not known here could be anybody's."""
    if detector not in (*_TELLERS.values(), _OTHERS):
        return True
    if not of_node:
        return detector in (_CHIPS, _OTHERS)
    return detector == _TELLERS.get(code[:2], _OTHERS)
