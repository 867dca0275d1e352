"""A library for devices, here one that communicates nothing: tensors in host memory take another, guarded way."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from evertrain.torch import backends, codec, groups, repair
from evertrain.torch.backends import RawGroup
from evertrain.torch.interrupt import Interrupted
from tests.torch.teams import Member, team


class Pretend(backends.OnDevice):
    name = "pretend"
    aborted = 0

    def connect(self, store: dist.Store, rank: int, size: int, timeout: float) -> RawGroup:
        backend = FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())
        return backends._raw(store, rank, size, dist.ProcessGroup.BackendType.CUSTOM, torch.device("meta"), backend)

    def abort(self, raw: RawGroup) -> None:
        self.aborted += 1


def begin(me: Member) -> None:
    me.kept["backend"] = backend = Pretend()
    me.kept["group"] = groups.build(1, me.rank, me.size, me.store(1), backend, 30.0, threading.Event())


def pass_state_on(me: Member) -> str:
    group = me.kept["group"]
    group.allreduce([torch.ones(4, device="meta")]).wait()
    packed = codec.pack({"small": torch.arange(10.0), "big": torch.full((1 << 20,), 7.0)})
    if me.rank == 0:
        repair.send_state(group, packed, [1])
    else:
        packed = repair.receive_state(group, 0)
    return codec.digest(packed)


def wait_in_vain(me: Member) -> list[Any]:
    group, began = me.kept["group"], time.monotonic()
    if me.rank == 0:
        group.stop()
    try:
        group.recv([torch.empty(1)], 1 - me.rank, 5).wait()
    except Interrupted:
        return [time.monotonic() - began < 10, me.kept["backend"].aborted]
    return ["got through"]


def test_a_state_is_passed_on_through_host_memory(tmp_path: Path) -> None:
    with team(__file__, tmp_path, 2) as ranks:
        ranks.call(begin)
        digests = ranks.call(pass_state_on)
        assert digests[0] == digests[1]
        assert ranks.call(wait_in_vain) == [[True, 1], [True, 1]]
        assert [ranks.finish(rank) for rank in range(2)] == [0, 0]
