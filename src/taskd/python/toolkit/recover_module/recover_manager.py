"""ClusterD's client of jobs without a manager. It lives in `evertrain.taskd.legacy`."""

from evertrain.taskd.legacy import (
    DLRecoverManager,
    init_grpc_process,
    report_process_fault,
    report_recover_status,
    report_recover_strategy,
    report_stop_complete,
)

__all__ = [
    "DLRecoverManager",
    "init_grpc_process",
    "report_process_fault",
    "report_recover_status",
    "report_recover_strategy",
    "report_stop_complete",
]
