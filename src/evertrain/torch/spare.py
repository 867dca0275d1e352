"""A process in reserve: everything that a rank needs is imported and has run once, only the rank is missing.

    python -m evertrain.torch.spare [--rank unknown ...]

"torch is imported" is not warm: the first backward pass, optimizer, process group and loader each load code or start
threads, a second in all. So the spare takes a real training step on a toy model, forgets it, puts the random number
generators back to those of a fresh process, and waits (`parking` tells for what and how).

With EVERTRAIN_PARK=1 it doesn't wait there but runs the script of EVERTRAIN_PARK_ARGV (JSON, like boot's command line)
up to the point where that needs its rank: then the script's imports and the building of its model cost nothing after
a fault either. EVERTRAIN_WARM_IMPORTS names modules, separated by commas, that the script will want, and
EVERTRAIN_LEARNED_IMPORTS those of torch that the ranks have imported (`imports`).

Its own command line is for people who look at the list of processes (`title`).

Nothing in the warm-up may run with more threads than the rank will have: an OpenMP pool keeps its size.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from evertrain.torch import boot, imports, parking
from evertrain.torch.parking import wait_for_rank

__all__ = ["main", "wait_for_rank"]

PARK = "EVERTRAIN_PARK"
PARK_ARGV = "EVERTRAIN_PARK_ARGV"
WARM_IMPORTS = "EVERTRAIN_WARM_IMPORTS"
LEARNED_IMPORTS = "EVERTRAIN_LEARNED_IMPORTS"

_OWN_MODULES = ("training", "groups", "reducer", "repair", "codec", "data", "rng", "checkpoint", "state")
_TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    # A loader with workers imports these at its first iteration.
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
)


def main() -> None:
    del sys.argv[1:]
    # The launcher gives every rank one thread unless the user says otherwise; torch reads it when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    boot.prepare()
    link = parking.Link(int(os.environ.pop(boot.SPARE_FD)))
    warm_up(f"evertrain.torch.{name}" for name in _OWN_MODULES)
    if os.environ.pop(PARK, "0") == "1":
        _run_parked(link, json.loads(os.environ.pop(PARK_ARGV)))
        return
    link.tell(ready=True)
    boot.run(link.wait_for_promotion())


def _run_parked(link: parking.Link, argv: list[str]) -> None:
    parking.park(link)
    error = "the script ended before it asked for its rank"
    try:
        boot.run(argv)
    except BaseException as raised:
        error = f"the script raised {type(raised).__name__}: {raised} before it asked for its rank"
        raise
    finally:
        unused = parking.leave()
        if unused is not None:
            print(f"evertrain: a parked spare is of no use: {error}", file=sys.stderr)
            unused.tell(ready=False, error=error)
            unused.close()


# --- warming up ------------------------------------------------------------------------------------------------------


def warm_up(own: Iterable[str]) -> None:
    """Load and run once what training needs; afterwards the process looks like one that has only imported modules."""
    for name in _TORCH_MODULES:
        _import(name)
    import torch

    fresh = torch.default_generator.get_state()
    asked_for = (name.strip() for name in os.environ.get(WARM_IMPORTS, "").split(",") if name.strip())
    for name in (*own, *asked_for):
        _import(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imports.load(os.environ.pop(LEARNED_IMPORTS, "").split(","))
    has_numpy = importlib.util.find_spec("numpy") is not None
    if has_numpy:
        _import("numpy.random")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in (_train_step, _collective, _loader):
            _try(f"warm-up ({part.__name__.strip('_')})", part)
    torch.default_generator.set_state(fresh)
    # Torch seeded its own from the operating system when it was imported; these two are seeded likewise.
    random.seed()
    if has_numpy:
        sys.modules["numpy.random"].seed()
    gc.collect()
    # What is here now stays: the collector needn't visit it again and again while the rank trains.
    gc.freeze()


def _import(name: str) -> None:
    def load() -> None:
        module = importlib.import_module(name)
        # Makes a package that was put off (`lazy_dynamo`) load in earnest: somebody asked for it by name.
        getattr(module, "__path__", None)

    _try(f"import of {name}", load)


def _try(what: str, action: Callable[[], Any]) -> None:
    """A spare that is less warm than hoped is still a spare."""
    try:
        action()
    except Exception as error:
        print(f"evertrain: spare: {what} failed: {type(error).__name__}: {error}", file=sys.stderr)


def _train_step() -> None:
    """Forward, backward and update with the layers and optimizers that most scripts use."""
    import torch
    from torch import nn

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 32)
            self.layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1))
            self.head = nn.Linear(32, 16)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.layers(self.embedding(tokens))
            heads = hidden.unsqueeze(1)
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)
            return (hidden + attended + torch.softmax(hidden, dim=-1)) @ self.head.weight.T

    tokens = torch.randint(0, 16, (4, 8))
    scaler = torch.amp.GradScaler("cpu")
    for optimizer_class in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        model = Toy()
        optimizer = optimizer_class(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())


def _collective() -> None:
    """A group of one: loads the transport and takes the ways through the registry once."""
    import torch
    import torch.distributed as dist

    show_exception = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(8))
        dist.barrier()
    finally:
        dist.destroy_process_group()
        # The group has put "[rank0]:" in front of every later traceback.
        sys.excepthook = show_exception


def _loader() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    for _batch in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, shuffle=True):
        pass


if __name__ == "__main__":
    main()
