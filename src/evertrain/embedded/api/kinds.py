"""What the API server asks of the kinds that it serves. `embedded/schema` answers; tests may answer with less.

All functions are pure: they know no store and no clock. Objects are plain dictionaries. "In place" means that the caller
has given a copy that nobody else holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evertrain.kube.port import Object


@dataclass(frozen=True)
class Resource:
    """A kind in one version, as discovery describes it."""

    group: str
    """Empty for the core group."""
    version: str
    kind: str
    plural: str
    singular: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    list_kind: str = ""
    subresources: tuple[str, ...] = ()
    """Of these the server knows how to serve: status, scale, binding, eviction, log, finalize."""
    custom: bool = False
    """Defined by a CustomResourceDefinition."""
    storage: bool = True
    """Objects are stored under this version; other versions of the same plural show them with another apiVersion."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def group_resource(self) -> str:
        """`pods`, `leases.coordination.k8s.io`: as in messages and as the key in the store."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with an object, as in `details.causes` of a Status."""

    field: str
    """`spec.containers[0].name`"""
    message: str
    """Without the field name: `Required value`, `Invalid value: "x": must be ...`"""
    reason: str = "FieldValueInvalid"
    """FieldValueRequired, FieldValueInvalid, FieldValueTypeInvalid, FieldValueNotSupported, FieldValueForbidden, ..."""


class Malformed(Exception):
    """The object can't be read as its kind at all (a string where a core kind has a list): 400."""


class PatchFailed(Exception):
    """The patch can't be applied to this object: 422."""


class ApplyConflict(Exception):
    """Server-side apply met fields that others own."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        super().__init__("; ".join(cause.message for cause in causes))
        self.causes = tuple(causes)
        """`field` as `.spec.replicas`, `message` as `conflict with "kubectl" using apps/v1`, reason FieldManagerConflict."""


@dataclass(frozen=True)
class Table:
    columns: list[Object]
    """columnDefinitions: name, type, format, description, priority."""
    rows: list[list[Any]]
    """The cells of each object, in the order of the objects."""


class Kinds(Protocol):
    """The registry of kinds and what can be done with an object of each."""

    def resources(self) -> list[Resource]:
        """All that are served, in the order of discovery."""
        ...

    def find(self, group: str, version: str, plural: str) -> Resource | None: ...

    def define(self, definition: Object) -> None:
        """Serve (or serve changed) what a CustomResourceDefinition says. Raises Malformed; the definition was validated."""
        ...

    def undefine(self, definition: Object) -> None: ...

    def prune(self, resource: Resource, item: Object) -> list[str]:
        """Drops unknown fields in place. Returns their paths (`spec.replcas`)."""
        ...

    def default(self, resource: Resource, item: Object) -> None:
        """Fills in defaults in place, those of the schema and those the API server gives to core kinds."""
        ...

    def validate(self, resource: Resource, item: Object, old: Object | None = None, subresource: str = "") -> list[Cause]:
        """What is wrong; with `old` also what may not be changed. Metadata is the server's own business."""
        ...

    def strategic_merge(self, resource: Resource, live: Object, patch: Object) -> Object:
        """A new object. Raises PatchFailed."""
        ...

    def apply(
        self,
        resource: Resource,
        live: Object | None,
        config: Object,
        *,
        manager: str,
        force: bool,
        subresource: str,
        now: str,
    ) -> Object:
        """Server-side apply: a new object with its managedFields. Raises ApplyConflict, PatchFailed."""
        ...

    def track(
        self, resource: Resource, old: Object | None, new: Object, *, manager: str, subresource: str, now: str
    ) -> None:
        """Writes the managedFields of `new` in place after a create, update or patch (operation Update)."""
        ...

    def table(self, resource: Resource, items: Sequence[Object], now: float) -> Table:
        """What `kubectl get` shows. `now` in seconds of the epoch, for ages."""
        ...

    def openapi_v2(self) -> Object: ...

    def openapi_v3(self) -> list[str]:
        """The paths of the documents: `api/v1`, `apis/coordination.k8s.io/v1`."""
        ...

    def openapi_v3_of(self, path: str) -> Object | None: ...
