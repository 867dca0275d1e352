"""Marks of a training that knows nothing of them, and the files that they are written to."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evertrain.mindio.tft.runtime import runtime
from evertrain.mindio.tft.steps import Steps
from evertrain.taskd.worker import profiler as profiling
from evertrain.taskd.worker import traces
from evertrain.taskd.worker.marks import marks
from evertrain.taskd.worker.profiler import Profiler
from evertrain.taskd.worker.torch_marks import tell_steps
from evertrain.taskd.worker.traces import Traces
from evertrain.torch import groups
from evertrain.torch.backends import Gloo


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TASKD_PROFILING_DIR", str(tmp_path))
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    marks.take()
    yield
    marks.default = marks.communication = False
    marks.take()


def train(steps: int, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.randn(steps, 4), batch_size=1):
        model(batch).sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), folder / "model.pt")


def names(lines: list[str]) -> Counter[tuple[str, int]]:
    return Counter((json.loads(line)["Name"], json.loads(line)["Flag"]) for line in lines)


def test_a_plain_training_is_timed_while_it_is_switched_on_and_left_alone_afterwards(tmp_path: Path) -> None:
    originals = (torch.save, dist.all_reduce, torch.utils.data.dataloader._BaseDataLoaderIter.__next__)
    profiler = Profiler(3, "pt", 10)
    train(2, tmp_path)
    assert marks.take() == []
    assert profiler.switch(True, False) == 1410
    train(3, tmp_path)
    found = names(marks.take())
    assert (found["forward", 2], found["forward", 4]) == (3, 3), "the outermost module, not each layer"
    assert (found["dataloader", 2], found["save_checkpoint", 2], found["save_checkpoint", 4]) == (4, 1, 1)
    assert [found[f"step {number}", 2] for number in (1, 2, 3)] == [1, 1, 1] and found["step 1", 4] == 1
    assert profiler.switch(False, False) == 1400
    train(2, tmp_path)
    assert marks.take() == []
    assert (torch.save, dist.all_reduce, torch.utils.data.dataloader._BaseDataLoaderIter.__next__) == originals


def test_collectives_belong_to_a_domain_of_their_own(tmp_path: Path) -> None:
    profiler = Profiler(3, "pt", 10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert profiler.switch(True, True) == 1411
        dist.all_reduce(torch.ones(1))
        (begin, end) = (json.loads(line) for line in marks.take())
        assert (begin["Name"], begin["Domain"], begin["Flag"], end["Flag"]) == ("all_reduce", "communication", 2, 4)
        assert begin["Id"] == end["Id"] and end["Timestamp"] >= begin["Timestamp"]
        assert set(begin) == {"Kind", "Flag", "SourceKind", "Timestamp", "Id", "MsptiObjectId", "Name", "Domain"}
        profiler.switch(True, False)
        dist.all_reduce(torch.ones(1))
        assert marks.take() == []
    finally:
        profiler.switch(False, False)
        dist.destroy_process_group()


def exchanges(lines: list[str]) -> list[tuple[int, int]]:
    """Of DDP: when each began and ended."""
    marked = [each for line in lines if (each := json.loads(line))["Name"] == "ddp_all_reduce"]
    assert {each["Domain"] for each in marked} <= {"communication"}
    assert [each["Flag"] for each in marked] == [2, 4] * (len(marked) // 2)
    pairs = list(zip(marked[::2], marked[1::2], strict=True))
    assert all(begin["Id"] == end["Id"] for begin, end in pairs)
    return [(begin["Timestamp"], end["Timestamp"]) for begin, end in pairs]


def test_what_ddp_exchanges_in_backward_is_seen(ddp: DistributedDataParallel) -> None:
    """Torch would time ten iterations and then every hundredth."""
    profiler = Profiler(3, "pt", 10)

    def step() -> tuple[int, int]:
        output = ddp(torch.ones(2, 4)).sum()
        began = time.time_ns()
        output.backward()
        return began, time.time_ns()

    for _ in range(11):
        step()
    assert profiler.switch(True, True) == 1411
    backwards = [step() for _ in range(5)]
    with torch.no_grad():
        ddp(torch.ones(2, 4))
    seen = exchanges(marks.take())
    assert len(seen) == 4, "of all but the last one, which the next forward pass tells"
    for (began, ended), (first, last) in zip(backwards, seen, strict=False):
        assert began <= first <= last <= ended
    assert profiler.switch(True, False) == 1410
    step(), step()
    assert exchanges(marks.take()) == []
    assert profiler.switch(True, True) == 1411
    step()
    assert exchanges(marks.take()) == [], "none of the time before"
    step()
    assert len(exchanges(marks.take())) == 1
    assert profiler.switch(False, False) == 1400
    untimed = ddp._get_ddp_logging_data()["backward_comm_time_start"]
    step(), step()
    assert ddp._get_ddp_logging_data()["backward_comm_time_start"] == untimed, "torch takes them as seldom as before"
    assert marks.take() == [] and ddp._comm_hooks == []


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(4, 4))
    dist.destroy_process_group()


def test_operations_of_groups_that_can_be_left_last_until_they_are_waited_for() -> None:
    profiler = Profiler(3, "pt", 10)
    group = groups.build(0, 0, 1, dist.HashStore(), Gloo(), 10.0, threading.Event())
    originals = groups.GuardedGroup._start, groups.GuardedWork.wait
    try:
        assert profiler.switch(False, True) == 1401
        work = group.allreduce([torch.ones(1)])
        (begin,) = marks.take()
        work.wait(timeout=timedelta(seconds=5))
        (end,) = marks.take()
        assert [(json.loads(line)["Name"], json.loads(line)["Flag"]) for line in (begin, end)] == [
            ("allreduce", 2),
            ("allreduce", 4),
        ]
        work.wait()
        assert marks.take() == []
    finally:
        profiler.switch(False, False)
        group.stop()
    assert (groups.GuardedGroup._start, groups.GuardedWork.wait) == originals


def test_marks_that_can_not_be_taken_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler(3, "pt", 10)
    original = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    with monkeypatch.context() as patch:
        patch.delattr(torch, "save")
        assert profiler.switch(True, True) == profiler.state() == 1422
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is original
    assert profiler.switch(True, False) == 1410 and profiler.switch(False, False) == 1400


def test_marks_that_nobody_writes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evertrain.taskd.worker.marks._KEPT", 10)
    before = marks.dropped
    for number in range(12):
        marks.begin(str(number))
    assert len(marks.take()) == 10 and marks.dropped - before == 2


def test_files_are_appended_until_they_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "FILE_LIMIT", 10)
    written = Traces(3, 10)
    for line in ("a", "b" * 20, "c", "d"):
        written.write([line])
    files = sorted((tmp_path / "job-1" / "3").iterdir(), key=lambda file: int(file.name))
    assert [file.read_text().split() for file in files] == [["a", "b" * 20], ["c", "d"]]


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    folder = tmp_path / "job-1" / "3"
    folder.mkdir(parents=True)
    for number in range(10):
        (folder / str(number)).write_bytes(b"x" * (1 << 18))
    (folder / "parallel_group.json").write_text("{}")
    Traces(3, 100).keep_limit()
    assert len(list(folder.iterdir())) == 11, "there is room"
    Traces(3, 2).keep_limit()
    assert sorted(file.name for file in folder.iterdir()) == [*map(str, range(2, 10)), "parallel_group.json"]


def test_what_can_not_be_deleted_stays_and_nobody_suffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of another user's job, and what only looks like timings."""
    own, others = tmp_path / "job-2" / "3", tmp_path / "job-1" / "3"
    for folder in (own, others):
        (folder / "0").mkdir(parents=True)
        for number in range(1, 11):
            (folder / str(number)).write_bytes(b"x" * (1 << 18))
    real = Path.unlink

    def unlink(file: Path, missing_ok: bool = False) -> None:
        if file.parent == others:
            raise PermissionError(13, "not yours")
        real(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    Traces(3, 2).keep_limit()
    assert len(list(others.iterdir())) == 11
    assert sorted(int(file.name) for file in own.iterdir()) == [0, *range(3, 11)]


def test_a_folder_that_can_not_be_used_costs_the_lines_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job-1").symlink_to(tmp_path / "elsewhere")
    written: Any = Traces(3, 10)
    for _ in range(3):
        written.write(["x"])
    assert caplog.text.count("can't be written") == 1 and not list((tmp_path / "elsewhere").rglob("1*"))


def test_steps_are_told_for_crash_reports(tmp_path: Path) -> None:
    steps: list[int] = []
    end = tell_steps(steps.append)
    train(3, tmp_path)
    end()
    train(1, tmp_path)
    assert steps == [1, 2, 3]


def test_the_step_of_a_crash_is_that_of_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It began in another process."""
    progress, told = Steps(), list[int]()
    monkeypatch.setattr(runtime, "processor", SimpleNamespace(steps=progress))
    end = tell_steps(told.append)
    try:
        for step in (501, 502):
            progress.start_updating()
            train(1, tmp_path)
            progress.end_updating(step)
        train(1, tmp_path)  # of an optimizer of which MindIO does not know
    finally:
        end()
    assert told == [1, 502, 502]


def test_marks_that_can_not_be_taken_out_are_told_and_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler(3, "pt", 10)
    assert profiler._torch is not None

    def fail() -> None:
        raise AttributeError("it is gone")

    monkeypatch.setattr(profiler._torch, "take_out", fail)
    assert profiler.switch(False, False) == 1422


def test_a_limit_that_can_not_be_kept_does_not_end_the_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Traces(3, 0)
    written.write(["x"])

    def fail(folder: Path) -> Iterator[Path]:
        raise OSError(f"{folder}: stale file handle")

    monkeypatch.setattr(Path, "iterdir", fail)
    written.keep_limit()
    assert "stale file handle" in caplog.text


def test_timings_of_mindspore_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    profiler = Profiler(3, "ms", 10)
    for wanted in ((True, True), (True, False), (False, True)):
        assert profiler.switch(*wanted) == profiler.state() == 1422
    assert not marks.default and not marks.communication
    assert "the timings can't be taken: there are none of MindSpore" in caplog.text
    assert profiler.switch(False, False) == 1400
    profiler.close()


def test_a_torch_without_what_the_marks_need_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.utils.data.dataloader, "_BaseDataLoaderIter")
    profiler = Profiler(3, "pt", 10)
    assert profiler.switch(True, False) == 1422
    assert "it lacks torch.utils.data.dataloader._BaseDataLoaderIter: " in caplog.text
    assert "timings of the loading of data can't be taken" in caplog.text
    monkeypatch.undo()
    monkeypatch.delattr(DistributedDataParallel, "_get_ddp_logging_data")
    assert profiler.switch(True, False) == 1422
    assert "it lacks torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data: " in caplog.text
    profiler.close()


def test_while_timings_are_written_all_together_are_kept_within_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most once in so many seconds, since it looks at all files of all ranks."""
    looks: list[int] = []
    written: list[int] = []
    many = threading.Event()

    class Disk:
        def __init__(self, rank: int, limit_mb: int) -> None:
            assert (rank, limit_mb) == (3, 10)

        def write(self, lines: list[str]) -> None:
            written.append(len(lines))
            if len(written) == 4:
                profiler.switch(True, False)
            if len(looks) == 2:
                many.set()

        def keep_limit(self) -> None:
            looks.append(len(written))

    monkeypatch.setattr(profiling, "Traces", Disk)
    monkeypatch.setattr(profiling, "WRITE", 0.001)
    monkeypatch.setattr(profiling, "CHECK", 0.003)
    profiler = Profiler(3, "pt", 10)
    profiler.start()
    assert many.wait(90)
    profiler.close()
    assert looks[:2] == [4, 7], "not while nothing is written"
