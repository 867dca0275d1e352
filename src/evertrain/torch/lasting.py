"""Process groups that scripts may keep: the same object for the life of the process, whatever generation it is.

A device mesh, FSDP2 and a script that called `dist.new_group` hold on to group objects. A recovery makes new groups,
since those of the old generation have dead members. So what torch and the script get is a `LastingGroup`, which hands
every operation to the group that is *present*: before training a `prelude.Prelude`, in training the guarded group of
the current generation, in between none at all.

torch demands that all ranks make the same groups in the same order, and gives them the same names. So the list of what
was made before training is the recipe from which every generation builds its groups, in that order. A replacement that
runs the script from the top makes the groups again, alone, and arrives with the same list.

The training function may make groups too. When it is called again, some ranks make them again (and get the objects that
they had before, by their names), and some may have kept them from the first call. Nobody can tell which, so after a
recovery these groups are built by the first operation in them, where all of their members meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evertrain.torch import groups
from evertrain.torch.default_group import default_installed, install_default
from evertrain.torch.interrupt import Interrupted

WORLD = "0"
"""torch's name of the default group; `new_group` counts on from there."""
FIRST = 1
"""The job's first generation: in it all ranks make their groups together, as without faults."""

Build = Callable[[str, list[int]], Any]
"""Makes the present group of this name with these ranks, this process among them."""


def _ignore(_: Any) -> None:
    pass


def _handed_on(name: str) -> Callable[..., dist.Work]:
    def operation(self: LastingGroup, *args: Any, **options: Any) -> dist.Work:
        return getattr(self._here(), name)(*args, **options)

    operation.__name__ = name
    operation.__qualname__ = f"LastingGroup.{name}"
    operation.__doc__ = f"torch's `{name}`, on the present group."
    return operation


class LastingGroup(dist.ProcessGroup):
    """A process group as scripts see it."""

    def __init__(self, keeper: Keeper, name: str, ranks: list[int], rank: int, kind: Any, description: str) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._keeper = keeper
        self.label, self.description = name, description
        self.ranks = ranks
        """The members, as ranks of the whole job."""
        self._index, self._size = ranks.index(rank), len(ranks)
        self._kind: Any = kind
        self.present: Any = None

    def point(self, present: Any | None) -> None:
        """From now on this group is meant."""
        if self.present is not present and (retire := getattr(self.present, "retire", None)) is not None:
            retire()  # the group before training
        self.present = present
        if present is not None:
            self._kind = present
            self._index, self._size = present.rank(), present.size()

    def _here(self) -> Any:
        if self.present is None:
            self._keeper.connect(self)
        return self.present

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> LastingGroup | None:
        """torch asks the default group for the groups that `dist.new_group` is to make."""
        return self._keeper.make(str(group_name), list(ranks), group_desc)

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    # torch keeps a group's name in its backend, of which there is none between two generations.

    def getGroupName(self) -> str:
        return self.label

    def getGroupDesc(self) -> str:
        return self.description

    def _set_group_name(self, name: str) -> None:
        self.label = str(name)

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def getBackendName(self) -> str:
        return self._kind.name()

    def name(self) -> str:
        return self._kind.name()

    def get_group_store(self) -> dist.Store:
        return self._kind.get_group_store()

    @property
    def _device_types(self) -> list[torch.device]:
        return self._kind._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self._here()._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        self._here().set_timeout(timeout)

    def abort(self) -> None:
        if self.present is not None:
            self.present.abort()

    def shutdown(self) -> None:
        """A script's `destroy_process_group`."""
        self._keeper.forget(self)


for _name in groups.OPERATIONS:
    setattr(LastingGroup, _name, _handed_on(_name))


class Keeper:
    """All lasting groups of this process, in the order in which they were made."""

    def __init__(self) -> None:
        self._groups: dict[str, LastingGroup] = {}
        self._rank = -1
        self._members: list[int] = []
        self._build: Build | None = None
        self._on_wait: Callable[[bool], None] = _ignore
        self._lock = threading.Lock()
        self._present: dict[str, groups.GuardedGroup] = {}
        self._stopped = False
        self._recipe: list[str] = []
        self._made_before = 1
        self._generation = 0
        self._trained = False

    # Before training.

    def open(self, rank: int, size: int, build: Build) -> None:
        """The script's own `init_process_group`: make the default group of before training."""
        self._rank, self._members, self._build = rank, list(range(size)), build
        self._install(build(WORLD, self._members))

    def _install(self, present: Any) -> None:
        world = self._groups.get(WORLD)
        if world is None:
            ranks = list(self._members)
            world = self._groups[WORLD] = LastingGroup(self, WORLD, ranks, self._rank, present, "default_pg")
        world.point(present)
        if not default_installed():
            install_default(world)

    # The script's `new_group`, before and in training.

    def make(self, name: str, indices: list[int], description: str | None) -> LastingGroup | None:
        ranks = [self._members[index] for index in indices]
        if self._rank not in ranks:
            return None
        group = self._groups.get(name)
        if group is None or group.ranks != ranks:
            kind = self._groups[WORLD].present or self._groups[WORLD]
            group = self._groups[name] = LastingGroup(self, name, ranks, self._rank, kind, description or "undefined")
        if group in c10d._world.pg_names:
            c10d._unregister_process_group(name)  # torch is about to register it again
        if group.present is None and self._generation <= FIRST:
            self.connect(group)
        return group

    def connect(self, group: LastingGroup) -> None:
        """Build a group together with its members, who do the same."""
        if self._build is None:
            raise Interrupted("this rank is between two generations of its process groups")
        ranks = [member for member in group.ranks if member in self._members]
        self._on_wait(True)
        try:
            present = self._build(group.label, ranks)
        finally:
            self._on_wait(False)
        if self._trained:
            self._take(group.label, present)
        group.point(present)

    def forget(self, group: LastingGroup) -> None:
        """The script destroys a group: later generations go without it. Its connections stay: a peer may use them."""
        if group.label == WORLD:
            if self._trained:
                return  # the rank may still have to send its state
            for other in self._groups.values():
                other.point(None)
            self._groups.clear()
        if self._groups.get(group.label) is group:
            del self._groups[group.label]
        group.point(None)

    # Generations. All of it by the training thread, but `stop`.

    def begin(
        self,
        rank: int,
        members: list[int],
        main: groups.GuardedGroup,
        build: Build,
        on_wait: Callable[[bool], None] = _ignore,
    ) -> None:
        """A generation is built: its groups are made from the recipe, in its order. Raises what `build` raises.

        `on_wait` is called around the making of groups that the script asks for later.
        """
        self._rank, self._members, self._generation = rank, list(members), main.generation
        with self._lock:
            self._stopped = False
        self._take(WORLD, main)
        for name, group in self._groups.items():
            ranks = [member for member in group.ranks if member in self._members]
            if name != WORLD and (not self._trained or name in self._recipe):
                self._take(name, build(name, ranks))
        self._build, self._on_wait = build, on_wait

    def _take(self, name: str, group: groups.GuardedGroup) -> None:
        with self._lock:
            self._present[name] = group
            stopped = self._stopped
        if stopped:
            group.stop()

    def go(self) -> None:
        """User code is about to run: torch and the script mean the groups of this generation now."""
        if not self._trained:
            self._trained = True
            self._recipe = list(self._groups)
            self._made_before = max(c10d._world.group_count, 1)
        main = self._present[WORLD]
        self._install(main)
        world = self._groups[WORLD]
        c10d._world.pg_map[world] = (world.name(), dist.PrefixStore("user/", main.get_group_store()))
        for group in self._groups.values():
            # torch's table of who is who in a group, by the ranks of this generation, some of whom may be missing.
            here = (index for index, member in enumerate(self._members) if member in group.ranks)
            c10d._world.pg_group_ranks[group] = {index: number for number, index in enumerate(here)}
        # Groups that the function makes are numbered from here at each of its calls, the same on every rank.
        c10d._world.group_count = self._made_before
        for name, group in self._present.items():
            if name in self._groups:
                self._groups[name].point(group)

    def stop(self) -> None:
        """End all present groups: whoever waits in them leaves. From any thread."""
        with self._lock:
            self._stopped = True
            present = list(self._present.values())
        for group in present:
            group.stop()

    def leave(self) -> None:
        """Out of user code: the generation is over."""
        self.stop()
        self._build = None
        if self._trained:
            for group in self._groups.values():
                group.point(None)
        with self._lock:
            self._present.clear()


keeper = Keeper()
"""torch's own list of groups belongs to the process; so does ours."""
