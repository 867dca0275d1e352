"""Was a batch changed since it was loaded?

A step that is run again must see the batch as the loader made it. The batch is still in memory, but user code had it:
`batch.pop("labels")` changed a container, `images.mul_(scale)` changed a tensor. A `Record` is taken when the batch
arrives. Containers are put back as they were, because a shallow copy of them is cheap. Tensors are not copied: torch
counts the writes to each of them, so a change is noticed, and the caller loads the batch again. So it does if the batch
holds things whose changes nobody counts, NumPy arrays for example.

Two writes go unnoticed, because torch does not count them: through `tensor.data`, and through the array that
`tensor.numpy()` returns.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

_MOST_ITEMS = 4096
"""Beyond this size a record would cost more than it is worth; such a batch is loaded again."""

_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), range, slice, torch.Size, torch.dtype, torch.device}
)

_known_kinds: dict[type, bool] = {}


def _is_plain(kind: type) -> bool:
    """Whether all that instances of this class hold is in their `__dict__`: written in Python, without slots."""
    plain = _known_kinds.get(kind)
    if plain is None:
        heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
        plain = all(
            base.__flags__ & heap_type and not base.__dict__.get("__slots__")
            for base in kind.__mro__
            if base is not object
        )
        _known_kinds[kind] = plain
    return plain


class Record:
    """How a batch looked when it was loaded."""

    __slots__ = ("_containers", "_known", "_tensors")

    def __init__(self, batch: Any) -> None:
        self._tensors: list[tuple[torch.Tensor, int, bool]] = []
        self._containers: list[tuple[list | dict, list | dict]] = []
        self._known = self._visit(batch)
        if not self._known:
            self._tensors.clear()
            self._containers.clear()

    def _visit(self, batch: Any) -> bool:
        tensors, containers = self._tensors, self._containers
        visited = 0
        seen: set[int] = set()  # of objects only: lists and dicts in a circle are stopped by the limit
        pending = [batch]
        while pending:
            item = pending.pop()
            kind = type(item)
            visited += 1
            if visited > _MOST_ITEMS:
                return False
            if kind in _ATOMS:
                continue
            if isinstance(item, torch.Tensor):
                if item.is_inference():
                    return False  # an inference tensor counts no writes
                tensors.append((item, item._version, item.requires_grad))
            elif isinstance(item, tuple):
                pending.extend(item)
            elif isinstance(item, list):
                containers.append((item, item[:]))
                pending.extend(item)
            elif isinstance(item, dict):
                containers.append((item, dict(item)))
                pending.extend(item.values())
            elif isinstance(item, enum.Enum | type):
                continue
            elif _is_plain(kind):
                if id(item) not in seen:
                    seen.add(id(item))
                    attributes = vars(item)
                    containers.append((attributes, dict(attributes)))
                    pending.extend(attributes.values())
            else:
                return False
        return True

    def restore(self) -> bool:
        """Put the containers back as they were; True if the whole batch is now what was loaded."""
        if not self._known:
            return False
        for tensor, version, requires_grad in self._tensors:
            if tensor._version != version or tensor.requires_grad != requires_grad:
                return False
            if requires_grad and tensor.is_leaf and tensor.grad is not None:
                return False  # the next backward pass would add to it
        for container, content in self._containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        return True
