"""The words on a virtual node: that it is one, and those with which it is switched off and on, cut off and joined."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

ORDER = "evertrain.dev/power"
"""Annotation on a node: what is wanted, OFF or ON. Without it a node is on."""
STATE = "evertrain.dev/power-state"
"""Annotation on a node: what is."""
ON, OFF = "on", "off"
VIRTUAL = "evertrain.dev/virtual"
"""Label of a node that is ours."""
NETWORK_ORDER, NETWORK_STATE = "evertrain.dev/network", "evertrain.dev/network-state"
"""The same for its cables: JOINED, CUT, or what else is wrong with them (see `Cables`). At first they are joined."""
JOINED, CUT = "joined", "cut"
NETWORK_REFUSED = "evertrain.dev/network-refused"
"""Annotation on a node: the last order for its cables that could not be obeyed, and why. It was taken back."""
NICS = ("nic0", "nic1")
SHARED = "its pods are in the network of this machine; start the cluster with --own-network"
"""Why a node has neither."""
UP, DOWN = "up", "down"


@dataclass(frozen=True)
class Cables:
    """What is wrong with those of a node; with none given, they are joined."""

    cut: bool = False
    pulled: frozenset[str] = frozenset()
    """NICs that have none."""
    delay: float = 0.0
    """Milliseconds by which what goes in or out is late."""
    loss: float = 0.0
    """Percent of what goes in or out."""

    @classmethod
    def parse(cls, text: str) -> Cables | None:
        """None if nobody has written such a text."""
        found = cls()
        for part in text.split(_AND) if text not in ("", JOINED) else ():
            match = _PART.fullmatch(part)
            if match is None:
                return None
            values = match.groupdict()
            found = cls(
                found.cut or part == CUT,
                found.pulled.union((values["nics"] or "").split(",")) & set(NICS),
                float(values["delay"] or found.delay),
                float(values["loss"] or found.loss),
            )
        return found if found.loss <= 100 else None

    def __str__(self) -> str:
        if self.cut:
            return CUT  # of all else nothing is seen then
        parts = ["without " + ",".join(sorted(self.pulled))] if self.pulled else []
        parts += [f"delayed by {_plain(self.delay)}ms"] if self.delay else []
        parts += [f"losing {_plain(self.loss)}%"] if self.loss else []
        return _AND.join(parts) or JOINED

    def without(self, *nics: str) -> Cables:
        """What is cut already stays so. With no NIC given, all is cut."""
        return replace(self, cut=self.cut or not nics, pulled=self.pulled.union(nics))

    def worse(self, delay: float | None, loss: float | None) -> Cables:
        """What isn't given stays as it is."""
        return replace(self, delay=self.delay if delay is None else delay, loss=self.loss if loss is None else loss)


_AND = "; "
_NUMBER = r"[0-9]{1,5}(?:\.[0-9]{1,6})?"
_PART = re.compile(
    rf"cut|without (?P<nics>nic[01](,nic[01])*)|delayed by (?P<delay>{_NUMBER})ms|losing (?P<loss>{_NUMBER})%"
)


def _plain(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".")


def link(network_state: str, nic: str) -> str:
    """UP or DOWN, of a NIC of a node in that state."""
    return DOWN if nic in (Cables.parse(network_state) or Cables()).pulled else UP
