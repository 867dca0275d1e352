"""AscendJobs and pods for tests."""

from __future__ import annotations

import json
from typing import Any

from evertrain.acjob.names import PORT_NAME
from evertrain.kube.port import Object


def replica(replicas: int | None = 1, *, chips: int = 8, restart: str = "Never", **spec: Any) -> Object:
    resources = {"huawei.com/Ascend910": chips} if chips else {}
    container = {
        "name": "ascend",
        "image": "pytorch-test:latest",
        "command": ["python"],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
    }
    found: Object = {"restartPolicy": restart, "template": {"spec": {"containers": [container], **spec}}}
    if replicas is not None:
        found["replicas"] = replicas
    return found


def ascend_job(
    name: str = "test-job",
    *,
    framework: str | None = "pytorch",
    workers: int = 1,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    run_policy: Object | None = None,
    specs: Object | None = None,
    chips: int = 8,
    restart: str = "Never",
    **spec: Any,
) -> Object:
    leader = {"mindspore": "Scheduler", "tensorflow": "Chief"}.get(framework or "", "Master")
    if specs is None:
        specs = {
            leader: replica(chips=chips, restart=restart),
            "Worker": replica(workers, chips=chips, restart=restart),
        }
    found = {} if framework is None else {"framework": framework}
    job: Object = {
        "apiVersion": "mindxdl.gitee.com/v1",
        "kind": "AscendJob",
        "metadata": {"name": name, "namespace": "default", "labels": {**found, **(labels or {})}},
        "spec": {"replicaSpecs": specs, **spec},
    }
    if annotations:
        job["metadata"]["annotations"] = annotations
    if run_policy is not None:
        job["spec"]["runPolicy"] = run_policy
    return job


def on_port(port: int, job: Object) -> Object:
    """Jobs on the same port run one after the other where pods share the network of the machine."""
    for spec in job["spec"]["replicaSpecs"].values():
        spec["template"]["spec"]["containers"][0]["ports"] = [{"name": PORT_NAME, "containerPort": port}]
    return job


def stored(job: Object, uid: str = "U", version: int = 1) -> Object:
    """As the API server returns it."""
    job["metadata"] |= {"uid": uid, "resourceVersion": str(version), "creationTimestamp": "2026-01-01T00:00:00Z"}
    return job


def environment_of(pod: Object) -> dict[str, Any]:
    """Values, or the field path that a value comes from."""
    container = next(each for each in pod["spec"]["containers"] if each["name"] == "ascend")
    names = [variable["name"] for variable in container["env"]]
    assert len(names) == len(set(names))
    return {
        variable["name"]: variable["value"] if "value" in variable else variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in container["env"]
    }


def chips_annotation(pod: str, host: str, chips: int, first: int = 0, **device: str) -> dict[str, str]:
    devices = [
        {"device_id": str(first + number), "device_ip": f"192.168.1.{10 + first + number}", **device}
        for number in range(chips)
    ]
    content = {"pod_name": pod, "server_id": f"uid-of-{pod}", "host_ip": host, "super_pod_id": 0, "devices": devices}
    return {"ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps(content)}
