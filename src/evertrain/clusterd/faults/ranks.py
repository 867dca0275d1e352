"""Which ranks of a job the faults of nodes and chips hit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evertrain.clusterd.faults.inplace import CURABLE
from evertrain.clusterd.faults.jobview import JobView
from evertrain.clusterd.faults.relations import SEPARATE, Verdict
from evertrain.clusterd.faults.retry import REPORT_MS, Reports, may_retry, type_of
from evertrain.clusterd.faults.seen import IN_PLACE, NO_FAULT, RETRIED, YOUNG, Seen, number
from evertrain.clusterd.faults.wellknown import MEMORY_ERROR, RETRY_FAILED
from evertrain.clusterd.model import (
    HEALTHY,
    MEMORY,
    OTHER,
    SUB_HEALTHY,
    UNHEALTHY,
    FaultDevice,
    JobFaults,
    Pod,
    RankFault,
)
from evertrain.faultcodes.levels import (
    FREE_RESTART,
    NORMAL,
    NORMAL_NETWORK,
    NOT_HANDLE,
    PRE_SEPARATE_CHIP,
    RESTART_BUSINESS,
    SEPARATE_CHIP,
    SEPARATE_NODE,
    SUB_HEALTH,
)
from evertrain.wire.faultinfo import NODE_FAULT, NodeInfo, SwitchInfo

NO_DEVICE = "-1"
_NO_JOB_FAULT = frozenset({NORMAL, NORMAL_NETWORK, NOT_HANDLE, PRE_SEPARATE_CHIP, ""})
"""A chip with such faults goes on with its job."""


@dataclass(frozen=True, slots=True)
class NodeFaults:
    """All that is known of a node that has faults."""

    name: str
    ip: str = ""
    serial: str = ""
    ready: bool = True
    seen: Sequence[Seen] = ()
    unhealthy: frozenset[str] = frozenset()
    """Chips in the scheduler's lists of bad ones."""
    switch: SwitchInfo = SwitchInfo()
    """As the scheduler sees it."""
    young: SwitchInfo = SwitchInfo()
    """With all faults."""
    node: NodeInfo = NodeInfo()


def job_faults(
    view: JobView,
    faulty: Callable[[str], NodeFaults | None],
    reports: Reports,
    verdicts: Iterable[Verdict],
    now: int,
) -> tuple[JobFaults, int | None]:
    """What is wrong with the job, and when that changes by time alone. `faulty`: None of a node without faults."""
    ranks: dict[tuple[int, str, str], RankFault] = {}
    devices: dict[FaultDevice, None] = {}
    wakes: list[int] = []

    def hit(fault: RankFault) -> None:
        ranks.setdefault((fault.rank, fault.device, fault.code), fault)

    for name, pods in view.pods.items():
        node = faulty(name)
        if node is None:
            continue
        for device in _devices(node, pods, view):
            devices[device] = None
        for pod in pods:
            for fault in _of_node(view, pod, node):
                hit(fault)
        for each in node.seen:
            found = _of_chip(view, each, node, reports, now)
            if found is not None:
                hit(found)
    for fault in _reported(view, reports, now, wakes, {fault.rank for fault in ranks.values() if fault.type != OTHER}):
        hit(fault)
    related = list(verdicts)
    for verdict in related:
        for fault in _related(view, verdict):
            hit(fault)
    found_ranks = tuple(sorted(ranks.values(), key=lambda each: (each.rank, each.device, each.code)))
    health = _health(found_ranks, any(verdict.verdict == SEPARATE for verdict in related))
    ordered = tuple(sorted(devices, key=lambda each: (each.node, each.type, each.device, each.code, each.time)))
    return JobFaults(view.uid, health, found_ranks, ordered), min(wakes, default=None)


def _of_chip(view: JobView, each: Seen, node: NodeFaults, reports: Reports, now: int) -> RankFault | None:
    place, fault = each.place, each.fault
    if place is None or place.job != view.uid or each.hidden in (NO_FAULT, YOUNG):
        return None
    if fault.level in _NO_JOB_FAULT and each.hidden != RETRIED:
        return None
    if fault.level == FREE_RESTART and fault.chip not in node.unhealthy:
        return None
    type_ = type_of(fault.code) if view.retries else OTHER
    if type_ != OTHER:
        reported = reports.when(view.uid, place.rank, type_, now)
        if not may_retry(fault.time_ms, reported, now):
            if each.hidden == RETRIED:
                return None  # nobody knows yet whether the job can cure it
            type_ = OTHER
    return RankFault(
        rank=place.rank,
        pod=place.pod,
        pod_uid=place.pod_uid,
        node=node.name,
        device=place.device,
        code=fault.code,
        level=fault.level if fault.level not in _NO_JOB_FAULT else RESTART_BUSINESS,
        time_ms=fault.time_ms,
        type=type_,
        in_place=each.hidden == IN_PLACE or (each.hidden == RETRIED and _cured_in_place(view, fault.level)),
    )


def _cured_in_place(view: JobView, level: str) -> bool:
    """If running the step again does not help, starting the process again may."""
    return view.restarts_in_place and (level in CURABLE or level in _NO_JOB_FAULT)


def _of_node(view: JobView, pod: Pod, node: NodeFaults) -> list[RankFault]:
    """What hits every rank of a pod."""
    found: list[tuple[str, str, int]] = []
    if not node.ready:
        found.append(("", SEPARATE_CHIP, 0))
    if node.switch.status in (UNHEALTHY, SUB_HEALTHY):
        codes = ",".join(dict.fromkeys(fault.code for fault in node.switch.faults))
        since = min((fault.time_ms for fault in node.switch.faults), default=0)
        found.append((codes, SEPARATE_CHIP if node.switch.status == UNHEALTHY else SUB_HEALTH, since))
    if node.node.status == UNHEALTHY:
        codes = ",".join(dict.fromkeys(code for fault in node.node.faults for code in fault.codes))
        found.append((codes, SEPARATE_CHIP, 0))
    if not found or view.table is None:
        return []
    return [
        RankFault(rank, pod.rank, pod.uid, node.name, NO_DEVICE, code, level, since)
        for rank in view.table.ranks_of(pod.rank)
        for code, level, since in found
    ]


def _reported(view: JobView, reports: Reports, now: int, wakes: list[int], known: set[int]) -> list[RankFault]:
    """What processes have reported, and their chips have not."""
    found: list[RankFault] = []
    if not view.retries or view.table is None:
        return found
    for rank, type_, then in reports.of(view.uid, now):
        pod = view.table.pods.get(view.table.pod_of(rank))
        if rank in known or pod is None or now - then >= REPORT_MS:
            continue
        wakes.append(then + REPORT_MS)
        index = rank - view.table.ranks_of(pod.rank).start
        device = pod.devices[index].id if index < len(pod.devices) else NO_DEVICE
        code = MEMORY_ERROR if type_ == MEMORY else RETRY_FAILED
        found.append(
            RankFault(
                rank, pod.rank, pod.uid, pod.node, device, code, RESTART_BUSINESS, then, type_, view.restarts_in_place,
                reported=True,
            )
        )  # fmt: skip
    return found


def _related(view: JobView, verdict: Verdict) -> list[RankFault]:
    level = SEPARATE_NODE if verdict.verdict == SEPARATE else SUB_HEALTH
    if verdict.chip:
        place = view.places.get(verdict.node, {}).get(number(verdict.chip))
        if place is None or place.pod_uid not in verdict.pods:
            return []
        return [
            RankFault(
                place.rank, place.pod, place.pod_uid, verdict.node, place.device, verdict.code, level, verdict.time_ms
            )
        ]
    return [
        RankFault(rank, pod.rank, pod.uid, verdict.node, NO_DEVICE, verdict.code, level, verdict.time_ms)
        for pod in view.pods.get(verdict.node, ())
        if pod.uid in verdict.pods and view.table is not None
        for rank in view.table.ranks_of(pod.rank)
    ]


def _devices(node: NodeFaults, pods: Iterable[Pod], view: JobView) -> list[FaultDevice]:
    """For those who subscribe to faults: also what is ignored, and what is withheld from schedulers for its age."""
    ip = node.ip or next((pod.host_ip for pod in pods if pod.host_ip), "")
    found = []
    if not node.ready:
        found.append(FaultDevice(node.name, ip, node.serial, NO_DEVICE, "Node", "", SEPARATE_CHIP, kind=NODE_FAULT))
    for switch in node.young.faults:
        found.append(
            FaultDevice(
                node.name, ip, node.serial, NO_DEVICE, "Switch", switch.code, switch.level or node.young.level,
                str(switch.chip), str(switch.port), str(switch.raised or switch.time_ms // 1000),
            )
        )  # fmt: skip
    for part in node.node.faults:
        for code in part.codes:
            found.append(FaultDevice(node.name, ip, node.serial, str(part.id), part.type, code, part.level))
    for each in node.seen:
        if each.place is None or each.place.job != view.uid or each.hidden in (NO_FAULT, RETRIED):
            continue
        fault = each.fault
        found.append(
            FaultDevice(
                node.name, ip, node.serial, each.place.device, "NPU", fault.code, fault.level,
                time=str(fault.time_ms), kind=fault.kind,
            )
        )  # fmt: skip
    return found


def _health(ranks: Iterable[RankFault], separate: bool) -> str:
    levels = {fault.level for fault in ranks}
    if separate or levels - {SUB_HEALTH, *_NO_JOB_FAULT}:
        return UNHEALTHY
    return SUB_HEALTHY if SUB_HEALTH in levels else HEALTHY
