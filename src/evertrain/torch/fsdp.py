"""Models sharded by FSDP2 (`fully_shard`): weights and optimizer state of which every rank holds a shard.

On a mesh of (replicate, shard) the ranks of a column hold the same shard, the part `shard:I` of the state, and repair
each other. FSDP2 does the communication itself, in process groups that last (`lasting`), so the reducer has nothing to
do here but to bring the module back to its resting state when a step was left half-way.

**A step is taken by all shards or by none.** With plain data parallelism a rank that has finished a step can give it to
any other. Here the ranks of another shard can't be helped: if they are stopped before their update, their shard exists
only at the old step and that of the others only at the new one. So the ranks meet before the update. Whoever gets
through knows that all others have their final gradients. Whoever is stopped while it waits keeps its gradients: if
somebody got through, the controller asks for the new step, and the update is made then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evertrain.mindio.protocol import STATE
from evertrain.torch import codec, settings
from evertrain.torch.buffers import Buffers
from evertrain.torch.errors import NOT_RESILIENT, StateError, UsageError

Faults = Callable[[str], None]
MESH = "fully_shard(model, mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')))"


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied. Doesn't import FSDP2 if nobody else has."""
    import sys

    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not hasattr(module, "FSDPModule"):
        return False
    if isinstance(model, module.FSDPModule):
        return True
    if any(isinstance(child, module.FSDPModule) for child in model.modules()):
        raise UsageError(
            "some modules of the model are wrapped by fully_shard, but not the model itself: apply it to the model, too"
        )
    return False


def check_torch(model: Any) -> None:
    """Raise UsageError with the names of what this torch's FSDP2 lacks, if anything."""
    missing = [name for name in ("_get_fsdp_state", "reset_iter_state") if not hasattr(model, name)]
    if not missing:
        state = model._get_fsdp_state()
        missing = [name for name in ("_lazy_init", "_state_ctx", "_fsdp_param_groups") if not hasattr(state, name)]
    if missing:
        version, lacks = torch.__version__, ", ".join(missing)
        raise UsageError(f"the FSDP2 of torch {version} is not supported: it lacks {lacks}, which 2.13 has")


class StepAside:
    """In the place of the reducer: FSDP2 reduces the gradients, and this looks after the module between generations."""

    def __init__(self, model: Any, faults: Any = None) -> None:
        check_torch(model)
        self._model = model
        self._faults: Faults = faults or _ignore
        self._group: Any = None
        self._device = next(model.parameters()).device
        self._buffers = Buffers(model)
        self._source_of_buffers = 0
        self._reduced = False
        self.may_train = True
        model.register_forward_pre_hook(self._before_forward)
        if faults:
            self._inject_into(model)

    def _before_forward(self, *_: Any) -> None:
        if not self.may_train and self._model.training and torch.is_grad_enabled():
            raise UsageError(NOT_RESILIENT)

    def prepare(self) -> None:
        """Let FSDP2 set itself up now: an interrupt in the middle of it, in the first step, could not be mended."""
        self._model._get_fsdp_state()._lazy_init()

    def attach(self, group: Any | None, world: int = 0, source_of_buffers: int = 0) -> None:
        """Begin a generation, or end one: nothing is left of a step that was interrupted half-way."""
        self._group = group if group is not None and group.size() > 1 else None
        self._source_of_buffers = source_of_buffers
        self._reduced = False
        self._model.set_requires_gradient_sync(True)
        self._reset()

    def _reset(self) -> None:
        for state in self._model._get_fsdp_state()._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group._all_gather_result = None  # would be waited for, in a group that is gone
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
                        param.to_sharded()  # each one: an interrupt may have come between two of them
                group._sharded_state = type(group._sharded_state).SHARDED
        self._model.reset_iter_state()
        for param in self._model.parameters():
            param.grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def collect(self, counts: bool) -> Iterator[None]:
        raise UsageError("the ranks of a sharded model can't do the work of missing ones")
        yield

    def meet(self) -> None:
        """Wait until all ranks are here."""
        if self._group is not None:
            self._group.allreduce([torch.zeros(1, device=self._device)]).wait()

    def share_buffers(self) -> None:
        """Give one rank's buffers (BatchNorm) to all, as data parallelism does; FSDP2 lets them drift apart."""
        self._reduced = False
        buffers = [buffer for buffer in self._buffers.named().values() if buffer.numel()]
        if self._group is None or not buffers:
            return
        options = dist.BroadcastOptions()
        options.rootRank = self._source_of_buffers
        with torch.no_grad():
            flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
            self._group.broadcast([flat], options).wait()
            if self._group.rank() != self._source_of_buffers:
                parts = flat.split([buffer.numel() * buffer.element_size() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _inject_into(self, model: Any) -> None:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        aside = self

        class Watched(DefaultReduceScatter):
            """The gradients are on their way: the replicas wait for this one."""

            def __call__(self, *args: Any, **options: Any) -> Any:
                work = super().__call__(*args, **options)
                if not aside._reduced:
                    aside._reduced = True
                    aside._faults("allreduce")
                return work

        model.register_forward_pre_hook(lambda *_: self._faults("forward"), prepend=True)
        params = [param for param in model.parameters() if param.requires_grad]
        params[len(params) // 2].register_post_accumulate_grad_hook(lambda _: self._faults("backward"))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(Watched())


class FullySharded:
    """The shard of this rank: its part of the state, and how a step of it comes about."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], aside: StepAside) -> None:
        self._params: dict[str, Any] = dict(model.named_parameters())
        self._aside = aside
        self._check(model, optimizers)
        self.optimizer = optimizers[0]
        mesh, placements = self._layout()
        sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        copied = [dim for dim in range(mesh.ndim) if dim not in sharded]
        sizes, place = mesh.shape, mesh.get_coordinate()
        self.shards, self.copies = _product(sizes[dim] for dim in sharded), _product(sizes[dim] for dim in copied)
        shard = 0
        for dim in sharded:
            shard = shard * sizes[dim] + place[dim]
        self.name = f"shard:{shard}"
        self.first = all(place[dim] == 0 for dim in copied)
        """Whether this rank is the first holder of its shard."""
        self._names = {id(param): name for name, param in self._params.items()}
        self._gradients: dict[str, Any] = {}
        self._step = -1
        """Of the beginning of the newest update."""
        self._settings: settings.Settings = []
        self._depth = 0
        self._through = self._updated = self.catching_up = False

    @property
    def cut(self) -> str:
        return f"fsdp {self.shards}"

    @property
    def every_part(self) -> tuple[str, ...]:
        return tuple(f"shard:{shard}" for shard in range(self.shards))

    def _check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        from torch.distributed.tensor import DTensor

        if len(optimizers) != 1:
            raise UsageError("a model that is wrapped by fully_shard can have one optimizer only")
        for name, param in self._params.items():
            if not isinstance(param, DTensor):
                raise UsageError(
                    f"parameter {name!r} is not sharded: apply fully_shard to the whole model, without ignored_params"
                )

    def _layout(self) -> tuple[Any, Any]:
        first, *rest = self._params.values()
        for param in rest:
            if param.device_mesh != first.device_mesh or [p.is_replicate() for p in param.placements] != [
                p.is_replicate() for p in first.placements
            ]:
                raise UsageError(f"all parameters must be sharded over one mesh: {MESH}")
        if first.device_mesh.size() != dist.get_world_size():
            raise UsageError(f"the mesh has {first.device_mesh.size()} ranks, the job {dist.get_world_size()}: {MESH}")
        return first.device_mesh, first.placements

    # One update.

    def attach(self, group: Any | None) -> None:
        """A generation begins or ends; the group is with the one who steps aside."""

    def begin(self, step: int) -> None:
        """Before the optimizer's update: meet the others. Raises Interrupted if they don't come."""
        if self._step == step and self._depth:  # its step() has called that of the class that it extends
            self._depth += 1
            return
        if self._step == step and self._updated:
            raise UsageError(
                "call optimizer.step() once in each step of the loop: of a model that is wrapped by fully_shard, a "
                "rank that is stopped in between can't make up for a second update"
            )
        self._step, self._depth, self._through, self._updated = step, 1, False, False
        self._aside.share_buffers()
        self._gradients = {name: param.grad for name, param in self._params.items()}
        self._settings = settings.of(self.optimizer.param_groups)
        self._aside.meet()
        self._through = True
        self._gradients = {}

    def finish(self) -> None:
        self._depth = max(self._depth - 1, 0)
        self._updated = not self._depth and not self.catching_up

    def abandon(self, step: int) -> dict[str, int]:
        self._depth = 0
        if self._step != step or not self._through:
            return {STATE: step, self.name: step}
        return {self.name: step + 1} if self._updated else {}

    def others(self) -> list[tuple[str, int]]:
        return [(self.name, self._step + 1)] if self._gradients else []

    def switch(self, part: str, step: int) -> bool:
        """Somebody has got through: make the update that this rank was about to make."""
        if part != self.name or not self._gradients or step != self._step + 1:
            return False
        for name, param in self._params.items():
            param.grad = self._gradients[name]
        # The loop may have set a learning rate before its update; what the groups say now is of the step's beginning.
        now = settings.of(self.optimizer.param_groups)
        settings.put_back(self.optimizer.param_groups, self._settings)
        self.catching_up = True
        try:
            self.optimizer.step()
        finally:
            self.catching_up = False
            settings.put_back(self.optimizer.param_groups, now)
            self._gradients = {}
            for param in self._params.values():
                param.grad = None
        return True

    def forget(self) -> None:
        self._gradients = {}
        self._step = -1

    # The part.

    def core(self) -> codec.Packed:
        return codec.pack(self.tree())

    def core_of(self, tree: Mapping[str, Any]) -> codec.Packed:
        return codec.pack(tree)

    def tree(self) -> dict[str, Any]:
        states = {}
        for param, values in self.optimizer.state.items():
            states[self._names[id(param)]] = {key: _local(value) for key, value in values.items()}
        return {"params": {name: _local(param) for name, param in self._params.items()}, "optimizer": states}

    def check(self, tree: Mapping[str, Any]) -> None:
        if list(tree["params"]) != list(self._params):
            raise StateError("the shard belongs to another model")
        for name, param in self._params.items():
            own, source = _local(param).shape, tree["params"][name].shape
            if own != source:
                raise StateError(f"{name} is sharded in another way: {tuple(source)}, not {tuple(own)}")

    def load(self, tree: Mapping[str, Any]) -> None:
        self.check(tree)
        with torch.no_grad():
            for name, param in self._params.items():
                own, source = _local(param), tree["params"][name]
                if own.data_ptr() != source.data_ptr():
                    own.copy_(source)
        self.optimizer.state.clear()
        for name, values in tree["optimizer"].items():
            param = self._params[name]
            self.optimizer.state[param] = {key: _like(param, value) for key, value in values.items()}
        self._gradients = {}

    def absorb(self) -> None:
        raise StateError("the checkpoint is not one of a model that is wrapped by fully_shard")

    def load_shards(self, trees: Sequence[Mapping[str, Any]]) -> None:
        raise StateError(
            f"the checkpoint was made with another number of shards than {self.shards}; start with as many as before"
        )


def _local(value: Any) -> Any:
    """This rank's piece of a sharded tensor."""
    return getattr(value, "_local_tensor", value).detach() if isinstance(value, torch.Tensor) else value


def _like(param: Any, value: Any) -> Any:
    """A value of the optimizer's state, sharded as its parameter is, if it is a value for each element."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != _local(param).shape:
        return value
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _product(sizes: Any) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _ignore(_: str) -> None:
    pass
