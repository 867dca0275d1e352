"""How long a fault stops training, beside the budgets, and beside plain torchrun in the same run.

Time runs from the fault to the end of the first new step on the slowest rank. Rows alternate fault by fault within one
job, so that a warm-up counts for none of them; noise of the machine hits all rows alike.

    python -m bench.recovery [--quick] [--runs 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.jobs import Job, Recovery, Stuck
from bench.report import Row, show

BOUND = 2.0


@dataclass
class Case:
    name: str
    fault: str
    evertrain: bool
    budget: float | None = None
    warm: bool = True
    flags: tuple[str, ...] = ()
    slow: bool = False
    """Takes so long that it is measured a few times only, and not at all in a quick run."""


CASES = (
    Case("evertrain: a rank raises (retry)", "raise", True, 0.1),
    Case("evertrain: kill -9, warm replacement", "SIGKILL", True, 0.2),
    Case("evertrain: kill -9, cold replacement", "SIGKILL", True, 2.0, warm=False, flags=("--ft-warm=0",)),
    Case("evertrain: SIGSTOP", "SIGSTOP", True, 0.3),
    Case("evertrain: GIL held, bound 2 s", "gil", True, BOUND + 0.3, flags=(f"--ft-bound={BOUND}",)),
    Case("torchrun: a rank raises", "raise", False),
    Case("torchrun: kill -9", "SIGKILL", False),
)


def measure(case: Case, runs: int, ranks: int) -> list[Recovery]:
    found: list[Recovery] = []
    with Job(ranks=ranks, evertrain=case.evertrain, flags=case.flags) as job:
        job.wait_for_steps(30)
        while len(found) < runs:
            if case.evertrain and case.warm:
                job.wait_for_spare()
            job.wait_for_steps(15)
            found.append(job.disturb(case.fault))
            print(f"  {case.name}: {found[-1].seconds * 1000:.0f} ms", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="faults per row")
    parser.add_argument("--quick", action="store_true", help="two faults per row, under a minute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    args = parser.parse_args()
    runs = 2 if args.quick else args.runs
    rows = []
    for case in CASES:
        try:
            found = measure(case, runs, args.ranks)
        except Stuck as problem:
            rows.append(Row(case.name, [], budget=case.budget or 0.0, notes=str(problem).splitlines()[0]))
            print(problem, file=sys.stderr)
            continue
        repeated = max(recovery.repeated for recovery in found)
        restarted = max(recovery.restarted for recovery in found)
        notes = f"{repeated} steps repeated, {restarted} of {args.ranks} processes restarted"
        rows.append(Row(case.name, [recovery.seconds for recovery in found], budget=case.budget, notes=notes))
        if case.evertrain:
            rows[-1].extra = {"steps_repeated": repeated, "restarted": restarted}
            if repeated:
                rows[-1].budget = 0.0
                rows[-1].notes += " (budget: 0 steps)"
    title = f"Recovery: from the fault to the first new step on all of {args.ranks} ranks, {runs} faults per row"
    return 0 if show(title, rows, args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
