"""Numbers that a training loop counts up, kept like everything else: they go back with the step and come back with a
checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Values(SimpleNamespace):
    """Variables of the loop that must survive a recovery, which local ones don't.

        values = Values(loss=0.0, seen=0)
        training = Training(..., extra={"values": values})
        ...
            values.loss += loss.item()

    They may be numbers, strings, tensors, and lists, tuples or dicts of these.
    """

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).clear()
        vars(self).update(state)
