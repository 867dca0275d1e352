from __future__ import annotations

import torch

from evertrain.torch import Values
from evertrain.torch.state import TrainingState


def test_what_the_loop_counted_goes_back_with_the_step() -> None:
    values = Values(loss=0.5, seen=[1])
    model = torch.nn.Linear(1, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"values": values})
    state.snapshot()
    values.loss += 1.0
    values.seen.append(2)
    values.late = 3
    assert state.rollback()
    assert vars(values) == {"loss": 0.5, "seen": [1]}
