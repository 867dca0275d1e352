"""What the state of a node means for its taints and for the pods on it. Pure."""

from __future__ import annotations

from collections.abc import Callable

from evertrain.kube.port import Object

NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_OURS = (NOT_READY, UNREACHABLE, UNSCHEDULABLE)


def ready_status(node: Object) -> str:
    """True, False or Unknown."""
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready":
            return str(condition.get("status"))
    return "Unknown"


def unknown_conditions(node: Object, now: str) -> list[Object] | None:
    """The conditions of a node that is silent, or None if they say so already."""
    conditions = list((node.get("status") or {}).get("conditions") or ())
    if not any(condition.get("type") == "Ready" for condition in conditions):
        conditions.append({"type": "Ready"})
    if all(condition.get("status") == "Unknown" for condition in conditions):
        return None
    return [
        condition
        if condition.get("status") == "Unknown"
        else {
            **condition,
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
            "lastTransitionTime": now,
        }
        for condition in conditions
    ]


def wanted_taints(node: Object, now: str) -> list[Object] | None:
    """All taints that the node should have, or None if it has them."""
    spec = node.get("spec") or {}
    have = list(spec.get("taints") or ())
    ready = ready_status(node)
    keys: list[tuple[str, str]] = []
    if ready == "Unknown":
        keys += [(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")]
    elif ready == "False":
        keys += [(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")]
    if spec.get("unschedulable"):
        keys.append((UNSCHEDULABLE, "NoSchedule"))
    old = {(str(taint.get("key")), str(taint.get("effect"))): taint for taint in have}
    if {key for key in old if key[0] in _OURS} == set(keys):
        return None
    others = [taint for taint in have if taint.get("key") not in _OURS]
    return others + [old.get((key, effect), {"key": key, "effect": effect, "timeAdded": now}) for key, effect in keys]


def eviction_delay(node: Object, pod: Object, age: Callable[[Object], float] = lambda taint: 0.0) -> float | None:
    """So many seconds the pod may stay on the node; None if for ever. `age` says how long a taint has been there."""
    shortest: float | None = None
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint.get("effect") != "NoExecute":
            continue
        matching = [item for item in pod["spec"].get("tolerations") or () if tolerates(item, taint)]
        if not matching:
            return 0.0
        bounds = [item["tolerationSeconds"] for item in matching if item.get("tolerationSeconds") is not None]
        if bounds:
            bound = max(0, min(bounds)) - age(taint)
            shortest = bound if shortest is None else min(shortest, bound)
    return shortest


def tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == (taint.get("value") or "")
