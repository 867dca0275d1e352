"""One rank whose controller is played by the test: what it answers, whatever the script does."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from evertrain.mindio import protocol as p
from evertrain.mindio.board import Board
from evertrain.mindio.timing import Timing
from evertrain.torch import codec, lasting
from evertrain.torch.default_group import uninstall_default
from evertrain.torch.inject import Injector
from evertrain.torch.interrupt import Interrupter
from evertrain.torch.reducer import Reducer
from evertrain.torch.session import Session
from evertrain.torch.state import StateError, TrainingState


class NothingMoreToSay(BaseException):
    """Ends a test's run: the controller has said all that the test had in mind."""


class Controller:
    """The rank's end of the link. `inbox` is what the rank will hear, `said` what it has answered."""

    def __init__(self) -> None:
        self.inbox: deque[p.Message] = deque()
        self.said: list[p.Message] = []
        self.newest_stop = -1
        self.on_pause: Callable[[Any], None] = lambda message: None
        self._store: dict[str, bytes] = {}

    def lead_into(self, generation: int, step: int) -> None:
        self.inbox += [
            p.Join(generation=generation, spans=[(0, 0)], step=step, prefix=f"g{generation}/"),
            p.Repair(generation=generation, step=step),
            p.Go(generation=generation, step=step),
        ]

    def stop(self, attempt: int) -> None:
        self.newest_stop = attempt
        self.inbox.append(p.Stop(attempt=attempt))

    def outs(self) -> list[p.Out]:
        return [message for message in self.said if isinstance(message, p.Out)]

    # What a Processor does.

    def send(self, message: p.Message) -> None:
        self.said.append(message)

    def receive(self) -> p.Message:
        if not self.inbox:
            raise NothingMoreToSay
        return self.inbox.popleft()

    def entered(self, generation: int, step: int) -> None:
        pass

    def store_set(self, key: str, value: bytes) -> None:
        self._store[key] = value

    def store_get(self, keys: list[str], timeout: float) -> list[bytes]:
        return [self._store[key] for key in keys]


class Rank:
    def __init__(self) -> None:
        model = nn.Linear(2, 1)
        self.controller = Controller()
        self.state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.interrupter = Interrupter()
        self.session = Session(
            processor=self.controller,  # type: ignore[arg-type]
            rank=0,
            world_size=1,
            timing=Timing.derive(0.5),
            board=Board(),
            state=self.state,
            reducer=Reducer(model),
            injector=Injector([], 0, None, None),
            interrupter=self.interrupter,
            checkpoints=None,
            on_go=lambda: None,
        )

    def complete_step(self) -> None:
        def advance() -> None:
            self.state.step += 1
            self.state.snapshot()

        self.session.end_step(advance)

    def run(self, function: Callable[[], Any]) -> None:
        with pytest.raises(NothingMoreToSay):
            self.session.run(function, self.complete_step)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.interrupter.uninstall()
    lasting.keeper.leave()
    uninstall_default()
    lasting.keeper.__init__()  # type: ignore[misc]


def test_a_stop_that_came_in_a_pause_is_answered_whatever_the_script_does(rank: Rank) -> None:
    rank.controller.lead_into(1, 0)

    def train() -> None:
        rank.controller.on_pause(p.Pause(number=1))
        rank.controller.stop(7)
        try:
            rank.complete_step()
        finally:
            raise ValueError("in the script's own cleanup")

    rank.run(train)
    first, answer = rank.controller.outs()
    assert (answer.attempt, answer.step, answer.clean) == (7, 1, True), "the controller would wait for it, and kill it"
    assert answer.fault is not None and "own cleanup" in answer.fault.detail


@pytest.mark.parametrize("first", ["update", "stop"])
def test_a_stop_in_an_update_is_answered_at_once_and_obeyed_at_the_end_of_the_step(rank: Rank, first: str) -> None:
    rank.controller.lead_into(1, 0)

    def train() -> None:
        if first == "stop":
            rank.interrupter.raise_shield()  # the moment in which the update begins
        else:
            rank.session.begin_update()
        rank.controller.stop(7)
        rank.session.stop_now()
        if first == "stop":
            rank.session.begin_update()
            rank.interrupter.lower_shield()
        assert rank.controller.said[-1] == p.Updating(attempt=7), "the controller would take it for stuck, and kill it"
        rank.complete_step()

    rank.run(train)
    assert [type(message) for message in rank.controller.said[-3:]] == [p.Updating, p.Resumed, p.Out]
    _, out = rank.controller.outs()
    assert (out.attempt, out.step, out.clean, out.fault) == (7, 1, True, None)


def test_a_stop_outside_an_update_is_obeyed_at_once(rank: Rank) -> None:
    rank.controller.lead_into(1, 0)

    def train() -> None:
        rank.controller.stop(7)
        rank.session.stop_now()
        raise AssertionError("still here")

    rank.run(train)
    assert not any(isinstance(message, p.Updating) for message in rank.controller.said)
    assert [(out.attempt, out.step) for out in rank.controller.outs()] == [(-1, 0), (7, 0)]


@pytest.mark.parametrize(
    ("text", "in_update", "clean"),
    [("some error", False, True), ("some error", True, False), ("UCE ERROR: a bit", False, False)],
)
def test_what_the_state_of_a_rank_is_worth_that_has_failed(rank: Rank, text: str, in_update: bool, clean: bool) -> None:
    rank.controller.lead_into(1, 0)

    def train() -> None:
        if in_update:
            rank.session.begin_update()
        raise RuntimeError(text)

    rank.run(train)
    _, out = rank.controller.outs()
    assert (out.clean, out.also) == (clean, [])
    assert out.fault is not None and text in out.fault.detail


@pytest.mark.parametrize("damage", ["breaks off", "core", "rest"])
def test_a_copy_that_comes_damaged_leaves_the_own_one_as_it_is(
    rank: Rank, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has a newer step and dies, or sends wrong bits, in the middle of a repair."""
    newer = nn.Linear(2, 1)
    source = TrainingState(newer, torch.optim.SGD(newer.parameters(), lr=0.1))
    source.step = 2
    expected = codec.digest(source.core())
    received: list[weakref.ref[torch.Tensor]] = []

    def receive(group: object, root: int, into: codec.Packed | None) -> codec.Packed:
        assert into is None, "what arrives would overwrite what is there"
        tree = source.tree()
        tree["params"] = {name: value.clone() for name, value in tree["params"].items()}
        if damage == "breaks off":
            raise RuntimeError("Connection closed by peer")
        if damage == "core":
            tree["params"]["weight"][0, 0] += 1
        else:
            tree["rest"]["step"] = 3
        packed = codec.pack(tree)
        received.extend(weakref.ref(tensor) for tensor in packed.tensors)
        return packed

    monkeypatch.setattr("evertrain.torch.session.repair.receive_state", receive)
    rank.controller.lead_into(1, 0)

    seen: list[object] = []

    def train() -> None:
        rank.complete_step()
        rank.session._held = {p.STATE: 1}
        seen.append(codec.digest(rank.state.core()))
        try:
            rank.session._receive_part(p.STATE, 0, expected, 2)
        except (StateError, RuntimeError):
            seen.extend([dict(rank.session._held), rank.state.step, codec.digest(rank.state.core())])
        rank.controller.stop(7)
        rank.complete_step()

    gc.disable()
    try:
        rank.run(train)
        assert not any(each() is not None for each in received), "the damaged copy stays in memory"
        assert seen == [seen[0], {p.STATE: 1}, 1, seen[0]]
    finally:
        gc.enable()
