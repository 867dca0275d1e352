"""What a virtual node is: name, resources, labels, and the object that says so. Pure but for asking the machine."""

from __future__ import annotations

import json
import os
import platform
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import evertrain
from evertrain.acjob.ranktable import SUPER_POD_NODES
from evertrain.embedded.network.plan import LOOPBACK, Plan
from evertrain.embedded.power import VIRTUAL
from evertrain.embedded.recorder import rfc3339
from evertrain.kube.port import Object

CHIP = "huawei.com/Ascend910"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_HOST_ARCHITECTURES = {"x86_64": "huawei-x86", "aarch64": "huawei-arm"}


@dataclass(frozen=True)
class NodeConfig:
    name: str
    index: int
    """Its number in the cluster, from which its addresses follow."""
    plan: Plan = LOOPBACK
    npus: int = 8
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every container, beside the usual ones."""
    max_pods: int = 110
    lease_seconds: float = 20.0
    """The Lease is renewed four times in this."""
    backoff: float = 10.0
    """Seconds before the second restart of a container; doubled with each further one."""
    host_paths: Mapping[str, Path] = field(default_factory=dict)
    """Directories of the virtual machine that are elsewhere on the real one."""
    isolate: bool = True
    """Namespaces for mounts and process ids, where the kernel allows them."""
    log_limits: Mapping[str, int] = field(default_factory=dict)
    """max_bytes of a log file and max_files of a container."""


def capacity(config: NodeConfig) -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    found = {"cpu": str(os.cpu_count() or 1), "memory": f"{memory}Ki", "pods": str(config.max_pods)}
    if config.npus:
        found[CHIP] = str(config.npus)
    return found


def base_environment(config: NodeConfig) -> dict[str, str]:
    """What every container has: nothing of the cluster's own, but the Python that it runs with."""
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = "/"
    found = {"PATH": f"{os.path.dirname(sys.executable)}:{PATH}", "HOME": home}
    if sys.prefix != sys.base_prefix:
        found["VIRTUAL_ENV"] = sys.prefix
    return {**found, **config.environment}


def node_object(config: NodeConfig) -> Object:
    machine = platform.machine()
    labels = {
        "kubernetes.io/hostname": config.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": _ARCHITECTURES.get(machine, machine),
        "host-arch": _HOST_ARCHITECTURES.get(machine, machine),
        **({"accelerator": "huawei-Ascend910"} if config.npus else {}),
        VIRTUAL: "true",
        **config.labels,
    }
    chips = {
        f"Ascend910-{number}": {"IP": config.plan.chip(config.index, number), "SuperDeviceID": 0}
        for number in range(config.npus)
    }
    network = str(config.plan.of_node(config.index))
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": config.name,
            "labels": labels,
            "annotations": _annotations(config, chips),
        },
        "spec": {"podCIDR": network, "podCIDRs": [network]},
    }


def _annotations(config: NodeConfig, chips: dict[str, Object]) -> dict[str, str]:
    """As the device plugin writes them. Nodes that are labelled as those of a super pod are all in one."""
    if not chips:
        return {}
    found = {"baseDeviceInfos": json.dumps(chips, separators=(",", ":"))}
    if config.labels.get("accelerator-type") in SUPER_POD_NODES:
        found |= {"superPodID": "0", "serverIndex": str(config.index)}
    return found


def node_status(config: NodeConfig, now: float, before: Object | None = None) -> Object:
    """As a merge patch. Conditions that stay as they are keep their times."""
    resources = capacity(config)
    known = {condition.get("type"): condition for condition in ((before or {}).get("conditions") or [])}
    conditions = []
    for name, value, reason, message in (
        ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        ("Ready", "True", "KubeletReady", "pods run as processes of this machine"),
    ):
        old = known.get(name, {})
        since = old.get("lastTransitionTime") if old.get("status") == value else None
        conditions.append(
            {
                "type": name,
                "status": value,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": rfc3339(now),
                "lastTransitionTime": since or rfc3339(now),
            }
        )
    return {
        "capacity": resources,
        "allocatable": resources,
        "conditions": conditions,
        "addresses": [
            {"type": "InternalIP", "address": config.plan.host(config.index)},
            {"type": "Hostname", "address": config.name},
        ],
        "nodeInfo": {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "bootID": "",
            "containerRuntimeVersion": f"evertrain://{evertrain.__version__}",
            "kernelVersion": platform.release(),
            "kubeProxyVersion": "",
            "kubeletVersion": f"v{evertrain.__version__}",
            "machineID": config.name,
            "operatingSystem": "linux",
            "osImage": _os_image(),
            "systemUUID": config.name,
        },
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
    }


def _os_image() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"
