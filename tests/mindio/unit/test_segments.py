from __future__ import annotations

import os
import subprocess
from pathlib import Path

from evertrain.mindio import segments
from evertrain.mindio.board import Board


def dead() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    gone, stranger = dead(), dead()
    left = [f"torch_{gone}_123_0", f"torch_{gone}_9_17"]
    kept = [f"torch_{os.getpid()}_1_0", f"torch_{stranger}_1_0", f"sem.{gone}", f"torch_{gone}0_1_0", "torch_x_1_1"]
    for name in (*left, *kept):
        (tmp_path / name).touch()
    assert sorted(segments.remove([gone, os.getpid()], tmp_path)) == sorted(left)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)


def test_a_dead_process_that_nobody_has_asked_for_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / f"torch_{process.pid}_1_0").touch()
    assert segments.remove([process.pid], tmp_path)
    process.wait()


def test_without_shared_memory_there_is_nothing_to_remove(tmp_path: Path) -> None:
    assert segments.remove([1, 2], tmp_path / "none") == []


def test_a_board_remembers_the_last_helpers() -> None:
    board = Board()
    try:
        assert board.helpers == set()
        board.note_helpers([7, 8])
        assert board.helpers == {7, 8}
        board.note_helpers(range(1000, 1200))
        assert board.helpers == set(range(1072, 1200))
        board.leave_imports(["torch"])
        assert board.imports == ["torch"] and len(board.helpers) == 128
    finally:
        board.close()
