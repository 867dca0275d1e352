"""Faults in mounted files, and ending processes. They live in `evertrain.taskd.agent`, `reset_files` and `pids`."""

from evertrain.taskd.agent.pids import grace_exit_pids, stop_pids
from evertrain.taskd.agent.pids import stop_pids as force_exit_pids
from evertrain.taskd.agent.reset_files import FaultStatus
from evertrain.taskd.agent.reset_files import Reset as ResetCmData

__all__ = ["FaultStatus", "ResetCmData", "force_exit_pids", "grace_exit_pids", "stop_pids"]
