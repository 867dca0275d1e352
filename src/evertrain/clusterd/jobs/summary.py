"""What others are told of a job: the ConfigMaps job-summary-<job>[-<i>] and the signals of the Job service. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from evertrain.acjob import names
from evertrain.clusterd.jobs.table import COMPLETE, FAILED, device_configuration, same_places
from evertrain.clusterd.model import Job, Pod
from evertrain.kube.port import Object

PREFIX = "job-summary-"
LABELS = {"outside-job-info": "true"}
RING, RING_VALUE = "ring-controller.atlas", "ascend-910"
LIMIT = 800 * 1024
"""Bytes of a rank table in one ConfigMap."""
MOST_CHIPS = 40_000
"""A job with more has no rank table in its signals: nobody's message may be that large."""
ADD, DELETE = "add", "delete"
INITIALIZING, COMPLETED = "initializing", "complete"
NONE_YET = json.dumps({"status": INITIALIZING}, separators=(",", ":"))
CUSTOM_KEY, CUSTOM_ID = "customJobKey", "custom-job-id"
SHARED_TOR, SHARED_TOR_IP = "isSharedTor", "sharedTorIp"


@dataclass(frozen=True)
class Summary:
    job: Job
    operator: str = ADD
    ended: int = 0
    """When it was over, in seconds; 0 while it isn't."""
    serials: Mapping[str, str] = field(default_factory=dict)
    """Serial numbers of nodes."""

    @cached_property
    def servers(self) -> list[Object]:
        return _servers(self.job, self.serials)

    @cached_property
    def chips(self) -> int:
        return sum(len(server["device"]) for server in self.servers)

    @cached_property
    def tables(self) -> list[str]:
        """The rank table, cut between servers so that each part fits into a ConfigMap."""
        if not self.servers:
            return [NONE_YET]
        parts: list[list[Object]] = [[]]
        size = 0
        for server in self.servers:
            length = len(_compact(server)) + 1
            if self._is_npu:
                length += len(_compact(_ranks([server])))
            if parts[-1] and size + length > LIMIT - 4096:
                parts.append([])
                size = 0
            parts[-1].append(server)
            size += length
        return [self._table(part, len(parts)) for part in parts]

    @cached_property
    def table(self) -> str:
        """All of it."""
        return self._table(self.servers, 1) if self.servers else NONE_YET

    def _table(self, servers: list[Object], total: int) -> str:
        found: Object = {
            "status": COMPLETED if self.job.complete else INITIALIZING,
            "server_list": servers,
            "server_count": str(len(self.servers)),
            "total": total,
        }
        if self._is_npu:
            found |= {"version": "2.0", "rank_list": _ranks(servers), "rank_count": self.chips}
        return _compact(found)

    @property
    def _is_npu(self) -> bool:
        return self.job.resource == names.NPU

    @property
    def sid(self) -> str:
        labels = self.job.labels
        key = labels.get(CUSTOM_KEY) or ""
        return labels.get(key) or labels.get(CUSTOM_ID) or self.job.uid

    @property
    def shared_tor_ip(self) -> str:
        addresses = [
            pod.annotations[SHARED_TOR_IP]
            for pod in self.job.pods.values()
            if pod.annotations.get(SHARED_TOR) and pod.annotations.get(SHARED_TOR_IP)
        ]
        return addresses[0] if addresses and self._pytorch else ""

    @property
    def _pytorch(self) -> bool:
        return self.job.framework == names.PYTORCH

    def fields(self) -> dict[str, str]:
        """What the ConfigMaps say beside the rank table."""
        job = self.job
        found = {
            "job_name": job.name,
            "framework": job.framework,
            "job_id": job.uid,
            "job_status": job.status,
            "operator": self.operator,
            "time": str(job.created),
            "sid": self.sid,
        }
        optional = {
            "deleteTime": str(self.ended or ""),
            "sharedTorIp": self.shared_tor_ip,
            "masterAddr": job.master if self._pytorch else "",
        }
        return found | {name: value for name, value in optional.items() if value}

    def config_maps(self) -> list[Object]:
        labels = dict(LABELS) if self.job.resource == names.NPU else {**LABELS, RING: RING_VALUE}
        fields, tables = self.fields(), self.tables
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name_of(self.job.name, number), "namespace": self.job.namespace, "labels": labels},
                "data": {**fields, "cm_index": str(number), "total": str(len(tables)), "hccl.json": table},
            }
            for number, table in enumerate(tables)
        ]

    def signal(self) -> dict[str, str]:
        """The fields of a JobSummarySignal, but for its uuid."""
        job = self.job
        return {
            "jobId": job.uid,
            "jobName": job.name,
            "namespace": job.namespace,
            "frameWork": job.framework,
            "jobStatus": job.status,
            "time": str(job.created),
            "cmIndex": "0",
            "total": str(len(self.tables)),
            "HcclJson": self.table if self.chips <= MOST_CHIPS else "",
            "deleteTime": str(self.ended or ""),
            "sharedTorIp": self.shared_tor_ip,
            "masterAddr": job.master if self._pytorch else "",
            "operator": self.operator,
            "sid": self.sid,
        }


def summarise(job: Job, now: int, before: Summary | None = None, serials: Mapping[str, str] | None = None) -> Summary:
    """The very summary before if it says the same."""
    over = job.status in (COMPLETE, FAILED)
    ended = (before.ended if before is not None and before.ended else now) if over else 0
    if before is not None and (before.ended, before.serials) == (ended, serials or {}) and same_places(before.job, job):
        return before
    return Summary(job, ended=ended, serials=serials or {})


def deleted(summary: Summary, now: int) -> Summary:
    return replace(summary, operator=DELETE, ended=summary.ended or now)


def name_of(job: str, number: int) -> str:
    """Of the first ConfigMap, and of those that a long rank table needs beside it."""
    return f"{PREFIX}{job}" if number == 0 else f"{PREFIX}{job}-{number}"


def _servers(job: Job, serials: Mapping[str, str]) -> list[Object]:
    pods = [pod for _, pod in sorted(job.pods.items()) if pod.devices]
    nodes = [pod.node for pod in pods]
    alone = len(set(nodes)) == len(nodes)
    return [_server(pod, alone, serials.get(pod.node, "")) for pod in pods]


def _server(pod: Pod, alone: bool, serial: str) -> Object:
    known = device_configuration(pod.annotations)
    host = str(known.get("host_ip") or pod.host_ip)
    devices: list[Any] = []
    for position, device in enumerate(pod.devices):
        entry = {"device_id": device.id, "device_ip": device.ip, "rank_id": str(pod.rank * len(pod.devices) + position)}
        devices.append(entry | ({"super_device_id": device.super_id} if device.super_id else {}))
    return {
        "device": devices,
        "server_id": host if alone else str(known.get("server_id") or pod.uid),
        "host_ip": host,
        "super_pod_id": known.get("super_pod_id", 0),
        "server_name": pod.node,
        "server_sn": serial,
        "pod_name": pod.name,
        "container_ids": dict(pod.containers),
    }


def _ranks(servers: list[Object]) -> list[Object]:
    return [
        {"rank_id": int(device["rank_id"]), "device_id": device["device_id"]}
        for server in servers
        for device in server["device"]
    ]


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
