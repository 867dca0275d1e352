"""Names of torch's groups in real processes, and the time that torchrun gives a process to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from evertrain.torch import tft_names

repair_id = 0
tft_names.apply(lambda: repair_id)
names = []
for repair_id in (0, 3):
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
    groups = [dist.new_group([0]), dist.new_group([0])]
    groups += [dist.new_group([0], use_local_synchronization=True) for _ in range(2)]
    names.append([c10d._world.pg_names[g] for g in (dist.group.WORLD, *groups)])
    dist.destroy_process_group()
print(json.dumps(names))
"""

ELASTIC = """
import json, sys
sys.argv = ["/usr/bin/torchrun"]
import torch.distributed.elastic.multiprocessing.api as api
seen = []
for context in (api.MultiprocessContext, api.SubprocessContext):
    context._close = lambda self, death_sig, timeout=30: seen.append(timeout)
import mindio_ttp.framework_ttp
from evertrain.mindio.tft import naming
naming.lengthen_torchrun()
api.MultiprocessContext._close(None, 15)
api.SubprocessContext._close(None, 15, 7)
api.SubprocessContext._close(None, 15, timeout=1000)
print(json.dumps(seen))
"""


def run(script: str, *arguments: str, **environment: str) -> list:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.matrix
def test_names_differ_from_recovery_to_recovery(tmp_path: Path) -> None:
    first, second = run(SCRIPT, str(tmp_path / "store"))
    assert first[:3] == ["0__", "1_0", "2_0"]
    assert second[:3] == ["3__", "1_3", "2_3"]
    assert all(name.endswith("_0") for name in first[3:]) and all(name.endswith("_3") for name in second[3:])
    assert len(set(first + second)) == 10
    # What the ranks agree on by themselves: the same hash in each recovery.
    assert [name.rpartition("_")[0] for name in first[3:]] == [name.rpartition("_")[0] for name in second[3:]]


@pytest.mark.matrix
def test_torchrun_gives_processes_the_time_for_a_checkpoint() -> None:
    assert run(ELASTIC, TTP_NORMAL_ACTION_TIME_LIMIT="300") == [300, 300, 1000]
