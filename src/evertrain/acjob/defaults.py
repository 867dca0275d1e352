"""What an AscendJob means where it says nothing. Never written back to the object. Pure."""

from __future__ import annotations

import copy

from evertrain.acjob import names
from evertrain.kube.port import Object


def with_defaults(item: Object) -> Object:
    """A copy of the job with its defaults filled in."""
    job = copy.deepcopy(item)
    spec = job.get("spec") or {}
    job["spec"] = spec
    spec["runPolicy"] = spec.get("runPolicy") or {}
    spec["runPolicy"]["cleanPodPolicy"] = spec["runPolicy"].get("cleanPodPolicy") or "None"
    spec["successPolicy"] = spec.get("successPolicy") or ""
    spec["replicaSpecs"] = spec.get("replicaSpecs") or {}
    for kind, replica in spec["replicaSpecs"].items():
        if replica.get("replicas") is None:
            replica["replicas"] = 1
        replica["restartPolicy"] = replica.get("restartPolicy") or "Never"
        if kind != names.WORKER:
            _add_port(replica.get("template") or {})
    return job


def _add_port(template: Object) -> None:
    """The leader is reached by its service; a service needs a port."""
    containers = (template.get("spec") or {}).get("containers") or []
    container = next((each for each in containers if each.get("name") == names.CONTAINER), None)
    if container is None and containers:
        container = containers[0]
    if container is None:
        return
    ports = container.get("ports") or []
    if not any(port.get("name") == names.PORT_NAME for port in ports):
        container["ports"] = [*ports, {"name": names.PORT_NAME, "containerPort": names.DEFAULT_PORT}]
