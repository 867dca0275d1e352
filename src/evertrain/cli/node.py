"""`evertrain node list|nics|stop|start|cut|slow|join`: look at virtual nodes, take one away, as if its machine had lost
its power or its cables were pulled or bad, and give it back.

The order is an annotation on the node, which the cluster obeys and answers with another: so it is kept over a restart
of the cluster, and kubectl can give it, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evertrain import aio
from evertrain.cli import running
from evertrain.cli.objects import cluster_options
from evertrain.cli.running import CommandError, UsageError
from evertrain.embedded.power import (
    CUT,
    JOINED,
    NETWORK_ORDER,
    NETWORK_REFUSED,
    NETWORK_STATE,
    NICS,
    OFF,
    ON,
    ORDER,
    SHARED,
    STATE,
    Cables,
    link,
)

if TYPE_CHECKING:
    from evertrain.cli.connection import Connection
    from evertrain.embedded.nodestats import Traffic
    from evertrain.kube.port import Object

PATIENCE = 30.0
MOST_DELAY = 60_000.0
WORDS = {
    "stop": (ORDER, STATE, OFF, "stopped"),
    "start": (ORDER, STATE, ON, "started"),
    "cut": (NETWORK_ORDER, NETWORK_STATE, CUT, "cut off"),
    "slow": (NETWORK_ORDER, NETWORK_STATE, "", ""),
    "join": (NETWORK_ORDER, NETWORK_STATE, JOINED, "joined"),
}
"""The annotation of an order and that of its answer, what they say, and what we say then."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="evertrain node",
        description="Virtual nodes of the embedded cluster.",
        epilog="`stop` kills the node's pods at once and ends its heartbeat. As on Kubernetes, the node becomes "
        "NotReady some 40 s later and its pods are deleted when their toleration is over. `cut` loses all packets of "
        "the node and its pods, which run on: nobody is told, connections hang, and the node becomes NotReady, too.",
    )
    cluster_options(parser)
    orders = parser.add_subparsers(dest="order", required=True, metavar="ORDER")
    for order, text in (
        ("list", "the nodes and whether they run"),
        ("nics", "the NICs of nodes: whether their links are up, and how many bytes went through each"),
        ("stop", "take nodes away, as if their power were gone"),
        ("start", "bring nodes back"),
        ("cut", "cut nodes off from the network, as if their cables were pulled"),
        ("slow", "have what goes in or out of nodes come late, or get lost now and then"),
        ("join", "plug them in again, and all is well"),
    ):
        # The options may come behind the order, too; one that isn't given there leaves what came before.
        given = orders.add_parser(order, help=text, description=text)
        cluster_options(given, kubeconfig=argparse.SUPPRESS, data_dir=argparse.SUPPRESS)
        if order == "nics":
            given.add_argument("names", metavar="NODE", nargs="*", help="for example node-1 (default: all that run)")
            given.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")
        elif order != "list":
            given.add_argument("names", metavar="NODE", nargs="+", help="for example node-1")
        if order == "cut":
            given.add_argument(
                "--nic",
                action="append",
                default=[],
                choices=NICS,
                help="pull out the cable of this NIC only (repeatable): the link is down, and so are those of its pods",
            )
        if order == "slow":
            given.add_argument("--delay", type=_milliseconds, metavar="TIME", help="each way, for example 50ms or 0.2s")
            given.add_argument("--loss", type=_percent, metavar="SHARE", help="each way, for example 1%%")
    arguments = parser.parse_args(argv)
    if arguments.order == "slow" and arguments.delay is None and arguments.loss is None:
        parser.error("slow takes --delay or --loss")
    return running.run("node", lambda: _main(arguments))


def _milliseconds(text: str) -> float:
    """For argparse."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s)", text)
    found = round(float(match[1]) * (1000 if match[2] == "s" else 1), 6) if match else math.nan
    if not 0 <= found <= MOST_DELAY:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 50ms or 0.2s, of at most a minute")
    return found


def _percent(text: str) -> float:
    """For argparse."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    found = round(float(match[1]), 6) if match else math.nan
    if not 0 <= found <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share like 1%")
    return found


async def _main(arguments: argparse.Namespace) -> int:
    from evertrain.cli import connection

    kube = connection.connect(connection.choose_kubeconfig(arguments.kubeconfig, arguments.data_dir))
    try:
        if arguments.order == "list":
            return await _list(kube)
        if arguments.order == "nics":
            return await _nics(kube, arguments.names, arguments.output)
        for name in arguments.names:
            await _switch(kube, name, arguments)
        return 0
    finally:
        await kube.close()


async def _list(kube: Connection) -> int:
    from evertrain.cli import printing
    from evertrain.kube.port import NODE, POD

    rows = [["NAME", "POWER", "NETWORK", "STATUS", "NPUS", "PODS"]]
    pods = (await kube.list(POD, fields="status.phase=Running")).items
    for node in (await kube.list(NODE)).items:
        name, status = node["metadata"]["name"], node.get("status") or {}
        ready = [c["status"] == "True" for c in status.get("conditions") or [] if c["type"] == "Ready"]
        state, network = _annotation(node, STATE), _annotation(node, NETWORK_STATE) or JOINED
        count = sum((pod.get("spec") or {}).get("nodeName") == name for pod in pods)
        npus = str((status.get("capacity") or {}).get("huawei.com/Ascend910", "0"))
        condition = "Ready" if ready == [True] else "NotReady"
        rows.append([name, state or "-", network if state else "-", condition, npus, str(count)])
    print(printing.aligned(rows))
    return 0


async def _nics(kube: Connection, names: Sequence[str], output: str) -> int:
    """What the nodes count, as a kubelet is asked for it."""
    from evertrain.cli import printing
    from evertrain.kube.port import NODE

    nodes = [await _node(kube, name) for name in names] or [
        node for node in (await kube.list(NODE)).items if _annotation(node, STATE) == ON
    ]
    if not nodes:
        raise CommandError("no virtual node runs")
    found: list[dict[str, str | int]] = []
    for node in nodes:
        name = node["metadata"]["name"]
        if _annotation(node, STATE) == OFF:
            raise CommandError(f"{name} is stopped: nobody counts there")
        counted = await traffic(kube, name)
        if not counted:
            raise CommandError(f"{name} has no NICs of its own: {SHARED}")
        state = _annotation(node, NETWORK_STATE)
        found += [
            {"node": name, "nic": nic, "link": link(state, nic), "received": bytes.received, "sent": bytes.sent}
            for nic, bytes in counted.items()
        ]
    if output == "json":
        print(json.dumps(found, indent=4))
    else:
        head = ["NODE", "NIC", "LINK", "RECEIVED", "SENT"]
        print(printing.aligned([head, *([str(cell) for cell in row.values()] for row in found)]))
    return 0


async def traffic(kube: Connection, node: str) -> dict[str, Traffic]:
    """By NIC; empty if the node has none of its own."""
    from evertrain.cli import connection
    from evertrain.embedded import nodestats
    from evertrain.kube.port import NODE

    path = f"{connection.path_of(NODE, None, node, 'proxy')}/{nodestats.SUMMARY}"
    return nodestats.traffic(await kube.ask("GET", path))


async def _node(kube: Connection, name: str) -> Object:
    """One that is ours."""
    from evertrain.kube.port import NODE, NotFound

    try:
        node = await kube.get(NODE, name)
    except NotFound:
        raise UsageError(f"there is no node {name}; `evertrain node list` names them") from None
    if not _annotation(node, STATE):
        raise UsageError(f"{name} is not a virtual node")
    return node


def _annotation(node: Object, key: str) -> str:
    return str((node["metadata"].get("annotations") or {}).get(key) or "")


async def _switch(kube: Connection, name: str, arguments: argparse.Namespace) -> None:
    from evertrain.kube.port import NODE

    word = arguments.order
    order, state, wanted, done = WORDS[word]

    def answer(node: Object) -> str:
        return _annotation(node, state) or (JOINED if wanted == JOINED else "")

    node = await _node(kube, name)
    if state == NETWORK_STATE and _annotation(node, STATE) == OFF:
        raise UsageError(f"{name} is stopped: it has no network to be cut off from")
    if word in ("cut", "slow"):
        before = Cables.parse(_annotation(node, order)) or Cables()
        wanted = str(before.without(*arguments.nic) if word == "cut" else before.worse(arguments.delay, arguments.loss))
        done = WORDS[wanted][3] if wanted in WORDS else f"is {wanted}"
    node = await kube.patch(NODE, name, None, {"metadata": {"annotations": {order: wanted}}})
    if answer(node) != wanted:
        version = node["metadata"]["resourceVersion"]
        changes = kube.watch(NODE, resource_version=version, fields=f"metadata.name={name}")
        try:
            async with aio.timeout(PATIENCE), contextlib.aclosing(changes):  # type: ignore[type-var]
                async for change in changes:
                    if answer(change.object) == wanted:
                        break
                    if _annotation(change.object, order) != wanted:  # taken back
                        refused = _annotation(change.object, NETWORK_REFUSED) or "somebody else wants something else"
                        raise CommandError(f"{name}: {refused}")
        except TimeoutError:
            raise CommandError(f"{name} has not obeyed in {PATIENCE:g} s; does its cluster run?") from None
    print(f"{name} {done}", flush=True)
