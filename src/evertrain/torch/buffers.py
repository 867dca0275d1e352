"""A model's buffers, wherever they are now.

A module may put another tensor in the place of a buffer: `self.centre = 0.9 * self.centre + 0.1 * batch.mean(0)`. So a
buffer is known by its module and name and looked up each time; a tensor that was taken once may be one of the past.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Buffers:
    def __init__(self, model: nn.Module) -> None:
        places: dict[int, tuple[str, dict[str, Tensor | None], str]] = {}
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), (f"{prefix}.{key}" if prefix else key, module._buffers, key))
        self._places = list(places.values())
        self._seated: list[Tensor | None] = []
        """What was in each place at the snapshot."""
        self._filled: list[Tensor] = []
        self._copies: list[Tensor] = []

    def named(self) -> dict[str, Tensor]:
        present = ((name, owner.get(key)) for name, owner, key in self._places)
        return {name: buffer for name, buffer in present if buffer is not None}

    def load(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, owner, key in self._places:
                value, buffer = values.get(name), owner.get(key)
                if value is None or buffer is None or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
                    device = None if buffer is None else buffer.device
                    owner[key] = None if value is None else value.clone().to(device)
                else:
                    buffer.copy_(value)

    def snapshot(self) -> None:
        present = [owner.get(key) for _, owner, key in self._places]
        with torch.no_grad():
            if len(present) != len(self._seated) or not all(map(operator.is_, present, self._seated)):
                self._seated, self._filled = present, [buffer for buffer in present if buffer is not None]
                self._copies = [buffer.clone() for buffer in self._filled]
            elif self._copies:
                torch._foreach_copy_(self._copies, self._filled)

    def rollback(self) -> None:
        """The tensors of the last snapshot, with the values that they had then."""
        for (_, owner, key), buffer in zip(self._places, self._seated, strict=False):
            if owner.get(key) is not buffer:
                owner[key] = buffer
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._filled, self._copies)
