"""gRPC in processes that fork: launchers start their processes, and trainings their data loaders.

gRPC has handlers for forks, so that a child can go on using it. Ours never do, and the handlers of a process that is
just talking to its manager kill a good part of the children before they have begun. So grpcio is loaded here first,
without them, unless the environment wants them.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

log = logging.getLogger(__name__)

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"


def load_grpc() -> None:
    """The environment is as before afterwards: it is that of the processes that are started."""
    if VARIABLE in os.environ:
        return
    if "grpc" in sys.modules:
        log.warning("grpcio was loaded before TaskD: children that are forked may die; %s=0 prevents it", VARIABLE)
        return
    os.environ[VARIABLE] = "0"
    try:
        importlib.import_module("grpc.aio")
    finally:
        del os.environ[VARIABLE]
