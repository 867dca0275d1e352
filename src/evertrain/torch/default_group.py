"""torch's default process group, exchanged from generation to generation.

A script that calls `dist.all_reduce(...)`, `dist.barrier()` or `dist.get_rank()` means the current generation's group.
torch has a public way to install one, `init_process_group`, but it isn't made for doing it again and again: it wraps
`sys.excepthook` anew each time, and the matching `destroy_process_group` would wait for stuck workers. So the group is
entered in torch's registry directly. `check_torch` says at start what a torch version lacks of the private names that
this takes, instead of a fault saying it later; those of FSDP2 are in `fsdp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh

from evertrain.torch import attic
from evertrain.torch.errors import UsageError

_SUBGROUP_TIMEOUT = 1800.0
"""torch's own default for groups that a script makes with `new_group`."""

OLDEST = "2.6"
"""The first torch in which a process group is made of a store, a rank and a size alone."""

_WORLD = ("default_pg", "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg",
          "pg_coalesce_state", "group_count")  # fmt: skip
_MODULE = ("_world", "_update_default_pg", "_register_process_group", "_unregister_process_group",
           "_unregister_all_process_groups")  # fmt: skip
_GROUP = ("_set_default_backend", "_register_backend", "_set_group_name", "allreduce", "broadcast", "send", "recv")
_GLOO = ("_Options", "create_device")


def check_torch() -> None:
    """Raise UsageError if this torch is too old, or with the names of what it lacks."""
    if torch.__version__ < OLDEST:
        raise UsageError(f"torch {torch.__version__} is not supported: version {OLDEST} or newer is needed")
    missing = [f"torch.distributed.distributed_c10d.{name}" for name in _MODULE if not hasattr(c10d, name)]
    if not missing:
        missing += [f"distributed_c10d._world.{name}" for name in _WORLD if not hasattr(c10d._world, name)]
    missing += [f"torch.distributed.ProcessGroup.{name}" for name in _GROUP if not hasattr(dist.ProcessGroup, name)]
    if dist.is_gloo_available():
        gloo = "torch.distributed.ProcessGroupGloo"
        missing += [f"{gloo}.{name}" for name in _GLOO if not hasattr(dist.ProcessGroupGloo, name)]
    if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
        missing.append("torch.Tensor.register_post_accumulate_grad_hook")
    if not hasattr(torch._C, "_current_graph_task_id"):
        missing.append("torch._C._current_graph_task_id")
    if not hasattr(torch.autograd.Variable._execution_engine, "queue_callback"):
        missing.append("the autograd engine's queue_callback")
    if missing:
        raise UsageError(f"torch {torch.__version__} is not supported: it lacks {', '.join(missing)}")


def install_default(group: Any) -> None:
    """Make this group (a `GuardedGroup` or a `Prelude`) the one that torch.distributed works on."""
    uninstall_default()
    world = c10d._world
    name = c10d.GroupName("0") if hasattr(c10d, "GroupName") else "0"
    tag = f"ptd:{name}"
    group._set_group_name(name)
    world.pg_map[group] = (group.name(), dist.PrefixStore("user/", group.get_group_store()))
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    devices = [device.type for device in group._device_types]
    world.pg_backend_config[group] = ",".join(f"{device}:{group.name()}" for device in devices)
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    # new_group() numbers its groups from here, the same on every rank of a generation.
    world.group_count = 1
    c10d._register_process_group(name, group)
    c10d._update_default_pg(group)


def uninstall_default() -> None:
    """Take the default group and all groups that were made from it out of torch's registry. Never blocks.

    Groups that a script made with `dist.new_group` have members of the generation that is over. They go to the attic;
    a script has to make them anew in its training function.
    """
    world = c10d._world
    default = world.default_pg
    if (retire := getattr(default, "retire", None)) is not None:
        retire()  # the group before training
    for group in list(world.pg_map):
        if group is not default:
            attic.keep(group, _SUBGROUP_TIMEOUT)
    c10d._update_default_pg(None)
    for mapping in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
                    world.tags_to_pg, world.pg_coalesce_state):  # fmt: skip
        mapping.clear()
    world.group_count = 0
    c10d._unregister_all_process_groups()


def default_installed() -> bool:
    return c10d._world.default_pg is not None


def replace_init_process_group(function: Callable[..., None]) -> Callable[[], None]:
    """Have scripts call this instead of torch's own; returns a function that takes it back."""
    original = c10d.init_process_group
    modules = (c10d, dist, device_mesh)  # a device mesh calls it by a name of its own
    for module in modules:
        module.init_process_group = function

    def undo() -> None:
        for module in modules:
            module.init_process_group = original

    return undo
