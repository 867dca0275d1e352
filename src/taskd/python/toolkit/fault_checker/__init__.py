"""What the cluster says about faults in mounted files, and ending processes."""

from taskd.python.toolkit.fault_checker.fault_check import (
    FaultStatus,
    ResetCmData,
    force_exit_pids,
    grace_exit_pids,
    stop_pids,
)

__all__ = ["FaultStatus", "ResetCmData", "force_exit_pids", "grace_exit_pids", "stop_pids"]
