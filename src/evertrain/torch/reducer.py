"""Averages gradients over the ranks while backward runs, in buckets whose layout never changes.

DistributedDataParallel re-arranges its buckets after its first iteration, and the place of an element in a buffer
decides in which order the ranks' values are added: with three ranks or more a re-wrapped DDP gives other bits. Here the
layout is part of the state. It follows from the model alone: parameters in reverse registration order, filled into
buckets for each dtype and device, the first one small so that communication starts early.

- When a gradient is accumulated, it is scaled by 1/size into its place in the bucket, and the parameter's `.grad`
  becomes a view of that place. A full bucket is reduced at once, in the background; buckets start in their fixed order,
  so that all ranks agree.
- When backward ends, what is missing is filled up: with gradients from earlier passes (accumulation), else with zeros.
  One number for each parameter rides behind the last bucket and says whether anybody has a gradient for it. A parameter
  that nobody used keeps `grad = None`, as without distribution.
- Then, still inside `backward()`, buffers that changed are broadcast from rank 0 (or who does its work). DDP does this
  at the beginning of the next forward, where rank 0's last change is in no other process if rank 0 dies; at the end of
  the step all ranks hold the same buffers, and every rank can repair every other.

While ranks are missing (`world` above the size of the group), a rank runs several backward passes for one step, one for
each share of the data that it carries. `collect` has the gradients of all but the last of them kept aside, where
neither `zero_grad` nor clipping reaches them; the last one adds them before the exchange.

`attach` begins a new generation: new buffers, because an operation stuck in the old group may still write to the old
ones, and nothing is left of a backward that was interrupted half-way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evertrain.torch.errors import NOT_RESILIENT, UsageError

MIB = 1024 * 1024
FIRST_BUCKET = MIB


def _ignore(_: str) -> None:
    pass


@dataclass(eq=False)
class Bucket:
    """A part of the layout, and the state of its reduction in the current backward."""

    dtype: torch.dtype
    device: torch.device
    members: list[int] = field(default_factory=list)
    """Indices of the parameters."""
    numel: int = 0
    missing: int = 0
    flat: torch.Tensor | None = None
    work: Any = None


class _Done:
    def wait(self) -> bool:
        return True


class _Alone:
    """The group of a rank that carries the data of all others."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def allreduce(self, _: Any) -> _Done:
        return _Done()

    def broadcast(self, *_: Any) -> _Done:
        return _Done()


class Reducer:
    """Averages the gradients of a module's parameters over the ranks of the attached group."""

    def __init__(
        self,
        module: nn.Module,
        bucket_bytes: int = 25 * MIB,
        broadcast_buffers: bool = True,
        faults: Callable[[str], None] | None = None,
    ) -> None:
        named = list(module.named_parameters())
        for name, tensor in [*named, *module.named_buffers()]:
            if tensor.is_meta:
                raise ValueError(f"{name!r} is on the meta device: give the model real tensors (to_empty()) first")
        self._names = [name for name, p in named if p.requires_grad]
        self._params = [p for _, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        # Modules with buffers, not the buffers: a module may put a new tensor in the place of a buffer, and batch_norm
        # writes its statistics without counting it as a change, while the counter beside them is counted.
        self._owners = [m for m in module.modules() if broadcast_buffers and _buffers(m)]
        self.buckets = _layout(self._params, bucket_bytes)
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self._faults = faults or _ignore
        self.may_train = True
        """False while nobody would exchange the gradients."""
        self._middle = len(self._params) // 2
        self._group: Any = None
        self._attached = False
        self._sync = True
        self._scale = 1.0
        self._views: list[torch.Tensor] = []
        self._flags = self._changes = torch.empty(0)
        self._source_of_buffers = 0
        self._collecting = False
        self._latest: dict[int, torch.Tensor] = {}
        self._carried: dict[int, torch.Tensor] = {}
        self._seen: list[tuple] = []
        # The state of one backward.
        self._begun = False
        self._root: int | None = None
        self._next = 0
        self._unused: list[int] = []
        self._ready: list[bool] = []
        self._reset()
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook_of(i)) for i, p in enumerate(self._params)]

    def prepare(self) -> None:
        """Training begins."""

    # --- generations -------------------------------------------------------------------------------------------------

    def attach(self, group: Any | None, world: int = 0, source_of_buffers: int = 0) -> None:
        """Begin a generation with this group; None, or a group of one, means that nothing is communicated.

        `world` is the number of shares that the gradients are averaged over, if there are more than members.
        `source_of_buffers` is the member (its number in the group) whose buffers all take over.

        The gradients of the generation before are dropped: its step will run again.
        """
        if self._attached:
            for p in self._params:
                p.grad = None
        self._attached = True
        self._reset()
        self._group = group if group is not None and group.size() > 1 else None
        if group is not None and self._group is None and world > 1:
            self._group = _Alone()
        self._source_of_buffers = source_of_buffers
        self._collecting = False
        self._latest.clear()
        self._carried.clear()
        for bucket in self.buckets:
            bucket.flat = bucket.work = None
        self._views = []
        if self._group is None:
            return
        self._scale = 1.0 / max(self._group.size(), world)
        views: dict[int, torch.Tensor] = {}
        riders = len(self._params) + len(self._owners)
        for bucket in self.buckets:
            extra = riders if bucket is self.buckets[-1] else 0
            bucket.flat = torch.zeros(bucket.numel + extra, dtype=bucket.dtype, device=bucket.device)
            offset = 0
            for i in bucket.members:
                views[i] = _view(bucket.flat, offset, self._params[i])
                offset += self._params[i].numel()
            self._flags = bucket.flat[bucket.numel : bucket.numel + len(self._params)]
            self._changes = bucket.flat[bucket.numel + len(self._params) :]
        self._views = [views[i] for i in range(len(self._params))]
        self._seen = [_version(owner) for owner in self._owners]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; the next one outside averages the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def collect(self, counts: bool) -> Iterator[None]:
        """Backward passes in here belong to another share of the same step; if it doesn't count, they are dropped."""
        self._collecting = counts
        with self.no_sync():
            yield
        self._collecting = False
        for index, gradient in self._latest.items():
            if index in self._carried:
                self._carried[index].add_(gradient)
            else:
                self._carried[index] = gradient
        self._latest.clear()

    # --- one backward ------------------------------------------------------------------------------------------------

    def watch(self, output: Any) -> None:
        """Tell the reducer what forward returned.

        The end of a backward is seen by a callback of the autograd pass in which it is requested. Re-entrant activation
        checkpointing runs passes inside the pass; a hook on the output is called in the outer one.
        """
        if self._group is not None and self._sync and torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_root)

    def _on_root(self, _: torch.Tensor) -> None:
        root = torch._C._current_graph_task_id()
        if root != self._root and self._group is not None:
            self._root = root
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        if index != self._middle:
            return lambda p: self._on_gradient(index, p)

        def middle(p: torch.Tensor) -> None:
            self._faults("backward")
            self._on_gradient(index, p)

        return middle

    def _on_gradient(self, index: int, p: torch.Tensor) -> None:
        if self._collecting and p.grad is not None:
            # A copy of all of this share's passes so far; what the script then does to the gradient doesn't matter.
            self._latest[index] = p.grad.detach().clone()
        if self._group is None or not self._sync:
            return
        if not self._begun:
            self._begun = True
            if self._root is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._ready[index]:
            raise RuntimeError(
                f"parameter {self._names[index]!r} got a gradient twice in one backward(): weights that are shared "
                "between re-entrant checkpoints need use_reentrant=False. (An earlier backward() that failed half-way "
                "looks the same; let its exception end the step.)"
            )
        self._place(index, p)
        bucket = self._bucket_of[index]
        bucket.missing -= 1
        if not bucket.missing:
            self._launch_full()

    def _place(self, index: int, p: torch.Tensor) -> None:
        """Bring a gradient, scaled, to its place in the bucket."""
        self._ready[index] = True
        grad, view = p.grad, self._views[index]
        assert grad is not None
        if (carried := self._carried.pop(index, None)) is not None:
            grad = grad.detach().add_(carried)
        if p.grad is view:
            view.mul_(self._scale)
        elif grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {self._names[index]!r} has a sparse gradient, which can't be reduced in buckets: "
                "use sparse=False in its embedding"
            )
        else:
            # With create_graph=True the gradient belongs to a graph, and backward runs with gradients enabled.
            with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
                torch.mul(grad, self._scale, out=view)
            p.grad = view

    def _launch_full(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            bucket = self.buckets[self._next]
            self._next += 1
            if bucket is self.buckets[-1]:
                self._fill_riders()
            bucket.work = self._group.allreduce([bucket.flat])
            if self._next == 1:
                self._faults("allreduce")

    def _fill_riders(self) -> None:
        self._flags.fill_(1)
        for index in self._unused:
            self._flags[index] = 0
        if self._owners:
            now = [_version(owner) for owner in self._owners]
            changed = [float(a != b) for a, b in zip(now, self._seen, strict=True)]
            self._changes.copy_(torch.tensor(changed))

    def _finish(self) -> None:
        """Backward is done: complete the reduction. An exception in here comes out of `backward()`."""
        if not self._begun or self._group is None:
            self._root = None
            return
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} did not require gradients when training was set up and does now: its gradient "
                    "would not be averaged. Freeze parameters after the setup, or not at all"
                )
        for index, p in enumerate(self._params):
            if not self._ready[index]:
                if p.grad is None and index in self._carried:
                    p.grad = self._carried.pop(index)
                if p.grad is None:
                    self._views[index].zero_()
                    self._unused.append(index)
                else:
                    self._place(index, p)
                self._bucket_of[index].missing -= 1
        self._launch_full()
        for bucket in self.buckets:
            bucket.work.wait()
        for index in self._unused:
            if self._flags[index] > 0:
                self._params[index].grad = self._views[index]
        if self._owners:
            self._broadcast_buffers()
        self._reset()

    def _broadcast_buffers(self) -> None:
        changed = self._changes.nonzero().flatten().tolist()
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for index in changed:
            for buffer in _buffers(self._owners[index]):
                by_device.setdefault(buffer.device, []).append(buffer.detach())
        options = dist.BroadcastOptions()
        options.rootRank = self._source_of_buffers
        for buffers in by_device.values():
            flat = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
            self._group.broadcast([flat], options).wait()
            if self._group.rank() != self._source_of_buffers:
                parts = flat.split([buffer.numel() * buffer.element_size() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    # A copy, because a part of a flat buffer need not begin where the other dtype may.
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        for index in changed:
            self._seen[index] = _version(self._owners[index])

    def _reset(self) -> None:
        self._begun = False
        self._root = None
        self._next = 0
        self._unused = []
        self._ready = [False] * len(self._params)
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)


class Replica(nn.Module):
    """The model as the training function sees it: called like the user's module, reduced by the reducer.

    Everything that isn't forward falls through to the wrapped module, `state_dict` included, so that a checkpoint
    doesn't know of the wrapping.
    """

    def __init__(self, module: nn.Module, reducer: Reducer, faults: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.module = module
        # Not as an attribute of the module tree: the reducer is no part of the model.
        object.__setattr__(self, "reducer", reducer)
        object.__setattr__(self, "_faults", faults or _ignore)

    def forward(self, *args: Any, **options: Any) -> Any:
        if not self.reducer.may_train and self.module.training and torch.is_grad_enabled():
            raise UsageError(NOT_RESILIENT)
        self._faults("forward")
        output = self.module(*args, **options)
        self.reducer.watch(output)
        return output

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.reducer.no_sync()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*args, **options)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **options)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **options)


def _layout(params: list[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Fill parameters in reverse order into buckets; the one that makes a bucket big enough is its last.

    So a small bias does not travel alone because the big weight after it would be too much for both.
    """
    buckets: list[Bucket] = []
    opened: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for index in reversed(range(len(params))):
        p = params[index]
        kind = (p.dtype, p.device)
        bucket = opened.get(kind)
        if bucket is None:
            bucket = opened[kind] = Bucket(*kind)
            buckets.append(bucket)
        bucket.members.append(index)
        bucket.numel += p.numel()
        limit = min(FIRST_BUCKET, bucket_bytes) if bucket is buckets[0] else bucket_bytes
        if bucket.numel * p.element_size() >= limit:
            del opened[kind]
    return buckets


def _view(flat: torch.Tensor, offset: int, p: torch.Tensor) -> torch.Tensor:
    """The place of a parameter in a bucket, with the parameter's own order of elements if it is dense."""
    part = flat[offset : offset + p.numel()]
    for layout in (torch.channels_last, torch.channels_last_3d):
        if p.dim() == (4 if layout is torch.channels_last else 5) and p.is_contiguous(memory_format=layout):
            return part.as_strided(p.size(), p.stride())
    return part.view(p.shape)


def _buffers(owner: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in owner._buffers.values() if buffer is not None]


def _version(owner: nn.Module) -> tuple:
    """Changes when one of the module's buffers is written or replaced."""
    return tuple((id(buffer), buffer._version) for buffer in _buffers(owner))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for part in dataclasses.fields(output):
            yield from _tensors(getattr(output, part.name))
