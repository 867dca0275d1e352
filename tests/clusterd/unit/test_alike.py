"""Which states of a recovery need not be kept at once: who takes over would do the same from the one before."""

from __future__ import annotations

import json

import pytest

from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover.events import Signal
from evertrain.clusterd.recover.state import Data, Fresh, alike, encode


def fields(**values: object) -> dict[str, object]:
    found: dict[str, object] = json.loads(encode(Data(**values)))
    return found


FAULTS = {"faults": {3: "1"}, "pods": {1: "uid"}, "uuid": "a", "id": "r"}


def test_the_way_to_a_decision_is_gone_again_by_who_takes_over() -> None:
    stopped = fields(state=n.STOPPED, until=900.0, sent=[Signal("stopTrain", "a")], **FAULTS)
    offers = fields(state=n.OFFERS, until=950.0, clock=50.0, sent=[Signal("globalFault", "a")], mended=True, **FAULTS)
    assert alike(stopped, offers) and alike(offers, stopped)
    assert alike(fields(state=n.STOPPING, lonely=3.0, **FAULTS), stopped)


@pytest.mark.parametrize(
    "more",
    [{"faults": {3: "1", 4: "1"}}, {"pods": {1: "uid", 2: "other"}}, {"later": {5: "1"}}, {"replaced": {"uid"}},
     {"state": n.DECIDED}, {"state": n.RETRY_STATUS}, {"state": n.INIT}, {"confirmed": True}, {"platform": "recover"},
     {"hardware": {1: True}}, {"retry_over": True}, {"after": n.RETRY}, {"id": "another"}],
)  # fmt: skip
def test_what_nobody_could_find_out_again_is_kept_at_once(more: dict[str, object]) -> None:
    before = {"state": n.STOPPED, **FAULTS}
    assert not alike(fields(**before), fields(**{**before, "state": n.OFFERS, **more}))


def test_a_decision_is_kept_at_once() -> None:
    for state in n.STATES:
        for other in n.STATES:
            if not {state, other} <= {n.STOPPING, n.STOPPED, n.OFFERS} and {state, other} != {n.INIT}:
                assert not alike(fields(state=state), fields(state=other)), (state, other)


def test_what_faults_are_dealt_with_can_wait_if_nothing_else_happens() -> None:
    assert alike(fields(handled={"x"}), fields(clock=3.0)) and alike(fields(), fields(handled={"x", "y"}))
    assert not alike(fields(), fields(later={1: "1"}))
    assert not alike(fields(), fields(fresh={1: Fresh("u", 1.0)}))
