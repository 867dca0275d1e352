"""`python -m evertrain.clusterd`: ClusterD for a cluster that exists, in a pod of it or beside it.

The options of the original are understood, with one dash as it writes them.

Of several that may lead, one does; the others look on, so that little is left to be read when one takes over. Who
loses the lead, as all do when the API server is away for a few seconds, ends all that it does and stands by, with a
new ClusterD: the same process may lead again.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from prometheus_client.core import Metric

from evertrain import __version__, aio
from evertrain.clusterd.leading import show_leader
from evertrain.clusterd.metrics import Figures
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.certificates import Certificates
from evertrain.clusterd.services.tokens import Tokens
from evertrain.clusterd.shell import PORT, ClusterD
from evertrain.kube import daemon
from evertrain.kube.daemon import CannotStart
from evertrain.kube.lease import Leader, LostLeadership
from evertrain.kube.metrics import page
from evertrain.kube.port import ApiError, Kube

logger = logging.getLogger("evertrain.clusterd")

LEASE = "clusterd"
LEASE_SECONDS, LEASE_DEADLINE, LEASE_PERIOD = 3.0, 2.2, 0.6
"""So that who stands by has taken over within 5 seconds."""
HEALTH_PORT = 11253
CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""In a folder of certificates, as Kubernetes mounts a Secret of them."""


def address(text: str) -> str:
    """HOST:PORT, HOST or :PORT."""
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, number = text, str(PORT)
    host = host.strip("[]") or own_address()
    if not number.isdecimal() or int(number) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form HOST:PORT")
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def own_address() -> str:
    return os.environ.get("POD_IP") or "127.0.0.1"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="evertrain clusterd",
        description="Gathers the faults of a cluster, decides how each job recovers, and leads it through.",
    )

    found.add_argument(
        "-listen", "--listen", type=address, metavar="HOST:PORT",
        help=f"where to serve gRPC (default: $POD_IP, else 127.0.0.1, port {PORT})",
    )  # fmt: skip
    daemon.add_flag(
        found, "useProxy", False, f"serve on 127.0.0.1:{PORT}, for a proxy beside us that does the encryption"
    )
    found.add_argument("--tls-dir", type=Path, metavar="DIR", help=f"certificates: {CA}, {CERTIFICATE} and {KEY}")
    found.add_argument("--tls-ca", type=Path, metavar="FILE", help="or each of them: the authority of both sides,")
    found.add_argument("--tls-cert", type=Path, metavar="FILE", help="the own certificate,")
    found.add_argument("--tls-key", type=Path, metavar="FILE", help="and its key")
    found.add_argument(
        "--token-secret", type=Path, metavar="FILE",
        help="the secret that the tokens of jobs are made from; the operator needs the same",
    )  # fmt: skip
    found.add_argument(
        "--insecure", action="store_true",
        help="plain text and no tokens: whoever reaches the port may lead every job. For clients of the original",
    )  # fmt: skip
    found.add_argument("--timeline", type=Path, metavar="FILE", help="keep all incidents in this database, too")
    daemon.add_flag(found, "leader-elect", False, "let only one of several act and serve, by a Lease")
    daemon.add_health(found, HEALTH_PORT)
    daemon.add_options(found, f"clusterd version: {__version__}")
    return found


def security(options: argparse.Namespace) -> Security:
    """Raises CannotStart."""
    if options.insecure and (options.tls_dir or options.tls_ca or options.token_secret):
        raise CannotStart("--insecure means neither certificates nor tokens; leave it out, or those")
    files = [options.tls_ca, options.tls_cert, options.tls_key]
    if options.tls_dir:
        files = [given or options.tls_dir / name for given, name in zip(files, (CA, CERTIFICATE, KEY), strict=True)]
    if any(files) and not all(files):
        raise CannotStart("TLS needs all of --tls-ca, --tls-cert and --tls-key, or --tls-dir")
    try:
        certificates = Certificates(*files) if all(files) else None
        if certificates is not None:
            certificates.check()
        tokens = Tokens.read(options.token_secret.read_bytes()) if options.token_secret else None
        return Security(certificates, tokens, options.insecure)
    except OSError as error:
        raise CannotStart(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise CannotStart(f"{error} (--tls-dir, --token-secret, --insecure)") from None


def listen_address(options: argparse.Namespace) -> str:
    if options.useProxy:
        return f"127.0.0.1:{PORT}"
    found: str = options.listen or address(f":{PORT}")
    host = found.rpartition(":")[0].strip("[]")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere and options.insecure:
        raise CannotStart(f"{found}: without certificates and tokens ClusterD serves on one address, not on all")
    return found


async def run(options: argparse.Namespace) -> None:
    who, where = security(options), listen_address(options)
    try:
        async with daemon.connected(options) as kube:
            figures = Figures(kube.answers)

            def make() -> ClusterD:
                clusterd = ClusterD(kube, [where], who, timeline=options.timeline)
                figures.follow(clusterd)
                return clusterd

            await lead(kube, make, where, options, figures.collect, lambda: daemon.connected(options))
    except aio.ExceptionGroup as group:
        raise _known(group.exceptions[0]) from group
    except OSError as error:
        raise _known(error) from error


def _known(error: Exception) -> Exception:
    """What can't be listened on, say, is no defect."""
    return CannotStart(str(error)) if isinstance(error, OSError) else error


def _may_pass(error: BaseException) -> bool:
    """Somebody else leads, or the API server is away, and it may be otherwise soon."""
    if isinstance(error, aio.ExceptionGroup):
        return all(map(_may_pass, error.exceptions))
    if isinstance(error, ApiError):
        return error.code >= 500 or error.code == 429
    return isinstance(error, (LostLeadership, ConnectionError, TimeoutError))


async def lead(
    kube: Kube,
    make: Callable[[], ClusterD],
    where: str,
    options: argparse.Namespace,
    figures: Callable[[bool], Iterable[Metric]] = lambda leads: (),
    connect: Callable[[], AbstractAsyncContextManager[Kube]] | None = None,
) -> None:
    """`make`: a ClusterD is of one use. `connect`: a way of its own for renewals of the lease. On a cluster of 10 000
    nodes the event loop is held up for several times the period while all that there is comes in, and for longer at
    each new list."""
    namespace, pod = os.environ.get("POD_NAMESPACE", "mindx-dl"), os.environ.get("POD_NAME", "")
    leader = Leader(
        kube,
        LEASE,
        namespace,
        f"{socket.gethostname()}_{uuid.uuid4()}",
        duration=LEASE_SECONDS,
        deadline=LEASE_DEADLINE,
        period=LEASE_PERIOD,
        connect=connect,
    )

    clusterd = make()

    async def work(running: Awaitable[None]) -> None:
        telling = [asyncio.ensure_future(_tell(clusterd, where))]
        if options.leader_elect and pod:
            telling.append(asyncio.ensure_future(_show(kube, clusterd, namespace, pod)))
        try:
            await running
        finally:
            for task in telling:
                task.cancel()

    async def stand_by_and_lead() -> None:
        leads = asyncio.Event()
        running = asyncio.ensure_future(clusterd.run(leads))

        async def lead() -> None:
            leads.set()
            await work(running)

        async def lead_when_read() -> None:
            """Who took the lease and only then began to read would hold it, and serve nobody."""
            await clusterd.looks_on.wait()
            await leader.lead(lead)

        leading = asyncio.ensure_future(lead_when_read())
        try:
            await asyncio.wait({leading, running}, return_when=asyncio.FIRST_COMPLETED)
            if leads.is_set():  # then `leading` ends when `running` does, and knows why
                await asyncio.wait({leading})
        finally:
            for task in (leading, running):  # in this order: the lease is released when the work is at its end
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for task in (leading, running):
            if not task.cancelled():
                task.result()

    def is_healthy() -> bool:
        """It serves, or somebody else leads: who stands by must not be restarted for it."""
        return clusterd.ready.is_set() or (options.leader_elect and not leader.leads)

    metrics = page(lambda: figures(leader.leads or not options.leader_elect))
    async with daemon.health(options, is_healthy, metrics):
        if not options.leader_elect:
            await work(clusterd.run())
            return
        while True:
            try:
                await stand_by_and_lead()
                return
            except Exception as error:
                if not _may_pass(error):
                    raise
                logger.warning("it stands by until it can lead again: %s", error)
            clusterd = make()
            await asyncio.sleep(LEASE_PERIOD)


async def _tell(clusterd: ClusterD, where: str) -> None:
    await clusterd.ready.wait()
    host = where.rpartition(":")[0]
    print(f"clusterd serves on {host}:{clusterd.port}", flush=True)


async def _show(kube: Kube, clusterd: ClusterD, namespace: str, pod: str) -> None:
    await clusterd.ready.wait()
    await show_leader(kube, namespace, pod)


def main(arguments: Sequence[str] | None = None) -> int:
    return daemon.run("clusterd", parser().parse_args(arguments), run)


if __name__ == "__main__":
    sys.exit(main())
