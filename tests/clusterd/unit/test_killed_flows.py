"""The walk of `test_killed_states.py`, which takes minutes, leaves no state out."""

from __future__ import annotations

from evertrain.clusterd.recover import names as n
from tests.clusterd.integration.test_killed_states import REST
from tests.clusterd.killing import FLOWS


def test_clusterd_is_killed_in_every_state() -> None:
    """Where a recovery rests; `decode` takes no other. A new state needs a flow that leads to it."""
    killed = frozenset().union(*(flow.kills for name, flow in FLOWS.items() if name not in REST))
    assert killed == set(n.STATES) - {n.INIT}
