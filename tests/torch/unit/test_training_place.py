"""Training outside of the places where it is protected is refused; here without the launcher."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evertrain.torch.errors import NO_STEPS, NOT_RESILIENT, UsageError, user_frames
from evertrain.torch.training import Training

LOADER = [torch.ones(2, 4), torch.zeros(2, 4)]


@pytest.fixture
def training() -> Training:
    model = nn.Linear(4, 1)
    return Training(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), seed=1)


def optimizer_of(training: Training) -> torch.optim.Optimizer:
    return training._state.optimizers[0]


def train(training: Training, until: int) -> None:
    for _, batch in training.steps(LOADER, until):
        training.model(batch).sum().backward()
        optimizer_of(training).step()
        optimizer_of(training).zero_grad()


def test_outside_of_a_resilient_function(training: Training) -> None:
    for attempt in (
        lambda: training.steps(LOADER, until=1),
        lambda: training.model(LOADER[0]),
        lambda: optimizer_of(training).step(),
    ):
        with pytest.raises(UsageError) as raised:
            attempt()
        assert str(raised.value) == NOT_RESILIENT
    assert training.step == 0


def test_after_a_resilient_function_has_ended(training: Training) -> None:
    training.resilient(train)(training, 2)
    assert training.step == 2
    with pytest.raises(UsageError, match="training.resilient"):
        train(training, 4)
    training.resilient(train)(training, 4)
    assert training.step == 4


def test_after_a_resilient_function_has_failed(training: Training) -> None:
    @training.resilient
    def fails() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fails()
    with pytest.raises(UsageError, match="training.resilient"):
        training.model(LOADER[0])


def test_evaluation_is_allowed_anywhere(training: Training) -> None:
    with torch.no_grad():
        training.model(LOADER[0])
    training.model.eval()
    training.model(LOADER[0])
    training.model.train()
    training.resilient(train)(training, 1)
    training.model.eval()
    training.model(LOADER[0])


def test_an_update_without_steps(training: Training) -> None:
    @training.resilient
    def loop() -> None:
        for batch in LOADER:
            training.model(batch).sum().backward()
            optimizer_of(training).step()

    before = [p.clone() for p in training.model.parameters()]
    with pytest.raises(UsageError) as raised:
        loop()
    assert str(raised.value) == NO_STEPS
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    training.resilient(train)(training, 2)  # steps of an earlier call do not count for a later one
    with pytest.raises(UsageError, match="training.steps"):
        loop()


def test_only_the_frames_of_the_script_are_shown(training: Training) -> None:
    with pytest.raises(UsageError) as raised:
        training.model(LOADER[0])
    shown = user_frames(raised.value)
    assert shown.count("File ") == 1
    assert __file__ in shown and "training.model(LOADER[0])" in shown


def test_the_state_of_one_of_several_optimizers_is_asked_for_by_name() -> None:
    model = nn.Linear(4, 1)
    first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.2)
    training = Training(model=model, optimizer=[first, second], seed=1)
    assert training.optimizer_state_dict(second) == second.state_dict() != first.state_dict()
    with pytest.raises(UsageError, match="several optimizers"):
        training.optimizer_state_dict()
    with pytest.raises(UsageError, match="was not given"):
        training.optimizer_state_dict(torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_state_of_the_only_optimizer(training: Training) -> None:
    (only,) = training._state.optimizers
    assert training.optimizer_state_dict() == training.optimizer_state_dict(only) == only.state_dict()
