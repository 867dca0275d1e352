"""The words on a virtual node: that it is one, and those with which it is switched off and on, cut off and joined."""

from __future__ import annotations

from collections.abc import Collection

ORDER = "evertrain.dev/power"
"""Annotation on a node: what is wanted, OFF or ON. Without it a node is on."""
STATE = "evertrain.dev/power-state"
"""Annotation on a node: what is."""
ON, OFF = "on", "off"
VIRTUAL = "evertrain.dev/virtual"
"""Label of a node that is ours."""
NETWORK_ORDER, NETWORK_STATE = "evertrain.dev/network", "evertrain.dev/network-state"
"""The same for its cables: CUT, JOINED, or which NICs have none, in the words of `without`. At first it is joined."""
JOINED, CUT = "joined", "cut"
NETWORK_REFUSED = "evertrain.dev/network-refused"
"""Annotation on a node: the last order for its cables that could not be obeyed, and why. It was taken back."""
NICS = ("nic0", "nic1")
SHARED = "its pods are in the network of this machine; start the cluster with --own-network"
"""Why a node has neither."""
UP, DOWN = "up", "down"
_WITHOUT = "without "


def without(nics: Collection[str]) -> str:
    return _WITHOUT + ",".join(nic for nic in NICS if nic in nics)


def cut_more(order: str, nics: Collection[str]) -> str:
    """The order after which these NICs have no cable either, or, if none is named, the node is cut off. What is cut
    already stays so."""
    if order == CUT or not nics:
        return CUT
    return without({*nics, *(NICS[number] for number in unplugged(order) or ())})


def link(network_state: str, nic: str) -> str:
    """UP or DOWN, of a NIC of a node in that state."""
    return DOWN if NICS.index(nic) in (unplugged(network_state) or ()) else UP


def unplugged(text: str) -> list[int] | None:
    """The numbers of the NICs that a text of `without` names; None if it is another one."""
    named = text.removeprefix(_WITHOUT).split(",")
    if not text.startswith(_WITHOUT) or not set(named) <= set(NICS):
        return None
    return [NICS.index(nic) for nic in named]
