"""What the daemons of a cluster have in common: options, the way to the API server, a health port, signals, exit codes.

The options of the originals are understood, with one dash as they write them. Those that say how they log are accepted
and do nothing: we log to standard error and leave rotation to whoever collects it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from evertrain import aio
from evertrain.kube.client import Client
from evertrain.kube.lease import CannotLead, LostLeadership

LEVELS = {-1: logging.DEBUG, 0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: logging.CRITICAL}
IGNORED = ("logFile", "maxAge", "maxBackups", "isCompress")
METRICS = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger(__name__)


class CannotStart(Exception):
    """The text is for the user."""


def add_options(parser: argparse.ArgumentParser, version: str, ignored: Iterable[str] = ()) -> None:
    kubeconfig = "default: the pod's service account, $KUBECONFIG"
    parser.add_argument("-kubeconfig", "--kubeconfig", type=Path, metavar="FILE", help=kubeconfig)
    parser.add_argument("-logLevel", "--logLevel", type=int, choices=LEVELS, default=0, help="-1 debug to 3 critical")
    parser.add_argument("-version", "--version", action="version", version=version)
    for name in (*IGNORED, *ignored):
        parser.add_argument(f"-{name}", f"--{name}", nargs="?", help=argparse.SUPPRESS)


def add_flag(parser: argparse.ArgumentParser, name: str, default: bool, text: str) -> None:
    """Of Go: `-name`, `-name=false`."""
    parser.add_argument(f"-{name}", f"--{name}", type=boolean, nargs="?", const=True, default=default, help=text)


def add_health(parser: argparse.ArgumentParser, default: int) -> None:
    add_flag(parser, "enable-healthz", False, "answer GET / on the health port, and GET /metrics for Prometheus")
    parser.add_argument("-healthz-address", "--healthz-address", type=port, default=default, metavar="PORT")
    where = "where that port is (default: everywhere)"
    parser.add_argument("--healthz-host", default="0.0.0.0", metavar="ADDRESS", help=where)


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


@contextlib.asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncIterator[Client]:
    """Raises CannotStart."""
    kubeconfig: Path | None = options.kubeconfig
    try:
        kube = Client.from_kubeconfig(kubeconfig) if kubeconfig else Client.from_environment()
    except Exception as error:  # lightkube lets through whatever it stumbles over in a file that is none
        place = kubeconfig or "what the environment names"
        raise CannotStart(f"{place} is not a usable kubeconfig: {error}") from None
    try:
        yield kube
    finally:
        await kube.close()


@contextlib.asynccontextmanager
async def health(
    options: argparse.Namespace, is_healthy: Callable[[], bool], metrics: Callable[[], bytes] = bytes
) -> AsyncIterator[None]:
    """Answers while it is entered, if the options say so: /metrics with the metrics, all else with how it is. Raises
    CannotStart."""
    if not options.enable_healthz:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with aio.timeout(5):
                request = await reader.readuntil(b"\r\n\r\n")
                if request.startswith((b"GET /metrics ", b"GET /metrics?")):
                    writer.write(_shown(metrics))
                else:
                    writer.write(_response(b"200 OK" if is_healthy() else b"503 Service Unavailable"))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, options.healthz_host, options.healthz_address)
    except OSError as error:
        raise CannotStart(f"port {options.healthz_address} can't be used: {error.strerror}") from None
    async with server:
        yield


def _shown(metrics: Callable[[], bytes]) -> bytes:
    try:
        return _response(b"200 OK", metrics())
    except Exception:  # who can't be measured works all the same
        logger.exception("the metrics can't be gathered")
        return _response(b"500 Internal Server Error")


def _response(state: bytes, content: bytes = b"") -> bytes:
    kind = b"Content-Type: %s\r\n" % METRICS.encode() if content else b""
    head = b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (state, kind, len(content)) + content


def run(name: str, options: argparse.Namespace, work: Callable[[argparse.Namespace], Awaitable[None]]) -> int:
    """Until it is stopped by a signal; the exit code: 1 if somebody else leads now, 2 if it can't work here."""
    logging.basicConfig(level=LEVELS[options.logLevel], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        aio.run(_until_stopped(work(options)))
    except LostLeadership as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except (CannotStart, CannotLead) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


async def _until_stopped(work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
