"""The service by which the other pods find the leader. Pure."""

from __future__ import annotations

from evertrain.acjob import names
from evertrain.acjob.job import Job, ascend_container
from evertrain.kube.port import Object


def identity(job: Job, kind: str, index: int) -> dict[str, str]:
    """The labels by which a pod of the job is found."""
    return {
        names.GROUP_NAME_LABEL: names.GROUP,
        names.OPERATOR_NAME: names.CONTROLLER,
        names.JOB_NAME: job.name,
        names.OLD_JOB_NAME: job.name,
        names.REPLICA_TYPE: kind.lower(),
        names.OLD_REPLICA_TYPE: kind.lower(),
        names.REPLICA_INDEX: str(index),
        names.OLD_REPLICA_INDEX: str(index),
    }


def leader_service(job: Job) -> Object:
    assert job.leader is not None
    labels = identity(job, job.leader, 0)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": job.service_name,
            "namespace": job.namespace,
            "labels": labels,
            "ownerReferences": [job.owner_reference()],
        },
        "spec": {
            "selector": dict(labels),
            "ports": [_port(port) for port in ascend_container(job.template(job.leader)).get("ports") or ()],
        },
    }


def _port(port: Object) -> Object:
    number = port.get("containerPort")
    found: Object = {"name": port.get("name") or f"port-{number}", "port": number}
    if port.get("protocol"):
        found["protocol"] = port["protocol"]
    return found


def address(service: Object) -> tuple[str, str]:
    """The address and the port of the leader; empty where the service has none."""
    spec = service.get("spec") or {}
    ports = [port.get("port") for port in spec.get("ports") or () if port.get("name") == names.PORT_NAME]
    return spec.get("clusterIP") or "", str(ports[0]) if ports and ports[0] else ""
