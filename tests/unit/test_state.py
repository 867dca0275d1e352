"""Going back to the beginning of a step."""

from __future__ import annotations

import pytest
import torch

from evertrain.torch.state import TrainingState


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
