"""What is made of the lines that dying processes leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.taskd.native import crash

LINE = b"taskd-crash 1 signal=%d code=%d address=0x10 pid=40 thread=41 time=1000 step=%d\n"
SENT = b"taskd-crash 1 signal=%d code=0 sender=%d pid=40 thread=40 time=1000 step=-1\n"


def cause(returncode: int, *lines: bytes) -> crash.Cause:
    return crash.cause(returncode, crash.parse(b"".join(lines)))


def test_the_agent_reads_what_was_written(tmp_path: Path) -> None:
    file = crash.path(tmp_path, 40)
    file.write_bytes(LINE % (signal.SIGSEGV, 2, 3))
    (record,) = crash.read(tmp_path, 40)
    assert (record.number, record.code, record.address, record.thread, record.step) == (11, 2, 16, 41, 3)
    assert record.words() == "SIGSEGV (no permission for this address) at 0x10 in thread 41 of process 40, step 3"
    assert crash.read(tmp_path, 40, since_ns=1001) == [], "an earlier process with the same number"
    assert crash.read(tmp_path, 41) == []
    crash.path(tmp_path, 41).write_bytes(LINE % (signal.SIGSEGV, 2, 3))
    assert crash.read(tmp_path, 41) == [], "what another process wrote"
    crash.forget(tmp_path, 40)
    crash.forget(tmp_path, 40)
    assert crash.read(tmp_path, 40) == []
    assert crash.environment(tmp_path) == {"TASKD_CRASH_DIR": str(tmp_path)}


def test_the_directory_of_an_agent() -> None:
    directory = crash.Directory()
    assert directory.path is not None
    assert directory.path.stat().st_mode & 0o7777 == 0o700
    file = crash.path(directory.environment()["TASKD_CRASH_DIR"], 40)
    file.write_bytes(LINE % (signal.SIGSEGV, 2, 3))
    assert directory.cause(40, -signal.SIGSEGV).step == 3 and not file.exists()
    assert directory.cause(40, -signal.SIGSEGV) == crash.Cause(1, "killed by SIGSEGV", code=-signal.SIGSEGV)
    file.mkdir()
    assert directory.cause(40, 1).words == "exited with code 1"
    directory.close()
    directory.close()
    assert not directory.path.exists()


def test_what_killed_agents_have_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "from evertrain.taskd.native import crash; d = crash.Directory(); print(d.path, flush=True); input()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    killed, living = agents
    try:
        left, kept = (Path(agent.stdout.readline().decode().strip()) for agent in agents if agent.stdout)
        crash.path(left, 40).write_bytes(LINE % (signal.SIGSEGV, 2, 3))
        killed.kill()
        killed.wait()
        own = crash.Directory()
        assert own.path is not None and sorted(tmp_path.iterdir()) == sorted([kept, own.path])
        own.close()
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def test_a_directory_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make, made = tempfile.mkdtemp, []

    def swept_twice(prefix: str) -> str:
        made.append(make(prefix=prefix))
        if len(made) < 3:
            crash._sweep()
        return made[-1]

    monkeypatch.setattr("tempfile.mkdtemp", swept_twice)
    directory = crash.Directory()
    assert [str(directory.path)] == made[2:] == [str(each) for each in tmp_path.iterdir()]
    directory.close()


def test_without_a_directory_there_is_the_return_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    directory = crash.Directory()
    assert directory.environment() == {}
    assert directory.cause(40, -signal.SIGSEGV).words == "killed by SIGSEGV"
    directory.close()


def test_without_a_return_code_there_is_the_record() -> None:
    assert crash.cause(None) == crash.Cause(1, "it is gone")
    told = crash.cause(None, crash.parse(LINE % (signal.SIGBUS, 4, 3)))
    assert told.fault_type == 0 and told.step == 3 and told.words.startswith("killed by SIGBUS")


@pytest.mark.parametrize("code", [4, 5])
def test_a_machine_check_is_an_uncorrectable_memory_error(code: int) -> None:
    told = cause(-signal.SIGBUS, LINE % (signal.SIGBUS, code, 3))
    assert told.fault_type == 0 and "uncorrectable memory error" in told.words and told.step == 3


@pytest.mark.parametrize(("number", "code"), [(7, 1), (7, 2), (7, 3), (11, 4), (11, 5), (8, 4), (6, 4), (99, 4)])
def test_everything_else_is_not(number: int, code: int) -> None:
    told = cause(-number, LINE % (number, code, 3))
    assert told.fault_type == 1 and told.words.startswith("killed by ")


def test_a_handler_that_aborts_does_not_hide_the_cause() -> None:
    told = cause(-signal.SIGABRT, LINE % (signal.SIGBUS, 4, 3), SENT % (signal.SIGABRT, 40))
    assert told.fault_type == 0
    assert told.words.index("SIGBUS") < told.words.index(", then SIGABRT (the process aborted itself)")


def test_a_signal_that_it_lived_through_is_no_cause() -> None:
    assert cause(-signal.SIGKILL, LINE % (signal.SIGBUS, 4, 3)) == crash.Cause(1, "killed by SIGKILL", code=-9)
    assert cause(3, LINE % (signal.SIGBUS, 4, 3)) == crash.Cause(1, "exited with code 3", code=3)
    assert cause(-signal.SIGSEGV, LINE % (signal.SIGSEGV, 1, 3), LINE % (signal.SIGBUS, 4, 3)).fault_type == 1


def test_who_sent_it_is_told() -> None:
    assert "sent by process 77" in cause(-signal.SIGABRT, SENT % (signal.SIGABRT, 77)).words
    assert "from outside" in cause(-signal.SIGABRT, SENT % (signal.SIGABRT, 0)).words
    assert "passed on by another handler" in cause(-signal.SIGSEGV, SENT % (signal.SIGSEGV, 40)).words


def test_many_are_told_shortly() -> None:
    words = cause(-signal.SIGABRT, *[LINE % (signal.SIGSEGV, 1, 3)] * 30, SENT % (signal.SIGABRT, 40)).words
    assert words.count("then") == 2


@pytest.mark.parametrize("kind", ["missing", "symlink", "large", "folder", "pipe"])
def test_a_file_that_is_not_to_be_trusted_says_nothing(tmp_path: Path, kind: str) -> None:
    file, line = crash.path(tmp_path, 40), LINE % (11, 1, 3)
    if kind == "symlink":
        (tmp_path / "other").write_bytes(line)
        file.symlink_to("other")
    elif kind == "large":
        file.write_bytes(line + b" " * crash.LIMIT)
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    assert crash.read(tmp_path, 40) == []


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(-70, 300))
def test_garbage_around_a_line_is_skipped(before: bytes, after: bytes, returncode: int) -> None:
    line = LINE % (11, 1, 3)
    records = crash.parse(before + b"\n" + line + after)
    assert crash.parse(line)[0] in records
    assert crash.cause(returncode, records).fault_type in (0, 1)


@given(st.data())
def test_a_damaged_line_is_no_line_or_another(data: st.DataObject) -> None:
    line = bytearray(LINE % (7, 4, 3))
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    for record in crash.parse(bytes(line)):
        assert record.words()
