"""The rank table (hccl.json): which rank sits on which chip of which server. Pure.

The scheduler writes the chips of a pod into an annotation; when all pods have theirs, the table is complete. While pods
are missing, an existing table is marked as not valid and otherwise left as it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evertrain.acjob import names
from evertrain.acjob.job import Job, ascend_container, npu_request
from evertrain.acjob.pods import is_extra, is_going, place
from evertrain.acjob.ranktable_v2 import rank_list
from evertrain.kube.port import Object

INITIALIZING, COMPLETED = "initializing", "completed"
SUPER_POD_POLICIES = ("chip2-node16-sp", "chip2-node8-sp", names.MULTILEVEL)
SUPER_POD_NODES = ("module-a3-16-super-pod", "module-a3-8-super-pod")
TABLE_ANNOTATIONS = (
    *names.DEVICE_CONFIGURATIONS,
    names.RANK_INDEX,
    names.HARDWARE_TYPE,
    names.SUPER_POD_RANK,
    names.SUPER_POD_ID,
)
"""All annotations of pods that a table is made from."""


class Unready(ValueError):
    """The table can't be made from these pods yet, or ever; the text says why."""


def table_version(job: Job) -> str:
    containers = [
        container for kind in job.types for container in (job.template(kind).get("spec") or {}).get("containers") or ()
    ]
    if any(names.NPU in ((container.get("resources") or {}).get("requests") or {}) for container in containers):
        return "2.0"
    policy = job.annotations.get(names.SCHEDULE_POLICY)
    if policy is not None:
        return "1.2" if policy in SUPER_POD_POLICIES else "1.0"
    selectors = [(job.template(kind).get("spec") or {}).get("nodeSelector") or {} for kind in job.types]
    on_super_pod = any(selector.get("accelerator-type") in SUPER_POD_NODES for selector in selectors)
    return "1.2" if names.SP_BLOCK in job.annotations or on_super_pod else "1.0"


def mounts_file(job: Job) -> bool:
    """Some pod mounts a volume by the name of `ranktable`: the table is wanted as a file."""
    return any(
        volume.get("name") == names.RANK_TABLE_VOLUME
        for kind in job.types
        for volume in (job.template(kind).get("spec") or {}).get("volumes") or ()
    )


def next_table(job: Job, pods: Sequence[Object], current: str) -> str | None:
    """What the table has to become; None if it is right as it is. Raises Unready."""
    here = [pod for pod in pods if not is_going(pod)]
    allocated = [pod for pod in here if not _wants_chips(job, pod) or _configuration(pod) is not None]
    if len(allocated) > job.total or job.total == 0:
        return None
    if len(allocated) == job.total:
        table = json.dumps(build(job, allocated), separators=(",", ":"))
        return None if table == current else table
    return invalidated(current)


def invalidated(current: str) -> str | None:
    """The same table, no longer valid; None if it isn't anyway."""
    try:
        table = json.loads(current)
    except (ValueError, RecursionError):
        return None
    if not isinstance(table, dict) or table.get("status") != COMPLETED:
        return None
    return json.dumps({**table, "status": INITIALIZING}, separators=(",", ":"))


def next_version(current_table: str, current_version: str, now: float) -> str:
    """The number beside the table: it grows with each change, and the first table has 0."""
    try:
        before = json.loads(current_table)
    except (ValueError, RecursionError):
        before = None
    if not isinstance(before, dict) or not {"server_list", "rank_list"} & set(before):
        return "0"
    last = int(current_version) if current_version.isdecimal() else 0
    return str(max(int(now), last + 1))


def build(job: Job, pods: Sequence[Object]) -> Object:
    version = table_version(job)
    with_chips = [pod for pod in pods if _wants_chips(job, pod)]
    found = sorted(((_rank(pod), _read(pod), pod) for pod in with_chips), key=lambda each: each[0])
    if version == "2.0":
        ranks = rank_list([(rank, instance) for rank, instance, _ in found], job.labels.get(names.SCALE_OUT_TYPE, ""))
        return {"status": COMPLETED, "version": version, "rank_list": ranks, "rank_count": len(ranks)}
    nodes = [(pod.get("spec") or {}).get("nodeName") for pod in pods]
    by_host = len(set(nodes)) == len(nodes)
    servers = [_server(job, version, rank, instance, pod, by_host) for rank, instance, pod in found]
    table: Object = {"status": COMPLETED, "server_list": servers, "server_count": str(len(servers))}
    table["version"] = version
    if version == "1.2":
        table["super_pod_list"] = _super_pods(job, servers, [pod for _, _, pod in found])
    return table


def _wants_chips(job: Job, pod: Object) -> bool:
    where = place(job, pod)
    kind = where[0] if where is not None and where[0] in job.types else job.types[0]
    return npu_request(ascend_container(job.template(kind)))[1] > 0 and not is_extra(pod)


def _configuration(pod: Object) -> str | None:
    annotations = pod["metadata"].get("annotations") or {}
    return next((annotations[name] for name in names.DEVICE_CONFIGURATIONS if name in annotations), None)


def _read(pod: Object) -> Object:
    name = pod["metadata"]["name"]
    try:
        instance = json.loads(_configuration(pod) or "")
    except (ValueError, RecursionError) as error:
        raise Unready(f"the chips of pod {name} are not JSON: {error}") from error
    devices = instance.get("devices") if isinstance(instance, dict) else None
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise Unready(f"the chips of pod {name} are not a list of devices")
    found: Object = instance
    return found


def _rank(pod: Object) -> int:
    text = (pod["metadata"].get("annotations") or {}).get(names.RANK_INDEX, "")
    if not text.isdecimal():
        raise Unready(f"the rank of pod {pod['metadata']['name']} is not a number: {text!r}")
    return int(text)


def _server(job: Job, version: str, rank: int, instance: Object, pod: Object, by_host: bool) -> Object:
    name, address = pod["metadata"]["name"], (pod.get("status") or {}).get("podIP")
    if not address:
        raise Unready(f"pod {name} has no address yet")
    devices: list[Any] = instance["devices"]
    block = job.super_pod_block
    needs_address = version == "1.0" or (block > 0 and job.chips[1] * job.training_pods // block > 1)
    listed = []
    for position, device in enumerate(devices):
        if needs_address and device.get("device_ip") == "-1":
            raise Unready(f"the address of chip {device.get('device_id')} of pod {name} is not known")
        entry = {"device_id": str(device.get("device_id", "")), "device_ip": str(device.get("device_ip", ""))}
        if version == "1.2":
            entry["super_device_id"] = str(device.get("super_device_id", ""))
        entry["rank_id"] = str(rank * len(devices) + position)
        listed.append(entry)
    server: Object = {"device": listed}
    if job.is_inference_service:
        server["hardware_type"] = (pod["metadata"].get("annotations") or {}).get(names.HARDWARE_TYPE, "")
    host = str(instance.get("host_ip", ""))
    server["server_id"] = host if by_host else str(instance.get("server_id", ""))
    server["host_ip"] = host
    server["container_ip"] = address
    return server


def _super_pods(job: Job, servers: list[Object], pods: list[Object]) -> list[Object]:
    groups: dict[int, list[Object]] = {}
    for position, (server, pod) in enumerate(zip(servers, pods, strict=True)):
        annotations = pod["metadata"].get("annotations") or {}
        if job.is_inference_service:
            text = annotations.get(names.SUPER_POD_ID, "")
        elif job.labels.get(names.SUPER_POD_AFFINITY) == "soft":
            text = annotations.get(names.SUPER_POD_RANK, "")
        else:
            block = job.super_pod_block
            text = str(position // max(1, block // max(1, len(server["device"]))) if block > 0 else 0)
        if not text.isdecimal():
            raise Unready(f"the super-pod of pod {pod['metadata']['name']} is not a number: {text!r}")
        groups.setdefault(int(text), []).append({"server_id": server["server_id"]})
    return [{"super_pod_id": str(number), "server_list": groups[number]} for number in sorted(groups)]
