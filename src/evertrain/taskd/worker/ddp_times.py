"""When DistributedDataParallel exchanges gradients: in `backward`, and in torch, where no Python function is called.

Torch takes these times by itself, in its first ten iterations and then in every hundredth. While marks of communication
are wanted it does so in each. It works them out when the next forward pass begins, and after that one they are read.

Nothing comes between DDP and its group. A communication hook would be told of each bucket, but DDP leaves it to such a
hook to divide by the number of ranks. DDP itself does that by a product or by a quotient, depending on where a gradient
lies, which a hook can't know: it would give other bits. And it stays for good, in the place of one of the script's.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any
from weakref import WeakKeyDictionary

from evertrain.taskd.worker.marks import COMMUNICATION, marks

MARK = "ddp_all_reduce"


class DdpTimes:
    def __init__(self) -> None:
        """UnknownTorch if this one does not tell its times."""
        self._private = importlib.import_module("evertrain.taskd.agent.torch_private")  # it loads torch
        self._ddp = self._private.timed_ddp()
        self._read: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """By model: when the exchange began that was the last one here."""

    def forward_ended(self, module: Any) -> None:
        if not isinstance(module, self._ddp) or _tells_itself(module.process_group):
            return
        if not marks.communication:
            self.end()
            return
        began, ended = self._private.last_exchange(module)
        if module not in self._read:
            self._private.time_exchanges(module, each=True)
        elif began != self._read[module] and ended >= began:
            marks.past(began, ended, MARK, COMMUNICATION)
        self._read[module] = began

    def end(self) -> None:
        for module in list(self._read):
            self._private.time_exchanges(module, each=False)
        self._read.clear()


def _tells_itself(group: Any) -> bool:
    """It is one that can be left, which has marks of its own."""
    groups = sys.modules.get("evertrain.torch.groups")
    return groups is not None and isinstance(group, groups.GuardedGroup)
