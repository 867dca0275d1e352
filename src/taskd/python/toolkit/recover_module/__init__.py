"""ClusterD's client of jobs without a manager."""

from evertrain.wire import recover_pb2
from taskd.python.toolkit.recover_module.recover_manager import (
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
    "recover_pb2",
    "report_process_fault",
    "report_recover_status",
    "report_recover_strategy",
    "report_stop_complete",
]
