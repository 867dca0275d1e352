"""What a training process can do on order: change its link, test its device. By the framework or what is registered.

On an NPU the frameworks have functions for both. Elsewhere the groups of gloo are moved (`evertrain.torch.failover`),
and the stress test computes on the CPU. A training that knows better registers functions of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evertrain.mindio.tft.runtime import runtime
from evertrain.taskd.worker import cpu_stress

log = logging.getLogger(__name__)

AIC, P2P = 0, 1
TEXTS = {
    0: "OK",
    1: "exec failed",
    2: "find fault rank",
    3: "exec timeout",
    4: "voltage recovery failed",
}
FAILED, TIMED_OUT, BAD_VOLTAGE = 1, 3, 4
NO_RESULT = "can not exec stress test"
_NPU = {"pt": "torch_npu", "ms": "mindspore"}
"""By framework: the package with which it knows NPUs."""

SwitchNic = Callable[[list[int], list[bool]], bool]
Detect = Callable[[int], Any]
_switch_nic: SwitchNic | None = None
_detect: Detect | None = None


def register_nic_switch(function: SwitchNic | None) -> None:
    """`function(ranks, ops)` moves the traffic of these ranks to their other link (True) or back; True if it could."""
    global _switch_nic
    _switch_nic = function


def register_stress_test(function: Detect | None) -> None:
    """`function(op)` tests the device (0) or its connections (1); returns one of the codes of `TEXTS`."""
    global _detect
    _detect = function


@contextlib.contextmanager
def paused() -> Iterator[Callable[[], bool] | None]:
    """Keep the training thread where it has paused; None if it has not."""
    processor = runtime.processor
    if processor is None:
        yield None
        return
    with processor.main.hold() as ended:
        yield ended


def can_be_paused() -> bool:
    """MindIO knows this process."""
    return runtime.processor is not None


def switch_nic(framework: str, rank: int, name: str, ranks: Sequence[int], ops: Sequence[bool]) -> bool:
    """`name` is that of this order, the same for all ranks."""
    function = _switch_nic or _of_the_framework(framework)
    try:
        with paused() as ended:
            if function is None:
                if framework != "pt":
                    raise RuntimeError("there is neither an NPU nor a function registered for it")
                _move_groups(rank, name, ranks, ops, ended)
            elif not function(list(ranks), list(ops)):
                raise RuntimeError(f"{getattr(function, '__name__', function)} could not do it for ranks {list(ranks)}")
    except Exception as error:
        log.error("link failover failed: %s", str(error))
        return False
    return True


def _move_groups(
    rank: int, name: str, ranks: Sequence[int], ops: Sequence[bool], ended: Callable[[], bool] | None
) -> None:
    if ended is None:
        # Whoever uses a group while others have moved theirs would wait for ever.
        raise RuntimeError("the training is not paused")
    importlib.import_module("evertrain.torch.failover").move(rank, name, ranks, ops, ended)


def _of_the_framework(framework: str) -> SwitchNic | None:
    module, name = {
        "pt": ("torch_npu.npu", "_comm_switch_nic"),
        "ms": ("mindspore.communication.management", "_comm_switch_nic"),
    }[framework]
    try:
        function: SwitchNic | None = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return function


def stress(framework: str, op: int) -> tuple[int, str]:
    """Run one test; code and text."""
    try:
        detect = _detector(framework)
    except Exception as error:
        log.error("the stress test could not be prepared: %s: %s", type(error).__name__, str(error))
        return FAILED, TEXTS[FAILED]
    try:
        code = detect(op)
    except Exception as error:
        log.error("the stress test failed: %s", str(error))
        return BAD_VOLTAGE, TEXTS[BAD_VOLTAGE]
    if not isinstance(code, int):
        log.error("the stress test came to %.100r, which is no code", code)
        return FAILED, NO_RESULT
    return (int(code), TEXTS[code]) if code in TEXTS else (FAILED, TEXTS[FAILED])


def _detector(framework: str) -> Detect:
    """An NPU whose software is broken must not pass because the processor computes right: then this fails."""
    if _detect is not None:
        return _detect
    if not _is_installed(_NPU[framework]):
        return cpu_stress.detect
    if framework == "ms":
        detect: Detect = importlib.import_module("mindspore.utils").stress_detect
        return detect
    found: Detect = importlib.import_module("torch_npu").npu.stress_detect
    importlib.import_module("torch").npu.set_device(f"npu:{os.environ['LOCAL_RANK']}")
    return found


def _is_installed(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None
