"""`python -m evertrain.operator`: the operator for a cluster that exists, in a pod of it or beside it.

The options of the original are understood, with one dash as it writes them. Those that say how it logs are accepted and
do nothing: the operator logs to its standard error and leaves rotation to whoever collects it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from evertrain import __version__
from evertrain.kube.client import Client
from evertrain.kube.lease import Leader, LostLeadership
from evertrain.operator.shell import RANK_TABLES, WORKERS, Operator

LEVELS = {-1: logging.DEBUG, 0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: logging.CRITICAL}
IGNORED = ("logFile", "maxAge", "maxBackups", "isCompress", "kubeApiQps", "tls-cert-file", "tls-private-key-file")


def boolean(text: str) -> bool:
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


class CannotStart(Exception):
    """The text is for the user."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="evertrain operator", description="Runs AscendJobs.")

    def flag(name: str, default: bool, text: str) -> None:
        found.add_argument(f"-{name}", f"--{name}", type=boolean, nargs="?", const=True, default=default, help=text)

    flag("enableGangScheduling", True, "start the pods of a job together, by a PodGroup")
    flag("leader-elect", False, "let only one of several operators act, by a Lease")
    flag("enable-healthz", False, "answer GET / on the health port")
    found.add_argument("-healthz-address", "--healthz-address", type=port, default=11251, metavar="PORT")
    found.add_argument("-kubeconfig", "--kubeconfig", type=Path, help="default: the pod's service account, $KUBECONFIG")
    found.add_argument("-namespace", "--namespace", help="only jobs of this namespace; default: all")
    found.add_argument("-logLevel", "--logLevel", type=int, choices=LEVELS, default=0, help="-1 debug to 3 critical")
    found.add_argument("-kubeApiBurst", "--kubeApiBurst", type=int, default=32, help="requests under way at once")
    found.add_argument("--workers", type=int, default=WORKERS, help="jobs looked at at once")
    found.add_argument("--ranktable-dir", type=Path, default=RANK_TABLES, help="folder of rank tables as files")
    found.add_argument("-version", "--version", action="version", version=f"ascend-operator version: {__version__}")
    for name in IGNORED:
        found.add_argument(f"-{name}", f"--{name}", nargs="?", help=argparse.SUPPRESS)
    return found


@contextlib.asynccontextmanager
async def health(port: int | None, is_healthy: Callable[[], bool]) -> AsyncIterator[None]:
    if port is None:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(5):
                await reader.readuntil(b"\r\n\r\n")
                state = b"200 OK" if is_healthy() else b"503 Service Unavailable"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % state)
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, "0.0.0.0", port)
    except OSError as error:
        raise CannotStart(f"port {port} can't be used: {error.strerror}") from None
    async with server:
        yield


def connect(kubeconfig: Path | None) -> Client:
    try:
        return Client.from_kubeconfig(kubeconfig) if kubeconfig else Client.from_environment()
    except Exception as error:  # lightkube lets through whatever it stumbles over in a file that is none
        place = kubeconfig or "what the environment names"
        raise CannotStart(f"{place} is not a usable kubeconfig: {error}") from None


async def run(options: argparse.Namespace) -> None:
    kube = connect(options.kubeconfig)
    try:
        operator = Operator(
            kube,
            gang=options.enableGangScheduling,
            namespace=options.namespace,
            rank_tables=options.ranktable_dir,
            workers=max(1, options.workers),
            parallel=min(10000, max(1, options.kubeApiBurst)),
        )
        namespace = os.environ.get("POD_NAMESPACE", "mindx-dl")
        leader = Leader(kube, "ascend-operator", namespace, f"{socket.gethostname()}_{uuid.uuid4()}")

        def is_healthy() -> bool:
            """All jobs are known, or somebody else leads: who stands by must not be restarted for it."""
            return operator.ready.is_set() or (options.leader_elect and not leader.leads)

        async with health(options.healthz_address if options.enable_healthz else None, is_healthy):
            await (leader.lead(operator.run) if options.leader_elect else operator.run())
    finally:
        await kube.close()


async def until_stopped(options: argparse.Namespace) -> None:
    task = asyncio.ensure_future(run(options))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=LEVELS[options.logLevel], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        asyncio.run(until_stopped(options))
    except LostLeadership as error:
        print(f"ascend-operator: {error}", file=sys.stderr)
        return 1
    except CannotStart as error:
        print(f"ascend-operator: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
