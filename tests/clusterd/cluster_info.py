"""The ConfigMaps cluster-info-*, as ClusterD writes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping

from evertrain.kube.port import CONFIG_MAP, AlreadyExists, Kube, Object
from evertrain.wire.faultinfo import ChipFault, DeviceInfo, device_list

NAMESPACE = "mindx-dl"


def devices(
    unhealthy: Iterable[str] = (),
    faults: Iterable[tuple[str, str]] = (),
    network: Iterable[str] = (),
    type: str = "Ascend910",
) -> Object:
    """`faults`: chips and their levels."""
    info = DeviceInfo(
        type=type,
        unhealthy=tuple(unhealthy),
        network_unhealthy=tuple(network),
        faults=tuple(ChipFault(chip, f"8000000{n}", level, 1) for n, (chip, level) in enumerate(faults)),
    )
    return {"DeviceList": device_list(info), "UpdateTime": 1, "CmName": "", "SuperPodID": -2, "ServerIndex": -2}


def node(status: str = "Healthy", level: str = "") -> Object:
    parts = [{"DeviceType": "CPU", "DeviceId": 0, "FaultCode": ["0000001D"], "FaultLevel": level}] if level else []
    return {"FaultDevList": parts, "NodeStatus": status, "CmName": "", "UpdateTime": 1}


def switch(status: str = "Healthy", level: str = "") -> Object:
    return {"FaultCode": [], "FaultLevel": level, "UpdateTime": 1, "NodeStatus": status, "FaultTimeAndLevelMap": {}}


def texts(
    chips: Mapping[str, Object] | None = None,
    nodes: Mapping[str, Object] | None = None,
    switches: Mapping[str, Object] | None = None,
) -> dict[str, str]:
    """Of each ConfigMap, by its name."""
    return {
        "cluster-info-device-0": json.dumps({f"mindx-dl-deviceinfo-{k}": v for k, v in (chips or {}).items()}),
        "cluster-info-node-cm": json.dumps({f"mindx-dl-nodeinfo-{k}": v for k, v in (nodes or {}).items()}),
        "cluster-info-switch-0": json.dumps({f"mindx-dl-switchinfo-{k}": v for k, v in (switches or {}).items()}),
    }


async def publish(
    kube: Kube,
    chips: Mapping[str, Object] | None = None,
    nodes: Mapping[str, Object] | None = None,
    switches: Mapping[str, Object] | None = None,
) -> None:
    for name, text in texts(chips, nodes, switches).items():
        metadata = {"name": name, "namespace": NAMESPACE, "labels": {"mx-consumer-volcano": "true"}}
        item: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {name: text}}
        with contextlib.suppress(AlreadyExists):
            await kube.create(CONFIG_MAP, item)
            continue
        await kube.patch(CONFIG_MAP, name, NAMESPACE, {"data": {name: text}})
