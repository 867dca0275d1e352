"""What the callback interface needs of the device, whatever the framework. Without one, nothing happens."""

from __future__ import annotations

import contextlib
import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Device(Protocol):
    def current(self) -> Any:
        """The device that the calling thread uses."""

    def use(self, device: Any) -> None:
        """Make it the calling thread's."""

    def empty_cache(self) -> None: ...

    def memory(self) -> str:
        """How much is allocated, in words; empty if unknown."""

    def timestamp(self) -> int:
        """Microseconds of the device's clock; 0 if it has none."""

    def save_stream(self) -> AbstractContextManager[Any]:
        """Where the dying-gasp checkpoint copies its data, apart from what training left behind."""


class NoDevice:
    def current(self) -> Any:
        return None

    def use(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory(self) -> str:
        return ""

    def timestamp(self) -> int:
        return 0

    def save_stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


def port() -> Device:
    """The adaptor's port if the process uses PyTorch. Found by name: this package knows no framework."""
    if "torch" not in sys.modules:
        return NoDevice()
    found: Device = importlib.import_module("evertrain.torch.devices").port()
    return found
