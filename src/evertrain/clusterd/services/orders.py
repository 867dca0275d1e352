"""What a platform may order of a job: link failover and stress test. Pure.

The checks come in the reference's order with its words; the first that fails is the answer (code 413).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import StressTest, SwitchNics
from evertrain.clusterd.services.ports import Reply
from evertrain.clusterd.services.replies import Code

AIC, P2P = 0, 1
OPERATIONS = (AIC, P2P)
ALL_NODES = "AllNodes"
RUNNING = "running"
DEVICE = "device"
"""The documents write `device0`; rank tables have `0`."""

NICS_ORDERED = Reply(Code.OK, "switching operation was successfully distributed")
STRESS_ORDERED = Reply(Code.OK, "stress test operation was successfully distributed")


class Refused(ValueError):
    """Its text is the answer's."""


def nics_busy(job: str) -> Reply:
    return Reply(Code.ORDER_RUNNING, f"jobId={job} nic is swtiching, or job recovering")


def stress_busy(job: str) -> Reply:
    return Reply(Code.ORDER_RUNNING, f"jobId={job} om is running, or job recovering")


def switch_nics(
    name: str,
    job: Job | None,
    registered: bool,
    nodes: Mapping[str, tuple[Sequence[str], Sequence[bool]]],
    super_pod: Callable[[str], int | None],
) -> SwitchNics:
    """By node: devices, and for each whether it goes to its standby link. Refused says what is wrong."""
    if job is None:
        raise Refused(f"job:{name} not exist")
    if not registered:
        raise Refused(f"job:{name} is not registered")
    if job.status != RUNNING:
        raise Refused(f"job:{name} is not running")
    if not nodes:  # the original pauses the training, and forgets why
        raise Refused("dev or op is empty")
    ranks = ranks_of_nodes(job)
    for node in nodes:
        if node not in ranks or super_pod(node) is None:
            raise Refused(f"node:{node} not exist in job:{name}")
    wanted: dict[int, bool] = {}
    for node, (devices, ops) in nodes.items():
        if len(devices) != len(ops):
            raise Refused("dev and op length is not equal")
        if not devices:
            raise Refused("dev or op is empty")
        for device, op in zip(devices, ops, strict=True):
            rank = ranks[node].get(device.removeprefix(DEVICE))
            if rank is None:
                raise Refused(f"device:{device} not exist in node:{node}")
            wanted[rank] = op
        if (super_pod(node) or 0) < 0:
            raise Refused(f"node:{node} should operate in superPodID")
    return SwitchNics(dict(sorted(wanted.items())))


def stress_test(
    name: str, job: Job | None, registered: bool, nodes: Mapping[str, Sequence[int]], everywhere: Sequence[int]
) -> StressTest:
    """By node: which tests; `everywhere`, if there are any, takes the place of all these."""
    if job is None:
        raise Refused(f"job:{name} not exist")
    if not registered:
        raise Refused(f"job:{name} is not registered")
    ranks = ranks_of_nodes(job)
    if everywhere:
        _check_operations(ALL_NODES, everywhere)
        nodes = dict.fromkeys(ranks, everywhere)
    for node, ops in nodes.items():
        _check_operations(node, ops)
    if not nodes:
        raise Refused("stress test node is nil")
    for node, ops in nodes.items():
        if not ops:
            raise Refused(f"node:{node} stress test ops is 0")
        if node not in ranks:
            raise Refused(f"node:{node} not exist in job:{name}")
    wanted = {rank: tuple(ops) for node, ops in nodes.items() for rank in ranks[node].values()}
    return StressTest(dict(sorted(wanted.items())))


def _check_operations(node: str, ops: Sequence[int]) -> None:
    for op in ops:
        if op not in OPERATIONS:
            raise Refused(f"op:{op} not exist in support operation:[0 1]")
    if len(set(ops)) != len(ops):
        raise Refused(f"node:{node} stress test ops should not repeat")


def ranks_of_nodes(job: Job) -> dict[str, dict[str, int]]:
    """The job's rank table: node, device id, rank."""
    found: dict[str, dict[str, int]] = {}
    for pod in job.pods.values():
        if pod.node:
            ranks = job.ranks_of(pod.rank)
            devices = {device.id: rank for device, rank in zip(pod.devices, ranks, strict=False)}
            found.setdefault(pod.node, {}).update(devices)
    return {node: devices for node, devices in found.items() if devices}
