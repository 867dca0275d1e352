"""Other hosts' clocks. Pure.

CLOCK_MONOTONIC counts from a host's own start, so a time that another host measured means nothing here. Every heartbeat
carries its sender's clock; the smallest difference to the time of arrival that was ever seen is the offset of the two
clocks plus the shortest way between the hosts, which is exact enough to order faults.
"""

from __future__ import annotations

import msgspec

from evertrain.mindio.protocol import Fault, Observed, Out

SAME_HOST = 0.05
"""Below this the difference is the way through the kernel, and the clock is the same one."""


class Clocks:
    def __init__(self) -> None:
        self._offsets: dict[int, float] = {}

    def sample(self, node: int, sent: float, arrived: float) -> None:
        if sent > 0:
            self._offsets[node] = min(arrived - sent, self._offsets.get(node, arrived - sent))

    def offset(self, node: int) -> float:
        """What to add to a time of this node's."""
        offset = self._offsets.get(node, 0.0)
        return 0.0 if abs(offset) < SAME_HOST else offset

    def fault(self, node: int, fault: Fault) -> Fault:
        offset = self.offset(node)
        if not offset or fault.at <= 0:
            return fault
        return msgspec.structs.replace(fault, at=fault.at + offset)

    def observed(self, node: int, observed: Observed) -> Observed:
        return msgspec.structs.replace(observed, fault=self.fault(node, observed.fault))

    def out(self, node: int, out: Out) -> Out:
        return out if out.fault is None else msgspec.structs.replace(out, fault=self.fault(node, out.fault))
