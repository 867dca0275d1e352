"""The state of a training run: what rolls back together, what a replacement receives, what a checkpoint holds.

It has two parts. The *core* (seed, parameters and optimizer state) is the same on every rank of a data-parallel job, so
its digest can be compared between ranks. The *rest* (buffers, scheduler, scaler, extra objects, data position, step)
goes along with it.

A rank that is stopped before its optimizer update still has the core of the step's beginning; only the small, fast
changing rest has to be put back. That is what `snapshot` keeps at each step's beginning and `rollback` restores. A rank
that is stopped after its update has begun can't go back and is a receiver.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evertrain.mindio.protocol import STATE
from evertrain.torch import codec, settings
from evertrain.torch.buffers import Buffers
from evertrain.torch.errors import StateError
from evertrain.torch.fsdp import FullySharded
from evertrain.torch.parts import Part, Update
from evertrain.torch.sharded import Sharding, assemble

__all__ = ["StateError", "TrainingState"]

_CORE = ("params", "optimizers", "seed", "run")
_SMALL = 1 << 16
"""Tensors of extra objects up to this many bytes are copied at each step; larger ones are checked for changes only."""


class TrainingState:
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.seed = seed
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        for item in self.optimizers:
            if not isinstance(item, torch.optim.Optimizer):
                raise StateError(f"optimizer must be a torch.optim.Optimizer, not {type(item).__name__}")
        self.scaler = scaler
        self._named = _named("scheduler", scheduler) | _named("extra", extra)
        for name, item in self._named.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(item, method, None)):
                    raise StateError(f"{name} ({type(item).__name__}) has no {method}(): it can't be rolled back")
        self.parts: dict[str, Part] = {STATE: self}
        """What this rank holds, by name; this object is the part that every rank has."""
        self.every_part: tuple[str, ...] = (STATE,)
        """What all ranks together hold."""
        self.cut = ""
        """How the state is divided into these parts."""
        self.update: Update | None = None
        """Set if an optimizer update can be taken back."""
        self.sharding: Sharding | FullySharded | None = None
        self.step = 0
        self.positions: dict[str, tuple[int, int]] = {}
        self._params = dict(model.named_parameters())
        self._weights = self._params
        """Those of the parameters that belong to this part."""
        self.run = ""
        """If there is none: a mark of this run, given by rank 0 at its start."""
        self._buffers = Buffers(model)
        self._settings: settings.Settings = []
        # Now, since a module may put a buffer of another size, or none, in the place of one.
        tensors = self._params | self._buffers.named()
        self._tensors = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
        self._snapshot: tuple[bytes, list[torch.Tensor], list[tuple[torch.Tensor, int]]] | None = None
        self._check()

    # Identity.

    def _check(self) -> None:
        for name, tensor in (self._params | self._buffers.named()).items():
            if tensor.is_meta:
                raise StateError(
                    f"{name} is on the meta device and has no data; materialise the model first (model.to_empty(...) "
                    "and initialise it) before it is given to Training"
                )
        known = {id(param) for param in self._params.values()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(id(param) not in known for param in group["params"]):
                    raise StateError(
                        "the optimizer holds parameters that are not in the model; build it from model.parameters() of "
                        "the very model given to Training"
                    )
        codec.pack(self._rest())  # an extra object with something that can't be transferred is told at the start

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same on all ranks that train the same model with the same kind of optimizer."""
        words = list(self._tensors)
        for optimizer in self.optimizers:
            words.append(type(optimizer).__name__)
            words.extend(str(len(group["params"])) for group in optimizer.param_groups)
        words.extend(sorted(self._named))
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]

    @functools.cached_property
    def summary(self) -> str:
        elements = sum(param.numel() for param in self._params.values())
        shapes = ", ".join(f"{name}{list(param.shape)}" for name, param in list(self._params.items())[:3])
        kinds = "+".join(type(optimizer).__name__ for optimizer in self.optimizers)
        more = f", with {', '.join(sorted(self._named))}" if self._named else ""
        return f"{len(self._params)} parameters with {elements} elements ({shapes}, ...), {kinds}{more}"

    def nbytes(self) -> int:
        """About as many bytes as a repair moves: weights, and two moments for each."""
        return 3 * sum(param.numel() * param.element_size() for param in self._params.values())

    def weights(self) -> list[torch.nn.Parameter]:
        """The parameters that are the same on all ranks: all of them, or none if they are sharded."""
        return list(self._weights.values())

    # The whole state: repair and checkpoints.

    def core(self) -> codec.Packed:
        """References to the live tensors, parameters first."""
        return codec.pack(self._core())

    def core_of(self, tree: dict[str, Any]) -> codec.Packed:
        return codec.pack({name: tree[name] for name in _CORE})

    def _core(self) -> dict[str, Any]:
        return {
            "params": {name: param.detach() for name, param in self._weights.items()},
            "optimizers": [self._optimizer_state(optimizer) for optimizer in self.optimizers],
            "seed": self.seed,
            "run": self.run,
        }

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        whole = optimizer.state_dict()
        return {"param_groups": whole["param_groups"]} if isinstance(self.sharding, FullySharded) else whole

    def _rest(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "data": {name: list(position) for name, position in self.positions.items()},
            "buffers": {name: buffer.detach() for name, buffer in self._buffers.named().items()},
            "named": {name: item.state_dict() for name, item in self._named.items()},
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def tree(self) -> dict[str, Any]:
        """Everything, to be sent or saved."""
        rest = self._rest()
        return self._core() | {
            "rest": rest,
            "rest_digest": codec.digest(codec.pack(rest)),
            "fingerprint": self.fingerprint,
            "summary": self.summary,
        }

    def check(self, tree: dict[str, Any]) -> None:
        if tree["fingerprint"] != self.fingerprint:
            raise StateError(
                f"the state was made by another model or optimizer ({tree.get('summary', 'without a description')}) "
                f"than this one ({self.summary}{self._difference(tree['params'])}); if that is meant, use another "
                "checkpoint directory"
            )
        if codec.digest(codec.pack(tree["rest"])) != tree["rest_digest"]:
            raise StateError("the received state does not match its own hash")

    def load(self, tree: dict[str, Any]) -> None:
        """Take over a whole state. Parameter tensors that are already in place (received there) are not copied."""
        self.check(tree)
        rest = tree["rest"]
        with torch.no_grad():
            for name, param in self._weights.items():
                source = tree["params"][name]
                if source.data_ptr() != param.data_ptr() or not param.numel():
                    param.copy_(source)
        self._buffers.load(rest["buffers"])
        for optimizer, state in zip(self.optimizers, tree["optimizers"], strict=True):
            if "state" in state:
                optimizer.load_state_dict(state)
            else:
                for group, values in zip(optimizer.param_groups, state["param_groups"], strict=True):
                    group.update({key: value for key, value in values.items() if key != "params"})
        for name, item in self._named.items():
            item.load_state_dict(rest["named"][name])
        self._load_scaler(rest["scaler"])
        self.seed = tree["seed"]
        self.run = tree.get("run", "")
        self.step = rest["step"]
        self.positions = {name: (epoch, index) for name, (epoch, index) in rest["data"].items()}
        self.clear_gradients()
        self.snapshot()

    def _difference(self, others: Mapping[str, torch.Tensor]) -> str:
        """The first parameter of which there are two kinds: a description may show only what they have in common."""
        for name, param in self._weights.items():
            other = others.get(name)
            if other is None or (other.shape, other.dtype) != (param.shape, param.dtype):
                there = "missing" if other is None else f"{list(other.shape)} {other.dtype}"
                return f"; {name} is {list(param.shape)} {param.dtype} here and {there} there"
        return ""

    def _load_scaler(self, state: dict[str, Any] | None) -> None:
        if self.scaler is None or state is None:
            return
        if state:
            self.scaler.load_state_dict(state)
        # A step that was interrupted after unscale_() leaves "already unscaled" behind, which load_state_dict keeps.
        from torch.amp.grad_scaler import _refresh_per_optimizer_state

        self.scaler._per_optimizer_states = collections.defaultdict(_refresh_per_optimizer_state)

    def clear_gradients(self) -> None:
        for param in self._params.values():
            param.grad = None

    # Several parts.

    def shard(self, sharding: Sharding | FullySharded) -> None:
        """The optimizer's state is sharded from here on, or the weights with it."""
        self.sharding = self.update = sharding
        if isinstance(sharding, FullySharded):
            self._weights = {}
            self.new_run()
        self.parts[sharding.name] = sharding
        self.every_part += sharding.every_part
        self.cut = sharding.cut

    def new_run(self) -> None:
        """Checkpoint files of earlier runs must not be taken for some of this one. Rank 0's mark goes to all ranks."""
        if not self._weights:
            self.run = secrets.token_hex(8)

    def writes(self, is_first: bool) -> list[str]:
        """The parts that this rank writes into a periodic checkpoint: those of which it is the first holder."""
        first = [STATE] if is_first else []
        if self.sharding is not None and self.sharding.first:
            first.append(self.sharding.name)
        return first

    def wanted(self, available: Sequence[str], cut: str) -> list[str]:
        """The parts of a checkpoint that this rank needs: its own, or all if the state was cut in another way."""
        if cut == self.cut:
            return list(self.parts)
        return list(available)

    def load_parts(self, trees: Mapping[str, Any]) -> None:
        """Take over a checkpoint, from what `wanted` asked for."""
        shards = [trees[name] for name in trees if name != STATE]
        self.load(trees[STATE])
        if self.sharding is None:
            if shards:
                (optimizer,) = self.optimizers
                self._load_whole(optimizer, assemble(shards, optimizer))
        elif not shards:
            self.sharding.absorb()
        elif list(trees) == list(self.parts):
            self.sharding.load(trees[self.sharding.name])
        else:
            self.sharding.load_shards(shards)

    def _load_whole(self, optimizer: torch.optim.Optimizer, states: dict[tuple[int, int], dict[str, Any]]) -> None:
        tree = optimizer.state_dict()
        numbers = ((g, i, n) for g, group in enumerate(tree["param_groups"]) for i, n in enumerate(group["params"]))
        tree["state"] = {number: states[group, i] for group, i, number in numbers if (group, i) in states}
        optimizer.load_state_dict(tree)

    # Parts and their steps.

    def all_parts(self) -> dict[str, int]:
        """Every part at the present step."""
        return dict.fromkeys(self.parts, self.step)

    def abandon_update(self) -> dict[str, int]:
        """The thread has left between the beginning of the update and the end of the step: which parts are clean?"""
        held = {} if self.update is None else self.update.abandon(self.step)
        if STATE in held and not self.rollback():
            del held[STATE]
        return held

    def other_copies(self) -> list[tuple[str, int]]:
        return [] if self.update is None else self.update.others()

    def switch(self, part: str, step: int) -> bool:
        return self.update is not None and self.update.switch(part, step)

    def forget_other_copies(self) -> None:
        if self.update is not None:
            self.update.forget()

    # The step's beginning: local rollback.

    def snapshot(self) -> None:
        """Remember the small state as it is now, at a step's beginning."""
        self._buffers.snapshot()
        self._settings = settings.of(self.groups())
        if not self._named and self.scaler is None:
            return
        packed = codec.pack(self._small())
        copies, watched = [], []
        for tensor in packed.tensors:
            if tensor.numel() * tensor.element_size() <= _SMALL:
                copies.append(tensor.clone())
            else:
                copies.append(tensor)
                watched.append((tensor, tensor._version))
        self._snapshot = (packed.skeleton, copies, watched)

    def rollback(self) -> bool:
        """Back to the last snapshot. False if a large tensor of an extra object has changed since: it is not copied."""
        self.clear_gradients()
        self._buffers.rollback()
        settings.put_back(self.groups(), self._settings)
        if self._snapshot is None:
            return True
        skeleton, tensors, watched = self._snapshot
        if any(tensor._version != version for tensor, version in watched):
            return False
        tree = codec.unpack(skeleton, [tensor.clone() if tensor.numel() else tensor for tensor in tensors])
        for name, item in self._named.items():
            item.load_state_dict(tree["named"][name])
        self._load_scaler(tree["scaler"])
        return True

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _small(self) -> dict[str, Any]:
        return {
            "named": {name: item.state_dict() for name, item in self._named.items()},
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def flip_bits(self) -> None:
        """What the injected fault `corrupt` does: one element of the weights gets other bits."""
        tensor = next(iter(self._params.values())).detach()
        raw = tensor.view(torch.uint8) if tensor.is_contiguous() else tensor.contiguous().view(torch.uint8)
        raw.view(-1)[: tensor.element_size()].bitwise_xor_(0x55)


def _named(prefix: str, items: Any) -> dict[str, Any]:
    if items is None:
        return {}
    if isinstance(items, Mapping):
        return {f"{prefix}.{name}": item for name, item in items.items()}
    if isinstance(items, list | tuple):
        return {f"{prefix}.{index}": item for index, item in enumerate(items)}
    return {prefix: items}
