"""Run a suite of tests: `python -m tools.testing test|test-matrix|test-exhaustive`, or `test-all`.

A test that failed runs once more, alone, after all others have ended. What passes then is listed at the end; more than
three of these make the run red. It is the only retry there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.testing.summary import Failure, Outcome, table, told

STOPPED = 130
"""Our exit code when we are told to end: make's children get SIGTERM, and those of a terminal Ctrl-C."""
INTERRUPTED = "interrupted"
NO_TESTS = 5
"""What pytest ends with if none was chosen."""
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "tests"
LOOKS = 10
"""Of so many that failed we want to know whether they do so again; the run is red with fewer."""
MARKERS = {
    "test": "not matrix and not exhaustive and not kubernetes",
    "test-matrix": "matrix and not exhaustive",
    "test-exhaustive": "matrix or exhaustive",
}
WORKERS = {"test": 3, "test-matrix": 2, "test-exhaustive": 2}
"""Most tests wait more than they think and run at once. Whole jobs are several processes each."""
ALONE = (
    "tests/torch/integration/test_groups.py",
    "tests/launch/integration/test_launch.py",
    "tests/launch/integration/test_faults.py",
    "tests/torch/integration/test_spare.py",
    "tests/launch/e2e/test_elastic.py",
)
"""Have times to keep, and run after the others, one by one."""
ALL = ("lint", "test", "test-matrix", "test-kubernetes", "fuzz", "soak")
RECORDED = ("test-kubernetes", "fuzz")
"""Run pytest without us, and have no second look."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.testing", description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=[*MARKERS, "test-all"])
    parser.add_argument("--random", action="store_true", help="other random tests in each run, not always the same")
    options = parser.parse_args()
    if options.random or options.suite == "test-all":
        os.environ["EVERTRAIN_TEST_RANDOM"] = "1"
    signal.signal(signal.SIGTERM, _told_to_end)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if options.suite == "test-all":
        return all_suites()
    outcome = run(options.suite)
    (RESULTS / f"{options.suite}.json").write_text(json.dumps(dataclasses.asdict(outcome), indent=1))
    print(*told(outcome), sep="\n", flush=True)
    return STOPPED if outcome.broken == INTERRUPTED else 0 if outcome.green else 1


def run(suite: str) -> Outcome:
    began = time.monotonic()
    outcome = Outcome(suite, f"make {suite}")
    together = ("-n", str(WORKERS[suite]), "--dist", "worksteal", *(f"--ignore={file}" for file in ALONE))
    first: list[Ended] = []
    for number, each in enumerate((together, ALONE)):
        first.append(_pytest(suite, f"{suite}-{number}", each))
        if first[-1].broken == INTERRUPTED:
            break
    outcome.broken = "; ".join(ended.broken for ended in first if ended.broken)
    if not any((ended.passed, ended.failures, ended.broken) != (0, [], "") for ended in first):
        outcome.broken = "not a single test has passed or failed"
    outcome.skipped = sum(ended.skipped for ended in first)
    failures = [failure for ended in first for failure in ended.failures]
    looks = 0 if outcome.broken else min(len(failures), LOOKS)
    if looks:
        print(f"\n== a second look at {looks} of {len(failures)} that failed, one by one", flush=True)
    for number, failure in enumerate(failures[:looks]):
        again = _pytest(suite, f"{suite}-look-{number}", (failure.test,))
        if again.broken == INTERRUPTED:
            outcome.broken, looks = INTERRUPTED, number
            break
        if again.failures or again.broken:
            outcome.failed.append(next(iter(again.failures), failure))
        else:
            outcome.second.append(failure)
    outcome.unseen = failures[looks:]
    outcome.passed = sum(ended.passed for ended in first) + len(outcome.second)
    outcome.seconds = time.monotonic() - began
    return outcome


@dataclass
class Ended:
    passed: int
    skipped: int
    failures: list[Failure]
    broken: str = ""
    """What was wrong with the run itself, if anything."""


def _pytest(suite: str, name: str, arguments: Sequence[str]) -> Ended:
    record = RESULTS / f"{name}.jsonl"
    command = [sys.executable, "-m", "pytest", *_recorded(record), "-m", MARKERS[suite], *arguments]
    code = _call(command, signal.SIGINT)
    ended = _read(record)
    if code == STOPPED:
        ended.broken = INTERRUPTED
    elif not (code in (0, NO_TESTS) or (code == 1 and ended.failures)):
        ended.broken = f"pytest ended with {code}: {shlex.join(arguments)}"
    return ended


def _recorded(record: Path) -> tuple[str, ...]:
    record.unlink(missing_ok=True)
    return ("-p", "tools.testing.plugin", f"--record={record}")


def _read(record: Path) -> Ended:
    words = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    # The same test may fail twice, in its own code and in that of its fixtures.
    failures: dict[str, Failure] = {}
    for each in words:
        if each["outcome"] == "failed":
            failures.setdefault(each["test"], _failure(each))
    good = Counter(each["outcome"] for each in words if each["test"] not in failures)
    return Ended(good["passed"], good["skipped"], list(failures.values()))


def _failure(words: dict[str, str]) -> Failure:
    return Failure(words["test"], words["place"], words["message"], words["said"])


def all_suites() -> int:
    outcomes, code = [], 0
    for suite in ALL:
        print(f"\n== make {suite}", flush=True)
        result, record = RESULTS / f"{suite}.json", RESULTS / f"{suite}.jsonl"
        result.unlink(missing_ok=True)
        recorded = shlex.join(_recorded(record)) if suite in RECORDED else ""
        began = time.monotonic()
        code = _call(
            ["make", suite], signal.SIGTERM, PYTEST_ADDOPTS=f"{os.environ.get('PYTEST_ADDOPTS', '')} {recorded}"
        )
        if result.exists():
            known = json.loads(result.read_text())
        else:
            known = dataclasses.asdict(_read(record)) if suite in RECORDED else None
        outcomes.append((suite, known, code, time.monotonic() - began))
        if code == STOPPED:
            break
    print("", *table(outcomes), sep="\n", flush=True)
    return code if code == STOPPED else max(code != 0 for _, _, code, _ in outcomes)


def _call(command: Sequence[str], to_end: signal.Signals, **environment: str) -> int:
    """The exit code, STOPPED if we were told to end. Whoever runs then gets the time to end what it has started: it
    has got Ctrl-C from the terminal as we have, and gets `to_end` if we alone were told."""
    stopped = False
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment) as process:
        while True:
            try:
                code = process.wait()
                return STOPPED if stopped else code
            except ToldToEnd:
                process.send_signal(to_end)
            except KeyboardInterrupt:
                pass
            stopped = True


class ToldToEnd(KeyboardInterrupt):
    """By SIGTERM."""


def _told_to_end(_number: int, _frame: object) -> None:
    raise ToldToEnd


if __name__ == "__main__":
    sys.exit(main())
