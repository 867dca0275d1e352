"""The work of `evertrain switch-nic`: the order to ClusterD, and waiting for what became of it."""

from __future__ import annotations

import argparse
import time

from evertrain.cli import nics, ordering
from evertrain.cli.ordering import Order
from evertrain.cli.running import CommandError
from evertrain.wire import recover_pb2 as wire

DONE = "switch nic finish"


async def carry_out(arguments: argparse.Namespace) -> int:
    found = await ordering.find(arguments)
    wanted = nics.operations(arguments.node, arguments.dev, arguments.op, nics.used(found.pods))
    for line in nics.described(wanted):
        print(line, flush=True)
    began = time.monotonic()
    told = await ordering.give(_order(found.uid, wanted), found.address, found.token, arguments)
    if told != DONE:
        raise CommandError(f"{told}; what follows is in `evertrain timeline {arguments.job}`")
    print(f"{told}, after {time.monotonic() - began:.1f} s")
    return 0


def _order(uid: str, wanted: nics.Operations) -> Order:
    message = wire.SwitchNics(jobID=uid)
    for node, (devices, ops) in wanted.items():
        message.nicOps[node].dev.extend(devices)
        message.nicOps[node].op.extend(ops)
    return Order("SwitchNicTrack", message, "SubscribeSwitchNicSignal", wire.SwitchNicRequest(jobID=uid))
