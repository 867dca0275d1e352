"""What is read of a job, its pods and their nodes to decide about rescheduling. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from evertrain.acjob import names
from evertrain.acjob.conditions import FAILED, SUCCEEDED, find, is_finished, is_true
from evertrain.acjob.pods import annotations_of, is_backup, is_extra, is_going, phase, version
from evertrain.kube.port import Object
from evertrain.kube.times import parse_time
from evertrain.wire.clusterinfo import WELL, Health
from evertrain.wire.faultinfo import CHIP_TYPES, VENDOR

REAL = "huawei.com/AscendReal"
CHIP_ANNOTATIONS = (REAL, *(VENDOR + type_ for type_ in CHIP_TYPES))
NODE_HEALTH, UNHEALTHY = "NodeHealthyStatus", "UnHealthy"
"""Annotation of a node: somebody has found it unfit, such as a stress test."""


@dataclass(frozen=True, slots=True)
class PodView:
    name: str
    uid: str
    rank: int = -1
    node: str = ""
    phase: str = "Running"
    chips: frozenset[str] = frozenset()
    """Names, such as Ascend910-4."""
    leads: bool = False
    """It is not one of the workers."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    version: int = 0
    """How many restarts the job had when the pod was made."""
    created: float = 0.0
    deleting: bool = False
    asked: float = 0.0
    """When somebody asked it to go,"""
    grace: float = 0.0
    """and how many seconds it was given."""
    unschedulable: bool = False


@dataclass(frozen=True, slots=True)
class JobView:
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the AscendJob, and over them those of its PodGroup."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    backups: tuple[PodView, ...] = ()
    """Those that wait for the place of another pod."""
    grouped: bool = True
    """It has a PodGroup."""
    size: int = 1
    """How many pods it is to have."""
    over: bool = False
    """It has ended, or is being deleted."""
    succeeded: bool = False
    failure: str = ""
    """Why it has failed, if it has."""

    @property
    def runs(self) -> bool:
        """With all of its pods."""
        good = [pod for pod in self.pods if not pod.deleting and pod.phase in ("Running", "Succeeded")]
        return self.size <= len(good) == len(self.pods)

    @property
    def id(self) -> str:
        """As schedulers call it."""
        return f"{self.namespace}/{self.name}-{self.uid}"


@dataclass(frozen=True, slots=True)
class NodeView:
    health: Health = WELL
    ready: bool = True
    isolated: bool = False
    """Somebody has found it unfit."""

    @property
    def lost(self) -> bool:
        """Its pods have to go."""
        return not self.ready or self.isolated or self.health.lost


GONE = NodeView(ready=False)


def read_job(
    item: Object, group: Object | None, pods: Iterable[Object], read: Callable[[Object], PodView] | None = None
) -> JobView:
    """`read` may know pods already."""
    read = read or read_pod
    metadata = item["metadata"]
    labels, annotations = dict(metadata.get("labels") or {}), dict(metadata.get("annotations") or {})
    if group is not None:
        labels |= group["metadata"].get("labels") or {}
        annotations |= group["metadata"].get("annotations") or {}
    pods = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    conditions = (item.get("status") or {}).get("conditions") or []
    replicas = [each.get("replicas") for each in ((item.get("spec") or {}).get("replicaSpecs") or {}).values()]
    return JobView(
        namespace=metadata.get("namespace") or "default",
        name=metadata["name"],
        uid=str(metadata.get("uid") or ""),
        labels=labels,
        annotations=annotations,
        pods=tuple(read(pod) for pod in pods if not is_extra(pod)),
        backups=tuple(read(pod) for pod in pods if is_backup(pod)),
        grouped=group is not None,
        size=sum(1 if each is None else int(each) for each in replicas),
        over=bool(metadata.get("deletionTimestamp")) or is_finished(conditions),
        succeeded=is_true(conditions, SUCCEEDED),
        failure=str((find(conditions, FAILED) or {}).get("message") or "") if is_true(conditions, FAILED) else "",
    )


def read_pod(pod: Object) -> PodView:
    metadata, annotations = pod["metadata"], annotations_of(pod)
    labels = metadata.get("labels") or {}
    rank = annotations.get(names.RANK_INDEX, "")
    chips = (annotations[name] for name in CHIP_ANNOTATIONS if annotations.get(name))
    deletion, grace = metadata.get("deletionTimestamp"), metadata.get("deletionGracePeriodSeconds") or 0
    return PodView(
        name=metadata["name"],
        uid=str(metadata.get("uid") or ""),
        rank=int(rank) if rank.isascii() and rank.isdecimal() else -1,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        phase=phase(pod),
        chips=frozenset(name.strip() for name in next(chips, "").split(",") if name.strip()),
        leads=labels.get(names.REPLICA_TYPE, names.WORKER.lower()) != names.WORKER.lower(),
        labels=labels,
        annotations=annotations,
        version=version(pod),
        created=_seconds(metadata.get("creationTimestamp")),
        deleting=is_going(pod),
        asked=_seconds(deletion) - grace if deletion else 0.0,
        grace=grace,
        unschedulable=any(
            each.get("type") == "PodScheduled" and each.get("reason") == "Unschedulable"
            for each in (pod.get("status") or {}).get("conditions") or ()
        ),
    )


def read_node(node: Object, health: Health = WELL) -> NodeView:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return NodeView(
        health=health,
        ready=any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions),
        isolated=(node["metadata"].get("annotations") or {}).get(NODE_HEALTH) == UNHEALTHY,
    )


def _seconds(text: object) -> float:
    try:
        return parse_time(str(text)).timestamp()
    except ValueError:
        return 0.0
