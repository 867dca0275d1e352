"""TaskD's log files: names, permissions, format, rotation, several writers, and what must not stop anybody."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.taskd import log

pytestmark = pytest.mark.usefixtures("no_leftovers")
STAMP = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    log.stop()
    monkeypatch.setenv(log.PATH, str(tmp_path / "logs"))
    yield tmp_path / "logs"
    log.stop()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def line(directory: Path) -> str:
    return (directory / "taskd.log").read_text().splitlines()[-1]


def test_nothing_is_made_before_the_log_is_started(directory: Path) -> None:
    log.run_log.error("nobody listens")
    assert not directory.exists()


def test_a_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0o077)
    try:
        log.start()
        log.start()
    finally:
        os.umask(before)
    log.run_log.warning("rank %d is gone", 3)
    pattern = r"\[WARNING\]     \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} %d   test_log\.py:\d+     rank 3 is gone"
    assert re.fullmatch(pattern % os.getpid(), line(directory))
    assert capsys.readouterr().out.splitlines() == [line(directory)]
    assert (mode(directory), mode(directory / "taskd.log")) == (0o750, 0o640)


def test_a_message_is_one_line_of_bounded_length(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.start()
    log.run_log.error("a\nb\r\x1b[31m\x7f\u2028%s", "\x00")
    assert line(directory).endswith(r"a\nb\r\x1b[31m\x7f\u2028\x00")
    log.run_log.error("x" * 1023)
    assert line(directory).endswith(" " + "x" * 1023)
    log.run_log.error("x" * 1024)
    assert line(directory).endswith(" " + "x" * 1023 + "...")
    try:
        raise ValueError("why\nindeed")
    except ValueError:
        log.run_log.exception("it failed")
    assert r"it failed | Traceback (most recent call last):\n" in line(directory)
    assert line(directory).endswith(r"ValueError: why\nindeed\n")
    ours = [each for each in log.run_log.handlers if not type(each).__module__.startswith("_pytest")]
    with monkeypatch.context() as without_pytest:  # its workers can't send a surrogate in their reports
        without_pytest.setattr(log.run_log, "handlers", ours)
        log.run_log.error("surrogate \udc80")
    assert line(directory).endswith(r"surrogate \udc80")


@pytest.mark.parametrize(
    ("variables", "in_file", "on_stdout"),
    [
        ({}, "info error", "info error"),
        ({log.FILE_LEVEL: "ERROR"}, "error", "info error"),
        ({log.STD_LEVEL: "debug"}, "info error", "debug info error"),
        ({log.STDOUT: "False"}, "info error", ""),
        ({log.STDOUT: "false"}, "info error", "info error"),
        ({log.FILE_LEVEL: "LOUD"}, "info error", "info error"),
    ],
)
def test_the_variables(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    in_file: str,
    on_stdout: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    log.start()
    for level in ("debug", "info", "error"):
        getattr(log.run_log, level)(level)
    printed = capsys.readouterr()
    assert " ".join(each.split()[-1] for each in printed.out.splitlines()) == on_stdout
    written = (directory / "taskd.log").read_text()
    assert " ".join(each.split()[-1] for each in written.splitlines()) == in_file
    assert ("LOUD is not one of" in printed.err) == ("LOUD" in variables.values())


def test_a_directory_of_another_mode_is_used_with_a_warning(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    log.start()
    assert "taskd log path permission is not 0o750" in line(directory) and "0o755" in line(directory)
    assert mode(directory) == 0o755


def test_a_link_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    directory.symlink_to("other")
    with pytest.raises(Exception, match="taskd log path should not be a soft link"):
        log.start()
    os.environ[log.PATH] = f"{directory}/"
    with pytest.raises(Exception, match="taskd log path should not be a soft link"):
        log.part_log("manager")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("kind", ["a file instead of the directory", "a link instead of the file", "a full disk"])
def test_what_goes_wrong_costs_lines_only(directory: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    if kind == "a file instead of the directory":
        directory.write_text("")
    else:
        directory.mkdir()
    if kind == "a link instead of the file":
        (directory / "taskd.log").symlink_to("other")
    log.start()
    if kind == "a full disk":
        (file,) = [handler for handler in log._started if isinstance(handler, log.RotatingFile)]
        os.dup2(full := os.open("/dev/full", os.O_WRONLY), file._descriptor)
        os.close(full)
        file._is_ours = lambda: True  # type: ignore[method-assign]
    log.run_log.info("one")
    log.run_log.info("two")
    printed = capsys.readouterr()
    assert printed.err.startswith("taskd: ") and printed.err.count("\n") == 1
    assert [each.split()[-1] for each in printed.out.splitlines() if "one" in each or "two" in each] == ["one", "two"]
    assert not (directory / "other").exists()


def test_a_message_that_does_not_fit_its_arguments_stops_nobody(tmp_path: Path) -> None:
    code = "from taskd.python.utils.log import run_log; run_log.info('%d', 'x'); run_log.info('next')"
    done = front_door(code, tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("next\n") and "can't be written: %d format" in done.stderr
    assert line(tmp_path / "taskd_log").endswith("next")


def test_full_files_become_backups_and_old_ones_go(tmp_path: Path) -> None:
    handler = log.RotatingFile(tmp_path / "taskd.log", backups=3, max_bytes=100)
    (tmp_path / "taskd-worker-3.log").write_text("another log")
    for number in range(50):
        handler.emit(logging.LogRecord("taskd", logging.INFO, "", 0, f"{number:020}", None, None))
    handler.close()
    backups = sorted(path for path in tmp_path.iterdir() if re.fullmatch(f"taskd-{STAMP}.log", path.name))
    assert len(backups) == 3 and {mode(path) for path in backups} == {0o400}
    text = "".join(path.read_text() for path in (*backups, tmp_path / "taskd.log"))
    kept = [int(each) for each in text.split()]
    assert kept == list(range(kept[0], 50)) and len(kept) == 14
    assert all(path.stat().st_size <= 100 for path in backups)
    assert (tmp_path / "taskd-worker-3.log").exists()


def test_backups_of_a_part_are_kept_a_week(tmp_path: Path) -> None:
    old, young = tmp_path / "manager-2026-01-01T00-00-00.000.log", tmp_path / "manager-2026-01-02T00-00-00.000.log"
    for path, days in ((old, 8), (young, 6)):
        path.write_text("")
        os.utime(path, (time.time() - days * 86400,) * 2)
    handler = log.RotatingFile(tmp_path / "manager.log", log.PART_BACKUPS, log.PART_DAYS, max_bytes=1)
    for _ in range(2):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "x", None, None))
    handler.close()
    assert young.exists() and not old.exists()


def test_several_processes_write_one_file(tmp_path: Path) -> None:
    """Every line arrives whole and once, however often the file is exchanged under the writers."""
    program = """
import logging, sys
from pathlib import Path
from evertrain.taskd.log import RotatingFile
handler = RotatingFile(Path(sys.argv[1]) / "taskd.log", backups=10000, max_bytes=300)
print("ready", flush=True)
sys.stdin.read()
for number in range(500):
    text = f"{sys.argv[2]} {number} " + "x" * 80
    handler.emit(logging.LogRecord("taskd", logging.INFO, "", 0, text, None, None))
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name in range(3)
    ]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == b"ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.close()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    for writer in writers:
        assert writer.stdout
        writer.stdout.close()
    lines = [each for path in tmp_path.iterdir() for each in path.read_text().splitlines()]
    expected = {(str(name), str(number), "x" * 80) for name in range(3) for number in range(500)}
    assert len(lines) == 1500 and {tuple(each.split()) for each in lines} == expected
    assert len(list(tmp_path.iterdir())) > 100


def test_who_writes_follows_when_another_has_renamed_the_file(tmp_path: Path) -> None:
    first, second = (log.RotatingFile(tmp_path / "taskd.log", 3, max_bytes=100) for _ in range(2))
    for handler, text in ((second, "a" * 60), (first, "b" * 60), (second, "c")):
        handler.emit(logging.LogRecord("taskd", logging.INFO, "", 0, text, None, None))
    first.close()
    second.close()
    assert (tmp_path / "taskd.log").read_text().split() == ["b" * 60, "c"]


def test_a_file_that_somebody_removed_is_made_again(directory: Path) -> None:
    log.start()
    (directory / "taskd.log").unlink()
    log.run_log.info("again")
    assert line(directory).endswith("again")


def test_the_log_of_a_part(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = log.part_log("taskd-proxy-0-1794825081")
    assert log.part_log("taskd-proxy-0-1794825081") is part and len(part.handlers) == 1
    part.info("init network success, role=%s", "Proxy")
    part.debug("not this")
    text = (directory / "taskd-proxy-0-1794825081.log").read_text()
    pattern = (
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]\[INFO\]     \d+ unit/test_log\.py:\d+    "
        r"init network success, role=Proxy\n"
    )
    assert re.fullmatch(pattern, text)
    assert capsys.readouterr().out == ""
    part.info("x" * 200_000)
    assert len((directory / "taskd-proxy-0-1794825081.log").read_text().splitlines()[-1]) < 102_400 + 100
    with pytest.raises(ValueError):
        log.part_log("../elsewhere")


def test_a_part_tells_what_happens_however_quiet_the_others_are(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKD_FILE_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("TASKD_STD_LOG_LEVEL", "DEBUG")
    for levels, seen in (("ERROR", "ERROR"), ("DEBUG", "DEBUG")):
        log.stop()
        monkeypatch.setenv("TASKD_FILE_LOG_LEVEL", levels)
        monkeypatch.setenv("TASKD_STD_LOG_LEVEL", seen)
        log.open_part("manager")
        ours = logging.getLogger("evertrain.taskd.manager.api")
        ours.info("init at %s", levels)
        ours.debug("details at %s", levels)
    lines = [each.split()[-3:] for each in (directory / "manager.log").read_text().splitlines()]
    assert lines == [["init", "at", "ERROR"], ["init", "at", "DEBUG"]], "from INFO on, whatever the variables say"
    run = (directory / "taskd.log").read_text()
    assert "init at ERROR" not in run and "details at DEBUG" in run
    assert "at ERROR" not in capsys.readouterr().out


def test_a_part_may_have_the_words_of_the_network_only(directory: Path) -> None:
    log.open_part("agent-0")
    log.open_part("taskd-proxy-0-1", log.NETWORK)
    logging.getLogger("evertrain.taskd.agent.pytorch").info("a process has ended")
    logging.getLogger("evertrain.taskd.net.client").info("path join success")
    assert "path join" in (text := (directory / "taskd-proxy-0-1.log").read_text()) and "a process" not in text
    assert "path join" in (text := (directory / "agent-0.log").read_text()) and "a process" in text
    log.stop()
    assert not logging.getLogger(log.NETWORK).handlers


def front_door(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("TASKD_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env={**keep, **variables}, capture_output=True, text=True, check=False)


def test_the_front_door_opens_the_log_where_the_process_is(tmp_path: Path) -> None:
    done = front_door("import taskd; from taskd.python.utils.log import run_log; run_log.info('hello')", tmp_path)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.endswith("hello\n")
    assert "hello" in (tmp_path / "taskd_log/taskd.log").read_text()


def test_the_library_is_loaded_or_none_with_a_reason(tmp_path: Path) -> None:
    code = "import taskd.python.utils.log; from evertrain.taskd.native import library; print(library.load({}))"
    (tmp_path / "libtaskd.so").symlink_to("anything")
    (tmp_path / "empty.so").write_text("")
    done = front_door(code.format("'libtaskd.so'"), tmp_path)
    assert done.stdout.endswith("libtaskd.so is symlink\nNone\n"), done.stdout + done.stderr
    done = front_door(code.format("'./empty.so'"), tmp_path)
    assert "libtaskd.so loaded failed: " in done.stdout and done.stdout.endswith("None\n")
    done = front_door(code.format("'libc.so.6'"), tmp_path)
    assert "libtaskd.so loaded failed: " in done.stdout and "undefined symbol" in done.stdout


def test_importing_with_a_link_as_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taskd_log").symlink_to(".")
    done = front_door("import taskd.python.utils.log", tmp_path)
    assert done.returncode == 1 and "taskd log path should not be a soft link" in done.stderr


def test_a_closed_standard_output_stops_nobody(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.start()
    monkeypatch.setattr(sys, "stdout", None)
    log.run_log.info("to nobody")
    with open(os.devnull, "w") as closed, contextlib.suppress(OSError):
        closed.close()
        monkeypatch.setattr(sys, "stdout", closed)
    log.run_log.info("to a closed one")
    assert line(directory).endswith("to a closed one")


def test_the_front_door_is_light(tmp_path: Path) -> None:
    """It is imported by every training process and by torchrun."""
    code = "import sys, taskd.python.cython_api.cython_api, taskd.python.utils.validator, taskd.python.utils.ip"
    done = front_door(f"{code}; print(*sys.modules)", tmp_path)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "evertrain.taskd.native.library" in loaded and not {"grpc", "asyncio", "torch", "google.protobuf"} & loaded
