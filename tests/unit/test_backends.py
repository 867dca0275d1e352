"""Which library a group gets."""

from __future__ import annotations

import pytest
import torch

from evertrain.torch import backends, prelude


def test_a_torch_built_for_cuda_on_a_machine_without_it_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # What such a build says without looking at the machine.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backends.best_device() == "cpu"
    assert isinstance(prelude._backend_named(None), backends.Gloo)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends.best_device() == "cuda"
