"""What Evertrain costs when nothing goes wrong: step time against the same script with DDP under torchrun.

Both run in turns, so that noise of the machine hits both alike. A run's figure is the median of its step times after
the first ones; the overhead is the median difference between neighbouring runs.

    python -m bench.overhead [--quick] [--pairs 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.jobs import Job
from bench.report import Row, show

_SKIP = 50


def step_times(evertrain: bool, ranks: int, steps: int, batch: int) -> list[float]:
    """Milliseconds per step of rank 0."""
    with Job(ranks=ranks, evertrain=evertrain, script=(f"--steps={steps}", f"--batch={batch}")) as job:
        job.process.wait(300)
        times = [at for _, _, at in job.log(0)]
        if len(times) != steps:
            raise SystemExit(f"the job did not run to its end:\n{job.output()[-4000:]}")
    return [(after - before) * 1000 for before, after in zip(times[_SKIP:], times[_SKIP + 1 :], strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=600, help="steps in a run")
    parser.add_argument("--quick", action="store_true", help="three pairs of 250 steps, under a minute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    args = parser.parse_args()
    pairs, steps = (3, 250) if args.quick else (args.pairs, args.steps)
    plain, protected = [], []
    for number in range(pairs):
        for evertrain in (True, False) if number % 2 else (False, True):
            median = statistics.median(step_times(evertrain, args.ranks, steps, args.batch))
            (protected if evertrain else plain).append(median)
            print(f"  {'evertrain' if evertrain else 'torchrun'}: {median:.3f} ms a step", file=sys.stderr, flush=True)
    difference = [ours - theirs for ours, theirs in zip(protected, plain, strict=True)]
    share = [100 * d / theirs for d, theirs in zip(difference, plain, strict=True)]
    rows = [
        Row("torchrun + DDP", plain, "ms"),
        Row("evertrain", protected, "ms"),
        Row("overhead per step", difference, "ms", budget=0.3, judged="p50"),
        Row("overhead", share, "%", budget=1.0, judged="p50"),
    ]
    title = f"Fault-free overhead: {args.ranks} ranks, {pairs} pairs of runs of {steps} steps, medians"
    return 0 if show(title, rows, args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
