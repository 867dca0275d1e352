"""Defaults: those in schemas, and those of built-in kinds that depend on other fields."""

from __future__ import annotations

import base64
import copy
import re
from typing import Any

from evertrain.embedded.schema.kinds import Resource, Schema
from evertrain.embedded.schema.quantity import canonical
from evertrain.embedded.schema.structure import MICRO_TIME, QUANTITY, field_schema, item_schema
from evertrain.kube.port import Object

_TIME = re.compile(r"(.*T\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")
TOLERATION_SECONDS = 300
"""So long pods stay bound to a node that isn't ready, unless they say otherwise."""


def defaulted(resource: Resource, item: Object) -> Object:
    """A new object, with everything set that has a default."""
    made: Object = filled(resource, resource.schema, item)
    if resource.group == "" and resource.kind == "Pod":
        _pod(made)
    elif resource.group == "" and resource.kind == "Service":
        _service(made)
    elif resource.group == "" and resource.kind == "Secret":
        made.setdefault("type", "Opaque")
    elif resource.group == "" and resource.kind == "Namespace":
        made.setdefault("metadata", {}).setdefault("labels", {})["kubernetes.io/metadata.name"] = made["metadata"].get(
            "name", ""
        )
    elif resource.kind == "CustomResourceDefinition" and not resource.custom:
        _definition(made)
    return made


def with_secret_data(resource: Resource, item: Object) -> Object:
    """stringData of a Secret is for writers only: it becomes part of data. What is no text is left to be refused."""
    texts, data = item.get("stringData"), item.get("data") or {}
    if (resource.group, resource.kind) != ("", "Secret") or not isinstance(texts, dict) or not isinstance(data, dict):
        return item
    if not all(isinstance(text, str) for text in texts.values()):
        return item
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {key: value for key, value in item.items() if key != "stringData"} | {"data": data | encoded}


def filled(resource: Resource, schema: Schema, value: Any) -> Any:
    """The value with the defaults of its schema."""
    if isinstance(value, dict):
        made: Object = {}
        for key, item in value.items():
            made[key] = filled(resource, field_schema(resource, schema, key) or {}, item)
        for key, of_field in schema.get("properties", {}).items():
            if key not in made and "default" in of_field:
                made[key] = filled(resource, of_field, copy.deepcopy(of_field["default"]))
        return made
    if isinstance(value, list):
        of_item = item_schema(resource, schema)
        return [filled(resource, of_item, item) for item in value]
    return _canonical(schema, value)


def _canonical(schema: Schema, value: Any) -> Any:
    """A value in the one form that every client reads: quantities as text, and times with six digits after the point
    where Kubernetes has microseconds (a Lease or an Event without them can't be read in Go)."""
    if schema.get(QUANTITY):
        return canonical(value)
    if schema.get(MICRO_TIME) and isinstance(value, str) and (found := _TIME.fullmatch(value)):
        whole, fraction, zone = found.groups()
        return f"{whole}.{(fraction or '')[:6]:0<6}{zone}"
    return value


def with_canonical_values(resource: Resource, item: Object) -> Object:
    """Values in the form in which they are stored; nothing else changes."""

    def walk(schema: Schema, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(field_schema(resource, schema, key) or {}, part) for key, part in value.items()}
        if isinstance(value, list):
            return [walk(item_schema(resource, schema), part) for part in value]
        return _canonical(schema, value)

    made: Object = walk(resource.schema, item)
    return made


def _put(target: Object, **values: Any) -> None:
    for key, value in values.items():
        target.setdefault(key, value)


def _pod(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    _put(
        spec,
        restartPolicy="Always",
        dnsPolicy="ClusterFirst",
        schedulerName="default-scheduler",
        terminationGracePeriodSeconds=30,
        enableServiceLinks=True,
        priority=0,
        preemptionPolicy="PreemptLowerPriority",
    )
    spec.setdefault("securityContext", {})
    for volume in spec.get("volumes") or ():
        _volume(volume)
    for field in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(field) or ():
            if isinstance(container, dict):
                _container(container)
    if spec.get("hostNetwork"):
        for container in spec.get("containers") or ():
            for port in container.get("ports") or ():
                port.setdefault("hostPort", port.get("containerPort"))
    tolerations = spec.setdefault("tolerations", [])
    for taint in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            tolerations.append(
                {
                    "key": taint,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": TOLERATION_SECONDS,
                }
            )


def _tolerates(toleration: Object, taint: str) -> bool:
    return toleration.get("key", "") in ("", taint) and toleration.get("effect", "") in ("", "NoExecute")


def _container(container: Object) -> None:
    image = str(container.get("image", ""))
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    pinned = "@" in image or tag not in ("", "latest")
    _put(
        container,
        imagePullPolicy="IfNotPresent" if pinned else "Always",
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
    )
    resources = container.setdefault("resources", {})
    if isinstance(resources, dict) and resources.get("limits"):
        requests = resources.setdefault("requests", {})
        for name, amount in resources["limits"].items():
            requests.setdefault(name, amount)
    for variable in container.get("env") or ():
        chosen = (variable.get("valueFrom") or {}).get("fieldRef")
        if chosen is not None:
            chosen.setdefault("apiVersion", "v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(name)
        if isinstance(probe, dict):
            _put(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
            if isinstance(probe.get("httpGet"), dict):
                _put(probe["httpGet"], path="/", scheme="HTTP")


def _volume(volume: Object) -> None:
    for source in ("configMap", "secret", "downwardAPI", "projected"):
        if isinstance(volume.get(source), dict):
            volume[source].setdefault("defaultMode", 0o644)
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")
    if len(volume) == 1:
        volume["emptyDir"] = {}


def _service(service: Object) -> None:
    spec = service.setdefault("spec", {})
    _put(spec, type="ClusterIP", sessionAffinity="None")
    if spec["type"] != "ExternalName":
        _put(spec, internalTrafficPolicy="Cluster", ipFamilyPolicy="SingleStack", ipFamilies=["IPv4"])
    for port in spec.get("ports") or ():
        if isinstance(port, dict) and not port.get("targetPort") and "port" in port:
            port["targetPort"] = port["port"]


def _definition(definition: Object) -> None:
    names = definition.get("spec", {}).get("names")
    if isinstance(names, dict) and isinstance(names.get("kind"), str):
        _put(names, singular=names["kind"].lower(), listKind=names["kind"] + "List")
    definition.get("spec", {}).setdefault("conversion", {"strategy": "None"})
