"""The columns of `kubectl get` for the built-in kinds, and what stands in them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from evertrain.embedded.schema.ages import age
from evertrain.embedded.schema.kinds import Column
from evertrain.kube.port import Object

Cells = Callable[[Object, datetime], list[Any]]

_NAME = Column("Name", format="name", description="Name must be unique within a namespace.")
_AGE = Column("Age", description="CreationTimestamp is the time at which the object was created.")


def _wide(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, priority=1) for name in names)


COLUMNS: dict[tuple[str, str], tuple[Column, ...]] = {
    ("", "Pod"): (
        _NAME,
        Column("Ready"),
        Column("Status"),
        Column("Restarts"),
        _AGE,
        *_wide("IP", "Node", "Nominated Node", "Readiness Gates"),
    ),
    ("", "Node"): (
        _NAME,
        Column("Status"),
        Column("Roles"),
        _AGE,
        Column("Version"),
        *_wide("Internal-IP", "External-IP", "OS-Image", "Kernel-Version", "Container-Runtime"),
    ),
    ("", "Service"): (
        _NAME,
        Column("Type"),
        Column("Cluster-IP"),
        Column("External-IP"),
        Column("Port(s)"),
        _AGE,
        *_wide("Selector"),
    ),
    ("", "Namespace"): (_NAME, Column("Status"), _AGE),
    ("", "ConfigMap"): (_NAME, Column("Data", type="integer"), _AGE),
    ("", "Secret"): (_NAME, Column("Type"), Column("Data", type="integer"), _AGE),
    ("", "Event"): (
        Column("Last Seen"),
        Column("Type"),
        Column("Reason"),
        Column("Object"),
        *_wide("Subobject", "Source"),
        Column("Message"),
        *_wide("First Seen"),
        Column("Count", type="integer", priority=1),
        Column("Name", format="name", priority=1),
    ),
    ("coordination.k8s.io", "Lease"): (_NAME, Column("Holder"), _AGE),
    ("scheduling.k8s.io", "PriorityClass"): (
        _NAME,
        Column("Value", type="integer"),
        Column("Global-Default", type="boolean"),
        _AGE,
        Column("PreemptionPolicy"),
    ),
    ("apiextensions.k8s.io", "CustomResourceDefinition"): (
        _NAME,
        Column("Created At", type="date", description="CreationTimestamp is the time at which it was created."),
    ),
}
COLUMNS[("events.k8s.io", "Event")] = COLUMNS[("", "Event")]


def _name(item: Object) -> str:
    return str(item.get("metadata", {}).get("name", ""))


def _age(item: Object, now: datetime) -> str:
    return age(item.get("metadata", {}).get("creationTimestamp"), now)


def _pod(pod: Object, now: datetime) -> list[Any]:
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    reason, ready, restarts, last = _pod_state(pod)
    restarted = str(restarts) + (f" ({age(last, now)} ago)" if restarts and last else "")
    addresses = [entry.get("ip") for entry in status.get("podIPs") or [] if entry.get("ip")]
    gates = spec.get("readinessGates") or []
    true = {entry.get("type") for entry in status.get("conditions") or [] if entry.get("status") == "True"}
    passed = sum(gate.get("conditionType") in true for gate in gates)
    return [
        _name(pod),
        f"{ready}/{len(spec.get('containers') or [])}",
        reason,
        restarted,
        _age(pod, now),
        addresses[0] if addresses else status.get("podIP") or "<none>",
        spec.get("nodeName") or "<none>",
        status.get("nominatedNodeName") or "<none>",
        f"{passed}/{len(gates)}" if gates else "<none>",
    ]


def _pod_state(pod: Object) -> tuple[str, int, int, str]:
    """The word for the state of a pod, ready containers, restarts and when the last one was: as kubectl shows it."""
    status = pod.get("status") or {}
    reason = status.get("reason") or status.get("phase") or "Unknown"
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            reason = "SchedulingGated"
    ready = restarts = 0
    last = ""
    initial = status.get("initContainerStatuses") or []
    for index, container in enumerate(initial):
        restarts += container.get("restartCount", 0)
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting") or {}
        if ended is not None and ended.get("exitCode") == 0:
            continue
        if ended is not None:
            return f"Init:{_ended(ended)}", 0, restarts, last
        if waiting.get("reason") and waiting["reason"] != "PodInitializing":
            return f"Init:{waiting['reason']}", 0, restarts, last
        total = len((pod.get("spec") or {}).get("initContainers") or [])
        return f"Init:{index}/{total}", 0, restarts, last
    running = False
    restarts = 0
    for container in reversed(status.get("containerStatuses") or []):
        restarts += container.get("restartCount", 0)
        before = ((container.get("lastState") or {}).get("terminated") or {}).get("finishedAt") or ""
        last = max(last, before)
        state = container.get("state") or {}
        if (state.get("waiting") or {}).get("reason"):
            reason = state["waiting"]["reason"]
        elif state.get("terminated") is not None:
            reason = _ended(state["terminated"])
        elif container.get("ready") and state.get("running") is not None:
            running = True
            ready += 1
    if reason == "Completed" and running:
        is_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or [])
        reason = "Running" if is_ready else "NotReady"
    if pod.get("metadata", {}).get("deletionTimestamp"):
        if status.get("reason") == "NodeLost":
            reason = "Unknown"
        elif status.get("phase") not in ("Succeeded", "Failed"):
            reason = "Terminating"
    return reason, ready, restarts, last


def _ended(state: Object) -> str:
    if state.get("reason"):
        return str(state["reason"])
    return f"Signal:{state['signal']}" if state.get("signal") else f"ExitCode:{state.get('exitCode', 0)}"


def _node(node: Object, now: datetime) -> list[Any]:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    info = status.get("nodeInfo") or {}
    ready = [entry for entry in status.get("conditions") or [] if entry.get("type") == "Ready"]
    words = [("Ready" if ready[0].get("status") == "True" else "NotReady") if ready else "Unknown"]
    if spec.get("unschedulable"):
        words.append("SchedulingDisabled")
    prefix = "node-role.kubernetes.io/"
    labels = node.get("metadata", {}).get("labels") or {}
    roles = sorted(
        {key.removeprefix(prefix) for key in labels if key.startswith(prefix)}
        | {value for key, value in labels.items() if key == "kubernetes.io/role" and value}
    )

    def address(kind: str) -> str:
        found = [entry.get("address") for entry in status.get("addresses") or [] if entry.get("type") == kind]
        return found[0] if found else "<none>"

    return [
        _name(node),
        ",".join(words),
        ",".join(roles) or "<none>",
        _age(node, now),
        info.get("kubeletVersion", ""),
        address("InternalIP"),
        address("ExternalIP"),
        info.get("osImage") or "<unknown>",
        info.get("kernelVersion") or "<unknown>",
        info.get("containerRuntimeVersion") or "<unknown>",
    ]


def _service(service: Object, now: datetime) -> list[Any]:
    spec = service.get("spec") or {}
    ports = []
    for port in spec.get("ports") or []:
        node = f":{port['nodePort']}" if port.get("nodePort") else ""
        ports.append(f"{port.get('port')}{node}/{port.get('protocol', 'TCP')}")
    external = ",".join(spec.get("externalIPs") or []) or "<none>"
    if spec.get("type") == "ExternalName":
        external = spec.get("externalName", "")
    if spec.get("type") == "LoadBalancer" and external == "<none>":
        external = "<pending>"
    return [
        _name(service),
        spec.get("type", "ClusterIP"),
        spec.get("clusterIP") or "<none>",
        external,
        ",".join(ports) or "<none>",
        _age(service, now),
        ",".join(f"{key}={value}" for key, value in sorted((spec.get("selector") or {}).items())) or "<none>",
    ]


def _event(event: Object, now: datetime) -> list[Any]:
    series, source = event.get("series") or {}, event.get("source") or event.get("deprecatedSource") or {}
    first = event.get("firstTimestamp") or event.get("deprecatedFirstTimestamp") or event.get("eventTime")
    last = event.get("lastTimestamp") or event.get("deprecatedLastTimestamp") or first
    count = event.get("count") or event.get("deprecatedCount") or 1
    if series:
        last = series.get("lastObservedTime") or last
        count = series.get("count") or count
    about = event.get("involvedObject") or event.get("regarding") or {}
    component = source.get("component") or event.get("reportingComponent") or event.get("reportingController") or ""
    where = source.get("host") or event.get("reportingInstance") or ""
    return [
        age(last, now),
        event.get("type", ""),
        event.get("reason", ""),
        f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}",
        about.get("fieldPath", ""),
        f"{component}, {where}" if where else component,
        str(event.get("message") or event.get("note") or "").strip(),
        age(first, now),
        count,
        _name(event),
    ]


def _secret(secret: Object, now: datetime) -> list[Any]:
    return [_name(secret), secret.get("type", ""), len(secret.get("data") or {}), _age(secret, now)]


def _config_map(item: Object, now: datetime) -> list[Any]:
    return [_name(item), len(item.get("data") or {}) + len(item.get("binaryData") or {}), _age(item, now)]


def _namespace(item: Object, now: datetime) -> list[Any]:
    return [_name(item), (item.get("status") or {}).get("phase", ""), _age(item, now)]


def _lease(item: Object, now: datetime) -> list[Any]:
    return [_name(item), (item.get("spec") or {}).get("holderIdentity", ""), _age(item, now)]


def _priority_class(item: Object, now: datetime) -> list[Any]:
    default = bool(item.get("globalDefault"))
    policy = item.get("preemptionPolicy", "PreemptLowerPriority")
    return [_name(item), item.get("value", 0), default, _age(item, now), policy]


def _definition(item: Object, now: datetime) -> list[Any]:
    return [_name(item), item.get("metadata", {}).get("creationTimestamp", "")]


CELLS: dict[tuple[str, str], Cells] = {
    ("", "Pod"): _pod,
    ("", "Node"): _node,
    ("", "Service"): _service,
    ("", "Namespace"): _namespace,
    ("", "ConfigMap"): _config_map,
    ("", "Secret"): _secret,
    ("", "Event"): _event,
    ("events.k8s.io", "Event"): _event,
    ("coordination.k8s.io", "Lease"): _lease,
    ("scheduling.k8s.io", "PriorityClass"): _priority_class,
    ("apiextensions.k8s.io", "CustomResourceDefinition"): _definition,
}
