"""One rank that does the work of three: its gradients, and what its script must not notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evertrain.torch.errors import UsageError
from evertrain.torch.reducer import Reducer
from evertrain.torch.rounds import Rounds
from evertrain.torch.state import TrainingState

WORLD = 3


class OneLeft:
    """The group of the last survivor."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def batch(share: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(share))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, share: int) -> torch.Tensor:
        return self.always(self.sometimes(x) if share == 1 else x).square().mean()


class Counter:
    def __init__(self, size: int = 1) -> None:
        self.values = torch.zeros(size)

    def state_dict(self) -> dict:
        return {"values": self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values = state["values"].clone()


class Job:
    def __init__(self, extra: Counter | None = None) -> None:
        torch.manual_seed(1)
        self.net, self.extra = Net(), extra or Counter()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.state = TrainingState(self.net, self.optimizer, self.scheduler, self.scaler, {"counter": self.extra})
        self.reducer = Reducer(self.net)
        self.reducer.attach(OneLeft(), WORLD)
        self.rounds = Rounds(self.state, self.reducer)
        self.state.snapshot()

    def body(self, share: int) -> None:
        """What a script does with a batch, without knowing whose it is."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.net(batch(share), share)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1e-3)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.extra.values += 1


def mean_of_all_shares() -> dict[str, torch.Tensor | None]:
    torch.manual_seed(1)
    net = Net()
    for share in range(WORLD):
        net(batch(share), share).backward()
    return {name: None if p.grad is None else p.grad / WORLD for name, p in net.named_parameters()}


def gradients_of(job: Job) -> None:
    """All shares of a step, one of them gone through twice; only passes, no update."""
    for share, counts in ((2, False), (1, True), (2, True)):
        with job.rounds.partial(counts):
            job.net(batch(share), share).backward()
            nn.utils.clip_grad_norm_(job.net.parameters(), 1e-3)
    job.optimizer.zero_grad()
    job.net(batch(0), 0).backward()


def test_the_gradient_is_the_mean_over_all_shares() -> None:
    job = Job()
    gradients_of(job)
    for name, expected in mean_of_all_shares().items():
        found = job.net.get_parameter(name).grad
        if expected is None:
            assert found is None, name
        else:
            torch.testing.assert_close(found, expected)


def test_a_whole_step_is_that_of_the_mean_gradient() -> None:
    job = Job()
    weights = {name: p.detach().clone() for name, p in job.net.named_parameters()}
    for share in (1, 2):
        with job.rounds.partial(True):
            assert not job.rounds.completes_step
            job.body(share)
    assert job.rounds.completes_step
    job.body(0)
    expected = {name: grad for name, grad in mean_of_all_shares().items() if grad is not None}
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert norm > 1e-3, "nothing is clipped"
    for name, grad in expected.items():
        # The parameter is moved along the complete gradient, clipped as a whole, at the step's own learning rate.
        step = (weights[name] - job.net.get_parameter(name)).detach()
        torch.testing.assert_close(step, 0.1 * grad * (1e-3 / norm), rtol=1e-3, atol=1e-7)


def test_what_the_body_does_counts_once() -> None:
    job = Job()
    for share in (1, 2):
        with job.rounds.partial(True):
            job.body(share)
    assert job.optimizer.param_groups[0]["lr"] == 0.1
    assert job.extra.values.item() == 0
    job.body(0)
    assert job.optimizer.param_groups[0]["lr"] == 0.05
    assert job.scheduler.last_epoch == 1
    assert job.scaler.get_scale() == 16.0
    assert job.extra.values.item() == 1


def test_an_extra_object_that_can_not_be_put_back_is_told() -> None:
    job = Job(Counter(100_000))
    with pytest.raises(UsageError, match="large tensor"), job.rounds.partial(True):
        job.body(1)


def test_a_round_that_was_left_in_the_middle_is_forgotten() -> None:
    job = Job()
    with pytest.raises(KeyboardInterrupt), job.rounds.partial(True):
        job.body(1)
        raise KeyboardInterrupt
    job.reducer.attach(OneLeft(), WORLD)
    job.rounds.reset()
    job.state.rollback()
    assert job.rounds.completes_step
    gradients_of(job)
    expected = mean_of_all_shares()
    torch.testing.assert_close(job.net.always.weight.grad, expected["always.weight"])
