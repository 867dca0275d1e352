"""Into the training function and out of it, with a stop at any moment: no fault is lost, and no interrupt gets out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from evertrain.mindio.tft.runtime import runtime
from evertrain.torch.interrupt import Interrupted
from evertrain.torch.tft_collectives import Collectives

MOMENTS = 60
"""More than there are calls and returns on the way."""


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collectives]:
    monkeypatch.setattr(runtime, "shield", runtime.shield)
    made = Collectives(0, dist.HashStore())
    yield made
    made._interrupter.acknowledge()
    made._interrupter.uninstall()


class Stop:
    """Another thread stops the training at this call or return in this one, or at the first later one at which it
    can."""

    def __init__(self, collectives: Collectives, moment: int) -> None:
        self._collectives, self._left = collectives, moment

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left < 0 and not self._collectives._lock.locked():
            sys.setprofile(None)
            self._collectives.stop()


def outcome(function: Any) -> str:
    try:
        function()
    except Interrupted:
        return "an interrupt"
    except RuntimeError as error:
        return str(error)
    finally:
        sys.setprofile(None)
    return ""


def test_a_fault_on_its_way_out_is_not_lost(collectives: Collectives) -> None:
    def train(moment: int) -> None:
        with collectives.training():
            sys.setprofile(Stop(collectives, moment))
            raise RuntimeError("UCE ERROR")

    for moment in range(MOMENTS):
        assert outcome(lambda: train(moment)) == "UCE ERROR", f"stopped at moment {moment}"  # noqa: B023
        assert not collectives._inside and not collectives._interrupter.pending
        collectives.clean()


def test_a_stop_on_the_way_in(collectives: Collectives) -> None:
    def train() -> None:
        with collectives.training():
            sys.setprofile(None)
            while collectives._stopped.is_set():
                pass  # repeated until it is heard

    for moment in range(MOMENTS):
        sys.setprofile(Stop(collectives, moment))
        said = outcome(train)
        assert said == ("FORCE STOP. By evertrain" if collectives._stopped.is_set() else ""), f"moment {moment}"
        assert not collectives._inside and not collectives._interrupter.pending
        collectives.clean()


@pytest.mark.parametrize("said", ["UCE ERROR", "HBM MULTI BIT ECC", "an ordinary error"])
def test_a_fault_of_a_script_that_cleans_up(said: str, collectives: Collectives) -> None:
    """Memory does not become good by being forgotten. Anything else is met again when the step is."""

    def train() -> None:
        with collectives.training():
            try:
                raise RuntimeError(said)
            finally:
                collectives.stop()

    assert outcome(train) == ("FORCE STOP. By evertrain" if "ordinary" in said else said)


def test_what_was_wrong_before_is_no_fault(collectives: Collectives) -> None:
    def train() -> None:
        with collectives.training():
            try:
                raise RuntimeError("UCE ERROR")
            except RuntimeError:
                pass
            collectives.stop()

    assert outcome(train) == "FORCE STOP. By evertrain"
