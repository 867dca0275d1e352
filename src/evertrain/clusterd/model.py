"""What the parts of ClusterD tell each other: jobs as the cluster has them, and the faults that hit them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HEALTHY, SUB_HEALTHY, UNHEALTHY = "Healthy", "SubHealthy", "UnHealthy"

# Types of faults of a rank, as on the wire.
MEMORY, OTHER, NETWORK = "0", "1", "2"


@dataclass(frozen=True, slots=True)
class Device:
    """A chip that a pod has."""

    id: str
    """Its number on the node, as in `device_id`."""
    ip: str = ""
    super_id: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    rank: int
    """`hccl/rankIndex`."""
    uid: str
    name: str
    node: str = ""
    ip: str = ""
    host_ip: str = ""
    phase: str = "Pending"
    devices: tuple[Device, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False
    containers: Mapping[str, str] = field(default_factory=dict)
    """Ids of its containers by name, once they have any."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Of the container that trains, as far as it is written out."""

    @property
    def running(self) -> bool:
        return self.phase == "Running" and not self.deleting


@dataclass(frozen=True, slots=True)
class Job:
    """A job as its AscendJob, PodGroup and pods say."""

    uid: str
    name: str
    namespace: str
    framework: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the AscendJob, and over them those of its PodGroup."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    """The PodGroup's name; empty where the job has none."""
    group_phase: str = ""
    replicas: int = 0
    per_pod: int = 1
    """Ranks in each pod."""
    status: str = "pending"
    """pending, running, complete or failed, as the job summary says."""
    ended: bool = False
    """It says itself that it is over. One that has failed without saying so is about to run again."""
    pods: Mapping[int, Pod] = field(default_factory=dict)
    """By pod rank; backup pods of a hot switch are not among them."""
    backups: Mapping[str, Pod] = field(default_factory=dict)
    """Backup pods by the name of the pod that they stand in for."""
    complete: bool = False
    """Every pod has its node and its devices."""
    created: int = 0
    """When, in seconds."""
    master: str = ""
    """Where the pods look for their leader (MASTER_ADDR), if the framework is PyTorch."""
    resource: str = ""
    """The kind of chips that it asks for; empty if none."""

    def pod_of(self, rank: int) -> int:
        return rank // max(1, self.per_pod)

    def ranks_of(self, pod: int) -> range:
        per_pod = max(1, self.per_pod)
        return range(pod * per_pod, (pod + 1) * per_pod)


@dataclass(frozen=True, slots=True)
class RankFault:
    """A fault of the cluster, where it hits a rank."""

    rank: int
    pod: int
    pod_uid: str
    node: str
    device: str = "-1"
    code: str = ""
    level: str = ""
    time_ms: int = 0
    type: str = OTHER
    """MEMORY or NETWORK if running the step again may help, else OTHER."""
    in_place: bool = False
    """Restarting the process where it is may help."""
    reported: bool = False
    """Only the training says so, its chip does not."""


@dataclass(frozen=True, slots=True)
class FaultDevice:
    """A faulty part of a node that runs a pod of the job, for those who subscribe to faults."""

    node: str
    node_ip: str
    node_sn: str
    device: str
    """Its id; -1 for the node or its switch."""
    type: str
    """NPU, Node, Switch, CPU, Storage, Network…"""
    code: str = ""
    level: str = ""
    switch_chip: str = ""
    switch_port: str = ""
    time: str = ""
    kind: str = ""
    """Of a chip's fault, as its node publishes it: CardUnhealthy, CardNetworkUnhealthy, PublicFault, NodeUnhealthy."""


@dataclass(frozen=True, slots=True)
class JobFaults:
    """All that is wrong with a job now."""

    job: str
    health: str = HEALTHY
    ranks: tuple[RankFault, ...] = ()
    devices: tuple[FaultDevice, ...] = ()
