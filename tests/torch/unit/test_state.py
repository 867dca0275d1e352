"""Going back to the beginning of a step."""

from __future__ import annotations

import pytest
import torch

from evertrain.torch import codec
from evertrain.torch.state import StateError, TrainingState


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_learning_rate_that_was_changed_before_the_update_goes_back(rate: float | torch.Tensor) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    state = TrainingState(model, optimizer, scheduler)
    state.snapshot()
    held = optimizer.param_groups[0]["lr"]

    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # without it the scheduler warns
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
    assert state.rollback()

    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert scheduler.last_epoch == 0
    if isinstance(rate, torch.Tensor):
        assert optimizer.param_groups[0]["lr"] is held, "what a compiled update reads must stay the same tensor"


def test_a_hyperparameter_that_the_loop_sets_goes_back() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainingState(model, optimizer)
    state.snapshot()
    optimizer.param_groups[0].update(lr=0.7, momentum=0.1)
    assert state.rollback()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)


class Centred(torch.nn.Module):
    """Puts a new tensor in the place of its buffer at each step, as losses with a moving centre do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre = 0.5 * self.centre + x.mean(0)
        self.cache = None
        return self.linear(x - self.centre)


def test_a_buffer_that_is_replaced_belongs_to_the_state() -> None:
    model, other = Centred(), Centred()
    state, received = (TrainingState(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, other))
    state.snapshot()
    model(torch.ones(1, 2))
    assert state.rollback()
    assert model.centre.tolist() == [0.0, 0.0] and model.cache is not None
    model(torch.ones(1, 2))
    state.snapshot()
    model(torch.ones(1, 2))
    assert state.rollback()
    assert model.centre.tolist() == [1.0, 1.0] and model.cache is None
    received.load(state.tree())
    assert other.centre.tolist() == [1.0, 1.0] and other.cache is None


def test_a_scaler_that_was_left_after_unscaling_can_begin_the_step_again() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = TrainingState(model, optimizer, scaler=scaler)
    state.snapshot()
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        assert state.rollback()


def test_a_state_of_another_model_or_with_other_bits_is_refused() -> None:
    def made(width: int) -> TrainingState:
        model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(StateError, match="another model or optimizer") as refused:
        made(2).load(made(3).tree())
    there, here = str(refused.value).split(" than this one ")
    assert "4 parameters with 15 elements" in there and "4 parameters with 10 elements" in here
    assert "0.weight is [2, 2] torch.float32 here and [3, 2] torch.float32 there" in here
    old = made(3).tree()
    del old["summary"]  # as written by earlier versions
    with pytest.raises(StateError, match="without a description"):
        made(2).load(old)
    tree = made(2).tree()
    tree["rest"]["step"] = 5
    with pytest.raises(StateError, match="does not match its own hash"):
        made(2).load(tree)


def test_what_is_received_can_be_judged_before_it_is_loaded() -> None:
    def trained(steps: int) -> TrainingState:
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99))
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return TrainingState(model, optimizer)

    source, behind = trained(3), trained(2)
    packed = codec.pack(source.tree())
    tree = codec.unpack(packed.skeleton, packed.tensors)
    assert codec.digest(behind.core_of(tree)) == codec.digest(source.core()) != codec.digest(behind.core())
    behind.load(tree)
    assert codec.digest(behind.core()) == codec.digest(source.core())
