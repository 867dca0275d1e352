"""The rank table of a whole MindIE service: coordinators, controllers, and a group for each of its servers. Pure.

Each server is a job of its own, whose rank table is in a ConfigMap rings-config-*; the label jobID says which service
it belongs to. A table that is not complete yet, or that nobody can read, is left out; the others are told nevertheless.
Without any, or while a coordinator or a controller has no address, there is nothing to tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from evertrain.acjob import names
from evertrain.acjob.pods import is_going, phase
from evertrain.kube.port import Object

CONTROLLER, COORDINATOR = "mindie-ms-controller", "mindie-ms-coordinator"
"""Values of the label `app`."""
DEPLOY_LABELS = ("grt-server/deploy-server", "grt-group/deploy-server")
"""Of a ConfigMap: one of them, not both."""
TABLE_KEY = "hccl.json"
COMPLETED = "completed"
FIRST_GROUP = 2
"""The number of the first group of servers: 0 has the coordinators, 1 the controllers."""


class BadTable(ValueError):
    """The text says why it is left out."""


# Field for field in the order of the original, which leaves out what is empty.


class _Device(msgspec.Struct, kw_only=True, omit_defaults=True):
    device_id: str
    device_ip: str
    super_device_id: str = ""
    device_logical_id: str = ""
    rank_id: str


class _Server(msgspec.Struct, kw_only=True, omit_defaults=True):
    device: list[_Device] = []
    server_id: str
    server_ip: str = ""
    hardware_type: str = ""


class _SuperPodServer(msgspec.Struct):
    server_id: str


class _SuperPod(msgspec.Struct):
    super_pod_id: str
    server_list: list[_SuperPodServer]


class _Group(msgspec.Struct, kw_only=True, omit_defaults=True):
    group_id: str
    deploy_server: str = ""
    server_count: str
    server_list: list[_Server]
    super_pod_list: list[_SuperPod] = []


class _Global(msgspec.Struct):
    version: str
    status: str
    server_group_list: list[_Group]


# What a job's own table says.


class _OwnDevice(msgspec.Struct):
    device_id: str = ""
    device_ip: str = ""
    super_device_id: str = ""
    rank_id: str = ""


class _OwnServer(msgspec.Struct):
    device: list[_OwnDevice] | None = None
    server_id: str = ""
    container_ip: str = ""
    hardware_type: str = ""


class _Own(msgspec.Struct):
    status: str = ""
    server_list: list[_OwnServer] | None = None
    server_count: str = ""
    version: str = ""
    super_pod_list: list[_SuperPod] | None = None


_own = msgspec.json.Decoder(_Own)


@dataclass(frozen=True, slots=True)
class Table:
    """The rank table of one server."""

    name: str
    deploy: str
    own: _Own


def service_of(item: Object) -> str | None:
    """Which service a ConfigMap belongs to; None if it holds no rank table of one."""
    metadata = item["metadata"]
    if not metadata["name"].startswith(names.RANK_TABLE_CONFIG):
        return None
    return (metadata.get("labels") or {}).get(names.JOB_ID) or None


def read_table(item: Object) -> Table | None:
    """None if it is not complete yet. Raises BadTable."""
    metadata = item["metadata"]
    try:
        own = _own.decode((item.get("data") or {}).get(TABLE_KEY) or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadTable(f"{metadata['name']}: {TABLE_KEY} can't be read: {error}") from None
    if own.status != COMPLETED:
        return None
    labels = metadata.get("labels") or {}
    found = [labels[name] for name in DEPLOY_LABELS if name in labels]
    if len(found) != 1:
        raise BadTable(f"{metadata['name']} must have one of the labels {' and '.join(DEPLOY_LABELS)}")
    return Table(metadata["name"], str(found[0]), own)


def assemble(coordinators: Iterable[Object], controllers: Iterable[Object], tables: Iterable[Table]) -> str | None:
    """From pods and tables. None: there is nothing to tell yet."""
    first = [_leaders(number, pods) for number, pods in enumerate((coordinators, controllers))]
    ordered = sorted(tables, key=lambda table: _natural(table.name))
    leaders = [group for group in first if group is not None]
    if len(leaders) < len(first) or not ordered:
        return None
    groups = [_servers(number, table) for number, table in enumerate(ordered, FIRST_GROUP)]
    return msgspec.json.encode(_Global(ordered[0].own.version, COMPLETED, [*leaders, *groups])).decode()


def _leaders(number: int, pods: Iterable[Object]) -> _Group | None:
    servers = []
    for pod in sorted(pods, key=lambda pod: _natural(pod["metadata"]["name"])):
        if is_going(pod) or phase(pod) in ("Succeeded", "Failed"):
            continue  # another takes its place
        status = pod.get("status") or {}
        host, own = (str(status.get(name) or "") for name in ("hostIP", "podIP"))
        if not host or not own:
            return None
        servers.append(_Server(server_id=host, server_ip=own))
    return _Group(group_id=str(number), server_count=str(len(servers)), server_list=servers) if servers else None


def _servers(number: int, table: Table) -> _Group:
    own = table.own
    servers = [
        _Server(
            device=[
                _Device(
                    device_id=device.device_id,
                    device_ip=device.device_ip,
                    super_device_id=device.super_device_id,
                    device_logical_id=str(place),
                    rank_id=device.rank_id,
                )
                for place, device in enumerate(server.device or ())
            ],
            server_id=server.server_id,
            server_ip=server.container_ip,
            hardware_type=server.hardware_type,
        )
        for server in own.server_list or ()
    ]
    return _Group(
        group_id=str(number),
        deploy_server=table.deploy,
        server_count=own.server_count or str(len(servers)),
        server_list=servers,
        super_pod_list=own.super_pod_list or [],
    )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """server-2 before server-10."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts if part]
