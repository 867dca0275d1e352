"""Jobs of `examples/resumable` on an embedded cluster, with ClusterD deciding: for benchmarks of the whole chain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.jobs import ROOT, Stuck
from evertrain.cli import connection, incidents
from evertrain.cli.connection import Connection
from evertrain.cli.demo import manifests, orders
from evertrain.cli.demo.play import NPUS
from evertrain.cli.demo.screen import Screen
from evertrain.cli.demo.training import RANKS, Training
from evertrain.cli.run import Submission
from evertrain.clusterd.timeline.incident import Incident
from evertrain.embedded.cluster import Cluster, Settings

EXAMPLES = ROOT / "examples" / "resumable"
POLL = 0.005
PATIENCE = 120.0
Done = dict[int, dict[int, str]]
"""By rank and step, what the rank has written down of the step: samples, loss, hash of the weights."""
READY = "taskd: this pod is ready to take a place"
TAIL = 2000
"""Characters in which the last line of a rank's steps is found."""


class Silent(Screen):
    """Who measures shows figures, not events."""

    def line(self, text: str = "", *, indent: str = "   ") -> None:
        pass

    def status(self, text: str) -> None:
        pass


class Watched(Training):
    """A job whose ranks' steps are looked at."""

    standbys_ready = 0
    """Pods that have been ready to take another's place; those that have done so, too."""

    def hand_on(self, pod: str, line: str) -> None:
        self.standbys_ready += line == READY
        super().hand_on(pod, line)

    @property
    def uid(self) -> str:
        return str(self._uid)

    def last_step(self, rank: int) -> int:
        """The last one that the rank has written down."""
        try:
            with open(self.output / f"steps.{rank}", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        whole = [line for line in lines if line.endswith(b"\n")]
        return int(json.loads(whole[-1])[0]) if whole else 0

    def steps(self) -> list[int]:
        return [self.last_step(rank) for rank in RANKS]

    async def until_step(self, step: int, limit: float = PATIENCE) -> None:
        """Until all ranks have done it."""
        end = time.monotonic() + limit
        while min(self.steps()) < step:
            if self._end.done() or time.monotonic() > end:
                raise Stuck(f"step {step} was not reached: the ranks are at {self.steps()}; {self.state()}")
            await asyncio.sleep(POLL)

    def kill(self, rank: int) -> tuple[int, float]:
        """The newest step that anybody had done then, and when that was."""
        pid = self.process_outside(rank)
        step, now = max(self.steps()), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return step, now

    async def told(self) -> list[Incident]:
        """What ClusterD shows at the moment."""
        return await incidents.published(self._kube, self.name, self.namespace, self.uid)

    def done(self) -> Done:
        """Of a step that was done again, the last time."""
        found: Done = {}
        for rank in RANKS:
            lines = (self.output / f"steps.{rank}").read_text().splitlines(keepends=True)
            found[rank] = {int(json.loads(line)[0]): line for line in lines if line.endswith("\n")}
        return found

    def repeated(self) -> int:
        """Steps that a rank has done more than once, at most: after a restart from a checkpoint."""
        counts = [(self.output / f"steps.{rank}").read_text().count("\n") for rank in RANKS]
        return max(count - len(steps) for count, steps in zip(counts, self.done().values(), strict=True))


class World:
    """Three nodes, of which two have the pods, in a cluster of this process."""

    def __init__(self, cluster: Cluster, kube: Connection, folder: Path) -> None:
        self.cluster, self.kube, self._folder = cluster, kube, folder
        self._jobs = 0

    @contextlib.asynccontextmanager
    async def training(
        self,
        example: str,
        *arguments: str,
        script: Path | None = None,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        **environment: str,
    ) -> AsyncIterator[Watched]:
        """A job of an example, from its start on. It is deleted in a good end. `script` takes the place of its own."""
        self._jobs += 1
        name = f"job-{self._jobs}"
        output = self._folder / name
        output.mkdir()
        (document,) = manifests.documents_of(EXAMPLES / example, name, output, arguments, environment)
        document.object["metadata"]["labels"] |= labels or {}
        document.object["metadata"]["annotations"] |= annotations or {}
        if script is not None:
            for replica in document.object["spec"]["replicaSpecs"].values():
                (container,) = replica["template"]["spec"]["containers"]
                container["args"][-1] = container["args"][-1].replace(" train.py ", f" {script} ")
        submission = Submission(self.kube, [document], document, self.kube.namespace)
        job = Watched(self.kube, await submission.submit(), document, output, Silent(), PATIENCE, lines=0)
        try:
            yield job
            await self._delete(job)  # one that has failed ends with the cluster: its nodes may not be there to say so
        finally:
            await job.close()

    async def _delete(self, job: Watched) -> None:
        from evertrain.cli.objects import gone
        from evertrain.kube.port import ASCEND_JOB, NotFound

        with contextlib.suppress(NotFound):
            await self.kube.delete(ASCEND_JOB, job.name, job.namespace, uid=job.uid, policy="Foreground")
            await gone(self.kube, ASCEND_JOB, job.name, job.namespace, job.uid)

    async def order(self, *arguments: str) -> None:
        """A command of Evertrain's, as a user gives it."""
        code, said = await orders.give(self.cluster.kubeconfig, *arguments)
        if code:
            raise Stuck(f"evertrain {' '.join(arguments)}: {said}")

    async def undisturbed(self, steps: int, pace: float = 0.0) -> tuple[Done, float]:
        """What each rank writes down of so many steps in which nothing happens, and the seconds that they take."""
        arguments = (f"--steps={steps}", f"--pace={pace}")
        async with self.training("process-rescheduling/recover.yaml", *arguments, TASKD_WARM_SPARES="0") as calm:
            await calm.until_step(1)
            began = time.monotonic()
            if not await calm.ends():
                raise Stuck(f"the undisturbed run failed: {calm.state()}")
            return calm.done(), time.monotonic() - began


@contextlib.asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    async with Cluster(Settings(folder=folder / "cluster", nodes=3, npus=NPUS, **settings)) as cluster:
        kube = connection.connect(cluster.kubeconfig)
        try:
            yield World(cluster, kube, folder)
        finally:
            await kube.close()


def difference(calm: Done, run: Done, last: int) -> str:
    """The first step, up to the last one, of which a rank has written down something else; empty if there is none.

    A rank that is killed after a step may have had no time to write it down. Of each step somebody has.
    """
    for step in range(1, last + 1):
        written = {rank: steps[step] for rank, steps in run.items() if step in steps}
        if not written:
            return f"nobody has done step {step}"
        for rank, text in written.items():
            if text != calm[rank][step]:
                return f"rank {rank}, step {step}: {text} instead of {calm[rank][step]}"
    return ""
