"""Which library a group gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from evertrain.torch import backends, nics, prelude


def test_a_torch_built_for_cuda_on_a_machine_without_it_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # What such a build says without looking at the machine.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backends.best_device() == "cpu"
    assert isinstance(prelude._backend_named(None), backends.Gloo)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends.best_device() == "cuda"


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({}, {"hostname": "127.0.0.1"}),
        ({"POD_IP": "10.0.0.7"}, {"hostname": "10.0.0.7"}),
        ({"POD_IP": "10.0.0.7", nics.INTERFACE: "eth1,eth2"}, {"interface": "eth1"}),
        ({"POD_IP": "10.0.0.7", backends.GLOO_HOST: "10.0.0.8"}, {"hostname": "10.0.0.8"}),
        ({"POD_IP": "10.0.0.7", nics.VARIABLE: "10.0.0.9,10.0.1.9"}, {"hostname": "10.0.0.9"}),
    ],
)  # fmt: skip
def test_where_gloo_listens(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], where: dict[str, str]
) -> None:
    """In a pod at the pod's address: on loopback, peers in other pods would not find it."""
    for name in ("POD_IP", backends.GLOO_HOST, nics.INTERFACE, nics.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nics, "_on_backup", False)
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", lambda **options: asked.append(options))
    backends._gloo_device(nics.current())
    assert asked == [where]
