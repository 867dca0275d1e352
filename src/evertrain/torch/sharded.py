"""An optimizer whose state is cut into shards, each held by several ranks (ZeRO-1 with replicas).

All parameters of a group, one behind the other, are cut into k = ranks / copies shards, and rank r holds shard r mod k.
In `optimizer.step()` a rank updates its shard only, of the same averaged gradients that every rank has, and then
everybody gathers the new weights from everybody. The copies of a shard compute the same bits, so each of them
contributes another piece of it: no weight is sent twice, and who has gathered everything knows that every rank has
updated its shard.

The update is a transaction. It works on copies of the weights and keeps the old moments; the live weights change when
the gathering is complete. A peer that dies in it leaves each of the others in one of two situations: it has all of the
new step, or it has all of the old one and beside it the new version of its own shard. If anybody has the new weights,
every rank has the new version of its shard, and the job goes on from there; else everybody has the old step.

The user's optimizer object stays in use. Its hooks exchange the parameters for the shard's while `step()` runs, so
that learning rates, schedulers, scalers and gradient clipping see what they always see.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from evertrain.torch import codec
from evertrain.torch.errors import StateError, UsageError

NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
State = dict[str, Any]


def part_name(shard: int) -> str:
    return f"shard:{shard}"


@dataclass(frozen=True)
class Slice:
    """The elements [start, stop) of a parameter, in the order in which they lie in memory."""

    group: int
    index: int
    """Of the parameter in its group."""
    start: int
    stop: int


@dataclass
class Run:
    """Parameters of one group with one dtype on one device, one behind the other and cut into equal pieces."""

    group: int
    members: list[tuple[int, int]]
    """(index in the group, number of elements)"""
    unit: int
    """Elements of a piece; the last ones reach beyond the end."""

    def slices(self, first: int, count: int) -> Iterator[tuple[Slice, int]]:
        """The parts of parameters in these pieces, each with its offset from the first piece's beginning."""
        begin, end = first * self.unit, (first + count) * self.unit
        offset = 0
        for index, numel in self.members:
            start, stop = max(begin - offset, 0), min(end - offset, numel)
            if start < stop:
                yield Slice(self.group, index, start, stop), offset + start - begin
            offset += numel


@dataclass(eq=False)
class Block:
    """All runs of one dtype and device: what is gathered by one operation."""

    dtype: torch.dtype
    device: torch.device
    runs: list[Run] = field(default_factory=list)
    shard: Tensor | None = None
    """The weights of this rank's shard while they are updated."""
    mine: Tensor | None = None
    """What this rank contributes."""
    all: Tensor | None = None
    work: Any = None

    @property
    def unit(self) -> int:
        return sum(run.unit for run in self.runs)


class Sharding:
    """The shard of this rank: its part of the state, and how it is updated."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        rank: int,
        world_size: int,
        copies: int,
        faults: Callable[[str], None] | None = None,
    ) -> None:
        check(optimizers, world_size, copies)
        self.optimizer = optimizer = optimizers[0]
        self.rank, self.world_size, self.copies = rank, world_size, copies
        self.shards = world_size // copies
        self.shard = rank % self.shards
        self.name = part_name(self.shard)
        self.first = rank < self.shards
        """Whether this rank is the first holder of its shard."""
        self._faults = faults or (lambda phase: None)
        self._group: Any = None
        self._layout = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        self._blocks = _blocks(optimizer, world_size)
        self._slices: list[Slice] = []
        self._params: list[nn.Parameter] = []
        self._make_shard()
        self._states: list[State] = [{} for _ in self._slices]
        self._saved: list[State] = [{} for _ in self._slices]
        """The version before, or the one after; else memory for the next copy."""
        self._step = -1
        """Of the beginning of the newest update."""
        self._begun = self._updated = self._committed = self._twice = False
        self._several = False
        """The script calls step() more than once in a step: after the first, the shard is of neither step."""
        self._swapped = False
        """The optimizer sees the shard."""
        self._depth = 0
        self._values: list[dict[str, Any]] = []
        """What the parameter groups said before the update."""
        self._at: int | None = None
        self._other: int | None = None
        """Steps of the present and of the saved version, as long as there are two to choose from."""
        self.absorb()

    @property
    def cut(self) -> str:
        """How the state is cut: shards of another cut hold other slices."""
        return f"{self.shards}x{self.copies}"

    @property
    def every_part(self) -> tuple[str, ...]:
        return tuple(map(part_name, range(self.shards)))

    def attach(self, group: Any | None) -> None:
        """Begin a generation. New memory, because an operation that is stuck in the old group may still write."""
        self._group = group
        for block in self._blocks:
            block.mine = block.all = block.work = None
            if group is not None:
                block.mine = torch.empty(block.unit, dtype=block.dtype, device=block.device)
                block.all = torch.empty(block.unit * self.world_size, dtype=block.dtype, device=block.device)

    # One update.

    def begin(self, step: int) -> None:
        """The optimizer is about to run: let it see the shard."""
        if self._swapped:  # its step() has called that of the class that it extends, which has hooks as well
            self._depth += 1
            return
        if [[id(p) for p in group["params"]] for group in self.optimizer.param_groups] != self._layout:
            raise UsageError("the optimizer's parameters have changed since Training was made: that can't be sharded")
        self._twice = self._committed and step == self._step
        self._several = self._several or self._twice
        self._step, self._begun, self._updated, self._committed = step, True, False, False
        self._at = self._other = None
        self._save()
        live, shard = [], []
        with torch.no_grad():
            for item, param in zip(self._slices, self._params, strict=True):
                whole = self._param(item)
                live.append(_flat(whole)[item.start : item.stop])
                shard.append(param.data)
                param.grad = _gradient(whole, item)
            if live:
                torch._foreach_copy_(shard, live)
        self._values = [
            {key: v for key, v in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        self._swapped = True
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [p for item, p in zip(self._slices, self._params, strict=True) if item.group == number]
        self.optimizer.state = collections.defaultdict(dict)
        for param, state in zip(self._params, self._states, strict=True):
            if state:
                self.optimizer.state[param] = state

    def finish(self) -> None:
        """The optimizer has run over the shard: exchange the results."""
        if self._depth:
            self._depth -= 1
            return
        self._restore()
        self._updated = True
        self._gather()
        self._commit()
        self._committed = True

    def _restore(self) -> None:
        """The optimizer sees the whole parameters again."""
        state = self.optimizer.state
        self._states = [state.get(param, {}) for param in self._params]
        self.optimizer.state = collections.defaultdict(dict)
        self._swapped, self._depth = False, 0
        for group, params in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = list(params)
        for param in self._params:
            param.grad = None

    def _gather(self) -> None:
        if self._group is None:
            raise UsageError("optimizer.step() of a sharded optimizer belongs inside the training function")
        piece = self.rank // self.shards
        for block in self._blocks:
            assert block.shard is not None and block.mine is not None and block.all is not None
            for run, shard, mine in zip(block.runs, *self._cut(block), strict=True):
                mine.copy_(shard[piece * run.unit : (piece + 1) * run.unit])
            block.work = self._group.allgather([list(block.all.split(block.unit))], [block.mine])
            self._faults("gather")
        for block in self._blocks:
            block.work.wait()

    def _cut(self, block: Block) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        assert block.shard is not None and block.mine is not None
        units = [run.unit for run in block.runs]
        return block.shard.split([unit * self.copies for unit in units]), block.mine.split(units)

    def _commit(self) -> None:
        into, out_of = [], []
        for block in self._blocks:
            assert block.all is not None
            for rank, gathered in enumerate(block.all.split(block.unit)):
                number = rank % self.shards * self.copies + rank // self.shards
                pieces = gathered.split([run.unit for run in block.runs])
                for run, piece in zip(block.runs, pieces, strict=True):
                    for item, offset in run.slices(number, 1):
                        into.append(_flat(self._param(item))[item.start : item.stop])
                        out_of.append(piece[offset : offset + item.stop - item.start])
        with torch.no_grad():
            torch._foreach_copy_(into, out_of)

    # What is left of an update that was not completed: see `parts.Update`.

    def abandon(self, step: int) -> dict[str, int]:
        if self._swapped:
            self._restore()
        if not self._begun or self._step != step:
            return {"state": step, self.name: step}
        if self._twice or (self._several and self._committed):
            return {}
        if self._committed:
            self._at, self._other = step + 1, step
            return {self.name: step + 1}
        self._states, self._saved = self._saved, self._states
        for group, values in zip(self.optimizer.param_groups, self._values, strict=True):
            group.update(values)
        self._at, self._other = step, step + 1 if self._updated else None
        return {"state": step, self.name: step}

    def others(self) -> list[tuple[str, int]]:
        return [] if self._other is None else [(self.name, self._other)]

    def switch(self, part: str, step: int) -> bool:
        if part != self.name or self._other != step:
            return False
        self._states, self._saved = self._saved, self._states
        self._at, self._other = self._other, self._at
        return True

    def forget(self) -> None:
        self._at = self._other = None
        self._begun = self._updated = self._committed = self._twice = False

    def _save(self) -> None:
        """Copy the optimizer's state, into the memory of the copy before where that fits."""
        into, out_of = [], []
        for state, saved in zip(self._states, self._saved, strict=True):
            for key in saved.keys() - state.keys():
                del saved[key]
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    saved[key] = value
                    continue
                old = saved.get(key)
                if not isinstance(old, Tensor) or old.shape != value.shape or old.dtype != value.dtype:
                    saved[key] = old = torch.empty_like(value)
                into.append(old)
                out_of.append(value)
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, out_of)

    # A part of the training state: see `parts.Part`.

    def core(self) -> codec.Packed:
        return codec.pack(self._core())

    def core_of(self, tree: dict[str, Any]) -> codec.Packed:
        return codec.pack(tree)

    def _core(self) -> dict[str, Any]:
        return {"slices": [_numbers(item) for item in self._slices], "states": self._states}

    def tree(self) -> dict[str, Any]:
        return self._core()

    def check(self, tree: dict[str, Any]) -> None:
        if [list(item) for item in tree["slices"]] != [_numbers(item) for item in self._slices]:
            raise StateError("the shard was cut in another way than this rank's: the number of ranks or copies differs")

    def load(self, tree: dict[str, Any]) -> None:
        self.check(tree)
        self._states = [
            {key: self._placed(item, key, value) for key, value in state.items()}
            for item, state in zip(self._slices, tree["states"], strict=True)
        ]
        self.forget()

    def _placed(self, item: Slice, key: str, value: Any) -> Any:
        """Where the optimizer keeps it: beside its parameter, except for counters, which most keep in host memory."""
        group = self.optimizer.param_groups[item.group]
        if not isinstance(value, Tensor) or (key == "step" and not (group.get("capturable") or group.get("fused"))):
            return value
        return value.to(self._param(item).device)

    # The whole of it.

    def load_shards(self, trees: list[dict[str, Any]]) -> None:
        """Take over a state that was cut in another way, from all of its shards."""
        self._absorb(assemble(trees, self.optimizer))

    def absorb(self) -> None:
        """Cut what the optimizer itself holds, for example because it was loaded before, and keep our shard of it."""
        held = self.optimizer.state
        if held:
            whole = {}
            for number, group in enumerate(self.optimizer.param_groups):
                for index, param in enumerate(group["params"]):
                    if param in held:
                        whole[number, index] = dict(held[param])
            self._absorb(whole)
            self.optimizer.state = collections.defaultdict(dict)

    def _absorb(self, whole: dict[tuple[int, int], State]) -> None:
        self._states = []
        for item in self._slices:
            param = self._param(item)
            state = {}
            for key, value in whole.get((item.group, item.index), {}).items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    value = _flat(_like(value, param))[item.start : item.stop].clone()
                state[key] = value.clone() if isinstance(value, Tensor) else value
            self._states.append(state)
        self._saved = [{} for _ in self._slices]
        self.forget()

    def gather_state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` would be without sharding. A collective: all ranks call it."""
        if self._group is None:
            raise UsageError("the optimizer's state can be gathered inside the training function only")
        packed = codec.pack(self._core())
        sizes = torch.tensor([len(packed.skeleton), packed.nbytes])
        gathered = [torch.empty_like(sizes) for _ in range(self.world_size)]
        self._group.allgather([gathered], [sizes]).wait()
        longest = max(int(size.sum()) for size in gathered)
        raw = torch.zeros(longest, dtype=torch.uint8)
        own = [torch.frombuffer(bytearray(packed.skeleton), dtype=torch.uint8)]
        own += [codec.flat_bytes(codec.host(tensor)) for tensor in packed.tensors if tensor.numel()]
        flat = torch.cat(own)
        raw[: flat.numel()] = flat
        everything = [torch.empty_like(raw) for _ in range(self.world_size)]
        self._group.allgather([everything], [raw]).wait()
        trees = []
        for data, size in zip(everything[: self.shards], gathered, strict=False):
            skeleton, rest = bytes(codec.view_bytes(data[: int(size[0])])), data[int(size[0]) :]
            trees.append(_taken_apart(skeleton, rest))
        whole = assemble(trees, self.optimizer)
        result = self.optimizer.state_dict()
        numbers = [index for group in result["param_groups"] for index in group["params"]]
        places = [(g, i) for g, group in enumerate(self._layout) for i in range(len(group))]
        result["state"] = {
            number: whole[place] for number, place in zip(numbers, places, strict=True) if place in whole
        }
        return result

    # The layout.

    def _make_shard(self) -> None:
        self._whole = [list(group["params"]) for group in self.optimizer.param_groups]
        for block in self._blocks:
            size = block.unit * self.copies
            block.shard = torch.zeros(size, dtype=block.dtype, device=block.device)
            begin = 0
            for run in block.runs:
                for item, offset in run.slices(self.shard * self.copies, self.copies):
                    at = begin + offset
                    self._slices.append(item)
                    self._params.append(nn.Parameter(block.shard[at : at + item.stop - item.start]))
                begin += run.unit * self.copies

    def _param(self, item: Slice) -> nn.Parameter:
        return self._whole[item.group][item.index]


def check(optimizers: Sequence[torch.optim.Optimizer], world_size: int, copies: int) -> None:
    """Raises UsageError if this can't be sharded so."""
    if len(optimizers) != 1:
        raise UsageError("sharded=True works with exactly one optimizer: an update of several could not be taken back")
    (optimizer,) = optimizers
    if type(optimizer).__name__ in NOT_ELEMENTWISE:
        raise UsageError(
            f"{type(optimizer).__name__} can't be sharded: the update of an element depends on other elements. Use an "
            "element-wise optimizer such as AdamW or SGD, or sharded=False"
        )
    if world_size < 2:
        raise UsageError("sharded=True needs at least two ranks: with one there is nobody to share the state with")
    if copies < 1:
        raise UsageError(f"replica_cnt must be at least 1: {copies}")
    if world_size % copies:
        raise UsageError(f"the number of ranks ({world_size}) must be a multiple of replica_cnt ({copies})")
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not _is_dense(param):
                raise UsageError(f"a parameter of shape {tuple(param.shape)} does not lie in memory without gaps")


def assemble(trees: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> dict[tuple[int, int], State]:
    """The states of whole parameters, by group and index, from those of all shards."""
    groups = optimizer.param_groups
    whole: dict[tuple[int, int], State] = {}
    flats: dict[tuple[int, int, str], Tensor] = {}
    for tree in trees:
        for (group, index, start, stop), state in zip(tree["slices"], tree["states"], strict=True):
            if group >= len(groups) or index >= len(groups[group]["params"]):
                raise StateError("the shards were made for another optimizer")
            param = groups[group]["params"][index]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == stop - start:
                    flat = flats.get((group, index, key))
                    if flat is None:
                        flat = flats[group, index, key] = torch.zeros(param.numel(), dtype=value.dtype)
                        whole.setdefault((group, index), {})[key] = flat.as_strided(param.shape, param.stride())
                    flat[start:stop] = value
                else:
                    whole.setdefault((group, index), {}).setdefault(key, value)
    return dict(sorted(whole.items(), key=lambda item: item[0]))


def _blocks(optimizer: torch.optim.Optimizer, world_size: int) -> list[Block]:
    blocks: dict[tuple[torch.dtype, torch.device], Block] = {}
    for number, group in enumerate(optimizer.param_groups):
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, int]]] = {}
        for index, param in enumerate(group["params"]):
            kinds.setdefault((param.dtype, param.device), []).append((index, param.numel()))
        for kind, members in kinds.items():
            unit = -(-sum(numel for _, numel in members) // world_size)
            blocks.setdefault(kind, Block(*kind)).runs.append(Run(number, members, unit))
    return list(blocks.values())


def _taken_apart(skeleton: bytes, data: Tensor) -> dict[str, Any]:
    tensors, at = [], 0
    for spec in codec.specs(skeleton):
        raw = data[at : at + spec.nbytes].clone()
        tensors.append(raw.view(spec.dtype).view(spec.shape) if raw.numel() else codec.allocate([spec])[0])
        at += spec.nbytes
    tree: dict[str, Any] = codec.unpack(skeleton, tensors)
    return tree


def _numbers(item: Slice) -> list[int]:
    return [item.group, item.index, item.start, item.stop]


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _like(tensor: Tensor, param: Tensor) -> Tensor:
    """With the parameter's order of elements in memory."""
    if tensor.stride() == param.stride() or tensor.numel() < 2:
        return tensor
    return torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _gradient(param: nn.Parameter, item: Slice) -> Tensor | None:
    if param.grad is None:
        return None
    return _flat(_like(param.grad, param))[item.start : item.stop]
