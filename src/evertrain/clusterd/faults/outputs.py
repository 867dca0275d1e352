"""What is written for schedulers and others: the contents of cluster-info-* and fault-job-info. Pure.

Each node is written once for each change of it, and stays on the page (ConfigMap) that it is on while it fits there; so
a change of a node rewrites one page, however many nodes there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from evertrain.clusterd.faults.result import Result
from evertrain.clusterd.model import Job, JobFaults
from evertrain.faultcodes.levels import HEALTHY, NODE_LEVELS
from evertrain.wire import faultinfo
from evertrain.wire.faultinfo import PUBLIC, DeviceInfo, NodeInfo, SwitchInfo, device_list, go_json

NAMESPACE = "mindx-dl"
LABELS = {"mx-consumer-volcano": "true"}
DEVICES, SWITCHES, NODES = "cluster-info-device-", "cluster-info-switch-", "cluster-info-node-cm"
JOB_INFO = "fault-job-info"
LARGEST = 800 * 1024
"""Bytes of a page."""


class _Device(msgspec.Struct):
    DeviceList: dict[str, str]
    UpdateTime: int
    CmName: str
    SuperPodID: int
    RackID: int
    ServerIndex: int


class _Switch(msgspec.Struct):
    FaultCode: list[str]
    FaultLevel: str
    UpdateTime: int
    NodeStatus: str
    FaultTimeAndLevelMap: dict[str, object]
    CmName: str


class _Node(msgspec.Struct):
    FaultDevList: list[object]
    NodeStatus: str
    CmName: str
    UpdateTime: int


def device_entry(node: str, info: DeviceInfo) -> str:
    """A node in cluster-info-device-<n>. Public faults have their times in seconds there, others in milliseconds."""
    faults = tuple(
        replace(fault, time_ms=fault.time_ms // 1000) if fault.kind == PUBLIC else fault for fault in info.faults
    )
    name = faultinfo.DEVICE_PREFIX + node
    lists = device_list(replace(info, faults=faults))
    rack = info.rack if info.rack is not None else 0
    entry = _Device(lists, info.update_time, name, info.super_pod, rack, info.server_index)
    return f"{go_json(name)}:{go_json(entry)}"


def switch_entry(node: str, info: SwitchInfo) -> str:
    name, fields = faultinfo.SWITCH_PREFIX + node, faultinfo.switch_fields(info)
    times: dict[str, object] = dict(fields.FaultTimeAndLevelMap or {})
    entry = _Switch(fields.FaultCode or [], info.level, info.update_time, info.status, times, name)
    return f"{go_json(name)}:{go_json(entry)}"


def node_entry(node: str, info: NodeInfo, now_ms: int) -> str:
    name = faultinfo.NODE_PREFIX + node
    entry = _Node(list(faultinfo.node_fields(info).FaultDevList or ()), info.status, name, now_ms)
    return f"{go_json(name)}:{go_json(entry)}"


class Pages:
    """Entries, spread over pages that are no larger than allowed."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._pages: list[dict[str, str]] = []
        self._sizes: list[int] = []
        self._page_of: dict[str, int] = {}

    def put(self, key: str, entry: str | None) -> set[int]:
        """An entry; None: it is gone. The pages that change by it."""
        before = self._page_of.get(key)
        changed = set()
        if before is not None:
            old = self._pages[before].get(key, "")
            if old == entry:
                return set()
            if entry is not None and self._sizes[before] + _size(entry) - _size(old) <= self._largest:
                self._pages[before][key] = entry
                self._sizes[before] += _size(entry) - _size(old)
                return {before}
            del self._pages[before][key], self._page_of[key]
            self._sizes[before] -= _size(old)
            changed.add(before)
        if entry is not None:
            changed.add(self._place(key, entry))
        return changed

    def text(self, page: int) -> str:
        """Empty: nothing is on it (any more)."""
        if page >= len(self._pages) or not self._pages[page]:
            return ""
        return "{" + ",".join(self._pages[page].values()) + "}"

    def __len__(self) -> int:
        return len(self._pages)

    def _place(self, key: str, entry: str) -> int:
        size = _size(entry)
        for page, taken in enumerate(self._sizes):
            if not self._pages[page] or taken + size <= self._largest:
                break
        else:
            page = len(self._pages)
            self._pages.append({})
            self._sizes.append(2)
        self._pages[page][key] = entry
        self._sizes[page] += size
        self._page_of[key] = page
        return page


def _size(entry: str) -> int:
    """With its comma."""
    return len(entry.encode()) + 1


class ClusterInfo:
    """The contents of cluster-info-*, kept up to date."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._devices, self._switches = Pages(largest), Pages(largest)
        self._nodes: dict[str, tuple[NodeInfo, str]] = {}
        self._beyond: dict[str, int] = {}
        self._first = True

    def found(self, names: Iterable[str]) -> None:
        """ConfigMaps that are there already, from before a restart: those that are not needed are emptied."""
        for name in names:
            for prefix in (DEVICES, SWITCHES):
                rest = name.removeprefix(prefix)
                if name != rest and rest.isascii() and rest.isdecimal() and len(rest) < 6:
                    self._beyond[prefix] = max(self._beyond.get(prefix, 0), int(rest) + 1)

    def update(self, result: Result, now_ms: int) -> dict[str, str]:
        """ConfigMaps to be written: their content by name. Empty text: there is nothing to say in it (any more).

        A node that moves is on its new page before it leaves the old one, if they are written in this order.
        """
        names = {*result.devices, *result.switches, *result.nodes} if self._first else result.news
        devices: set[int] = set()
        switches: set[int] = set()
        nodes = self._first
        for name in sorted(names):
            device, switch, info = result.devices.get(name), result.switches.get(name), result.nodes.get(name)
            devices |= self._devices.put(name, device_entry(name, device) if device is not None else None)
            switches |= self._switches.put(name, switch_entry(name, switch) if switch is not None else None)
            nodes |= self._put_node(name, info, now_ms)
        written = {}
        for prefix, pages, changed in ((DEVICES, self._devices, devices), (SWITCHES, self._switches, switches)):
            if self._first:
                changed |= set(range(max(len(pages), self._beyond.get(prefix, 0))))
            for page in sorted(changed, reverse=True):
                written[f"{prefix}{page}"] = pages.text(page)
        if nodes:
            written[NODES] = self._node_text()
        self._first = False
        return written

    def _node_text(self) -> str:
        """Schedulers read one ConfigMap of this kind, whatever there is to say. Nodes that it has no room for are those
        with which least is wrong: so the others are still heard of."""
        if sum(_size(entry) for _, entry in self._nodes.values()) + 2 <= self._largest:
            fitting = [entry for _, entry in self._nodes.values()]
        else:
            fitting, left = [], self._largest - 2
            for _, entry in sorted(self._nodes.values(), key=lambda each: _harm(each[0]), reverse=True):
                left -= _size(entry)
                if left < 0:
                    break
                fitting.append(entry)
        return "{" + ",".join(fitting) + "}" if fitting else ""

    def _put_node(self, name: str, info: NodeInfo | None, now_ms: int) -> bool:
        before = self._nodes.get(name)
        if (before[0] if before is not None else None) == info:
            return False
        if info is None:
            del self._nodes[name]
        else:
            self._nodes[name] = (info, node_entry(name, info, now_ms))
        return True


def _harm(info: NodeInfo) -> tuple[bool, int]:
    """How much it matters that others know of it."""
    levels = [NODE_LEVELS.index(fault.level) for fault in info.faults if fault.level in NODE_LEVELS]
    return info.status != HEALTHY, max(levels, default=0)


class _SuperPod(msgspec.Struct):
    SdIds: list[str]
    FaultNodes: dict[str, dict[str, str]]
    NodeNames: list[str]
    FaultTimes: int
    JobId: str


def fault_job_info(job: Job, faults: JobFaults, super_pods: Mapping[str, int | None], now_s: int) -> str:
    """What noded needs to free the job's communication on its super-pods; empty if no faulty node is in one."""
    faulty = {fault.node for fault in faults.ranks}
    found: dict[str, _SuperPod] = {}
    for pod in sorted(job.pods.values(), key=lambda pod: pod.rank):
        number = super_pods.get(pod.node)
        if number is None or number < 0:
            continue
        entry = found.setdefault(str(number), _SuperPod([], {}, [], now_s, job.uid))
        if pod.node in faulty:
            entry.FaultNodes[pod.node] = {}
            entry.SdIds += [device.super_id for device in pod.devices if device.super_id]
        if pod.node not in entry.NodeNames:
            entry.NodeNames.append(pod.node)
    concerned = {number: entry for number, entry in found.items() if entry.FaultNodes}
    return go_json(concerned) if concerned else ""
