"""Which timings are wanted: what ClusterD or a file says, as the two domains that workers know. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evertrain.taskd.codes import PROFILING_ORDERS

KINDS = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")


@dataclass(frozen=True, slots=True)
class Switch:
    default: bool = False
    communication: bool = False

    @property
    def code(self) -> int:
        """Of the order."""
        return PROFILING_ORDERS.start + 10 * self.default + self.communication


def switch(values: Mapping[str, str]) -> Switch:
    """The default domain is off only if everything is said to be."""
    return Switch(any(values.get(kind) != "off" for kind in KINDS), values.get("CommunicationOperator") == "on")
