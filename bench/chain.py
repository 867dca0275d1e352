"""Recovery through the whole chain, beside its budgets: AscendJob, TaskD, MindIO, and ClusterD decides.

    python -m bench.chain [--quick] [--runs N] [--json FILE]

A job of two pods with two processes each trains on an embedded cluster of three nodes. Rank 3 is killed with SIGKILL
again and again, whenever the training has gone on and, for the warm rows, a spare process or a pod that stands by is
ready. Time runs from the kill until all ranks have finished a step that nobody had finished before. In the end every
step of every rank is compared with a run in which nothing happened: samples, loss and the hash of the weights. The
load of the machine before each kill is shown, too: the job itself makes about 1.

The last row is not about a process: the node of the other pod is cut off from the network, so connections hang and
nobody is told. Time runs from the order to cut until the incident was opened. The budget is the time after which a rank
that says nothing counts as lost, and a margin for the order to get to the node and for the news to get to ClusterD. As
soon as it is seen, the node is joined again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.chained import PATIENCE, Watched, World, difference, world
from bench.jobs import Stuck
from bench.report import Row, show
from evertrain import aio
from evertrain.cli.running import CommandError
from evertrain.clusterd.timeline.incident import Incident, milliseconds
from evertrain.embedded import power
from evertrain.embedded.cluster import CannotStart
from evertrain.kube.port import NODE

VICTIM = 3
BETWEEN = 10
"""Steps between a recovery and the next fault."""
PACE = 0.02
ENDLESS = 1_000_000


@dataclass(frozen=True)
class Case:
    name: str
    example: str
    budget: float | None = None
    spares: int = 0
    """Warm processes in each pod."""
    standbys: int = 0
    """Warm pods."""

    def ready(self, job: Watched, times: int) -> bool:
        """For the next kill."""
        spares = not self.spares or job.spares_ready("worker") >= times
        return spares and (not self.standbys or job.standbys_ready >= times)


CASES = (
    Case("kill -9, in place, warm", "process-rescheduling/recover-in-place.yaml", budget=0.5, spares=1),
    Case("kill -9, pod replaced on another node, warm", "process-rescheduling/recover.yaml", budget=1.0, standbys=1),
    Case("kill -9, in place, cold", "process-rescheduling/recover-in-place.yaml"),
    Case("kill -9, pod replaced, cold", "process-rescheduling/recover.yaml"),
)
CUT, CUTS = "node cut off, until its incident opens", 3
"""Of the row, and how often at most: each takes the bound at least."""
BOUND, MARGIN = 10.0, 2.0
GRACE = 300.0
"""Seconds until the cluster gives a silent node up: it is the training that is to see it."""


async def main_async(options: argparse.Namespace, folder: Path) -> list[Row]:
    rows = []
    if cases := [case for case in CASES if options.only in case.name]:
        async with world(folder) as place:
            rows += [await _measure(place, case, options.runs) for case in cases]
    if options.only in CUT:
        rows.append(await _measure_cut(folder / "cut", min(options.runs, CUTS)))
    return rows


async def _measure(place: World, case: Case, runs: int) -> Row:
    row = Row(case.name, [], budget=case.budget)
    arguments = (f"--steps={ENDLESS}", f"--pace={PACE}")
    standbys = {"standby-pods": str(case.standbys)}
    totals: list[int] = []
    loads: list[float] = []
    try:
        async with place.training(
            case.example, *arguments, annotations=standbys, TASKD_WARM_SPARES=str(case.spares)
        ) as job:
            for number in range(1, runs + 1):
                await job.until(lambda: case.ready(job, number), "what is to be warm")  # noqa: B023
                await job.until_step(max(job.steps()) + BETWEEN)
                loads.append(os.getloadavg()[0])
                row.values.append(await _kill(job))
                incidents = await job.incidents(number)
                totals.append(incidents[-1].total_ms)
                print(f"{case.name}: {row.values[-1]:.3f} s, of which ClusterD saw {totals[-1]} ms", file=sys.stderr)
            run = job.done()
        last = min(max(steps) for steps in run.values())
        calm, _ = await place.undisturbed(last)
        row.failure = difference(calm, run, last)
        told = f"ClusterD's incident: {statistics.median(totals):.0f} ms p50"
        row.notes = f"{last} steps, the same bits; {told}; load {min(loads):.1f} to {max(loads):.1f}"
    except Stuck as error:
        row.failure = str(error)
    return row


async def _measure_cut(folder: Path, runs: int) -> Row:
    notes = f"bound {BOUND:g} s, margin {MARGIN:g} s"
    row = Row(CUT, [], budget=BOUND + MARGIN, judged="max", notes=notes)
    folder.mkdir()
    try:
        async with world(folder, own_network=True, node_grace=GRACE) as place:
            async with place.training("fallback/job.yaml", f"--steps={ENDLESS}", f"--pace={PACE}") as job:
                known: list[Incident] = []
                for _ in range(runs):
                    await job.until_step(max(job.steps()) + BETWEEN)
                    row.values.append(await _cut(place, job, len(known)))
                    known = await job.incidents(len(known) + 1)
                    print(f"{CUT}: {row.values[-1]:.3f} s; then {known[-1].decision}", file=sys.stderr)
                run = job.done()
            last = min(max(steps) for steps in run.values())
            calm, _ = await place.undisturbed(last)
            row.failure = difference(calm, run, last)
    except (CannotStart, CommandError, Stuck) as error:
        row.failure = str(error)
    return row


async def _cut(place: World, job: Watched, known: int) -> float:
    """Seconds until there is an incident more than are known. Then the node is joined again."""
    (node,) = (pod.node for pod in job.pods() if pod.is_of("worker"))
    began = milliseconds(time.time())
    # What the command does; its process would take longer to start than the cut takes.
    await place.kube.patch(NODE, node, None, {"metadata": {"annotations": {power.NETWORK_ORDER: power.CUT}}})
    end = time.monotonic() + PATIENCE
    while len(told := await job.told()) <= known:
        if time.monotonic() > end:
            raise Stuck(f"nobody has seen in {PATIENCE:g} s that {node} is cut off; {job.state()}")
        await asyncio.sleep(0.1)
    await place.order("node", "join", node)
    return (told[-1].opened_ms - began) / 1000


async def _kill(job: Watched) -> float:
    before, began = job.kill(VICTIM)
    await job.until_step(before + 1)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="kills for each row (default 10)")
    parser.add_argument("--quick", action="store_true", help="2 kills for each row")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if options.quick:
        options.runs = 2
    with tempfile.TemporaryDirectory(prefix="evertrain-chain-") as folder:
        logging.basicConfig(filename=Path(folder) / "cluster.log")
        rows = aio.run(main_async(options, Path(folder)))
    return 0 if show("Recovery through the whole chain", rows, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
