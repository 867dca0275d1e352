"""What the operator refuses though the schema allows it: eighteen checks, of which the first to fail counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from evertrain.acjob import names
from evertrain.acjob.job import npu_request
from evertrain.kube.port import Object


@dataclass(frozen=True)
class Invalid:
    """Why a job is refused."""

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def queue_of(item: Object) -> str | None:
    """The queue that must exist; None if the job says nothing about scheduling."""
    policy = ((item.get("spec") or {}).get("runPolicy") or {}).get("schedulingPolicy")
    return None if policy is None else policy.get("queue") or names.DEFAULT_QUEUE


def validate(item: Object, *, queue_error: str = "") -> Invalid | None:
    """The first reason to refuse the job as it was written, before defaults. `queue_error` says what is wrong with its
    queue, if somebody looked and something is."""
    return (
        _labels(item)
        or _specs(item)
        or _queue(item, queue_error)
        or _framework(item)
        or _replicas(item)
        or _leader_exists(item)
    )


def _labels_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _labels(item: Object) -> Invalid | None:
    labels, name = _labels_of(item), item["metadata"]["name"]
    if names.SCALING_RULE in labels:
        if names.SCALING_GROUP not in labels:
            return Invalid(
                "InvalidScalingConfig",
                f"job {name} has no group name, please set label of {names.SCALING_GROUP}=<the group of job>",
            )
        if names.JOB_ID not in labels:
            return Invalid(
                "InvalidScalingConfig",
                f"job {name} has no jobID, please set label of {names.JOB_ID}=<the jobID of job>",
            )
    network = (labels.get(names.SCALE_OUT_TYPE) or "").strip()
    if network and network.upper() not in ("ROCE", "UBOE"):
        return Invalid(
            "InvalidScaleOutConfig",
            f"the value of label {names.SCALE_OUT_TYPE} is invalid, which should be ROCE or UBOE",
        )
    return None


def _specs(item: Object) -> Invalid | None:
    spec = item.get("spec") or {}
    if spec.get("replicaSpecs") is None:
        return Invalid("InvalidSpecs", "replicaSpecs is not set, please modify your job")
    if (spec.get("successPolicy") or "") not in ("", "AllWorkers"):
        return Invalid("InvalidSuccessPolicy", 'job success policy is invalid, it must be one of <"", AllWorkers>')
    return None


def _queue(item: Object, error: str) -> Invalid | None:
    if not error:
        return None
    return Invalid("InvalidQueue", f"check queue<{queue_of(item)}> failed, err: {error}, maybe it is not create")


def _framework(item: Object) -> Invalid | None:
    framework = _labels_of(item).get(names.FRAMEWORK)
    if framework is None:
        return Invalid(
            "InvalidFramework",
            "framework label is not set, please set label framework as one of <pytorch,mindspore,tensorflow>",
        )
    if framework not in names.LEADERS:
        known = " ".join(f"{name}:{{}}" for name in sorted(names.LEADERS))
        return Invalid("InvalidFramework", f"framework label<{framework}> is not in map[{known}]")
    return None


def _replicas(item: Object) -> Invalid | None:
    leader = names.LEADERS[_labels_of(item)[names.FRAMEWORK]]
    specs = item["spec"]["replicaSpecs"]
    for kind in specs:
        if kind not in (leader, names.WORKER):
            return Invalid("InvalidReplicaType", f"replicaType is {kind} but must be one of [{leader} {names.WORKER}]")
    for kind in sorted(specs, key=lambda each: (each != leader, each)):
        found = _replica(kind, specs[kind], kind == leader)
        if found is not None:
            return found
    return None


def _replica(kind: str, replica: Object | None, is_leader: bool) -> Invalid | None:
    def invalid(text: str, reason: str = "InvalidReplicaSpec") -> Invalid:
        return Invalid(reason, f"{kind} replicaSpec is not {text}")

    if replica is None:
        return invalid("set, please modify your job")
    replicas = replica.get("replicas")
    if replicas is not None and replicas < 0:
        return invalid(f"valid: replicas can not be negative num, but got {replicas}")
    if replicas is not None and replicas > names.MAX_REPLICAS:
        return invalid(f"valid: replicas can not be larger than {names.MAX_REPLICAS}, but got {replicas}")
    containers = ((replica.get("template") or {}).get("spec") or {}).get("containers")
    if not containers:
        return invalid("valid: containers is undefined")
    if is_leader and replicas is not None and replicas != 1:
        return invalid("valid, the replicas must be only 1")
    ascend = [container for container in containers if container.get("name") == names.CONTAINER]
    if any(not container.get("image") for container in ascend):
        return invalid(f"valid: Image is undefined in the container of {names.CONTAINER}", "InvalidContainer")
    if not ascend:
        return invalid(f"valid: There is no container named {names.CONTAINER}", "InvalidContainer")
    return None


def _leader_exists(item: Object) -> Invalid | None:
    framework, specs = _labels_of(item)[names.FRAMEWORK], item["spec"]["replicaSpecs"]
    if names.LEADERS[framework] in specs:
        return None
    if framework != names.MINDSPORE:
        return Invalid(
            "InvalidReplicaType",
            "replicaType is not valid: there need 1 leader replicaType, Master for pytorch, Chief of tensorflow",
        )
    chips = 0
    for replica in specs.values():
        replicas = replica.get("replicas")
        container = next(
            each for each in replica["template"]["spec"]["containers"] if each.get("name") == names.CONTAINER
        )
        chips += npu_request(container)[1] * (1 if replicas is None else replicas)
    if chips > 1:
        return Invalid(
            "InvalidReplicaSpec", "replicaSpec is not valid: when scheduler not found, the req num must be 1"
        )
    return None
