"""libtaskd.so in processes that really die: what it records, and that they die as they would without it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evertrain.taskd.native import crash
from tests.taskd.native import LIVING, SOURCE, Death, build, compiled, die


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("libtaskd"))


@pytest.fixture(scope="session")
def living(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(LIVING, tmp_path_factory.mktemp("living") / "living", "-O1", "-pthread", "-ldl")


def cause(death: Death) -> crash.Cause:
    return crash.cause(death.returncode, death.records)


@pytest.mark.parametrize(
    ("way", "number", "code", "words"),
    [
        ("segv", signal.SIGSEGV, 1, "SIGSEGV (address not mapped) at 0x8 in the main thread"),
        ("bus", signal.SIGBUS, 2, "SIGBUS (no memory behind this address: a mapped file was cut short"),
        ("ill", signal.SIGILL, 2, "SIGILL (illegal operand) at 0x"),
        ("divided", signal.SIGFPE, 1, "SIGFPE (integer division by zero) at 0x1000"),
        ("abort", signal.SIGABRT, -6, "SIGABRT (the process aborted itself) in the main thread"),
        ("overflow", signal.SIGSEGV, 1, "SIGSEGV (address not mapped) at 0x"),
        ("memory-error", signal.SIGBUS, 4, "(uncorrectable memory error (machine check), in use) at 0x7f0000001000"),
    ],
)
def test_a_death_is_recorded_and_is_the_same_death(
    library: Path, tmp_path: Path, way: str, number: int, code: int, words: str
) -> None:
    before = time.time_ns()
    death = die(library, tmp_path, "step", way)
    assert death.returncode == -number
    assert death.stderr == ""
    (record,) = death.records
    assert (record.number, record.pid, record.thread, record.step) == (number, death.pid, death.pid, 12)
    assert record.code == code or way == "ill"  # processors differ in what they call an undefined instruction
    assert before <= record.time_ns <= time.time_ns()
    told = cause(death)
    assert told.step == 12
    assert way == "ill" or words in told.words, told.words
    assert told.fault_type == (crash.UCE_FAULT if way.startswith("memory-error") else crash.NORMAL_FAULT)


def test_a_core_dump_is_still_written(library: Path, tmp_path: Path) -> None:
    """The whole wait status, the bit for the core included, is that of a process without the library."""
    script = "ulimit -c unlimited; exec sleep 60"
    statuses = []
    for preload in ("", str(library)):
        environment = {**os.environ, "LD_PRELOAD": preload, crash.VARIABLE: str(tmp_path)}
        command = ["bash", "-c", f"echo; {script}"]
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" or (
            preload and str(library) not in Path(f"/proc/{process.pid}/maps").read_text()
        ):
            time.sleep(0.001)
        caught = f"/proc/{process.pid}/status"
        while preload and int(Path(caught).read_text().split("SigCgt:")[1].split()[0], 16) == 0:
            time.sleep(0.001)
        process.send_signal(signal.SIGSEGV)
        statuses.append(os.waitpid(process.pid, 0)[1])
        process.returncode = 0
        process.stdout.close()
    assert statuses[0] == statuses[1]
    assert os.WTERMSIG(statuses[1]) == signal.SIGSEGV
    (record,) = crash.read(tmp_path, process.pid)
    assert record.sender == os.getpid() and record.step is None
    assert f"sent by process {os.getpid()}" in record.words()


@pytest.mark.parametrize("fault", ["segv", "abort", "memory-error", "thread"])
@pytest.mark.parametrize(
    "order",
    [
        ("faulthandler", "load", "step"),
        ("load", "faulthandler", "step"),
        ("load", "step", "faulthandler"),
        ("load", "step", "faulthandler", "steps"),
        ("load", "faulthandler", "no-faulthandler", "faulthandler", "arm", "step"),
    ],
    ids=" ".join,
)
def test_faulthandler_still_tells(library: Path, tmp_path: Path, order: tuple[str, ...], fault: str) -> None:
    death = die(None, tmp_path, *order, fault, LIBRARY=str(library))
    number = {"abort": signal.SIGABRT, "memory-error": signal.SIGBUS}.get(fault, signal.SIGSEGV)
    assert death.returncode == -number
    assert death.stderr.count("Fatal Python error") == 1
    assert "most recent call first" in death.stderr
    (record,) = death.records
    assert (record.number, record.step) == (number, 12)
    if order[-1] != "faulthandler" and fault != "abort":  # in front again, so it saw the fault itself
        assert record.code > 0 and record.address is not None
        assert cause(death).fault_type == (0 if fault == "memory-error" else 1)


def test_a_handler_that_has_retired_does_not_keep_a_dying_process(library: Path, tmp_path: Path) -> None:
    """As Python's at the end of the interpreter: it is called, returns at once, and the fault comes again for ever."""
    death = die(library, tmp_path, "faulthandler", "step", "no-faulthandler", "segv")
    assert death.returncode == -signal.SIGSEGV
    assert "Fatal" not in death.stderr
    assert [record.code for record in death.records] == [1]


def test_a_program_that_lives_through_a_signal_lives(library: Path, tmp_path: Path) -> None:
    death = die(library, tmp_path, "handle-abrt", "arm", "kill-abrt", "kill-abrt")
    assert death.returncode == 0
    assert death.stdout.splitlines() == ["armed 5", "lived through 6", "lived through 6", "alive"]
    assert "exited with code 0" in cause(death).words


@pytest.mark.parametrize("way", ["jump", "jump-elsewhere", "again", "once", "abort", "abort-deferring"])
@pytest.mark.parametrize("directory", ["there", "missing"])
def test_a_program_notices_nothing(library: Path, living: Path, tmp_path: Path, way: str, directory: str) -> None:
    """It jumps out of its handler, guards a page again and again, has handlers with all sorts of flags and masks."""
    (tmp_path / "there").mkdir()
    runs = []
    for preload in ("", str(library)):
        environment = {**os.environ, "LD_PRELOAD": preload, crash.VARIABLE: str(tmp_path / directory)}
        done = subprocess.run([living, way], env=environment, capture_output=True, text=True, timeout=100, check=False)
        runs.append((done.returncode, done.stdout))
    assert runs[0] == runs[1]
    assert runs[0][0] == (-signal.SIGSEGV if way == "once" else 0), runs[0]


@pytest.mark.parametrize("way", ["allow", "third-time"])
def test_only_the_fault_that_ends_a_program_is_recorded(library: Path, living: Path, tmp_path: Path, way: str) -> None:
    """Hundreds that it lived through would leave no room for it."""
    environment = {**os.environ, "LD_PRELOAD": str(library), crash.VARIABLE: str(tmp_path)}
    process = subprocess.Popen([living, way], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=90)[0] == "lived\n"
    assert process.returncode == -signal.SIGSEGV
    assert [(record.code, record.address) for record in crash.read(tmp_path, process.pid)] == [(1, 16)]


def test_a_chain_of_handlers_is_kept(library: Path, tmp_path: Path) -> None:
    """The program's, ours, faulthandler's, and ours in front again: the last two pass it down, the first one lives."""
    ways = ("handle-abrt", "load", "faulthandler", "arm", "kill-abrt")
    death = die(None, tmp_path, *ways, LIBRARY=str(library))
    assert death.stdout.splitlines() == ["armed 5", "lived through 6", "alive"]
    assert death.stderr.count("Fatal Python error: Aborted") == 1
    assert (death.returncode, len(death.records)) == (0, 1)


def test_a_signal_that_the_program_ignores_stays_ignored(library: Path, tmp_path: Path) -> None:
    death = die(library, tmp_path, "ignore-abrt", "arm", "kill-abrt")
    assert death.stdout.splitlines() == ["armed 4", "alive"] and not death.records


def test_the_thread_is_named(library: Path, tmp_path: Path) -> None:
    death = die(library, tmp_path, "thread")
    thread = int(death.stdout.split()[0])
    assert thread != death.pid and [record.thread for record in death.records] == [thread]
    assert f"in thread {thread} of process {death.pid}" in cause(death).words


def test_two_threads_at_once(library: Path, tmp_path: Path) -> None:
    for _ in range(5):
        death = die(library, tmp_path, "faulthandler", "arm", "two-threads")
        assert death.returncode == -signal.SIGSEGV
        assert death.records and all(record.code == 1 for record in death.records[:1])


def test_a_worker_sets_the_step(library: Path, tmp_path: Path) -> None:
    code = (
        "import ctypes, faulthandler, sys; from evertrain.taskd.native.library import step_setter;"
        "faulthandler.enable(); set_step = step_setter(sys.argv[1]); set_step(7); set_step(2**40); print(set_step);"
        "ctypes.string_at(8)"
    )
    for asked in (True, False):
        environment = {**os.environ, crash.VARIABLE: str(tmp_path) if asked else ""}
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(library)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = process.communicate(timeout=90)
        assert process.returncode == -signal.SIGSEGV and b"Fatal Python error" in err
        assert (b"_ignore" in out) != asked
        assert [(record.step, record.code) for record in crash.read(tmp_path, process.pid)] == [(2**40, 1)] * asked


def test_a_process_that_learns_late_that_it_is_asked(library: Path, tmp_path: Path) -> None:
    code = (
        "import ctypes, os, sys; os.environ['TASKD_CRASH_DIR'] = sys.argv[2];"
        "from evertrain.taskd.native.library import step_setter; step_setter(sys.argv[1])(7); ctypes.string_at(8)"
    )
    environment = {name: value for name, value in os.environ.items() if name != crash.VARIABLE}
    command = [sys.executable, "-c", code, str(library), str(tmp_path)]
    process = subprocess.Popen(command, env={**environment, "LD_PRELOAD": str(library)})
    assert process.wait(timeout=90) == -signal.SIGSEGV
    assert [(record.step, record.code) for record in crash.read(tmp_path, process.pid)] == [(7, 1)]


@pytest.mark.parametrize("way", ["fork", "program"])
def test_children_record_for_themselves(library: Path, tmp_path: Path, way: str) -> None:
    death = die(library, tmp_path, "step", "chdir", way)
    child, returncode = map(int, death.stdout.split()[:2])
    assert (death.returncode, death.records, returncode) == (0, [], -signal.SIGSEGV)
    (record,) = crash.read(tmp_path, child)
    assert record.pid == child
    assert record.step == (12 if way == "fork" else None)


@pytest.mark.parametrize("where", ["relative", "missing/folder", "", "a" * 4090, "file"])
def test_where_nothing_can_be_recorded_the_death_is_the_same(library: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    directory = where if where in ("relative", "") else f"{tmp_path}/{where}"
    death = die(library, None, "segv", **{crash.VARIABLE: directory})
    assert (death.returncode, death.stderr) == (-signal.SIGSEGV, "")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["symlink", "pipe", "folder", "full"])
def test_whatever_lies_in_the_way_is_left_alone(library: Path, tmp_path: Path, kind: str) -> None:
    """A process whose number is known beforehand: a shell becomes the program that dies."""
    other = tmp_path / "other"
    content = b"x" * (crash.LIMIT if kind == "full" else 1)
    other.write_bytes(content)
    prepare = {"symlink": "ln -s other", "pipe": "mkfifo", "folder": "mkdir", "full": "cp other"}[kind]
    script = f'cd "$0" && {prepare} crash-$$ && exec "$@"'
    command = [sys.executable, "-I", "-S", "-c", "import os; os.abort()"]
    environment = {**os.environ, "LD_PRELOAD": str(library), crash.VARIABLE: str(tmp_path)}
    process = subprocess.Popen(["sh", "-c", script, str(tmp_path), *command], env=environment)
    assert process.wait(timeout=90) == -signal.SIGABRT
    assert other.read_bytes() == content
    assert kind != "full" or crash.path(tmp_path, process.pid).read_bytes() == content
    assert crash.read(tmp_path, process.pid) == []
    assert crash.cause(process.returncode, []).words == "killed by SIGABRT"


def test_unasked_it_does_nothing(library: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != crash.VARIABLE}
    with_it, without = ({**environment, "LD_PRELOAD": preload} for preload in (f"{library}:", ""))
    for command in (
        ["bash", "-c", "trap -p; kill -l SEGV; (exit 3); echo $?"],
        ["awk", 'BEGIN { print 1 + 1; system("echo two") }'],
        ["git", "--version"],
        ["sh", "-c", "kill -SEGV $$"],
        ["cat", "/proc/self/cmdline"],
        [sys.executable, "-I", "-S", "-c", "print(open('/proc/self/status').read().split('SigCgt')[1][:20])"],
    ):
        runs = [
            subprocess.run(command, env=each, cwd=tmp_path, capture_output=True, check=False)
            for each in (with_it, without)
        ]
        assert [(run.returncode, run.stdout, run.stderr) for run in runs[:1]] == [
            (run.returncode, run.stdout, run.stderr) for run in runs[1:]
        ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["bash", "-c", "trap -p; (exit 3); echo $?"], [sys.executable, "-m", "pip", "-V"]])
def test_asked_it_is_not_seen_either(library: Path, tmp_path: Path, command: list[str]) -> None:
    asked = {"LD_PRELOAD": str(library), crash.VARIABLE: str(tmp_path)}
    runs = [
        subprocess.run(command, env={**os.environ, **each}, capture_output=True, check=False) for each in (asked, {})
    ]
    assert len({(run.returncode, run.stdout, run.stderr) for run in runs}) == 1
    assert not list(tmp_path.iterdir())


def test_many_at_once(library: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library), crash.VARIABLE: str(tmp_path)}
    numbers = [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL] * 8
    script = "read line; kill -$0 $$"
    dying = [
        subprocess.Popen(["sh", "-c", script, str(int(number))], env=environment, stdin=subprocess.PIPE)
        for number in numbers
    ]
    for process in dying:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=90) for process in dying] == [-number for number in numbers]
    for process, number in zip(dying, numbers, strict=True):
        (record,) = crash.read(tmp_path, process.pid)
        assert (record.number, record.sender) == (number, process.pid)
        assert crash.path(tmp_path, process.pid).stat().st_mode & 0o7777 == 0o600
    assert len(list(tmp_path.iterdir())) == len(dying)


def test_the_compiler_has_no_complaints(tmp_path: Path) -> None:
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wundef", "-Wpointer-arith", "-Werror"]
    compiled(SOURCE, tmp_path / "object", "-std=gnu11", "-O2", "-fPIC", "-c", *warnings)


def test_it_clashes_with_nobody_and_runs_on_old_systems(library: Path) -> None:
    listed = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout.splitlines()
    defined = [line.split()[-1] for line in listed if " U " not in line and " w " not in line]
    assert sorted(defined) == ["taskd_crash_arm", "taskd_set_step"]
    versions = [tuple(map(int, line.split("@GLIBC_")[1].split("."))) for line in listed if "@GLIBC_" in line]
    assert versions and max(versions) <= (2, 17)
    dynamic = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "NODELETE" in dynamic and dynamic.count("NEEDED") == 1


def test_it_costs_nothing_to_speak_of(library: Path, tmp_path: Path) -> None:
    """Processor time of short programs, which is what a preloaded library could make slower."""

    def seconds(variables: dict[str, str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(50):
            subprocess.run(["/bin/true"], env={**os.environ, **variables}, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 50

    asked = {"LD_PRELOAD": str(library), crash.VARIABLE: str(tmp_path)}
    preloaded = {"LD_PRELOAD": str(library)}
    without, unasked, acting = (min(seconds(each) for _ in range(3)) for each in ({}, preloaded, asked))
    print(f"a process: {without * 1e3:.2f} ms, preloaded {unasked * 1e3:.2f} ms, acting {acting * 1e3:.2f} ms")
    assert max(unasked, acting) - without < 0.003
