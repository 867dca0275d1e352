"""Which chips of a node a pod gets, and how its annotations say so. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from evertrain.embedded.scheduler.views import NodeView, PodView

POLICY = "huawei.com/schedule_policy"
REAL = "huawei.com/AscendReal"
PREDICATE_TIME = "predicate-time"
CONFIGURATION_910 = "ascend.kubectl.kubernetes.io/ascend-910-configuration"
CONFIGURATION_NPU = "ascend.kubectl.kubernetes.io/ascend-npu-configuration"
UNKNOWN_SUPER_DEVICE = "-2"


def ring_size(policy: str) -> int:
    """The chips that are connected directly with each other: `chip4-node8` has rings of 4. 0 if nothing is said."""
    match = re.match(r"chip(\d+)-", policy)
    return int(match[1]) if match else 0


def choose(free: Iterable[int], count: int, ring: int = 0) -> tuple[int, ...]:
    """The lowest chips of the fullest ring that still has enough; if none has, the lowest of all.

    Filling a ring that is begun keeps whole rings for those who need them.
    """
    ascending = sorted(free)
    if len(ascending) < count:
        raise ValueError(f"{count} chips wanted, {len(ascending)} free")
    if ring > 0 and count <= ring:
        rings: dict[int, list[int]] = {}
        for chip in ascending:
            rings.setdefault(chip // ring, []).append(chip)
        fitting = [chips for chips in rings.values() if len(chips) >= count]
        if fitting:
            return tuple(min(fitting, key=lambda chips: (len(chips), chips))[:count])
    return tuple(ascending[:count])


def device_names(resource: str, chips: Iterable[int]) -> list[str]:
    family = resource.removeprefix("huawei.com/")
    return [f"{family}-{chip}" for chip in chips]


def describe(pod: PodView, node: NodeView, allocated: Mapping[str, tuple[int, ...]], now_ns: int) -> dict[str, str]:
    """What a pod is told about its chips, as the original's scheduler and device plugin do together."""
    found: dict[str, str] = {}
    for resource, chips in allocated.items():
        names = device_names(resource, chips)
        devices = []
        for name, chip in zip(names, chips, strict=True):
            known = node.devices.get(name) or {}
            devices.append(
                {
                    "device_id": str(chip),
                    "device_ip": str(known.get("IP", "")),
                    "super_device_id": str(known.get("SuperDeviceID", UNKNOWN_SUPER_DEVICE)),
                }
            )
        configuration = {
            "pod_name": pod.name,
            "server_id": pod.uid,
            "host_ip": node.address,
            "super_pod_id": 0,
            "devices": devices,
            "rack_id": 0,
            "server_index": "0",
            "server_ip": node.address,
        }
        found[resource] = found[REAL] = ",".join(names)
        key = CONFIGURATION_NPU if resource == "huawei.com/npu" else CONFIGURATION_910
        found[key] = json.dumps(configuration, separators=(",", ":"))
        found[PREDICATE_TIME] = str(now_ns)
    return found
