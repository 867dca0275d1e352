"""How a demo goes: a job in which nothing happens, the same job again and something happens, the comparison."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from evertrain.cli import connection, node, running
from evertrain.cli.connection import Connection
from evertrain.cli.demo import cutting, links, manifests, orders, proof, recorded
from evertrain.cli.demo.evidence import Evidence, Pod
from evertrain.cli.demo.features import NO_SPARES, Feature
from evertrain.cli.demo.screen import Screen, bold
from evertrain.cli.demo.training import Training
from evertrain.cli.run import Submission
from evertrain.cli.running import CommandError, UsageError
from evertrain.clusterd.timeline.incident import Incident, milliseconds
from evertrain.embedded.cluster import CannotStart, Cluster, Settings

EXAMPLES = Path("examples") / "resumable"
NPUS = 2
"""Of a node: what a pod takes. With more, one could stay beside a broken chip."""
LOOK = 3
"""Steps during which bytes are counted."""
PACE = 0.15
"""Seconds of a step that something happens to, so that it can be watched."""


async def show(
    feature: Feature, steps: int, timeout: float, keep: Path | None, own_network: bool | None = None
) -> int:
    """The exit code. `keep`: a folder for everything, which is left there. `own_network`: of the cluster's settings."""
    task = asyncio.current_task()
    assert task is not None
    running.on_signals(task.cancel, signal.SIGTERM, signal.SIGHUP)  # asyncio itself looks after Ctrl-C
    screen = Screen()
    try:
        with _folder(keep) as folder:
            # What the parts of the cluster have to say is for those who look for a defect in it.
            logging.basicConfig(filename=folder / "cluster.log")
            async with screen.alive(), _cluster(feature, folder, screen, own_network) as cluster:
                code = await Play(feature, cluster, folder, screen, steps or feature.steps, timeout).run()
        screen.line(f"It took {screen.seconds():.0f} s in all.", indent="")
        return code
    except asyncio.CancelledError:
        screen.line("interrupted; everything has been ended", indent="")
        return running.INTERRUPTED


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="evertrain-demo-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{keep} is there already; name a new folder") from None
    yield keep.absolute()


@contextlib.asynccontextmanager
async def _cluster(
    feature: Feature, folder: Path, screen: Screen, own_network: bool | None
) -> AsyncIterator[Cluster]:
    settings = Settings(
        folder=folder / "cluster",
        nodes=feature.nodes,
        npus=NPUS,
        labels=feature.labels,
        node_grace=feature.node_grace,
        own_network=own_network,
    )
    screen.line(bold(f"Evertrain demo: {feature.name}. {feature.title[0].upper()}{feature.title[1:]}."), indent="")
    screen.status(f"a cluster of {settings.text()} starts")
    async with contextlib.AsyncExitStack() as stack:
        try:
            cluster = await stack.enter_async_context(Cluster(settings))
        except CannotStart as error:
            raise CommandError(f"no cluster could be started: {error}") from None
        screen.line(f"A cluster of {settings.text()} runs, for a job of 2 pods with 2 processes each.", indent="")
        if cluster.shared is not None:
            screen.line(cluster.shared.text(), indent="")
        yield cluster
        screen.status("the cluster ends")


class Play:
    def __init__(
        self, feature: Feature, cluster: Cluster, folder: Path, screen: Screen, steps: int, timeout: float
    ) -> None:
        self.name = feature.name
        self._feature, self._cluster, self._folder = feature, cluster, folder
        self._screen, self._steps, self._timeout = screen, steps, timeout
        self._example = _find_example(feature.example)
        self._kube: Connection
        self._job: Training
        """The one that something happens to."""
        self._pods: list[Pod] = []
        """As they were before."""
        self._happened_ms: int | None = None
        """When something was broken from here, by the clock of the timeline."""
        self._links: list[str] = []

    async def run(self) -> int:
        self._kube = connection.connect(self._cluster.kubeconfig)
        try:
            self._screen.heading(f"1. For comparison: {self._steps} steps in which nothing happens.")
            async with self._training("undisturbed", [], NO_SPARES, lines=2) as calm:
                if not await calm.ends():
                    return running.FAILED
            self._screen.heading("2. The same again, and something happens.")
            self._screen.line(f"$ kubectl apply -f {os.path.relpath(self._example)}")
            waits = [f"{int(self._steps * part)}:0:hold" for part in self._feature.waits]
            faults = [f"--fault={fault}" for fault in [*self._feature.faults(self._steps), *waits]]
            async with self._training(
                self.name,
                ["--pace", str(PACE), *self._feature.arguments, *faults],
                self._feature.environment,
                lines=6,
            ) as self._job:
                await self._job.until(lambda: self._job.step, "the first step")
                self._show_job()
                await self._job.until(lambda: self._job.step >= self._steps // 6, "some steps")
                await self._feature.disturb(self)
                (self._job.output / "go").touch()
                if not await self._job.ends():
                    return running.FAILED
                return self._judge(calm, await self._job.incidents(self._feature.incidents))
        finally:
            await self._kube.close()

    @contextlib.asynccontextmanager
    async def _training(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], lines: int
    ) -> AsyncIterator[Training]:
        output = self._folder / name
        output.mkdir()
        given = ["--steps", str(self._steps), "--pace", "0", *arguments]
        documents = manifests.documents_of(self._example, name, output, given, environment)
        job = await Submission(self._kube, documents, documents[-1], self._kube.namespace).submit()
        training = Training(self._kube, job, documents[-1], output, self._screen, self._timeout, lines)
        try:
            yield training
        finally:
            await training.close()

    def _show_job(self) -> None:
        self._pods = self._job.pods()
        for pod in self._pods:
            ranks = [rank for rank in self._job.processes if self._job.process(rank)[0] == pod.name]
            who = ", ".join(f"rank {rank} (process {self._job.process_outside(rank)})" for rank in ranks)
            self._screen.line(f"{pod.name} on {pod.node}: {who}")

    # --- what a feature does

    def node_of(self, kind: str) -> str:
        return next(pod.node for pod in self._job.pods() if pod.is_of(kind))

    async def until_spare_is_warm(self, kind: str) -> None:
        await self._job.until(lambda: self._job.spares_ready(kind), f"a warm spare in the {kind}'s pod")
        self._screen.event(f"a spare process is warm in the {kind}'s pod")

    def kill(self, rank: int) -> None:
        pid = self._job.process_outside(rank)
        self._happened_ms = milliseconds(time.time())
        os.kill(pid, signal.SIGKILL)
        self._screen.event(bold(f"kill -9 {pid}") + f"   rank {rank} is gone, with everything in its memory")

    def cut(self, some: Sequence[int], others: Sequence[int]) -> int:
        """What connects these ranks with those, as a network does it that breaks. How many connections there were: none
        if other processes' may not be touched here."""
        now = milliseconds(time.time())
        count = cutting.cut(*([self._job.process_outside(rank) for rank in ranks] for ranks in (some, others)))
        if count:
            self._happened_ms = now
        told = " and ".join(", ".join(map(str, ranks)) for ranks in (some, others))
        text = f"{count} connections are cut" if count else "connections can't be cut here"
        self._screen.event(bold(text) + f"   between ranks {told}")
        return count

    def call_off(self, kind: str) -> None:
        """Faults that the training script was to make; it notes those that have happened, so that they don't again."""
        for fault in self._feature.faults(self._steps):
            if fault.endswith(f":{kind}"):
                (self._job.output / f"fault.{fault.replace(':', '.')}").touch()

    async def order(self, *arguments: str, code: int = 0) -> None:
        """A command of Evertrain's, as a user gives it, and with which exit code it is to end."""
        text = f"evertrain {shlex.join(arguments)}"
        self._screen.event(bold(f"$ {text}"))
        ended, said = await orders.give(self._cluster.kubeconfig, *arguments)
        for line in said.splitlines():
            self._screen.event(line)
        if ended != code:
            raise CommandError(f"`{text}` ended with code {ended}")

    async def until_ready_to_join(self, *ranks: int) -> None:
        await self._job.until(lambda: set(ranks) <= self._job.ready, f"new processes of ranks {ranks}")

    async def until_halfway(self) -> None:
        await self._job.until(lambda: self._job.step >= self._steps // 2, "half of the steps")

    async def until_recovered(self, count: int) -> None:
        await self._job.incidents(count)

    async def until_trained_by(self, ranks: int) -> None:
        await self._job.until(lambda: self._job.size == ranks, f"a step of {ranks} ranks")
        self._screen.event(f"step {self._job.step} was done by {ranks} ranks")

    async def see_links(self) -> None:
        """Which links the job's traffic goes over."""
        if not self._cluster.own_network:
            pids = [self._job.process_outside(rank) for rank in self._job.processes]
            counts = {name: links.connections(network, pids) for name, network in links.NETWORKS.items()}
            told = ", ".join(f"{count} over {name} links" for name, count in counts.items())
            self._screen.event(f"connections between the ranks: {told}")
        else:
            before, first = await self._carried(), self._job.step
            await self._job.until(lambda: self._job.step >= first + LOOK, f"{LOOK} steps")
            counts = {name: bytes - before[name] for name, bytes in (await self._carried()).items()}
            told = ", ".join(f"{count} bytes by {links.NICS[name]}, {name}" for name, count in counts.items())
            self._screen.event(f"{LOOK} steps: {told}")
            await self.order("node", "nics")
        self._links.append(links.busiest(counts))

    async def _carried(self) -> dict[str, int]:
        """Bytes by link so far, of all nodes."""
        counted = [await node.traffic(self._kube, name) for name in {pod.node for pod in self._pods}]
        return {name: sum(each[nic].received + each[nic].sent for each in counted) for name, nic in links.NICS.items()}

    # --- the end

    def _judge(self, calm: Training, incidents: Sequence[Incident]) -> int:
        evidence = Evidence(
            incidents,
            self._pods,
            self._job.pods(),
            {rank: len(had) for rank, had in self._job.processes.items()},
            self._job.outcome().repeated(),
            sorted(file.name for file in self._job.output.glob("iter_*")),
            self._links,
            self._job.times(),
            self._happened_ms,
        )
        self._screen.heading("3. What ClusterD recorded.")
        for number, incident in enumerate(incidents):
            if number:
                self._screen.line()
            for line, counts in recorded.lines(incident, evidence.happened(incident)):
                self._screen.line(bold(line) if counts else line)
        bound = self._feature.loss_within
        if bound is None:
            self._screen.heading("4. The proof: SHA-256 of what each rank has in the end.")
            same, lines = proof.same_bits(calm.outcome(), self._job.outcome())
            claim = "identical to the undisturbed run, bit for bit"
        else:
            self._screen.heading("4. The proof: each step beside that of the undisturbed run.")
            same, lines = proof.same_samples(calm.outcome(), self._job.outcome(), bound)
            claim = f"the same samples in each step as in the undisturbed run, and a loss within {bound:g} of its"
        for line in lines:
            self._screen.line(line)
        self._screen.line()
        verdicts = [*self._feature.judge(evidence), evidence.timed(), (claim, same)]
        for text, good in verdicts:
            self._screen.line(("yes  " if good else bold("NO   ")) + text)
        if all(good for _, good in verdicts):
            return 0
        raise CommandError("it fell short of what it promises; with --keep DIR all logs are left to look at")


def _find_example(name: str) -> Path:
    """In the folder that the user is in, else in the repository that this file is in."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[4]):
        if (file := root / EXAMPLES / name).is_file():
            return file
    raise UsageError(f"there is no {EXAMPLES / name}; run it in a clone of the repository")
