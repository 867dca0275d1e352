"""How long a fault stops training, beside the budgets, and beside plain torchrun in the same run.

Time runs from the fault to the end of the first new step on the slowest rank. Faults that can share a job take turns in
it, so that noise of the machine hits all rows alike.

    python -m bench.recovery [--quick] [--runs 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench import bandwidth
from bench.jobs import Job, Recovery, Stuck
from bench.report import Row, show

BOUND = 2.0


@dataclass
class Case:
    name: str
    fault: str
    budget: float | None = None
    everybody: bool = True
    """Does the time run until the lost rank trains again, or until the others do?"""
    found: list[Recovery] = field(default_factory=list)
    problem: str = ""


@dataclass
class Bench:
    """One job and the faults that take turns in it."""

    cases: list[Case]
    evertrain: bool = True
    warm: bool = True
    flags: tuple[str, ...] = ()

    def run(self, rounds: int, ranks: int) -> None:
        current = self.cases[0]
        try:
            with Job(ranks=ranks, evertrain=self.evertrain, flags=self.flags) as job:
                job.wait_for_steps(30)
                for _ in range(rounds):
                    for current in self.cases:
                        if self.warm:
                            job.wait_for_spare()
                        job.wait_for_steps(15)
                        current.found.append(job.disturb(current.fault, current.everybody))
                        seconds = current.found[-1].seconds
                        print(f"  {current.name}: {seconds * 1000:.0f} ms", file=sys.stderr, flush=True)
        except Stuck as problem:
            current.problem = str(problem).splitlines()[0]
            print(problem, file=sys.stderr)


def benches() -> list[Bench]:
    return [
        Bench(
            [
                Case("evertrain: a rank raises (retry)", "raise", 0.1),
                Case("evertrain: kill -9, warm replacement", "SIGKILL", 0.2),
                Case("evertrain: SIGSTOP, warm replacement", "SIGSTOP", 0.3),
                Case(f"evertrain: GIL held, bound {BOUND:g} s", "gil", BOUND + 0.3),
            ],
            flags=(f"--ft-bound={BOUND}",),
        ),
        Bench(
            [Case("evertrain: kill -9, cold replacement", "SIGKILL", 2.0)],
            warm=False,
            flags=("--ft-warm=0",),
        ),
        Bench(
            [Case("evertrain: kill -9, go on smaller", "SIGKILL", 0.2, everybody=False)],
            warm=False,
            flags=("--ft-warm=0", "--ft-elastic=1"),
        ),
        Bench(
            [Case("torchrun: a rank raises", "raise"), Case("torchrun: kill -9", "SIGKILL")],
            evertrain=False,
            warm=False,
        ),
    ]


def row(case: Case, evertrain: bool, ranks: int) -> Row:
    repeated = max((recovery.repeated for recovery in case.found), default=0)
    restarted = max((recovery.restarted for recovery in case.found), default=0)
    notes = f"{repeated} steps repeated, {restarted} of {ranks} processes restarted"
    made = Row(case.name, [recovery.seconds for recovery in case.found], budget=case.budget, notes=notes)
    made.extra = {"steps_repeated": repeated, "restarted": restarted}
    if case.problem or (evertrain and repeated):
        made.failure = case.problem or "the budget is 0 repeated steps"
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="faults per row")
    parser.add_argument("--quick", action="store_true", help="two faults per row (torchrun: one), under a minute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    args = parser.parse_args()
    runs = 2 if args.quick else args.runs
    rows = []
    for bench in benches():
        if args.quick and not bench.evertrain:
            bench.cases = bench.cases[-1:]
        bench.run(runs if bench.evertrain or not args.quick else 1, args.ranks)
        rows += [row(case, bench.evertrain, args.ranks) for case in bench.cases]
    # A bare one takes 40 or 80 ms, as the kernel happens to place the two ends: few turns would show only luck.
    shares, speed = bandwidth.ratios(10 if args.quick else 60)
    notes = f"{bandwidth.MEGABYTES} MB in 120 tensors at {speed:.1f} GB/s; 100 % is a bare send and receive"
    rows.append(Row("evertrain: repair bandwidth", shares, "%", budget=100, judged="p50", at_least=True, notes=notes))
    title = f"Recovery: from the fault to the first new step on all of {args.ranks} ranks"
    return 0 if show(title, rows, args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
