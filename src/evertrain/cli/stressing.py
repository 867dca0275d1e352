"""The work of `evertrain stress-test`: the order to ClusterD, and waiting for what was found."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

from evertrain.cli import ordering
from evertrain.cli.ordering import Order
from evertrain.cli.running import CommandError
from evertrain.clusterd.services.tokens import Tokens
from evertrain.embedded.clusterd import secret_file
from evertrain.wire import recover_pb2 as wire

DONE = "stress test finish, result:"


async def carry_out(arguments: argparse.Namespace) -> int:
    found = await ordering.find(arguments)
    token = _platform_token(arguments.token_secret, found.cluster)
    began = time.monotonic()
    told = await ordering.give(_order(found.uid, arguments.node, arguments.op), found.address, token, arguments)
    if not told.startswith(DONE):
        raise CommandError(f"{told}; what follows is in `evertrain timeline {arguments.job}`")
    for line in described(told.removeprefix(DONE)):
        print(line)
    print(f"stress test finish, after {time.monotonic() - began:.1f} s")
    return 0


def described(result: str) -> list[str]:
    """A line for each chip. As it came, if it is no such thing."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        return [
            f"{node}: device {device}: " + ", ".join(f"test {op} {each['result']}" for op, each in tested.items())
            for node, devices in json.loads(result).items()
            for device, tested in ((device, told["rankResult"]) for device, told in devices.items())
        ]
    return [result]


def _order(uid: str, nodes: list[str], ops: list[int]) -> Order:
    message = wire.StressTestParam(jobID=uid, allNodesOps=[] if nodes else ops)
    for node in nodes:
        message.stressParam[node].ops.extend(ops)
    return Order("StressTest", message, "SubscribeStressTestResponse", wire.StressTestRequest(jobID=uid))


def _platform_token(given: Path | None, cluster: Path) -> str:
    """Empty without a secret: ClusterD may ask for none, or for certificates."""
    file = given or secret_file(cluster)
    if given is None and not file.is_file():
        return ""
    try:
        return Tokens.read(file.read_bytes()).platform()
    except ValueError as error:
        raise CommandError(f"{file}: {error}") from None
