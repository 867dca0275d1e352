"""What our parts ask of a Kubernetes API, whoever serves it.

Objects are plain dictionaries, as they are on the wire: a part reads the few fields that it knows and hands the others
on untouched, also those of a newer API server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Object = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of object and where it is served."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def path(self) -> str:
        return f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"


NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
NODE = Kind("v1", "Node", "nodes", namespaced=False)
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
POD_GROUP = Kind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups")
QUEUE = Kind("scheduling.volcano.sh/v1beta1", "Queue", "queues", namespaced=False)
ASCEND_JOB = Kind("mindxdl.gitee.com/v1", "AscendJob", "ascendjobs")
CUSTOM_RESOURCE_DEFINITION = Kind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)


class ApiError(Exception):
    """The API server refused. `reason` is the machine-readable word of its Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


class NotFound(ApiError):
    """404."""


class AlreadyExists(ApiError):
    """409 with reason AlreadyExists."""


class Conflict(ApiError):
    """409: the object was changed since it was read."""


class Gone(ApiError):
    """410: the resource version is too old for a watch; list again."""


@dataclass(frozen=True)
class Listing:
    items: list[Object]
    resource_version: str


@dataclass(frozen=True)
class Change:
    """One event of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    object: Object


class Kube(Protocol):
    """The requests. Each raises ApiError if the server refuses, OSError or TimeoutError if it can't be reached."""

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object: ...

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Listing: ...

    def watch(
        self, kind: Kind, namespace: str | None = None, *, resource_version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Change]:
        """Changes after that version. Ends when the server ends it; raises Gone when the version is too old."""
        ...

    async def create(self, kind: Kind, item: Object) -> Object: ...

    async def replace(self, kind: Kind, item: Object) -> Object:
        """PUT. With a resourceVersion in the metadata it raises Conflict if the object was changed since."""
        ...

    async def replace_status(self, kind: Kind, item: Object) -> Object: ...

    async def patch(
        self, kind: Kind, name: str, namespace: str | None, patch: Object, *, status: bool = False
    ) -> Object:
        """JSON merge patch."""
        ...

    async def apply(self, kind: Kind, item: Object, *, manager: str, force: bool = False) -> Object:
        """Server-side apply."""
        ...

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
    ) -> None:
        """Delete; with `uid` only that very object, with `version` only as it was then (Conflict otherwise)."""
        ...

    async def bind(self, pod: Object, node: str, annotations: Mapping[str, str] | None = None) -> None:
        """Gives the pod its node, and together with it these annotations."""
        ...

    async def close(self) -> None: ...
