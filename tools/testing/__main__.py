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
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.testing.summary import Failure, Outcome, table, told

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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.testing", description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=[*MARKERS, "test-all"])
    parser.add_argument("--random", action="store_true", help="other random tests in each run, not always the same")
    options = parser.parse_args()
    if options.random or options.suite == "test-all":
        os.environ["EVERTRAIN_TEST_RANDOM"] = "1"
    if options.suite == "test-all":
        return all_suites()
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcome = run(options.suite)
    (RESULTS / f"{options.suite}.json").write_text(json.dumps(dataclasses.asdict(outcome), indent=1))
    print(*told(outcome), sep="\n", flush=True)
    return 0 if outcome.green else 1


def run(suite: str) -> Outcome:
    began = time.monotonic()
    outcome = Outcome(suite, f"make {suite}")
    together = ("-n", str(WORKERS[suite]), "--dist", "worksteal", *(f"--ignore={file}" for file in ALONE))
    first = [_pytest(suite, f"{suite}-{number}", each) for number, each in enumerate((together, ALONE))]
    outcome.broken = "; ".join(ended.broken for ended in first if ended.broken)
    outcome.skipped = sum(ended.skipped for ended in first)
    failures = [failure for ended in first for failure in ended.failures]
    looks = 0 if outcome.broken else min(len(failures), LOOKS)
    if looks:
        print(f"\n== a second look at {looks} of {len(failures)} that failed, one by one", flush=True)
    for number, failure in enumerate(failures[:looks]):
        again = _pytest(suite, f"{suite}-look-{number}", (failure.test,))
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
    broken: str
    """What was wrong with the run itself, if anything."""


def _pytest(suite: str, name: str, arguments: Sequence[str]) -> Ended:
    record = RESULTS / f"{name}.jsonl"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tools.testing.plugin", f"--record={record}"]
    code = subprocess.run([*command, "-m", MARKERS[suite], *arguments], cwd=ROOT).returncode
    words = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    # The same test may fail twice, in its own code and in that of its fixtures.
    failures: dict[str, Failure] = {}
    for each in words:
        if each["outcome"] == "failed":
            failures.setdefault(each["test"], _failure(each))
    good = Counter(each["outcome"] for each in words if each["test"] not in failures)
    known = code in (0, NO_TESTS) or (code == 1 and failures)
    return Ended(
        passed=good["passed"],
        skipped=good["skipped"],
        failures=list(failures.values()),
        broken="" if known else f"pytest ended with {code}: {shlex.join(arguments)}",
    )


def _failure(words: dict[str, str]) -> Failure:
    return Failure(words["test"], words["place"], words["message"], words["said"])


def all_suites() -> int:
    outcomes = []
    for suite in ALL:
        print(f"\n== make {suite}", flush=True)
        result = RESULTS / f"{suite}.json"
        result.unlink(missing_ok=True)
        began = time.monotonic()
        code = subprocess.run(["make", suite], cwd=ROOT).returncode
        known = json.loads(result.read_text()) if result.exists() else None
        outcomes.append((suite, known, code, time.monotonic() - began))
    print("", *table(outcomes), sep="\n", flush=True)
    return max(code != 0 for _, _, code, _ in outcomes)


if __name__ == "__main__":
    sys.exit(main())
