"""What the parameter groups of an optimizer say: learning rates and the like, everything but the parameters.

A scheduler changes them and does not put them back when its own state is loaded; a loop may set them by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

Settings = list[dict[str, Any]]


def of(groups: Iterable[dict[str, Any]]) -> Settings:
    """A copy of what they say now."""
    return [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()
         if key != "params"}
        for group in groups
    ]  # fmt: skip


def put_back(groups: Iterable[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """A tensor stays the same one: a compiled update reads it."""
    for group, values in zip(groups, saved, strict=False):
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
