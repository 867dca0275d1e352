"""The runner of the suites: what it says in the end, and its second look, with real runs of pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.testing.summary import LINES, Failure, Outcome, table, told

ROOT = Path(__file__).resolve().parents[3]
SAID = "exit code 3\n--- stdout\nstep 1\nstep 2\n--- stderr\nrank 1 died"
JOB = "AssertionError: " + SAID.replace("\n", "\n  ") + "\nassert 3 == 0"
"""As pytest has it."""


def test_a_green_run_is_one_line() -> None:
    assert told(Outcome("test", "make test", passed=5, skipped=1, seconds=90)) == [
        "== test: passed. 5 passed, 0 failed, 0 second looks, 1 skipped, 1.5 min"
    ]


def test_what_passed_at_the_second_look_is_listed_and_three_are_tolerated() -> None:
    looks = [Failure(f"tests/a.py::t{number}", message="assert 1 == 2") for number in range(4)]
    tolerated, too_many = (Outcome("test", "make test", second=looks[:count]) for count in (3, 4))
    assert tolerated.green and not too_many.green
    said = "\n".join(told(tolerated))
    assert "tests/a.py::t2\n       assert 1 == 2" in said and "To be mended" in said
    assert "FAILED" in told(too_many)[0] and "tests/a.py::t3" in "\n".join(told(too_many))


def test_a_red_run_says_the_assertion_the_jobs_last_lines_and_how_to_see_it_again() -> None:
    failure = Failure("tests/e2e/test_x.py::test_y[a b]", "/x/test_x.py:7", JOB)
    assert told(Outcome("test-matrix", "make test-matrix", failed=[failure]))[1:] == [
        "FAILED tests/e2e/test_x.py::test_y[a b]",
        "     AssertionError: exit code 3",
        "     assert 3 == 0",
        "     | stdout: step 1",
        "     | stdout: step 2",
        "     | stderr: rank 1 died",
        """     /x/test_x.py:7: make test-matrix ARGS=''"'"'tests/e2e/test_x.py::test_y[a b]'"'"''""",
    ]


def test_what_the_job_has_said_comes_before_what_others_say_of_it() -> None:
    parts = {"cluster": 90, "ttp-log/1": 90, "pod0.out": 2, "pod1.out": 90, "timeline": 90}
    text = "\n".join(f"--- {name}\n" + "\n".join(map(str, range(count))) for name, count in parts.items())
    said = [line for line in told(Outcome("test", "make test", failed=[Failure("t", message=text)])) if " | " in line]
    assert [line.split()[1] for line in said] == ["pod0.out:"] * 2 + ["pod1.out:"] * 12 + ["timeline:"] * 12
    assert said[-1].endswith("timeline: 89")


@pytest.mark.parametrize("count", [1, 2, 10, 30, 500])
def test_it_fits_on_a_screen_however_much_failed(count: int) -> None:
    long = "AssertionError: " + "x" * 500 + "\n" * 3 + "assert\n" * 50 + "--- stdout\n" + "line\n" * 100
    failures = [Failure(f"tests/a.py::t{number}", "a.py:1", long, "said\n" * 100) for number in range(count)]
    outcome = Outcome("test", "make test", failed=failures[:10], unseen=failures[10:], second=failures[:20])
    lines = told(outcome)
    assert 5 < len(lines) <= LINES and all(len(line) < 450 for line in lines)
    assert any("tests/a.py::t0" in line for line in lines)


def test_the_table_has_a_row_for_each_suite() -> None:
    known = {"passed": 7, "failed": [{}], "unseen": [], "second": [{}, {}]}
    assert table([("test", known, 1, 60.0), ("soak", None, 0, 6.0)]) == [
        "suite  result      passed  failed  second looks  minutes",
        "test   FAILED (1)  7       1       2             1.0",
        "soak   passed                                    0.1",
    ]


TESTS = (
    f"""
SAID = {SAID!r}
"""
    + """
import os, pathlib, pytest
HERE = pathlib.Path(__file__).parent
def first_time(name):
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
def test_good(): pass
def test_skipped(): pytest.skip("not here")
@pytest.mark.parametrize("number", range(FLAKY))
def test_flaky(number): assert not first_time(f"flaky-{number}"), "only at first"
@pytest.mark.parametrize("number", range(BAD))
def test_bad(number): assert number == -1, SAID
@pytest.fixture
def late():
    yield
    assert not first_time("late"), "in the end"
def test_teardown(late): pass
"""
)


def begun(folder: Path, tests: str, suite: str = "test") -> subprocess.Popen[str]:
    """The runner itself, in a project and a process group of its own."""
    (folder / "tools").symlink_to(ROOT / "tools")
    file = folder / "test_some.py"
    file.write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  matrix:\n  exhaustive:\n  kubernetes:\n")
    code = (
        "import sys, tools.testing.__main__ as m, pathlib\n"
        f"m.ROOT = pathlib.Path({str(folder)!r}); m.RESULTS = m.ROOT / 'build'; m.ALONE = ('test_some.py',)\n"
        f"sys.argv = ['testing', {suite!r}]; sys.exit(m.main())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment, start_new_session=True,
    )  # fmt: skip


def suite(folder: Path, tests: str, name: str = "test") -> subprocess.CompletedProcess[str]:
    with begun(folder, tests, name) as runner:
        said, _ = runner.communicate()
    return subprocess.CompletedProcess((), runner.returncode, said)


def test_what_fails_only_at_first_is_green_and_named(tmp_path: Path) -> None:
    ended = suite(tmp_path, TESTS.replace("FLAKY", "2").replace("BAD", "0"))
    assert ended.returncode == 0, ended.stdout
    end = ended.stdout.rpartition("== test: ")[2]
    assert end.startswith("passed. 4 passed, 0 failed, 3 second looks, 1 skipped") or "2 skipped" in end, end
    assert "test_some.py::test_flaky[1]" in end and "test_some.py::test_teardown" in end and "only at first" in end
    assert '"only at first' not in end and (tmp_path / "build" / "test.json").read_text().count("in the end") == 1


def test_a_fourth_that_fails_only_at_first_is_red(tmp_path: Path) -> None:
    ended = suite(tmp_path, TESTS.replace("FLAKY", "3").replace("BAD", "0"))
    assert ended.returncode == 1 and "0 failed, 4 second looks" in ended.stdout, ended.stdout


def test_what_fails_again_is_red(tmp_path: Path) -> None:
    ended = suite(tmp_path, TESTS.replace("FLAKY", "0").replace("BAD", "1"))
    assert ended.returncode == 1, ended.stdout
    end = ended.stdout.rpartition("== test: ")[2]
    assert "1 failed, 1 second looks" in end
    what, shown = end.partition("FAILED test_some.py::test_bad[0]\n")[2].splitlines()[:2], end.splitlines()[-4:-1]
    assert [line.strip() for line in what] == ["AssertionError: exit code 3", "assert 0 == -1"], end
    assert [line.strip() for line in shown] == ["| stdout: step 1", "| stdout: step 2", "| stderr: rank 1 died"], end


def test_tests_that_cannot_be_loaded_are_red(tmp_path: Path) -> None:
    ended = suite(tmp_path, "import nothing_of_this_name")
    assert ended.returncode == 1, ended.stdout
    assert "nothing_of_this_name" in ended.stdout.rpartition("== test: ")[2]


def test_a_run_without_a_test_is_red(tmp_path: Path) -> None:
    ended = suite(tmp_path, "")
    assert ended.returncode == 1 and "not a single test has passed or failed" in ended.stdout, ended.stdout


LONG = """
import pathlib, pytest, time
HERE = pathlib.Path(__file__).parent
def test_good(): pass
@pytest.fixture
def begun():
    (HERE / "begun").touch()
    yield
    time.sleep(1)
    (HERE / "cleaned-up").touch()
def test_long(begun): time.sleep(100)
def test_later(): pass
"""


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM"])
def test_a_run_that_is_told_to_end_cleans_up_and_says_what_it_knows(tmp_path: Path, by: str) -> None:
    with begun(tmp_path, LONG) as runner:
        try:
            while not (tmp_path / "begun").exists():
                assert runner.poll() is None, runner.communicate()
                time.sleep(0.02)
            if by == "Ctrl-C":
                os.killpg(runner.pid, signal.SIGINT)  # as a terminal does it
            else:
                runner.terminate()
            said, _ = runner.communicate()
        finally:
            runner.kill()
    assert runner.returncode == 130 and "Traceback" not in said, said
    assert (tmp_path / "cleaned-up").exists()
    assert "== test: FAILED. 1 passed" in said and said.endswith("   interrupted\n"), said


SUITES = """
lint: ; false
test: ; echo '{"passed": 3, "failed": [{}], "unseen": [], "second": []}' > build/$@.json; false
test-matrix: ; test "$$EVERTRAIN_TEST_RANDOM" = 1
test-kubernetes fuzz: ; PY -m pytest test_some.py
soak: ; false
"""


def test_all_suites_are_run_whatever_becomes_of_them_and_stand_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(SUITES.replace("PY", sys.executable))
    ended = suite(tmp_path, TESTS.replace("FLAKY", "1").replace("BAD", "1"), "test-all")
    assert ended.returncode == 1, ended.stdout
    rows = [line.split("  ") for line in ended.stdout.rpartition("\nsuite ")[2].splitlines()[1:]]
    assert [[cell.strip() for cell in row if cell][:-1] for row in rows] == [
        ["lint", "FAILED (2)"],
        ["test", "FAILED (2)", "3", "1", "0"],
        ["test-matrix", "passed"],
        ["test-kubernetes", "FAILED (2)", "1", "3", "0"],
        ["fuzz", "FAILED (2)", "3", "1", "0"],
        ["soak", "FAILED (2)"],
    ], ended.stdout
