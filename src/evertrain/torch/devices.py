"""Devices as the callback interface sees them: CPU, CUDA, and Ascend's NPU if its plug-in is loaded."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from evertrain.mindio.tft.device import NoDevice


class Accelerator:
    """`torch.cuda` and `torch.npu` have the same calls."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def current(self) -> Any:
        return self._module.current_device() if self._module.is_available() else None

    def use(self, device: Any) -> None:
        if device is not None:
            self._module.set_device(device)

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def memory(self) -> str:
        allocated, reserved = self._module.memory_allocated(), self._module.memory_reserved()
        return f"{allocated >> 20} MiB allocated, {reserved >> 20} MiB reserved"

    def timestamp(self) -> int:
        event = self._module.Event(enable_timing=True)
        if not hasattr(event, "recorded_time"):  # only the NPU's events know the time of the device
            return 0
        event.record()
        event.synchronize()
        return int(event.recorded_time())

    def save_stream(self) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(self._module.stream(self._module.Stream()))
        return stack


def port() -> NoDevice | Accelerator:
    npu = getattr(torch, "npu", None)
    if npu is not None:
        return Accelerator(npu)
    return Accelerator(torch.cuda) if torch.cuda.is_available() else NoDevice()
