"""The rank table of version 2.0, for chips that know several networks each. Pure."""

from __future__ import annotations

from evertrain.kube.port import Object

PLACEHOLDER: Object = {
    "net_layer": 3,
    "net_instance_id": "CLUSTER1",
    "net_type": "CLOS",
    "net_attr": "",
    "rank_addr_list": [],
}
NETWORKS = {"": ("ROCE", "UBOE", "UBG"), "ROCE": ("ROCE",), "UBOE": ("UBOE", "UBG")}
"""The networks that may connect racks, by what the job asks for; the first that a chip has is taken."""


def rank_list(instances: list[tuple[int, Object]], scale_out: str) -> list[Object]:
    """The ranks of pods with chips, in the order of their ranks."""
    ranks = []
    for rank, instance in instances:
        devices = instance["devices"]
        for position, device in enumerate(devices):
            number = rank * len(devices) + position
            ranks.append(
                {
                    "rank_id": number,
                    "local_id": position,
                    "device_id": int(device.get("device_id") or 0),
                    "level_list": _levels(device, NETWORKS.get(scale_out.strip().upper(), ())),
                }
            )
    return ranks


def _levels(device: Object, networks: tuple[str, ...]) -> list[Object]:
    found: dict[int, Object] = {}
    for entry in device.get("levelList") or ():
        found[int(entry.get("level", -1))] = entry.get("info") or {}
    levels = [dict(next(iter(found[level].values()))) for level in (0, 1) if found.get(level)]
    for network in networks:
        level = 3 if network == "ROCE" else 2
        if network in found.get(level, {}):
            return [*levels, dict(found[level][network])]
    return [*levels, dict(PLACEHOLDER)]
