"""Names of process groups that are new in every recovery; the framework's adaptor makes them."""

from __future__ import annotations

import importlib
import sys

from evertrain.mindio.tft import environment
from evertrain.mindio.tft.runtime import runtime


def apply() -> None:
    if "torch" in sys.modules and not environment.mindspore():
        importlib.import_module("evertrain.torch.tft_names").apply(_repair_id)


def _repair_id() -> int:
    return runtime.processor.rank.repair_id if runtime.processor is not None else 0
