"""Addresses and ports of Services. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from evertrain.embedded.network.plan import LOOPBACK
from evertrain.embedded.schema import FieldError
from evertrain.kube.port import Object

ADDRESSES = ("clusterIP", "clusterIPs")
NODE_PORTS = range(30000, 32768)


def has_addresses_of(service: Object, network: ipaddress.IPv4Network) -> bool:
    """Its addresses are of that range, as far as it has some."""
    own = [str(service["spec"].get("clusterIP") or ""), *(service["spec"].get("clusterIPs") or ())]
    return all(address in ("", "None") or _in_range(address, network) for address in own)


def used_addresses(services: Iterable[Object]) -> set[str]:
    return {address for service in services for address in (service["spec"].get("clusterIPs") or ())}


def allocate(
    service: Object,
    others: Iterable[Object],
    old: Object | None = None,
    *,
    within: ipaddress.IPv4Network = LOOPBACK.services,
) -> list[FieldError]:
    """Fills in addresses and node ports in place. Returns what can't be granted."""
    # Parts of an object that an update leaves as they are may be those of the stored one.
    spec = service["spec"] = {**service["spec"], "ports": [dict(port) for port in service["spec"].get("ports") or ()]}
    if not spec["ports"]:
        del spec["ports"]
    others = list(others)
    errors: list[FieldError] = []
    if spec.get("type") == "ExternalName":
        for key in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            spec.pop(key, None)
        return errors
    if old is not None and old["spec"].get("clusterIP") and old["spec"].get("type") != "ExternalName":
        for key in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if key in old["spec"]:
                spec.setdefault(key, old["spec"][key])
        if spec["clusterIP"] == "":
            spec["clusterIP"] = old["spec"]["clusterIP"]
    asked = spec.get("clusterIP") or next(iter(spec.get("clusterIPs") or ()), "")
    if asked != "None":
        used = used_addresses(others)
        if not asked:
            asked = _free_address(used, within)
        elif asked in used:
            errors.append(
                _invalid("spec.clusterIPs", f'["{asked}"]', "failed to allocate IP: provided IP is already allocated")
            )
        elif not _in_range(asked, within):
            detail = f"failed to allocate IP: the provided IP is not in the valid range {within}"
            errors.append(_invalid("spec.clusterIPs", f'["{asked}"]', detail))
    spec["clusterIP"] = asked
    spec["clusterIPs"] = [asked]
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")
    if spec.get("type") in ("NodePort", "LoadBalancer"):
        taken = {port.get("nodePort") for other in others for port in other["spec"].get("ports") or ()}
        before = {
            (port.get("port"), port.get("protocol")): port.get("nodePort")
            for port in (old["spec"].get("ports") or () if old else ())
        }
        for port in spec.get("ports") or ():
            if not port.get("nodePort"):
                known = before.get((port.get("port"), port.get("protocol")))
                port["nodePort"] = known or next(number for number in NODE_PORTS if number not in taken)
            elif port["nodePort"] in taken:
                errors.append(
                    _invalid("spec.ports.nodePort", str(port["nodePort"]), "provided port is already allocated")
                )
            taken.add(port["nodePort"])
    return errors


def _invalid(field: str, value: str, detail: str) -> FieldError:
    return FieldError(field, "FieldValueInvalid", f"Invalid value: {value}: {detail}")


def _in_range(address: str, within: ipaddress.IPv4Network) -> bool:
    try:
        return ipaddress.IPv4Address(address) in within
    except ValueError:
        return False


def _free_address(used: set[str], within: ipaddress.IPv4Network) -> str:
    number = int(within.network_address) + 1
    while True:
        address = str(ipaddress.IPv4Address(number))
        if address not in used:
            return address
        number += 1
