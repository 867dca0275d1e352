"""The fault centre alone: what many nodes publish, read and merged in one pass, and then one node that changes."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field

from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.faults.outputs import ClusterInfo
from evertrain.clusterd.model import Device, Job, Pod
from evertrain.wire.faultinfo import (
    DEVICE_INFO,
    NODE_INFO,
    ChipFault,
    DeviceInfo,
    NodeFault,
    NodeInfo,
    encode_device,
    encode_node,
)

CHIPS, PODS = 8, 10
EVERY = 20
"""Of the nodes one in so many has a fault."""
CHANGES = 50
NOW = 1_760_000_000_000


@dataclass
class Merged:
    all: float
    pages: int
    one: list[float] = field(default_factory=list)


def merge(nodes: int) -> Merged:
    """With all their chips in use by jobs of ten nodes."""
    names = [f"node-{number:05}" for number in range(nodes)]
    published = [(name, _device(number % EVERY == 0), _node(number % EVERY == 1)) for number, name in enumerate(names)]
    centre, info = FaultCentre(), ClusterInfo()
    for first in range(0, nodes, PODS):
        job = _job(f"job-{first}", names[first : first + PODS])
        centre.job(job.uid, job)
    gc.collect()
    began = time.perf_counter()
    for name, device, node in published:
        centre.device(name, device)
        centre.node(name, node)
    pages = info.update(centre.process(NOW), NOW)
    found = Merged(time.perf_counter() - began, len(pages))
    for number in range(CHANGES):
        name, data = names[number * 7 % nodes], _device(True, NOW + number)
        began = time.perf_counter()
        centre.device(name, data)
        info.update(centre.process(NOW + 1000 + number), NOW)
        found.one.append(time.perf_counter() - began)
    return found


def _device(faulty: bool, when: int = NOW) -> dict[str, str]:
    chips = tuple(f"Ascend910-{chip}" for chip in range(CHIPS))
    faults = (ChipFault(chips[0], "80E18402", "SeparateNPU", when),) if faulty else ()
    info = DeviceInfo(available=chips[len(faults) :], unhealthy=chips[: len(faults)], faults=faults)
    return {DEVICE_INFO: encode_device(info)}


def _node(faulty: bool) -> dict[str, str]:
    faults = (NodeFault("CPU", 1, ("0000001D",), "SeparateFault"),) if faulty else ()
    return {NODE_INFO: encode_node(NodeInfo(faults, "UnHealthy" if faulty else "Healthy"))}


def _job(uid: str, nodes: list[str]) -> Job:
    chips = tuple(Device(str(chip)) for chip in range(CHIPS))
    pods = {
        rank: Pod(rank, f"{uid}-{rank}", f"{uid}-{rank}", node, phase="Running", devices=chips)
        for rank, node in enumerate(nodes)
    }
    return Job(
        uid, uid, "default", replicas=len(pods), per_pod=CHIPS, status="running", pods=pods, complete=True,
        labels={"process-recover-enable": "on"}, annotations={"recover-strategy": "retry,recover"},
    )  # fmt: skip
