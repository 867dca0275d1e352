"""`evertrain run JOB.yaml`: a job from its file to its end, on the cluster that runs or on one made for it.

What happens to the job goes to standard error, what its pods print to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain import aio
from evertrain.cli import manifest, running
from evertrain.cli.running import CommandError, UsageError
from evertrain.cli.up import START_PATIENCE, check_nodes, node_options, settings_of
from evertrain.embedded import instance

if TYPE_CHECKING:
    from evertrain.cli.connection import Connection, Refused
    from evertrain.kube.port import Object

INVALID, TOO_LATE = 2, 124


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    check_nodes(parser, arguments)
    try:
        documents = manifest.read(arguments.file)
        job = _the_job(documents, arguments.file)
    except manifest.ManifestError as error:
        return running.complain("run", str(error), INVALID)
    return running.run("run", lambda: _main(arguments, documents, job))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain run",
        description="Run an AscendJob and wait for its end. If no embedded cluster runs, one is started for the job\n"
        "and ended with it.",
        epilog="examples:\n"
        "  evertrain run job.yaml                                      on 2 virtual nodes with 8 NPUs each\n"
        "  evertrain run --nodes 4 --timeout 600 job.yaml              on 4, and not longer than 10 minutes\n"
        "  evertrain run --node-label example-key=example-value examples/cluster/job.yaml\n\n"
        "exit codes: 0 the job Succeeded; 1 it Failed; 2 the file or the job is invalid; 124 --timeout is over;\n"
        "130 interrupted. A job on a cluster that was there before goes on after 124 and 130.\n\n"
        "which cluster: --kubeconfig, else the one that runs on --data-dir, else $KUBECONFIG if it is that of an\n"
        "embedded cluster that answers, else a new one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", metavar="JOB.yaml", help="one AscendJob, and whatever else it needs; - for standard input"
    )
    parser.add_argument("-n", "--namespace", default="", help="where the file names none (default: default)")
    parser.add_argument("--timeout", type=running.seconds, metavar="S", help="give up after this many seconds")
    parser.add_argument("--kubeconfig", metavar="FILE", help="run it on this cluster")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=instance.default_folder(),
        metavar="DIR",
        help="run it on the cluster there, if one runs (default: $EVERTRAIN_DATA_DIR, else ~/.evertrain/cluster)",
    )
    node_options(parser)
    return parser


async def _main(arguments: argparse.Namespace, documents: list[manifest.Document], job: manifest.Document) -> int:
    task = asyncio.current_task()
    assert task is not None
    running.on_signals(task.cancel, signal.SIGTERM, signal.SIGHUP)
    try:
        async with _cluster(arguments) as (kube, lasting):
            submission = Submission(kube, documents, job, arguments.namespace or kube.namespace)
            return await _follow(submission, lasting, arguments.timeout)
    except asyncio.CancelledError:
        return running.INTERRUPTED


async def _follow(submission: Submission, lasting: bool, seconds: float | None) -> int:
    from evertrain.cli.following import Follower

    follower = None
    try:
        async with aio.timeout(seconds) as limit:
            submitted = await submission.submit()
            follower = Follower(submission.kube, submitted, submission.job, alone=not lasting)
            return await follower.follow()
    except manifest.ManifestError as error:
        return running.complain("run", str(error), INVALID)
    except TimeoutError:
        if not limit.expired():
            raise
        if follower is None:
            return running.complain("run", f"the job could not be created within {seconds:g} s", TOO_LATE)
        if lasting:
            follower.say_how_to_end()
        return running.complain("run", f"not finished after {seconds:g} s: {follower.state()}", TOO_LATE)
    except asyncio.CancelledError:
        if lasting and follower is not None:
            follower.say_how_to_end()
        raise


def _the_job(documents: list[manifest.Document], source: str) -> manifest.Document:
    jobs = [document for document in documents if document.object["kind"] == "AscendJob"]
    if not jobs:
        kinds = ", ".join(document.object["kind"] for document in documents) or "nothing"
        line = documents[0].line_of("kind") if documents else None
        raise manifest.ManifestError(source, line, f"there is no AscendJob in it, but {kinds}", "kind")
    if len(jobs) > 1:
        raise manifest.ManifestError(source, jobs[1].line, "a second AscendJob; `evertrain run` runs one at a time")
    return jobs[0]


@contextlib.asynccontextmanager
async def _cluster(arguments: argparse.Namespace) -> AsyncIterator[tuple[Connection, bool]]:
    """A cluster, and whether it was there before and stays."""
    from evertrain.cli import connection

    found = await _running_cluster(arguments)
    if found is not None:
        kube = connection.connect(found)
        try:
            yield kube, True
        finally:
            await kube.close()
        return
    from evertrain.embedded.cluster import CannotStart, Cluster

    with tempfile.TemporaryDirectory(prefix="evertrain-run-") as folder:
        settings = settings_of(arguments, Path(folder))
        print(f"evertrain: no cluster runs; starting one with {settings.text()} for this job", file=sys.stderr)
        async with contextlib.AsyncExitStack() as stack:
            try:
                cluster = await stack.enter_async_context(Cluster(settings))
            except CannotStart as error:
                raise CommandError(f"no cluster could be started: {error}") from None
            if cluster.shared is not None:
                print(f"evertrain: {cluster.shared.text()}", file=sys.stderr)
            kube = connection.connect(cluster.kubeconfig)
            stack.push_async_callback(kube.close)
            yield kube, False


async def _running_cluster(arguments: argparse.Namespace) -> Path | None:
    from evertrain.cli import connection

    if arguments.kubeconfig:
        return connection.choose_kubeconfig(arguments.kubeconfig, arguments.data_dir)
    there = instance.find(arguments.data_dir)
    if there is not None and not there.kubeconfig:
        print(f"evertrain: the cluster on {arguments.data_dir} is starting; waiting for it", file=sys.stderr)
        there = await _until_it_serves(arguments.data_dir)
    if there is not None:
        return Path(there.kubeconfig)
    named = Path(os.environ.get("KUBECONFIG", "").split(os.pathsep)[0])
    if not named.is_file():
        return None
    try:
        kube = connection.connect(named)
    except UsageError:
        return None
    try:
        # A cluster of Kubernetes that happens to be in the environment is not for trying things out.
        version = await kube.ask("GET", "/version")
        return named if "evertrain" in str(version.get("gitVersion", "")) else None
    except Exception:  # it doesn't answer, or not as a cluster does
        return None
    finally:
        await kube.close()


async def _until_it_serves(folder: Path) -> instance.Running | None:
    """None if it ends instead."""
    with contextlib.suppress(TimeoutError):
        async with aio.timeout(START_PATIENCE):
            while (there := instance.find(folder)) is not None and not there.kubeconfig:
                await asyncio.sleep(0.1)
            return there
    raise CommandError(f"the cluster on {folder} has not started within {START_PATIENCE:g} s")


class Submission:
    """Gives the objects of a file to the server and translates its refusals into lines of the file."""

    def __init__(self, kube: Connection, documents: list[manifest.Document], job: manifest.Document, namespace: str):
        self.kube, self.job = kube, job
        self._documents, self._namespace = documents, namespace

    async def submit(self) -> Object:
        for document in self._documents:
            if document is not self.job:
                await self._give(document, replace=True)
        return await self._give(self.job, replace=False)

    async def _give(self, document: manifest.Document, *, replace: bool) -> Object:
        from evertrain.cli.connection import Refused, path_of

        try:
            kind = await self.kube.find_kind_of(document.object)
        except UsageError as error:
            raise document.refuse("apiVersion", str(error)) from None
        metadata = dict(document.object["metadata"])
        namespace = str(metadata.get("namespace") or self._namespace) if kind.namespaced else None
        if namespace:
            metadata["namespace"] = namespace
        item = document.object | {"metadata": metadata}
        name = str(metadata.get("name") or "")
        strict = {"fieldValidation": "Strict", "fieldManager": "evertrain"}
        try:
            if name and not replace and (earlier := await self._earlier(kind, name, namespace)):
                await self._try(path_of(kind, namespace), strict, item)
                await self._make_room(kind, name, namespace, earlier)
            try:
                return await self.kube.ask("POST", path_of(kind, namespace), strict, item)
            except Refused as error:
                if error.reason != "AlreadyExists" or not replace:
                    raise
            for _ in range(5):
                there = await self.kube.get(kind, name, namespace)
                version = there["metadata"]["resourceVersion"]
                renewed = item | {"metadata": metadata | {"resourceVersion": version}}
                try:
                    return await self.kube.ask("PUT", path_of(kind, namespace, name), strict, renewed)
                except Refused as error:
                    if error.reason != "Conflict":
                        raise
            raise CommandError(f"{kind.kind.lower()} {name} is changed by somebody else all the time")
        except Refused as error:
            if error.code in (400, 404, 413, 422):
                raise explain(document, error) from None
            raise

    async def _earlier(self, kind: Any, name: str, namespace: str | None) -> str:
        """The uid of a job of that name that is over; empty if there is none."""
        from evertrain.cli.following import outcome
        from evertrain.kube.port import NotFound

        try:
            there = await self.kube.get(kind, name, namespace)
        except NotFound:
            return ""
        if outcome(there) is None and not there["metadata"].get("deletionTimestamp"):
            raise CommandError(
                f"acjob {name} already runs in namespace {namespace}; wait for it, or `evertrain delete acjob {name}`"
            )
        return str(there["metadata"]["uid"])

    async def _try(self, path: str, options: dict[str, str], item: Object) -> None:
        """Would it be taken? Nothing is deleted for the sake of what would be refused."""
        from evertrain.cli.connection import Refused

        try:
            await self.kube.ask("POST", path, options | {"dryRun": "All"}, item)
        except Refused as error:
            if error.reason != "AlreadyExists":
                raise

    async def _make_room(self, kind: Any, name: str, namespace: str | None, uid: str) -> None:
        from evertrain.cli.objects import gone

        print(f"evertrain: acjob {name} of an earlier run is deleted first", file=sys.stderr)
        await self.kube.delete(kind, name, namespace, uid=uid, policy="Foreground")
        await gone(self.kube, kind, name, namespace, uid)


def explain(document: manifest.Document, error: Refused) -> manifest.ManifestError:
    """What the server refused, with the lines where it stands."""
    causes = [
        (str(cause["field"]), str(cause.get("message") or error.message))
        for cause in error.details.get("causes") or []
        if cause.get("field") and cause["field"] != "<nil>"
    ]
    if not causes:
        causes = manifest.blamed(error.message)
    if not causes:
        return manifest.ManifestError(document.source, document.line, error.message)
    first, *others = [document.refuse(field, what) for field, what in dict.fromkeys(causes)]
    return manifest.ManifestError(document.source, first.line, "\n".join([_after_place(first), *map(str, others)]))


def _after_place(error: manifest.ManifestError) -> str:
    return str(error).partition(": ")[2]
