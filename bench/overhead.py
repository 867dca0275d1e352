"""What Evertrain costs when nothing goes wrong: step time against the same step with DDP.

The budgets are held against blocks of steps of either kind that take turns in the same processes: each Evertrain block
is compared with the mean of its two neighbours. Runs of the whole script, with Evertrain and with DDP under torchrun,
are shown beside them; they also differ by what the machine does from minute to minute.

    python -m bench.overhead [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.jobs import ROOT, Job, environment
from bench.report import Row, show

_SKIP = 50


def turns(ranks: int, blocks: int, batch: int) -> tuple[list[float], list[float]]:
    """Milliseconds per step of plain and of Evertrain blocks; the plain ones are before, between and after them."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        script = (str(ROOT / "bench" / "taking_turns.py"), f"--result={result}")
        launcher = (sys.executable, "-m", "evertrain.cli.main", "launch", "--standalone", f"--nproc-per-node={ranks}")
        options = (f"--blocks={blocks}", f"--batch={batch}")
        subprocess.run([*launcher, "--ft-warm=0", *script, *options], check=True, env=environment(), timeout=300)
        times = json.loads(result.read_text())
    return times["plain"], times["evertrain"]


def whole_run(evertrain: bool, ranks: int, steps: int, batch: int) -> float:
    """Milliseconds per step of rank 0, from the end of the warm-up to the end."""
    flags = ("--ft-warm=0",) if evertrain else ()
    script = (f"--steps={steps}", f"--batch={batch}")
    with Job(ranks=ranks, evertrain=evertrain, flags=flags, script=script, resumable=False) as job:
        job.wait("the end", lambda: job.last(0)[1] == steps, pause=0.5)
        times = [at for _, _, at in job.log(0)][_SKIP:]
    return (times[-1] - times[0]) * 1000 / (len(times) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=300, help="blocks of 5 steps of each kind that take turns")
    parser.add_argument("--pairs", type=int, default=10, help="whole runs of each kind")
    parser.add_argument("--steps", type=int, default=400, help="steps in a whole run")
    parser.add_argument("--quick", action="store_true", help="120 blocks and one pair of runs, under a minute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    args = parser.parse_args()
    blocks, pairs, steps = (120, 1, 200) if args.quick else (args.blocks, args.pairs, args.steps)

    plain, protected = turns(args.ranks, blocks, args.batch)
    neighbours = [(before + after) / 2 for before, after in zip(plain, plain[1:], strict=False)]
    difference = [ours - theirs for ours, theirs in zip(protected, neighbours, strict=False)]
    share = [100 * d / theirs for d, theirs in zip(difference, neighbours, strict=False)]

    runs: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs):
        for evertrain in (True, False) if number % 2 else (False, True):
            runs[evertrain].append(whole_run(evertrain, args.ranks, steps, args.batch))
            kind = "evertrain" if evertrain else "torchrun"
            print(f"  {kind}: {runs[evertrain][-1]:.3f} ms a step", file=sys.stderr, flush=True)
    rows = [
        Row("taking turns: DDP", plain, "ms"),
        Row("taking turns: evertrain", protected, "ms"),
        Row("overhead per step", difference, "ms", budget=0.3, judged="p50"),
        Row("overhead", share, "%", budget=1.0, judged="p50"),
        Row("whole runs: torchrun + DDP", runs[False], "ms"),
        Row("whole runs: evertrain", runs[True], "ms"),
    ]
    title = f"Fault-free overhead on {args.ranks} ranks: blocks of 5 steps in turns, and whole runs of {steps} steps"
    return 0 if show(title, rows, args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
