"""The groups of a training, written by each of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evertrain.taskd import groups
from taskd.python.adaptor.pytorch.group_info import get_save_path

TRAINING = """
import os, sys
import torch.distributed as dist
from taskd.python.adaptor.pytorch.group_info import dump_group_info

assert not dump_group_info(), "there are no groups yet"
rank, children = 0, []
for other in (1, 2):  # they needn't all load torch
    children.append(os.fork())
    if not children[-1]:
        rank, children = other, []
        break
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3)
dist.new_group([2, 0], group_desc="tensor parallel")
assert dump_group_info()
dist.barrier()
dist.destroy_process_group()
assert not any(os.waitpid(child, 0)[1] for child in children)
"""


def test_each_process_writes_its_groups(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MINDX_TASK_ID": "job-1",
        "GROUP_BASE_DIR": str(tmp_path / "groups"),
        "TASKD_LOG_PATH": str(tmp_path / "log"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    subprocess.run([sys.executable, "-c", TRAINING, str(tmp_path / "store")], env=environment, check=True, timeout=80)
    files = [tmp_path / "groups" / "job-1" / str(rank) / "parallel_group.json" for rank in range(3)]
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in files)
    written = [sorted(json.loads(file.read_text()).values(), key=lambda each: each["group_name"]) for file in files]
    whole = [{"group_name": "default_group", "group_rank": rank, "global_ranks": [0, 1, 2]} for rank in range(3)]
    assert written[1] == [whole[1]]
    for rank in (0, 2):
        part = {**written[rank][1], "global_ranks": sorted(written[rank][1]["global_ranks"])}
        assert written[rank][0] == whole[rank]
        assert part == {"group_name": "tensor parallel", "group_rank": part["group_rank"], "global_ranks": [0, 2]}
    assert {written[rank][1]["group_rank"] for rank in (0, 2)} == {0, 1}
    assert not list((tmp_path / "groups").rglob(".*")), "nothing half written is left"


def test_where_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_BASE_DIR", "TASKD_PROFILING_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    assert get_save_path(3) == "/user/cluster-info/profiling/job-1/3"
    monkeypatch.setenv("GROUP_BASE_DIR", "/data")
    assert get_save_path(3) == "/data/job-1/3"
    monkeypatch.setenv("MINDX_TASK_ID", "../elsewhere")
    assert get_save_path(3) == ""
    monkeypatch.delenv("MINDX_TASK_ID")
    assert get_save_path(3) == ""


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "3").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        groups._write(tmp_path / "3", "{}")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_groups_that_can_not_be_told_cost_nothing_but_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert groups.dump_group_info() is False
    assert "there are none yet" in caplog.text

    def broken() -> bool:
        raise AttributeError("another torch")

    monkeypatch.setattr("torch.distributed.is_initialized", broken)
    assert groups.dump_group_info() is False
    assert "another torch" in caplog.text
