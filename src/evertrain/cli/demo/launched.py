"""`evertrain demo launch`: no cluster, only `evertrain launch`: train, kill a process in the middle, compare the bits.

Two runs of the example with the same arguments, started like any user would start them. In the second one a rank is
killed from outside with SIGKILL, the signal that no process can catch. What the screen shows is read from what the
launcher prints and from its events file; nothing in the training processes knows about the demo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evertrain.cli import timeline
from evertrain.cli.demo import screen

EXAMPLE = Path("examples") / "pytorch" / "train.py"
LINES = 6  # of progress in each run

PHASES = {
    "detect": "from the kill until the launcher knows; the system still cleans up after the process",
    "decide": "the controller chooses the finest strategy that can help",
    "stop": "the survivors leave what they are doing, even in the middle of a collective",
    "dump": "a checkpoint is written, to be safe",
    "start": "the replacement runs the script up to the training function",
    "rebuild": "all ranks connect to each other again, as a new generation",
    "repair": "the replacement gets weights, optimizer and data position from a survivor; hashes are compared",
    "resume": "every rank completes the interrupted step",
}


@dataclass
class Run:
    """What a run left: its final lines by rank and its events."""

    code: int
    seconds: float
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    script = _find_script(args.script)
    if script is None:
        missing = args.script or EXAMPLE
        print(f"evertrain demo launch: there is no {missing}; run it in a clone of the repository", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="evertrain-demo-") as folder:
        return _demo(script, args, Path(folder))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evertrain demo launch", description="Train, kill a process in the middle, compare."
    )
    parser.add_argument("script", nargs="?", help=f"the training script (default: {EXAMPLE} of this repository)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default 300)")
    parser.add_argument("--kill-rank", type=int, default=2, help="the rank to kill (default 2)")
    parser.add_argument("--events", help="also keep the second run's events in this file, for `evertrain timeline`")
    args = parser.parse_args(argv)
    if args.ranks < 2 or not 0 <= args.kill_rank < args.ranks or args.steps < 2 * LINES:
        parser.error(f"at least 2 ranks, the killed one among them, and at least {2 * LINES} steps")
    return args


def _find_script(given: str | None) -> Path | None:
    roots = (Path.cwd(), Path(__file__).resolve().parents[4])
    candidates = [Path(given)] if given else [root / EXAMPLE for root in roots]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _demo(script: Path, args: argparse.Namespace, folder: Path) -> int:
    title = f"{args.ranks} processes train a small transformer together; one of them is killed with kill -9."
    print(screen.bold("Evertrain demo. " + title))
    print("The question: does the training survive, and does it learn the same as if nothing had happened?")

    print(screen.bold(f"\n1. For comparison: {args.steps} steps in which nothing happens."))
    calm = _train(script, args, folder / "calm.jsonl", flags=["--ft-warm", "0"])
    if not _completed(calm, args.ranks):
        return 1

    print(screen.bold(f"\n2. The same again, and rank {args.kill_rank} is killed in the middle."))
    events = Path(args.events).absolute() if args.events else folder / "killed.jsonl"
    killer = Killer(args.kill_rank, args.steps, events)
    killed = _train(script, args, events, on_step=killer.watch)
    if not _completed(killed, args.ranks):
        return 1
    incidents = [event for event in killed.events if event["event"] == "incident"]
    if not killer.done or not incidents:
        print("   the run was over before the process could be killed; try more --steps")
        return 1

    print(screen.bold("\n3. The recovery, as the controller recorded it."))
    for incident in incidents:
        _show_incident(killer.timed(incident, killed.events))

    print(screen.bold("\n4. The proof: SHA-256 of what each rank has at the end."))
    same = _show_proof(calm, killed)
    print(screen.bold(f"\n   identical: {'yes' if same else 'NO'}"))
    if same:
        print(
            "   The killed process lost its memory, the training lost nothing: not one bit of the weights, the\n"
            "   optimizer's state or the learning rate differs, and every step used the same samples.\n\n"
            "   Next: docs/getting-started.md changes a script of yours; `evertrain launch --help` has the options."
        )
    return 0 if same else 1


class Killer:
    """Kills a rank as soon as a spare is warm, but not before a third of the steps, and near the end in any case."""

    def __init__(self, rank: int, steps: int, events: Path) -> None:
        self.rank, self._events = rank, events
        self._earliest, self._latest = steps // 3, steps * 9 // 10
        self._killed_at = 0.0
        self.done = False

    def watch(self, step: int) -> None:
        if self.done or step < self._earliest:
            return
        events = timeline.read(str(self._events))
        if step < self._latest and not any(e["event"] == "spare" for e in events):
            return
        pid = next(e["pid"] for e in reversed(events) if e["event"] == "started" and e["rank"] == self.rank)
        self._killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.done = True
        print(screen.bold(f"   kill -9 {pid}") + f"   rank {self.rank} is gone, with everything that was in its memory")

    def timed(self, incident: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
        """The incident with its first phase measured from the kill: the launcher knows only when it noticed.

        All processes of a machine share the clock.
        """
        seen = [event["t"] for event in events if event["event"] == "fault" and event["rank"] == self.rank]
        if not seen or incident["faults"][0]["rank"] != self.rank:
            return incident
        phases = incident["phases_ms"]
        detect = (seen[0] - self._killed_at) * 1000
        total = incident["total_ms"] - phases["detect"] + detect
        return incident | {"phases_ms": phases | {"detect": detect}, "total_ms": total}


def _train(
    script: Path,
    args: argparse.Namespace,
    events: Path,
    flags: Sequence[str] = (),
    on_step: Callable[[int], None] | None = None,
) -> Run:
    """Run the example to its end and show a few of its lines."""
    launch = ["launch", "--nproc-per-node", str(args.ranks), *flags]
    steps = ["--steps", str(args.steps)]
    print("   $ evertrain " + " ".join([*launch, os.path.relpath(script), *steps]))
    arguments = [*launch, "--ft-events", str(events), str(script), *steps, "--log-every", str(max(args.steps // 60, 1))]
    began, shown, run = time.monotonic(), 0, Run(code=-1, seconds=0.0)
    # The same interpreter as ours, wherever the console script is.
    process = subprocess.Popen(
        [sys.executable, "-m", "evertrain.cli.main", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            text = re.sub(r"^\[.*?\]: ?", "", line.rstrip())  # without the rank
            if match := re.match(r"step (\d+)/", text):
                step = int(match[1])
                if step * LINES >= (shown + 1) * args.steps:
                    shown = step * LINES // args.steps
                    print(f"   {text}", flush=True)
                if on_step is not None:
                    on_step(step)
            elif text.startswith('{"rank"'):
                result = json.loads(text)
                run.results[result["rank"]] = result
            else:
                print(f"   {text}", flush=True)
        run.code = process.wait()
    finally:
        if process.poll() is None:  # interrupted: the launcher ends its processes itself
            process.terminate()
            process.wait()
    run.seconds = time.monotonic() - began
    if run.code == 0:
        run.events = timeline.read(str(events))
        print(f"   done in {run.seconds:.1f} s, start of the processes included")
    return run


def _completed(run: Run, ranks: int) -> bool:
    if run.code == 0 and set(run.results) == set(range(ranks)):
        return True
    print(f"   the run ended with exit code {run.code} and results of {len(run.results)} of {ranks} ranks")
    return False


def _show_incident(incident: dict[str, Any]) -> None:
    for fault in incident["faults"]:
        print(f"   fault:     rank {fault['rank']}: {fault['detail'] or fault['kind']}")
    print(f"   decision:  {incident['decision']} ({incident['reason']})")
    for name, took in incident["phases_ms"].items():
        print(f"   {name:<8} {took:8.1f} ms   {PHASES.get(name, '')}")
    restarted = ", ".join(f"rank {rank}" for rank in incident["restarted"]) or "nobody"
    print(screen.bold(f"   {'total':<8} {incident['total_ms']:8.1f} ms") + "   until all have finished a new step")
    print(f"   steps lost: {incident['steps_lost']}; processes restarted: {restarted}")


def _show_proof(calm: Run, killed: Run) -> bool:
    same = True
    print("   Each rank has all weights and the log of who used which samples in which step: every row is the same.")
    print(f"   {'':<8}{'weights and optimizer':<42}samples of all ranks")
    print(f"   {'':<8}{'undisturbed':<19}{'killed':<23}{'undisturbed':<19}killed")
    for rank in sorted(calm.results):
        left, right = calm.results[rank], killed.results[rank]
        equal = all(left[key] == right[key] for key in ("step", "sha256", "samples_sha256"))
        same = same and equal
        cells = [side[key][:16] for key in ("sha256", "samples_sha256") for side in (left, right)]
        print(f"   rank {rank:<3}{cells[0]:<19}{cells[1]:<23}{cells[2]:<19}{cells[3]}  {'=' if equal else 'DIFFERENT'}")
    return same
