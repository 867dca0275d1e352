"""`python -m evertrain.operator`: the operator for a cluster that exists, in a pod of it or beside it.

The options of the original are understood, with one dash as it writes them.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evertrain import __version__
from evertrain.acjob import names
from evertrain.clusterd.services.tokens import Tokens
from evertrain.kube import daemon
from evertrain.kube.daemon import CannotStart
from evertrain.kube.lease import Leader
from evertrain.kube.metrics import page
from evertrain.operator.metrics import Figures
from evertrain.operator.shell import RANK_TABLES, WORKERS, Operator

HEALTH_PORT = 11251
TLS_FILES = tuple(names.TLS_VARIABLES.values())
IGNORED = ("kubeApiQps", "tls-cert-file", "tls-private-key-file")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="evertrain operator", description="Runs AscendJobs.")

    daemon.add_flag(found, "enableGangScheduling", True, "start the pods of a job together, by a PodGroup")
    daemon.add_flag(found, "leader-elect", False, "let only one of several operators act, by a Lease")
    daemon.add_health(found, HEALTH_PORT)
    found.add_argument("-namespace", "--namespace", help="only jobs of this namespace; default: all")
    found.add_argument("-kubeApiBurst", "--kubeApiBurst", type=int, default=32, help="requests under way at once")
    found.add_argument("--workers", type=int, default=WORKERS, help="jobs looked at at once")
    found.add_argument("--ranktable-dir", type=Path, default=RANK_TABLES, help="folder of rank tables as files")
    found.add_argument(
        "--token-secret",
        type=Path,
        metavar="FILE",
        help="what ClusterD makes the tokens of jobs from (its --token-secret)",
    )
    found.add_argument(
        "--job-tls-dir",
        type=Path,
        metavar="DIR",
        help=f"certificates for the pods of jobs, to show to ClusterD: {', '.join(TLS_FILES)}",
    )
    daemon.add_options(found, f"ascend-operator version: {__version__}", IGNORED)
    return found


def tokens(secret: Path | None) -> Callable[[str], str]:
    if secret is None:
        return lambda uid: ""
    try:
        return Tokens.read(secret.read_bytes()).job
    except OSError as error:
        raise CannotStart(f"{secret}: {error.strerror}") from None
    except ValueError as error:
        raise CannotStart(f"{secret}: {error}") from None


def certificates(folder: Path | None) -> Callable[[], Mapping[str, str]]:
    """Read whenever a job needs them: they may have been renewed. Raises CannotStart."""
    if folder is None:
        return dict

    def read() -> Mapping[str, str]:
        return {name: (folder / name).read_text() for name in TLS_FILES}

    try:
        read()
    except (OSError, UnicodeError) as error:
        raise CannotStart(f"--job-tls-dir: {error}") from None
    return read


async def run(options: argparse.Namespace) -> None:
    async with daemon.connected(options) as kube:
        operator = Operator(
            kube,
            gang=options.enableGangScheduling,
            namespace=options.namespace,
            rank_tables=options.ranktable_dir,
            workers=max(1, options.workers),
            parallel=min(10000, max(1, options.kubeApiBurst)),
            token_of=tokens(options.token_secret),
            job_tls=certificates(options.job_tls_dir),
        )
        namespace = os.environ.get("POD_NAMESPACE", "mindx-dl")
        leader = Leader(kube, "ascend-operator", namespace, f"{socket.gethostname()}_{uuid.uuid4()}")

        def is_healthy() -> bool:
            """All jobs are known, or somebody else leads: who stands by must not be restarted for it."""
            return operator.ready.is_set() or (options.leader_elect and not leader.leads)

        figures = Figures(operator, kube.answers)
        metrics = page(lambda: figures.collect(leader.leads or not options.leader_elect))
        async with daemon.health(options, is_healthy, metrics):
            await (leader.lead(operator.run) if options.leader_elect else operator.run())


def main(arguments: Sequence[str] | None = None) -> int:
    return daemon.run("ascend-operator", parser().parse_args(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
