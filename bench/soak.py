"""One job under many faults of many kinds: what became of each, and whether the end is that of a run without.

    python -m bench.soak [--faults N] [--seed N] [--json FILE] [--keep FOLDER]

An AscendJob of two pods with two processes each trains on an embedded cluster of three nodes. What happens to it when
is drawn from the seed: processes are killed or stopped, raise memory, network and ordinary errors, ranks fail whatever
is tried, chips break and are mended, nodes lose their power or their network and get it back, nodes are unwell; and
between them come orders to use the other links and to test the chips. ClusterD decides each time. In the end every step
of every rank is compared with a run in which nothing happened: samples, loss, hash of the weights. Elastic training is
not among it: a smaller job sums in another order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.chained import PATIENCE, Watched, World, difference, world
from bench.jobs import Stuck
from bench.report import machine, percentile
from evertrain import aio
from evertrain.cli.demo.features import BROKEN_CHIP, SUPER_POD
from evertrain.cli.demo.training import RANKS
from evertrain.cli.running import CommandError
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.timeline.incident import Incident
from evertrain.embedded.cluster import CannotStart
from evertrain.kube.port import Object

EXAMPLE, SCRIPT = "fallback/job.yaml", Path(__file__).with_name("soak_train.py")
ENDLESS = 1_000_000
APART = (8, 16)
"""Steps between two faults, at least and at most."""
PACE = 0.05
MEANWHILE = 2000
"""Steps that may be done while a fault is mended: a hot switch is prepared while training goes on."""
MARGIN = 5
"""More than ranks can be apart."""
NODE_GRACE = 5.0
RAISED = ("uce", "network", "error", "broken")
"""By the training script itself; the others come from outside."""
LINKS = "eth0,eth1"
NOT_THE_FIRST = ("sub-health", "cut")
"""The pod with the manager is not hot switched (docs/hot-switching.md). If it is cut off, nobody is left who could tell
ClusterD, which replaces it after two and a half minutes; that is too late for a job with the times of the example
(docs/cluster.md). All else happens to it as to any other."""
KINDS = {
    "kill": 6, "stop": 2, "uce": 4, "network": 4, "error": 2, "chip": 2, "node": 1, "cut": 1, "sub-health": 2,
    "broken": 1, "switch-nic": 2, "stress-test": 2,
}  # fmt: skip
"""How often, in relation to each other. What is broken can't be repaired, nor started again, nor replaced. The last two
are orders."""
INCIDENTS = {"switch-nic": 2}
"""Which there are at least, where it is more than one: links are switched there and back."""
STRATEGIES = (n.RETRY, n.IN_PLACE, n.RECOVER, n.DUMP, n.HOT_SWITCHES)
"""Each has to succeed with one of the faults, as soon as there are as many as kinds."""
COLUMNS = (n.RECOVERED, n.FELL_BACK, n.CANCELLED, n.FAILED)


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    after: int
    """Steps since the one before was mended."""

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank}"


def plan(seed: int, faults: int) -> list[Fault]:
    """The same for the same seed."""
    chance = random.Random(seed)
    kinds = list(KINDS)
    # Each kind at least once, if there are enough.
    drawn = kinds[:faults] + chance.choices(kinds, list(KINDS.values()), k=max(0, faults - len(kinds)))
    chance.shuffle(drawn)
    found = [
        Fault(
            kind,
            chance.choice((2, 3)) if kind in NOT_THE_FIRST else chance.randrange(4),
            chance.randint(*APART),
        )
        for kind in drawn
    ]
    # With the first pod goes the manager, and a new one begins anew: what is broken there may be mended before a dump.
    broken = [number for number, fault in enumerate(found) if fault.kind == "broken"]
    if broken and all(found[number].rank < 2 for number in broken):
        found[broken[0]] = replace(found[broken[0]], rank=found[broken[0]].rank + 2)
    return found


def succeeded(incident: Incident) -> bool:
    """Whether what was decided last has done what it is for. An end can be good without: a hot switch that is called
    off, a job that was started again as a whole meanwhile, or without the last checkpoint."""
    if incident.fallbacks and incident.fallbacks[-1].taken != incident.decision:
        return False
    if incident.decision == n.DUMP:  # all start again, and have been told to: it ends as a fallback
        return incident.ok and incident.phases[-1].name == n.PHASES[n.RESCHEDULING]
    return incident.ok and incident.outcome == n.RECOVERED


def column(incident: Incident) -> str:
    """What became of the strategy that was tried first."""
    if not incident.ok:
        return n.FAILED
    if incident.outcome == n.CANCELLED:
        return n.CANCELLED
    return n.RECOVERED if succeeded(incident) and not incident.fallbacks else n.FELL_BACK


@dataclass
class Result:
    incidents: list[Incident] = field(default_factory=list)
    faults: int = 0
    steps: int = 0
    repeated: int = 0
    """Steps that were done again, by the rank that did most."""
    seconds: float = 0.0
    undisturbed: float = 0.0
    """Seconds that the same steps take without faults, at the same pace."""
    failure: str = ""

    @property
    def explained(self) -> int:
        """Steps that may have been done again: the one under way whenever all started again from a last checkpoint."""
        return sum(incident.decision == n.DUMP for incident in self.incidents)

    @property
    def missing(self) -> list[str]:
        """Strategies that never succeeded, although there was a fault for each."""
        worked = {incident.decision for incident in self.incidents if succeeded(incident)}
        return [] if self.faults < len(KINDS) else [name for name in STRATEGIES if name not in worked]

    @property
    def ok(self) -> bool:
        good = not self.failure and not self.missing and all(incident.ok for incident in self.incidents)
        return good and self.repeated <= self.explained

    @property
    def goodput(self) -> float:
        return self.undisturbed / self.seconds if self.seconds else 0.0


class Soak:
    def __init__(self, place: World, faults: list[Fault]) -> None:
        self._place, self._faults = place, faults
        self._told: dict[str, Incident] = {}
        """By id. ClusterD shows the newest ones only."""

    async def run(self) -> Result:
        result = Result(faults=len(self._faults))
        arguments = (f"--steps={ENDLESS}", f"--pace={PACE}", "--checkpoint-every=50", "--taskd")
        try:
            async with self._place.training(
                EXAMPLE, *arguments, script=SCRIPT,
                labels={"subHealthyStrategy": "hotSwitch"}, annotations={"sp-block": str(len(RANKS))},
                TASKD_NICS=LINKS, TASKD_STRESS_SECONDS="1",
            ) as job:  # fmt: skip
                _put(job.output / "allowed", "1")
                await job.until_step(1)
                began = time.monotonic()
                for number, fault in enumerate(self._faults, 1):
                    await self._one(job, fault)
                    _progress(f"{number}/{len(self._faults)}  {fault}: {self._last()}")
                result.steps = max(job.steps()) + APART[1]
                _put(job.output / "last", str(result.steps))
                _put(job.output / "allowed", str(result.steps))
                if not await job.ends():
                    raise Stuck(f"the job did not succeed: {job.state()}")
                result.seconds = time.monotonic() - began
                await self._look(job)
                done, result.repeated = job.done(), job.repeated()
            calm, result.undisturbed = await self._place.undisturbed(result.steps, PACE)
            result.failure = difference(calm, done, result.steps)
        except (Stuck, CommandError) as error:
            result.failure = str(error)
        result.incidents = list(self._told.values())
        return result

    async def _one(self, job: Watched, fault: Fault) -> None:
        """Some steps, the fault, and what follows until it is mended and the cluster is as before."""
        step = max(job.steps()) + MARGIN + fault.after
        _put(job.output / "allowed", str(step))
        await job.until_step(step)
        await self._until_closed(job)  # what came of the one before may be more than one incident
        known = len(self._told)
        node = _node(job, fault.rank)
        if fault.kind in RAISED:
            _put(job.output / f"raise.{fault.rank}", fault.kind)
        _put(job.output / "allowed", str(step + MEANWHILE))
        match fault.kind:
            case "kill":
                job.kill(fault.rank)
            case "stop":
                os.kill(job.process_outside(fault.rank), signal.SIGSTOP)
            case "chip":
                await self._place.order("inject", "chip", BROKEN_CHIP, "--node", node, "--chip", "0")
            case "node":
                await self._place.order("node", "stop", node)
            case "cut":
                await self._place.order("node", "cut", node)
            case "sub-health":
                await self._place.order("inject", "sub-health", "--node", node)
            case "switch-nic":
                await self._place.order("switch-nic", job.name, "--op", "true")
                await self._place.order("switch-nic", job.name, "--op", "false")
            case "stress-test":
                await self._place.order("stress-test", job.name)
        await self._until_closed(job, known + INCIDENTS.get(fault.kind, 1))
        match fault.kind:
            case "chip" | "sub-health":
                await self._place.order("inject", "clear")
            case "node":
                await self._place.order("node", "start", node)
                await self._until_ready(node)
            case "cut":
                await self._place.order("node", "join", node)
                await self._until_ready(node)

    async def _until_closed(self, job: Watched, least: int = 0) -> None:
        """There are so many incidents, and none is open."""
        end = time.monotonic() + PATIENCE
        while True:
            await self._look(job)
            if len(self._told) >= least and all(incident.closed for incident in self._told.values()):
                return
            if time.monotonic() > end:
                raise Stuck(f"nothing was recorded, or it is not over: {self._last()}; {job.state()}")
            await asyncio.sleep(0.1)

    async def _look(self, job: Watched) -> None:
        self._told |= {incident.id: incident for incident in await job.told()}

    def _last(self) -> str:
        if not self._told:
            return "no incident"
        last = list(self._told.values())[-1]
        how = f"{last.decision or last.cause}, {last.outcome or 'not over'}"
        return f"{how} after {last.total_ms} ms" + (f", {len(last.fallbacks)} fallbacks" if last.fallbacks else "")

    async def _until_ready(self, name: str) -> None:
        from evertrain.kube.port import NODE

        end = time.monotonic() + PATIENCE
        while not _is_ready(await self._place.kube.get(NODE, name)):
            if time.monotonic() > end:
                raise Stuck(f"{name} does not come back")
            await asyncio.sleep(0.1)


def _node(job: Watched, rank: int) -> str:
    """Where the rank's pod is."""
    kind = "master" if rank < 2 else "worker"
    return next((pod.node for pod in job.pods() if f"-{kind}-" in pod.name), "")


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _put(file: Path, text: str) -> None:
    """Whole, or not there."""
    written = file.with_name(file.name + ".new")
    written.write_text(text)
    written.rename(file)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(result: Result, seed: int) -> None:
    print(f"\n{result.faults} faults in {result.steps} steps, seed {seed}\n{machine()}\n")
    outcomes: dict[str, Counter[str]] = {}
    phases: dict[str, list[float]] = {}
    for incident in result.incidents:
        first = incident.fallbacks[0].left if incident.fallbacks else incident.decision or incident.cause
        outcomes.setdefault(first, Counter())[column(incident)] += 1
        for name, took in incident.durations:
            phases.setdefault(name, []).append(took)
        phases.setdefault("total", []).append(incident.total_ms)
    print(f"{'strategy':24}" + "".join(f"{name:>11}" for name in COLUMNS))
    for name, counts in sorted(outcomes.items()):
        print(f"{name[:24]:24}" + "".join(f"{counts[each]:11}" for each in COLUMNS))
    if result.missing:
        print(f"NEVER SUCCEEDED: {', '.join(result.missing)}")
    print(f"\n{'phase':24}   n   p50 ms   p99 ms")
    for name, times in phases.items():
        print(f"{name[:24]:24} {len(times):3} {percentile(times, 0.5):8.0f} {percentile(times, 0.99):8.0f}")
    print(f"\ngoodput: {result.goodput:.0%} ({result.undisturbed:.0f} s of training in {result.seconds:.0f} s)")
    judged = "which" if result.repeated <= result.explained else "TOO MANY:"
    print(f"steps that had to be done again: {result.repeated}, {judged} last checkpoints explain {result.explained}")
    same = "yes, every step of every rank" if not result.failure else f"NO: {result.failure}"
    print(f"identical to the undisturbed run: {same}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--json", type=Path, help="also write the incidents to this file")
    parser.add_argument("--keep", type=Path, help="a new folder for what the jobs and the cluster write, to be kept")
    options = parser.parse_args()
    if options.faults < 1:
        parser.error("--faults is at least 1")
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evertrain-soak-")))
        folder.mkdir(parents=True, exist_ok=options.keep is None)
        logging.basicConfig(filename=folder / "cluster.log")
        try:
            result = aio.run(_main(folder, plan(options.seed, options.faults)))
        except CannotStart as error:
            print(f"no cluster could be started: {error}", file=sys.stderr)
            return 1
    _show(result, options.seed)
    if options.json:
        options.json.write_text(json.dumps([incident.record() for incident in result.incidents], indent=1) + "\n")
    return 0 if result.ok else 1


async def _main(folder: Path, faults: list[Fault]) -> Result:
    async with world(folder, node_grace=NODE_GRACE, labels=SUPER_POD, own_network=True) as place:
        return await Soak(place, faults).run()


if __name__ == "__main__":
    sys.exit(main())
