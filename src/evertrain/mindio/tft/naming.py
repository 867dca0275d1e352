"""What of torch has to be changed: the adaptor does it, found by name, because this package knows no framework."""

from __future__ import annotations

import importlib
import os
import sys

from evertrain.mindio.tft import environment
from evertrain.mindio.tft.runtime import runtime


def apply() -> None:
    """Names of process groups that are new in every recovery."""
    if "torch" in sys.modules and not environment.mindspore():
        importlib.import_module("evertrain.torch.tft_names").apply(_repair_id)


def lengthen_torchrun() -> None:
    """In torchrun's own process, which imports the interface for this: time for the last checkpoint."""
    torchrun = os.path.basename(sys.argv[0] if sys.argv else "") == "torchrun"
    loaded = "torch.distributed.elastic.multiprocessing.api" in sys.modules
    if (torchrun or loaded) and not environment.mindspore():
        importlib.import_module("evertrain.torch.tft_elastic").apply(environment.action_limit)


def _repair_id() -> int:
    return runtime.processor.rank.repair_id if runtime.processor is not None else 0
