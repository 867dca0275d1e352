"""`evertrain up`: a cluster in this process, until it is told to end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain import aio
from evertrain.cli import running
from evertrain.cli.running import CommandError
from evertrain.embedded import instance

if TYPE_CHECKING:
    from evertrain.embedded.cluster import Cluster, Settings

MOST_NODES = 1000
MOST_NPUS = 64
START_PATIENCE, END_PATIENCE = 60.0, 10.0
READY = b"ready\n"
WITHOUT_CLUSTERD = (
    "Without ClusterD nobody recovers jobs or takes pods off a lost node, whatever fault-scheduling says; "
    "`evertrain clusterd` beside this cluster does.\n"
)
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    arguments.data_dir = arguments.data_dir.expanduser().absolute()
    if arguments.kubeconfig:
        arguments.kubeconfig = arguments.kubeconfig.expanduser().absolute()
    check_nodes(parser, arguments)
    if not 0 <= arguments.port <= 65535:
        parser.error("--port is between 0 and 65535")
    if arguments.clusterd and arguments.clusterd_addr:
        check_clusterd(parser, arguments.clusterd_addr)
    if not arguments.node_grace >= 1:
        parser.error("--node-grace is at least 1")
    if arguments.detach:
        return running.run("up", lambda: _detach(argv, arguments.data_dir))
    return running.run("up", lambda: _up(arguments))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain up",
        description="Start a cluster on this machine: an API server that kubectl understands, a scheduler, the\n"
        "AscendJob operator, and virtual nodes whose pods are processes. It lasts until Ctrl-C or `evertrain down`;\n"
        "its objects are kept in the data directory and are there again at the next start.",
        epilog="examples:\n"
        "  evertrain up                                        2 nodes with 8 NPUs each, in the foreground\n"
        "  evertrain up --nodes 4 --npus 16 --detach           in the background; `evertrain down` ends it\n"
        "  evertrain up --node-label example-key=example-value for jobs with that nodeSelector\n\n"
        "then, in another terminal, as printed at the start:\n"
        "  export KUBECONFIG=~/.evertrain/cluster/kubeconfig\n"
        "  kubectl apply -f job.yaml; kubectl get acjob,pods   or, without kubectl: evertrain run job.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --detach is taken out of the command line by its name
    )
    node_options(parser)
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=instance.default_folder(),
        metavar="DIR",
        help="objects, logs and volumes (default: $EVERTRAIN_DATA_DIR, else ~/.evertrain/cluster)",
    )
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="where to write it (default: DIR/kubeconfig)")
    parser.add_argument("--port", type=int, default=0, help="of the API server on 127.0.0.1 (default: a free one)")
    parser.add_argument("--detach", action="store_true", help="go on in the background; messages go to DIR/cluster.log")
    parser.add_argument(
        "--no-operator", dest="operator", action="store_false", help="leave it out; see `evertrain operator`"
    )
    parser.add_argument(
        "--clusterd-addr",
        default=os.environ.get("EVERTRAIN_CLUSTERD_ADDR") or None,
        metavar="HOST:PORT",
        help="where ClusterD serves gRPC on this machine; port 0: a free one (default: $EVERTRAIN_CLUSTERD_ADDR, else "
        "127.0.0.1:8899, or a free port if that one is in use)",
    )
    parser.add_argument(
        "--clusterd-insecure",
        action="store_true",
        help="ClusterD asks nobody for a token, for clients of the original; plain text on this machine",
    )
    parser.add_argument(
        "--no-clusterd", dest="clusterd", action="store_false", help="leave it out; see `evertrain clusterd`"
    )
    parser.add_argument(
        "--node-grace",
        type=running.seconds,
        default=40.0,
        metavar="S",
        help="a silent node is NotReady after this (default 40)",
    )
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about what the parts do")
    return parser


def node_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=2, help="virtual nodes (default 2)")
    parser.add_argument("--npus", type=int, default=8, help="huawei.com/Ascend910 on each (default 8)")
    parser.add_argument(
        "--node-label", action="append", default=[], metavar="KEY=VALUE", help="on every node; repeatable"
    )
    network = parser.add_mutually_exclusive_group()
    network.add_argument(
        "--own-network",
        action="store_true",
        default=None,
        help="every pod has ports, loopback and addresses of its own, every node two NICs; nothing leaves the machine "
        "(default where the kernel allows it)",
    )
    network.add_argument(
        "--shared-network",
        dest="own_network",
        action="store_false",
        help="pods are in the network of this machine, with all that it reaches; jobs that listen on the same port run "
        "one after the other",
    )


def check_nodes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.nodes <= MOST_NODES:
        parser.error(f"--nodes is between 1 and {MOST_NODES}")
    if not 0 <= arguments.npus <= MOST_NPUS:
        parser.error(f"--npus is between 0 and {MOST_NPUS}")
    for label in arguments.node_label:
        key, sign, value = label.partition("=")
        if not sign or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            parser.error(f"--node-label {label!r} is not of the form key=value, as labels are written")


def check_clusterd(parser: argparse.ArgumentParser, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        good = ipaddress.IPv4Address(host).is_loopback and port.isdecimal() and int(port) <= 65535
    except ValueError:
        good = False
    if not good:
        parser.error(
            f"--clusterd-addr {address!r} is not of the form 127.0.0.1:8899: here, ClusterD serves this machine only"
        )


def settings_of(arguments: argparse.Namespace, folder: Path) -> Settings:
    from evertrain.embedded import clusterd
    from evertrain.embedded.cluster import Settings

    address = getattr(arguments, "clusterd_addr", clusterd.FREE)  # of `evertrain run`: such clusters may be many
    return Settings(
        folder=folder,
        nodes=arguments.nodes,
        npus=arguments.npus,
        labels=dict(label.split("=", 1) for label in arguments.node_label),
        kubeconfig=getattr(arguments, "kubeconfig", None),
        port=getattr(arguments, "port", 0),
        operator=getattr(arguments, "operator", True),
        clusterd=(address or clusterd.ADDRESS) if getattr(arguments, "clusterd", True) else "",
        clusterd_elsewhere=address is None,
        clusterd_insecure=getattr(arguments, "clusterd_insecure", False),
        node_grace=getattr(arguments, "node_grace", 40.0),
        own_network=arguments.own_network,
    )


async def _up(arguments: argparse.Namespace) -> int:
    from evertrain.embedded.cluster import CannotStart, Cluster

    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    running.on_signals(task.cancel, *ends)
    settings = settings_of(arguments, arguments.data_dir)
    try:
        async with Cluster(settings) as cluster:
            running.on_signals(stop.set, *ends)
            if cluster.taken_over:
                print("evertrain: the cluster before did not end in order; its objects are taken over", flush=True)
            detached = arguments.ready_fd >= 0
            print(_welcome(settings, cluster, detached=detached), flush=True)
            if arguments.ready_fd >= 0:
                os.write(arguments.ready_fd, READY)
                os.close(arguments.ready_fd)
            await stop.wait()
            # A second Ctrl-C doesn't wait for pods that won't end.
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            print("evertrain: ending the pods and the cluster", flush=True)
    except CannotStart as error:
        raise CommandError(str(error)) from None
    except asyncio.CancelledError:
        return running.INTERRUPTED
    return 0


def _welcome(settings: Settings, cluster: Cluster, *, detached: bool) -> str:
    end = f"evertrain down --data-dir {shlex.quote(str(settings.folder))}" if detached else "Ctrl-C"
    if detached and settings.folder == instance.default_folder():
        end = "evertrain down"
    about = _about_clusterd(settings, cluster.clusterd)
    if cluster.shared is not None:
        about += f"{cluster.shared.text()}\n"
    return f"""\
A cluster of {settings.text()} runs. To use it:

  export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}
  kubectl get nodes
  kubectl apply -f job.yaml            # or, without kubectl: evertrain run job.yaml

{about}{end} ends it and its pods; objects stay in {settings.folder}."""


def _about_clusterd(settings: Settings, clusterd: str) -> str:
    if not clusterd:
        return WITHOUT_CLUSTERD
    who = "anybody on this machine" if settings.clusterd_insecure else "whoever has a job's token"
    moved = settings.clusterd_elsewhere and clusterd != settings.clusterd
    why = f", for {settings.clusterd} is in use" if moved else ""
    return f"ClusterD leads the recovery of jobs; it serves {who} on {clusterd}{why}.\n"


async def _detach(argv: Sequence[str], folder: Path) -> int:
    """The same command in a session of its own; returns when it serves, or with what it complained about."""
    running_one = instance.find(folder)
    if running_one is not None:
        raise CommandError(str(instance.InUse(folder, running_one)))
    log = folder / instance.LOG
    reader, writer = os.pipe()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What the cluster before had to say stays: it may tell why it isn't there any more.
        with log.open("ab") as output:
            before = output.tell()
            kept = [argument for argument in argv if argument != "--detach"]
            # -P: the user's folder may have files that are named as modules are.
            command = [sys.executable, "-P", "-m", "evertrain.cli", "up", *kept, "--ready-fd", str(writer)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
    finally:
        os.close(writer)
    try:
        async with aio.timeout(START_PATIENCE):
            said = await _read(reader)
    except TimeoutError:
        await _end(process)
        raise CommandError(f"the cluster did not start within {START_PATIENCE:g} s; what it said is in {log}") from None
    except BaseException:
        await _end(process)
        raise
    text = log.read_bytes()[before:].decode(errors="replace").strip()
    if said != READY:
        raise CommandError(f"the cluster did not start (exit code {process.wait()}):\n{text}")
    print(text)
    return 0


async def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, END_PATIENCE)


async def _read(file: int) -> bytes:
    """What is written to a pipe, up to the first line or until its other end is gone."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    with contextlib.ExitStack() as stack:
        pipe = stack.enter_context(os.fdopen(file, "rb"))
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        stack.callback(transport.close)
        return await stream.readline()
