"""A reader's view of an AscendJob with its defaults filled in. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from evertrain.acjob import names
from evertrain.acjob.defaults import with_defaults
from evertrain.kube import quantity
from evertrain.kube.port import Object


def ascend_container(template: Object) -> Object:
    """The container that trains: `ascend`, or the first one. Empty if there is none."""
    containers = (template.get("spec") or {}).get("containers") or []
    for container in containers:
        if container.get("name") == names.CONTAINER:
            return dict(container)
    return dict(containers[0]) if containers else {}


def requests(container: Object) -> dict[str, object]:
    """What a container asks for. As Kubernetes does, limits stand in for requests that were not written."""
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def npu_request(container: Object) -> tuple[str, int]:
    """The resource and the number of chips that a container asks for; ("", 0) if none."""
    for name, amount in requests(container).items():
        if names.NPU_PREFIX in name:
            return name, int(quantity.lenient(amount))
    return "", 0


class Job:
    """The fields that the operator decides by. The object given is not changed."""

    def __init__(self, item: Object) -> None:
        self.item = with_defaults(item)
        metadata = self.item["metadata"]
        self.name: str = metadata["name"]
        self.namespace: str = metadata.get("namespace") or "default"
        self.uid: str = metadata.get("uid") or ""
        self.labels: dict[str, str] = metadata.get("labels") or {}
        self.annotations: dict[str, str] = metadata.get("annotations") or {}
        self.spec: Object = self.item["spec"]
        self.run_policy: Object = self.spec["runPolicy"]
        self.scheduling_policy: Object = self.run_policy.get("schedulingPolicy") or {}

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def framework(self) -> str:
        return self.labels.get(names.FRAMEWORK, "")

    @cached_property
    def types(self) -> list[str]:
        """The replica types: the leader first, so that nothing depends on the order in the YAML."""
        return sorted(self.spec["replicaSpecs"], key=lambda kind: (kind == names.WORKER, kind))

    @property
    def leader(self) -> str | None:
        """The replica type with the service; None for a MindSpore job of workers only."""
        leader = names.LEADERS[self.framework]
        return leader if leader in self.spec["replicaSpecs"] else None

    def replicas(self, kind: str) -> int:
        return int(self.spec["replicaSpecs"][kind]["replicas"])

    def restart_policy(self, kind: str) -> str:
        return str(self.spec["replicaSpecs"][kind]["restartPolicy"])

    def template(self, kind: str) -> Object:
        template: Object = self.spec["replicaSpecs"][kind].get("template") or {}
        return template

    @cached_property
    def total(self) -> int:
        return sum(self.replicas(kind) for kind in self.types)

    @property
    def min_available(self) -> int:
        wanted = self.scheduling_policy.get("minAvailable")
        return self.total if wanted is None else int(wanted)

    def indices(self) -> Iterator[tuple[str, int]]:
        for kind in self.types:
            for index in range(self.replicas(kind)):
                yield kind, index

    @cached_property
    def leader_has_chips(self) -> bool:
        return any(
            npu_request(ascend_container(self.template(kind)))[1] > 0 for kind in self.types if kind != names.WORKER
        )

    @cached_property
    def chips(self) -> tuple[str, int]:
        """The resource and number of chips of one pod. Pods with chips are taken to have the same number."""
        kinds = self.types if self.leader_has_chips else [names.WORKER]
        for kind in kinds:
            if kind in self.types:
                found = npu_request(ascend_container(self.template(kind)))
                if found[1] > 0:
                    return found
        return "", 0

    @property
    def leader_trains(self) -> bool:
        """The leader is one of the pods that train. One without chips only coordinates, unless nobody has any; and then
        MindSpore's scheduler still does nothing else."""
        return self.leader_has_chips or (self.chips[1] == 0 and self.framework != names.MINDSPORE)

    @property
    def training_pods(self) -> int:
        if self.leader_trains:
            return self.total
        return self.replicas(names.WORKER) if names.WORKER in self.types else 0

    @property
    def is_soft_share(self) -> bool:
        return all(label in self.labels for label in names.SOFT_SHARE)

    @property
    def is_inference_service(self) -> bool:
        """A part of a MindIE service: it gets only the environment of that."""
        return names.JOB_ID in self.labels and names.APP in self.labels

    @property
    def strategies(self) -> list[str]:
        """The recover-strategy annotation; empty if there is none."""
        return [name for name in self.annotations.get(names.RECOVER_STRATEGY, "").split(",") if name]

    @cached_property
    def standby_pods(self) -> int:
        """How many pods stand by for one that is replaced; 0 where processes of a new pod are not taken in, or where a
        pod's environment depends on its rank."""
        wanted = _number(self.annotations.get(names.STANDBY_PODS)) or 0
        usable = self.framework == names.PYTORCH and names.WORKER in self.types and "recover" in self.strategies
        fixed = self.super_pod_block > 0 or names.SUPER_POD_AFFINITY in self.labels or self.is_soft_share
        return max(0, min(wanted, names.MAX_STANDBY_PODS)) if usable and not fixed else 0

    @property
    def retry_times(self) -> int:
        """How often failed pods are to be restarted; 0 if they are not."""
        return _number(self.labels.get(names.FAULT_RETRY_TIMES)) or 0

    @property
    def backoff_limit(self) -> int:
        """How many rounds of restarts there may be; 0 or less means any number."""
        limit = self.run_policy.get("backoffLimit")
        if limit is not None:
            return int(limit)
        inherited = _number(self.labels.get(names.FAULT_RETRY_TIMES))
        return -1 if inherited is None else inherited

    @property
    def replaces_single_pods(self) -> bool:
        """A failed pod is replaced alone; otherwise all pods of the job start again together."""
        by_label = self.labels.get(names.POD_RESCHEDULING) == "on"
        return by_label or self.annotations.get(names.RECOVER_POLICY_PATH) == "pod"

    @property
    def takes_in_new_processes(self) -> bool:
        """Ranks that are left go on with those of a new pod, whichever it is: even the one with rank 0."""
        return not names.JOINING_STRATEGIES.isdisjoint(self.strategies)

    @cached_property
    def super_pod_block(self) -> int:
        """Chips of a logical super-pod; 0 if the job says nothing about it."""
        if names.SP_BLOCK in self.annotations:
            return _number(self.annotations[names.SP_BLOCK]) or 0
        if self.annotations.get(names.SCHEDULE_POLICY) == names.MULTILEVEL:
            levels = dict(
                part.split("=", 1) for part in self.annotations.get(names.AFFINITY_CONFIG, "").split(",") if "=" in part
            )
            resource, chips = self.chips
            return (_number(levels.get("level1")) or 0) * (chips if resource == names.ASCEND_910 else 0)
        return 0

    def pod_name(self, kind: str, index: int) -> str:
        return f"{self.name}-{kind.lower()}-{index}"

    @property
    def service_name(self) -> str:
        assert self.leader is not None
        return self.pod_name(self.leader, 0)

    @property
    def pod_group_name(self) -> str:
        return f"{self.name}-{self.uid}"

    @property
    def token_secret_name(self) -> str:
        """Not that of an earlier job of the same name, whose Secret may still be there when the first pods start."""
        return f"{self.name}{names.TOKEN_SECRET}-{self.uid}"

    def rank(self, kind: str, index: int) -> int:
        """The rank of a pod. A leader that doesn't train shares rank 0 with the first worker."""
        return index + 1 if kind == names.WORKER and self.leader_trains else index

    def owner_reference(self) -> Object:
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text.strip())
    except ValueError:
        return None
