"""What a pod's object tells people: how it is, what it waits for, which of its containers is the one that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evertrain.kube.port import Object

MAIN = "ascend"
NAMED = 3
"""Of more pods with the same to say only the number is given."""
_STARTING = ("ContainerCreating", "PodInitializing")


def describe_pod(pod: Object) -> str:
    """The phase, where it runs, and what explains it."""
    status: dict[str, Any] = pod.get("status") or {}
    parts = [str(status.get("phase") or "Pending")]
    if node := (pod.get("spec") or {}).get("nodeName"):
        parts.append(f"on {node}")
    if reason := _unscheduled(pod):
        parts.append(f"({reason})")
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        if ended := state.get("terminated"):
            if ended.get("exitCode") or ended.get("reason") not in (None, "Completed"):
                signal = f", signal {ended['signal']}" if ended.get("signal") else ""
                parts.append(f"({ended.get('reason')}, exit code {ended.get('exitCode')}{signal})")
        elif (waiting := state.get("waiting")) and waiting.get("message"):
            parts.append(f"({waiting.get('reason')}: {waiting['message']})")
        if container.get("restartCount"):
            parts.append(f"restarted {container['restartCount']}x")
    if status.get("reason"):
        parts.append(f"({status['reason']}: {status.get('message', '')})")
    return " ".join(parts)


def obstacle(pod: Object, warning: str) -> str:
    """Why a pod that should start doesn't; `warning` is the last one about it. Empty if nothing is in its way."""
    status: dict[str, Any] = pod.get("status") or {}
    if (status.get("phase") or "Pending") != "Pending":
        return ""
    if reason := _unscheduled(pod):
        return reason
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _STARTING:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return warning


def together(texts: Sequence[tuple[str, str]]) -> str:
    """Pods and what is to be said about them in one line, with those named together that have the same to say."""
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    return "; ".join(f"{_listed(who)}: {text}" for text, who in names.items())


def main_container(pod: Object) -> str:
    """The name of the one whose output is meant: `ascend`, else the first."""
    names = [str(container.get("name")) for container in (pod.get("spec") or {}).get("containers") or [{}]]
    return MAIN if MAIN in names else names[0]


def main_status(pod: Object) -> Object:
    """The status of that container, empty before it has one."""
    found: list[Object] = (pod.get("status") or {}).get("containerStatuses") or []
    return next((each for each in found if each.get("name") == main_container(pod)), {})


def _unscheduled(pod: Object) -> str:
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return ""


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"pod {names[0]}"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"pods {', '.join(names[:NAMED])}{more}"
