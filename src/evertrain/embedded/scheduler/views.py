"""What the scheduler reads of a pod, a node and a pod group. Pure.

The objects are read once and kept in this form: a decision looks at each pod for each node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from evertrain.embedded import resources
from evertrain.embedded.resources import Amounts
from evertrain.kube.port import Object
from evertrain.wire.clusterinfo import WELL, Health

SCHEDULERS = frozenset({"volcano", "default-scheduler"})
GROUP_ANNOTATIONS = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
TASK_ANNOTATION = "volcano.sh/task-spec"
CHIP_RESOURCES = ("huawei.com/Ascend910", "huawei.com/Ascend310", "huawei.com/Ascend310P", "huawei.com/npu")
RANK_ANNOTATION = "hccl/rankIndex"
POD_ANNOTATIONS = (*GROUP_ANNOTATIONS, TASK_ANNOTATION, *CHIP_RESOURCES, RANK_ANNOTATION)
"""What is read of a pod's annotations."""
DEVICES_ANNOTATION = "baseDeviceInfos"
"""On a node: `{"Ascend910-0": {"IP": "…", "SuperDeviceID": 0}}`, as the device plugin writes it."""
SUB_HEALTHY_STRATEGY, EXITS = "subHealthyStrategy", frozenset({"graceExit", "forceExit", "hotSwitch"})
"""Label of a pod group: its pods leave nodes that don't work as they should, and so are not put there."""
ANY_ADDRESS = "0.0.0.0"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

PENDING, INQUEUE, RUNNING, UNKNOWN, COMPLETED = "Pending", "Inqueue", "Running", "Unknown", "Completed"


@dataclass(frozen=True)
class Term:
    """One term of a pod (anti-)affinity."""

    selector: Mapping[str, Any] | None
    namespaces: frozenset[str] | None
    """None: all of them."""
    topology: str


@dataclass(frozen=True, order=True)
class HostPort:
    """A port of the node itself, which only one of its pods can have."""

    number: int
    protocol: str = "TCP"
    address: str = ANY_ADDRESS

    def clashes(self, other: HostPort) -> bool:
        same = (self.number, self.protocol) == (other.number, other.protocol)
        return same and (self.address == other.address or ANY_ADDRESS in (self.address, other.address))


@dataclass(frozen=True)
class PodView:
    namespace: str
    name: str
    uid: str
    version: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    node: str
    phase: str
    deleting: bool
    created: str
    requests: Amounts
    chips: Mapping[str, tuple[int, ...]]
    """Allocated chips by resource name, from the annotations."""
    group: str
    """namespace/name of the pod group, or empty."""
    task: str
    rank: int
    attract: tuple[Term, ...] = ()
    repel: tuple[Term, ...] = ()
    shape: str = ""
    """Pods with the same shape ask the same of a node."""
    picky: bool = False
    """It names nodes that it wants."""
    chip_requests: Mapping[str, int] = field(default_factory=dict)
    cautious: bool = False
    """Not for nodes that are not quite well."""
    ports: frozenset[int] = frozenset()
    """On which its containers say that they listen."""
    host_ports: frozenset[HostPort] = frozenset()
    party: str = ""
    """Common to the pods of a job: its pod group, else whoever has made them, else the pod itself."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def holds(self) -> bool:
        """Occupies its node. A pod that is being deleted does until it is gone."""
        return bool(self.node) and not self.finished

    @property
    def waits(self) -> bool:
        return not self.node and not self.finished and not self.deleting and not self.spec.get("schedulingGates")


@dataclass(frozen=True)
class NodeView:
    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    unschedulable: bool
    allocatable: Amounts
    address: str
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    health: Health = WELL
    """As ClusterD says."""

    @property
    def closed(self) -> bool:
        """It may look well to Kubernetes, but is no place for a pod."""
        return self.health.lost or self.health.leaving

    def has_use_for(self, resource: str, chip: int) -> bool:
        """The chip may be given to a pod."""
        name = f"{resource.removeprefix('huawei.com/')}-{chip}"
        return name not in self.health.unhealthy and name not in self.health.closed


@dataclass(frozen=True)
class GroupView:
    namespace: str
    name: str
    uid: str
    version: str
    created: str
    min_member: int
    min_task_member: Mapping[str, int]
    min_resources: Amounts
    queue: str
    phase: str
    status: Mapping[str, Any]
    annotations: Mapping[str, str]
    cautious: bool = False
    """Its pods are not for nodes that are not quite well."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class QueueView:
    name: str
    open: bool
    capability: Amounts


def read_pod(pod: Object) -> PodView:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    namespace = metadata.get("namespace", "")
    group = next((annotations[name] for name in GROUP_ANNOTATIONS if annotations.get(name)), "")
    affinity = spec.get("affinity") or {}
    requests = resources.pod_requests(spec)
    node_affinity = affinity.get("nodeAffinity")
    attract, repel = _terms(affinity.get("podAffinity"), namespace), _terms(affinity.get("podAntiAffinity"), namespace)
    host_ports = frozenset(_host_ports(spec))
    shape = [
        sorted(requests.items()),
        spec.get("nodeSelector"),
        node_affinity,
        spec.get("tolerations"),
        [(term.selector, sorted(term.namespaces or ()), term.topology) for term in (*attract, *repel)],
        sorted(host_ports),
    ]
    return PodView(
        namespace=namespace,
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        labels=metadata.get("labels") or {},
        spec=spec,
        node=spec.get("nodeName") or "",
        phase=status.get("phase") or PENDING,
        deleting=bool(metadata.get("deletionTimestamp")),
        created=metadata.get("creationTimestamp") or "",
        requests=requests,
        chips={name: chips for name in CHIP_RESOURCES if (chips := _chips(annotations.get(name)))},
        group=f"{namespace}/{group}" if group else "",
        task=annotations.get(TASK_ANNOTATION, ""),
        rank=_number(annotations.get(RANK_ANNOTATION)),
        attract=attract,
        repel=repel,
        shape=json.dumps(shape, sort_keys=True, default=str),
        picky=bool(spec.get("nodeSelector") or node_affinity),
        chip_requests={name: requests[name] // 1000 for name in CHIP_RESOURCES if requests.get(name, 0) >= 1000},
        ports=frozenset(
            port["containerPort"]
            for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
            for port in container.get("ports") or ()
        ),
        host_ports=host_ports,
        party=f"{namespace}/{group}" if group else _maker(metadata),
    )


def read_node(node: Object) -> NodeView:
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    try:
        devices = json.loads((metadata.get("annotations") or {}).get(DEVICES_ANNOTATION) or "{}")
    except (ValueError, RecursionError):
        devices = {}
    address = next((a.get("address", "") for a in status.get("addresses") or [] if a.get("type") == "InternalIP"), "")
    return NodeView(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        taints=tuple(spec.get("taints") or []),
        unschedulable=bool(spec.get("unschedulable")),
        allocatable=resources.amounts(status.get("allocatable") or status.get("capacity")),
        address=address,
        devices=devices if isinstance(devices, dict) else {},
    )


def read_group(group: Object) -> GroupView:
    metadata, spec, status = group["metadata"], group.get("spec") or {}, group.get("status") or {}
    return GroupView(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        created=metadata.get("creationTimestamp") or "",
        min_member=int(spec.get("minMember") or 0),
        min_task_member={task: int(count) for task, count in (spec.get("minTaskMember") or {}).items()},
        min_resources=resources.amounts(spec.get("minResources")),
        queue=spec.get("queue") or "default",
        phase=status.get("phase") or "",
        status=status,
        annotations=metadata.get("annotations") or {},
        cautious=(metadata.get("labels") or {}).get(SUB_HEALTHY_STRATEGY) in EXITS,
    )


def read_queue(queue: Object) -> QueueView:
    spec, status = queue.get("spec") or {}, queue.get("status") or {}
    return QueueView(
        name=queue["metadata"]["name"],
        open=(status.get("state") or "Open") == "Open",
        capability=resources.amounts(spec.get("capability")),
    )


def _chips(annotation: str | None) -> tuple[int, ...]:
    """`Ascend910-0,Ascend910-1` → (0, 1)."""
    return tuple(int(number) for number in re.findall(r"-(\d{1,4})(?:,|$)", annotation or ""))


def _host_ports(spec: Mapping[str, Any]) -> Iterator[HostPort]:
    """Of all that run together. An init container that ends has given its own back before the others start."""
    staying = [each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
    for container in (*(spec.get("containers") or ()), *staying):
        for port in container.get("ports") or ():
            if port.get("hostPort"):
                yield HostPort(port["hostPort"], port.get("protocol") or "TCP", port.get("hostIP") or ANY_ADDRESS)


def _maker(metadata: Mapping[str, Any]) -> str:
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    return str(owners[0]) if owners else f"pod {metadata.get('namespace', '')}/{metadata['name']}"


def _number(annotation: str | None) -> int:
    return int(annotation) if annotation and annotation.isdecimal() else 1 << 30


def _terms(affinity: Mapping[str, Any] | None, namespace: str) -> tuple[Term, ...]:
    found = []
    for term in (affinity or {}).get(_REQUIRED) or []:
        named = term.get("namespaces")
        everywhere = term.get("namespaceSelector") is not None
        found.append(
            Term(
                selector=term.get("labelSelector"),
                namespaces=None if everywhere else frozenset(named or [namespace]),
                topology=term.get("topologyKey", ""),
            )
        )
    return tuple(found)
