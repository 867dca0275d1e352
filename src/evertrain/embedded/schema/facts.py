"""What the model classes don't tell: how lists merge, which texts are allowed, what mappings hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_QUANTITIES = {
    "allocatable",
    "allocatedResources",
    "capacity",
    "hard",
    "limits",
    "overhead",
    "requests",
    "used",
    "default",
    "defaultRequest",
    "max",
    "maxLimitRequestRatio",
    "min",
}


LONG = frozenset(
    {
        "activeDeadlineSeconds",
        "capacity",
        "defaultUser",
        "deletionGracePeriodSeconds",
        "expirationSeconds",
        "fsGroup",
        "generation",
        "gid",
        "gracePeriodSeconds",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minItems",
        "minLength",
        "minProperties",
        "observedGeneration",
        "remainingItemCount",
        "runAsGroup",
        "runAsUser",
        "seconds",
        "sizeBytes",
        "supplementalGroups",
        "terminationGracePeriodSeconds",
        "tolerationSeconds",
        "uid",
        "user",
    }
)
"""Integers of 64 bits. All others have 32, and one object with more in them makes a whole list unreadable to clients in
Go, such as kubectl."""


def mapped(module: str, owner: str, field: str, pointer: Callable[[str, str], Schema]) -> Schema:
    """What the values of a mapping are."""
    if field in _QUANTITIES:
        return pointer("resource", "Quantity")
    if owner == "JSONSchemaProps":
        return pointer(module, "JSONSchemaPropsOrStringArray" if field == "dependencies" else "JSONSchemaProps")
    if (owner, field) in (("Secret", "data"), ("ConfigMap", "binaryData")):
        return {"type": "string", "format": "byte"}
    if field == "disruptedPods":
        return pointer("meta_v1", "Time")
    return {"type": "string"}


def _merged(*keys: str, also: tuple[str, ...] = (), strategy: str = "merge") -> Schema:
    """A list whose items are known by their keys; strategic merge patch knows one key, apply may know more."""
    return {
        "x-kubernetes-patch-strategy": strategy,
        "x-kubernetes-patch-merge-key": keys[0],
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [*keys, *also],
    }


_SET: Schema = {"x-kubernetes-patch-strategy": "merge", "x-kubernetes-list-type": "set"}
_ATOMIC: Schema = {"x-kubernetes-list-type": "atomic"}
_ATOMIC_MAP: Schema = {"x-kubernetes-map-type": "atomic"}
_CONDITIONS = _merged("type")
_PROTOCOL: Schema = {"enum": ["TCP", "UDP", "SCTP"], "default": "TCP"}
_PULL: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}
_TERMINATION: Schema = {"enum": ["File", "FallbackToLogsOnError"]}
_EFFECT: Schema = {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]}

FIELDS: dict[str, Schema] = {
    "ObjectMeta.finalizers": _SET,
    "ObjectMeta.ownerReferences": _merged("uid"),
    "ObjectMeta.managedFields": _ATOMIC,
    "PodSpec.volumes": _merged("name", strategy="merge,retainKeys"),
    "PodSpec.containers": _merged("name"),
    "PodSpec.initContainers": _merged("name"),
    "PodSpec.ephemeralContainers": _merged("name"),
    "PodSpec.imagePullSecrets": _merged("name"),
    "PodSpec.hostAliases": _merged("ip"),
    "PodSpec.topologySpreadConstraints": _merged("topologyKey", also=("whenUnsatisfiable",)),
    "PodSpec.schedulingGates": _merged("name"),
    "PodSpec.resourceClaims": _merged("name", strategy="merge,retainKeys"),
    "PodSpec.nodeSelector": _ATOMIC_MAP,
    "PodSpec.restartPolicy": {"enum": ["Always", "OnFailure", "Never"]},
    "PodSpec.dnsPolicy": {"enum": ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"]},
    "PodSpec.preemptionPolicy": {"enum": ["PreemptLowerPriority", "Never"]},
    "PodStatus.conditions": _CONDITIONS,
    "PodStatus.podIPs": _merged("ip"),
    "PodStatus.hostIPs": _ATOMIC | {"x-kubernetes-patch-strategy": "merge", "x-kubernetes-patch-merge-key": "ip"},
    "PodStatus.phase": {"enum": ["Failed", "Pending", "Running", "Succeeded", "Unknown"]},
    "PodStatus.resourceClaimStatuses": _merged("name", strategy="merge,retainKeys"),
    "ServiceSpec.ports": _merged("port", also=("protocol",)),
    "ServiceSpec.selector": _ATOMIC_MAP,
    "ServiceSpec.type": {"enum": ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]},
    "ServiceSpec.sessionAffinity": {"enum": ["ClientIP", "None"]},
    "ServiceStatus.conditions": _CONDITIONS,
    "ServicePort.protocol": _PROTOCOL,
    "ContainerPort.protocol": _PROTOCOL,
    "NodeSpec.podCIDRs": _SET,
    "NodeStatus.conditions": _CONDITIONS,
    "NodeStatus.addresses": _merged("type"),
    "NamespaceStatus.conditions": _CONDITIONS,
    "NamespaceStatus.phase": {"enum": ["Active", "Terminating"]},
    "CustomResourceDefinitionStatus.conditions": {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    },
    "CustomResourceDefinitionSpec.scope": {"enum": ["Cluster", "Namespaced"]},
    "Taint.effect": _EFFECT,
    "Toleration.effect": _EFFECT,
    "Toleration.operator": {"enum": ["Equal", "Exists"]},
    "HTTPGetAction.scheme": {"enum": ["HTTP", "HTTPS"]},
    "LabelSelectorRequirement.operator": {"enum": ["DoesNotExist", "Exists", "In", "NotIn"]},
    "NodeSelectorRequirement.operator": {"enum": ["DoesNotExist", "Exists", "Gt", "In", "Lt", "NotIn"]},
    "TopologySpreadConstraint.whenUnsatisfiable": {"enum": ["DoNotSchedule", "ScheduleAnyway"]},
    "EmptyDirVolumeSource.medium": {"enum": ["", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"]},
    "HostPathVolumeSource.type": {
        "enum": ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"]
    },
    "VolumeMount.mountPropagation": {"enum": ["Bidirectional", "HostToContainer", "None"]},
}
for _container in ("Container", "EphemeralContainer"):
    FIELDS |= {
        f"{_container}.ports": _merged("containerPort", also=("protocol",)),
        f"{_container}.env": _merged("name"),
        f"{_container}.volumeMounts": _merged("mountPath"),
        f"{_container}.volumeDevices": _merged("devicePath"),
        f"{_container}.imagePullPolicy": _PULL,
        f"{_container}.terminationMessagePolicy": _TERMINATION,
    }

NOT_REQUIRED = frozenset({"Event.eventTime", "ServicePort.port"})
"""Required by the class, but judged by rules with better words or by nobody."""

CLASSES: dict[str, Schema] = {
    name: _ATOMIC_MAP
    for name in (
        "LabelSelector",
        "LocalObjectReference",
        "ObjectReference",
        "OwnerReference",
        "SecretKeySelector",
        "ConfigMapKeySelector",
        "ObjectFieldSelector",
        "ResourceFieldSelector",
        "TypedLocalObjectReference",
        "NodeSelector",
        "NodeSelectorTerm",
        "SecretReference",
    )
}
