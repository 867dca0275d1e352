"""Checkpoints: whole or not there, under full disks, kills in the middle and damaged files."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import resource
import signal
import struct
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evertrain.torch import checkpoint, codec
from evertrain.torch.checkpoint import CheckpointError, Checkpoints


def state(step: int, size: int = 1000) -> dict:
    weights = torch.full((size,), float(step))
    return {"step": step, "w": weights, "b": torch.tensor(step, dtype=torch.bfloat16), "none": torch.ones(0), "lr": 0.5}


def packed(step: int, size: int = 1000) -> codec.Packed:
    return codec.pack(state(step, size))


def check(tree: dict, step: int) -> None:
    assert tree["step"] == step and (tree["w"] == step).all() and tree["w"].dtype == torch.float32
    assert tree["b"].dtype == torch.bfloat16 and tree["b"].shape == () and tree["none"].shape == (0,)


def in_child(body: Callable[[], None]) -> None:
    """Run the body in a process of its own, for limits, mounts and kills that must not touch this one."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            try:
                body()
            except BaseException:
                os.write(write, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        report = pipe.read().decode()
    os.waitpid(pid, 0)
    assert not report, report


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_saved_state_comes_back(tmp_path):
    store = Checkpoints(tmp_path / "new" / "directory")
    path = store.save(7, packed(7), "dump")
    assert path == tmp_path / "new" / "directory" / "step-000000000007.ckpt"
    step, tree = store.load(path)
    assert step == 7
    check(tree, 7)
    check(store.load_step(7), 7)
    assert store.load_newest()[0] == 7 and store.steps() == [7] and store.newest_step() == 7
    assert names(path.parent) == [path.name], "no temporary file is left"


def test_an_empty_directory_has_nothing(tmp_path):
    store = Checkpoints(tmp_path)
    assert store.load_newest() is None and store.newest_step() is None and store.steps() == []
    with pytest.raises(CheckpointError, match="No such file"):
        store.load_step(3)


def test_tensors_lie_aligned_in_the_file(tmp_path):
    path = Checkpoints(tmp_path).save(1, codec.pack([torch.full((3,), 7.0), torch.full((5,), 9.0)]))
    raw = path.read_bytes()
    for wanted in (struct.pack("<3f", 7, 7, 7), struct.pack("<5f", 9, 9, 9, 9, 9)):
        assert raw.index(wanted) % 64 == 0


def test_only_the_newest_are_kept(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        store.save(step, packed(step))
    assert store.steps() == [3, 4]
    assert Checkpoints(tmp_path, keep=1).save(5, packed(5)) and store.steps() == [5]


def test_the_one_just_written_is_kept_even_if_it_is_not_the_newest(tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    store.save(10, packed(10))
    store.save(4, packed(4))
    assert store.steps() == [4]


def test_damaged_files_do_not_push_out_good_ones(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    store.save(1, packed(1))
    (tmp_path / "step-000000000009.ckpt").write_bytes(b"rubbish")
    (tmp_path / "step-000000000000.ckpt").write_bytes(b"")
    store.save(2, packed(2))
    assert store.steps() == [1, 2]
    assert names(tmp_path)[0] == "step-000000000001.ckpt", "a damaged one older than all kept ones is removed"
    store.save(3, packed(3))
    assert store.steps() == [2, 3] and len(names(tmp_path)) == 3


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(position: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[int((len(raw) - 1) * position)] ^= 0x10
        path.write_bytes(raw)

    return damage


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def alien(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(5000))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "cut off"),
        (empty, "has 0 bytes"),
        (flip(0.0), "isn't a checkpoint"),
        (flip(0.6), "checksum is wrong"),
        (flip(1.0), "checksum is wrong"),
        (lengthen, "cut off or changed"),
        (alien, "isn't a checkpoint"),
    ],
)
def test_a_damaged_newest_is_passed_over_with_a_warning(tmp_path, caplog, damage, words):
    store = Checkpoints(tmp_path)
    store.save(1, packed(1))
    newest = store.save(2, packed(2))
    damage(newest)
    with pytest.raises(CheckpointError, match=words):
        store.load(newest)
    with caplog.at_level(logging.WARNING):
        step, tree = store.load_newest()
    assert step == 1
    check(tree, 1)
    assert newest.name in caplog.text and words in caplog.text


def test_every_flipped_byte_is_found(tmp_path):
    path = Checkpoints(tmp_path).save(3, packed(3, size=5))
    whole = path.read_bytes()
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            Checkpoints.load(path)


def test_the_list_is_cheap_but_sees_cut_files_and_wrong_names(tmp_path):
    store = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        store.save(step, packed(step))
    cut(tmp_path / "step-000000000002.ckpt")
    (tmp_path / "step-000000000003.ckpt").rename(tmp_path / "step-000000000004.ckpt")
    assert store.steps() == [1] and store.newest_step() == 1
    with pytest.raises(CheckpointError, match="holds step 3"):
        store.load_step(4)


def test_a_file_of_a_later_format_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    path = Checkpoints(tmp_path).save(1, packed(1))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 2"):
        Checkpoints.load(path)


def test_background_saving_keeps_the_state_of_its_moment(tmp_path):
    results = []
    store = Checkpoints(tmp_path, on_result=lambda *result: results.append(result))
    tree = state(1)
    saving = store.save_async(1, codec.pack(tree))
    tree["w"].fill_(99)
    path = saving.wait()
    store.wait()
    assert results == [(1, path, None)] and saving.done
    check(store.load_step(1), 1)


def test_background_saving_waits_for_the_one_before_and_reuses_its_memory(tmp_path, monkeypatch):
    store, allowed, order = Checkpoints(tmp_path), threading.Event(), []
    save, copy = Checkpoints.save, checkpoint._copy

    def slow(self, step, *rest):
        allowed.wait()
        order.append(f"written {step}")
        return save(self, step, *rest)

    def watched(tensors, clones):
        order.append(f"copied into {[clone.data_ptr() for clone in clones if clone.numel()]}")
        return copy(tensors, clones)

    monkeypatch.setattr(Checkpoints, "save", slow)
    monkeypatch.setattr(checkpoint, "_copy", watched)
    first = store.save_async(1, packed(1))
    memory = [clone.data_ptr() for clone in first.copies if clone.numel()]
    threading.Timer(0.05, allowed.set).start()
    store.save_async(2, packed(2)).wait()
    assert order == ["copied into []", "written 1", f"copied into {memory}", "written 2"]
    store.save_async(3, packed(3, size=7)).wait()
    assert [len(store.load_step(step)["w"]) for step in (1, 2, 3)] == [1000, 1000, 7]


def test_a_failure_in_the_background_is_reported_and_the_next_one_works(tmp_path):
    results = []
    store = Checkpoints(tmp_path / "d", on_result=lambda *result: results.append(result))
    os.rename(tmp_path / "d", tmp_path / "away")
    saving = store.save_async(1, packed(1))
    with pytest.raises(CheckpointError, match="directory is gone"):
        saving.wait()
    os.rename(tmp_path / "away", tmp_path / "d")
    path = store.save_async(2, packed(2)).wait()
    store.wait()
    assert [(step, found) for step, found, _ in results] == [(1, None), (2, path)]
    assert isinstance(results[0][2], CheckpointError) and results[1][2] is None


def test_a_failing_callback_stops_nothing(tmp_path):
    def fail(*result):
        raise RuntimeError("callback")

    store = Checkpoints(tmp_path, on_result=fail)
    store.save_async(1, packed(1)).wait()
    store.save_async(2, packed(2)).wait()
    assert store.steps() == [1, 2]


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "evertrain-checkpoint"]


def test_closing_or_dropping_ends_the_thread_after_its_work(tmp_path):
    gc.collect()
    before = len(writers())
    store = Checkpoints(tmp_path)
    store.save_async(1, packed(1, size=1_000_000))
    store.close()
    assert store.steps() == [1] and len(writers()) == before
    with pytest.raises(CheckpointError, match="closed"):
        store.save_async(2, packed(2))
    dropped = Checkpoints(tmp_path)
    saving = dropped.save_async(3, packed(3, size=1_000_000))
    del dropped
    assert saving.wait() is not None
    for thread in writers()[before:]:
        thread.join(5)
    assert len(writers()) == before and store.steps() == [1, 3]


def test_the_end_of_the_program_waits_for_the_background(tmp_path):
    def body():
        store = Checkpoints(tmp_path)
        store.save_async(5, packed(5, size=2_000_000))
        store.close._exitfunc()  # what the interpreter calls at its end

    in_child(body)
    assert Checkpoints(tmp_path).load_newest()[0] == 5


def test_a_file_size_limit_is_an_error_that_harms_nothing(tmp_path):
    def body():
        store = Checkpoints(tmp_path)
        store.save(1, packed(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        with pytest.raises(CheckpointError, match=r"step 2 .*ulimit -f"):
            store.save(2, packed(2, size=1_000_000))
        assert names(tmp_path) == ["step-000000000001.ckpt"]
        check(store.load_newest()[1], 1)
        store.save(3, packed(3))
        assert store.steps() == [1, 3]

    in_child(body)


def test_a_full_disk_is_an_error_that_harms_nothing(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")

    def body():
        # A mount namespace of its own: the mount ends with this process, whatever becomes of it.
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
        store = Checkpoints(tmp_path)
        store.save(1, packed(1, size=100_000))
        with pytest.raises(CheckpointError, match=r"disk is full: free some space .*needed: 800,"):
            store.save(2, packed(2, size=200_000))
        assert names(tmp_path) == ["step-000000000001.ckpt"]
        check(store.load_newest()[1], 1)
        with pytest.raises(CheckpointError):
            store.save_async(3, packed(3, size=200_000)).wait()
        store.save(4, packed(4, size=100_000))
        assert store.steps() == [1, 4]

    def probe():
        assert ctypes.CDLL(None).unshare(0x00020000) == 0

    try:
        in_child(probe)
    except AssertionError:
        pytest.skip("this container may not mount")
    in_child(body)
    assert names(tmp_path) == [], "the mount was never visible outside"


def test_a_directory_that_can_not_be_made_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="choose another"):
        Checkpoints(tmp_path / "file" / "below")


def test_missing_permission_is_explained(tmp_path):
    def body():
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(CheckpointError, match=r"correct the permissions or choose another checkpoint directory$"):
            store.save(1, packed(1))

    store = Checkpoints(tmp_path)
    os.chmod(tmp_path, 0o555)
    try:
        in_child(body)
    finally:
        os.chmod(tmp_path, 0o755)


def _later(folder, step: int) -> bool:
    return any(int("".join(filter(str.isdigit, file.name))) > step for file in folder.glob("step-*"))


def test_whenever_the_writer_is_killed_a_good_one_is_found(tmp_path):
    """Kill the writer at random moments of writing, renaming and pruning; the next one goes on where it was."""
    choose, newest = random.Random(1), 0
    states = packed(0, size=300_000)
    for turn in range(25):
        pid = os.fork()
        if pid == 0:
            try:
                store = Checkpoints(tmp_path, keep=2)
                for step in range(newest + 1, newest + 1000):
                    states.tensors[0].fill_(step)
                    store.save(step, states)
            finally:
                os._exit(1)
        begun = time.monotonic()
        pause = choose.uniform(0.0, 0.06)
        # Every other time it gets as far as the next checkpoint, however slow the machine is.
        while turn % 2 == 0 and not _later(tmp_path, newest) and time.monotonic() < begun + 20:
            time.sleep(0.001)
        time.sleep(pause)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        store = Checkpoints(tmp_path, keep=2)
        assert not list(tmp_path.glob(".*.tmp")), "the dead writer's temporary file is removed"
        step, tree = store.load_newest()
        assert step >= newest and (tree["w"] == step).all()
        assert store.newest_step() == step, "a file under its final name is whole"
        newest = step
    assert newest > 1


def test_temporary_files_of_living_writers_and_other_hosts_stay(tmp_path):
    def name(host: str, pid: int, start: int) -> str:
        return f".step-000000000001.{host}.{pid}-{start}-0.tmp"

    host, pid = checkpoint._host(), os.getpid()
    mine = name(host, pid, checkpoint._started(pid))
    reused, elsewhere = name(host, pid, checkpoint._started(pid) + 1), name("elsewhere", 4_000_000, 1)
    dead, locked = name(host, 4_000_000, 1), name(host, 4_000_001, 1)
    for entry in (mine, reused, elsewhere, dead, locked, "other.tmp", ".step-x.tmp"):
        (tmp_path / entry).write_bytes(b"x")
    with open(tmp_path / locked) as file:
        checkpoint.fcntl.flock(file, checkpoint.fcntl.LOCK_EX)
        Checkpoints(tmp_path)
    assert set(names(tmp_path)) == {mine, elsewhere, locked, "other.tmp", ".step-x.tmp"}


def test_several_processes_may_save_the_same_steps(tmp_path):
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store = Checkpoints(tmp_path, keep=2)
                for step in range(1, 20):
                    store.save(step, packed(step, size=20_000))
                    found, tree = store.load_newest()
                    assert found >= step and (tree["w"] == found).all()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    store = Checkpoints(tmp_path, keep=2)
    assert store.steps() == [18, 19] and len(names(tmp_path)) == 2
    check(store.load_step(19), 19)


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError):
        Checkpoints(tmp_path).save(-1, packed(1))


def test_a_step_whose_checkpoint_was_damaged_is_written_again(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(1, packed(1))
    flip(0.6)(store.save(2, packed(2)))
    assert store.load_newest()[0] == 1
    assert store.steps() == [1], "whoever asks whether step 2 is still to be written"
    store.save(2, packed(2))
    assert store.steps() == [1, 2] and store.newest_step() == 2
    check(store.load_newest()[1], 2)
