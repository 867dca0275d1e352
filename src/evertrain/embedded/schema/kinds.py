"""Which kinds there are: the built-in ones, and those that CustomResourceDefinitions add while the server runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from evertrain.kube.port import Object

Schema = dict[str, Any]
"""An OpenAPI v3 schema object. Those of built-in kinds may contain `$ref`; see `Resource.resolve`."""

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Column:
    """One column of `kubectl get`. Priority 0 is always shown, others with `-o wide`."""

    name: str
    path: str = ""
    """JSONPath into the object; empty for columns of built-in kinds, which are computed."""
    type: str = "string"
    format: str = ""
    description: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Resource:
    """One kind in one version, as it is served."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    singular: str = ""
    list_kind: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = VERBS
    subresources: frozenset[str] = frozenset()
    """Names behind the object's own path: `status`, `scale`, `log`, `binding`, `eviction`, …"""
    columns: tuple[Column, ...] = ()
    custom: bool = False
    """Made by a CustomResourceDefinition."""
    storage: str = ""
    """`group/plural` under which the objects are kept: one for all versions, and one for both kinds of Event."""
    selectable: tuple[str, ...] = ()
    """Further fields for field selectors, as paths (`.spec.color`)."""
    load: Callable[[], Schema] = field(default=dict, hash=False, compare=False, repr=False)
    definitions: Callable[[str], Schema] = field(default=lambda name: {}, hash=False, compare=False, repr=False)
    warning: str = ""
    """Of a deprecated version: what to tell its users."""
    resolved: dict[int, tuple[Schema, Schema]] = field(default_factory=dict, hash=False, compare=False, repr=False)
    """Schemas with what their references mean, by the id of the former, which is kept so that no other has that id."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def path(self) -> str:
        """`api/v1` or `apis/GROUP/VERSION`, as in URLs and in the index of OpenAPI v3."""
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources

    @property
    def qualified(self) -> str:
        """`ascendjobs.mindxdl.gitee.com`, as messages name a resource."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @cached_property
    def schema(self) -> Schema:
        """Built when first needed: making all of them costs more than starting the server."""
        return self.load()

    def resolve(self, schema: Schema) -> Schema:
        """The schema behind a `$ref`, or the schema itself."""
        while True:
            target = reference(schema)
            if not target:
                return schema
            schema = self.definitions(target)


def reference(schema: Schema) -> str:
    """The name of the definition that a schema points to, or an empty string."""
    target = schema.get("$ref")
    if target is None and len(schema.get("allOf", ())) == 1 and "properties" not in schema:
        target = schema["allOf"][0].get("$ref")
    return str(target).rsplit("/", 1)[-1] if target else ""


class Registry:
    """All kinds that are served. `revision` grows with every change, for caches."""

    def __init__(self, resources: Iterable[Resource] = ()) -> None:
        self._resources: dict[tuple[str, str, str], Resource] = {}
        self._defined: dict[str, tuple[tuple[str, str, str], ...]] = {}
        self.revision = 0
        self._remembered: tuple[int, dict[str, Any]] = (0, {})
        for resource in resources:
            self._put(resource)

    @classmethod
    def builtin(cls) -> Registry:
        """With the kinds that are there before any CustomResourceDefinition."""
        from evertrain.embedded.schema.builtin import RESOURCES

        return cls(RESOURCES)

    def _put(self, resource: Resource) -> tuple[str, str, str]:
        key = (resource.group, resource.version, resource.plural)
        self._resources[key] = resource
        self.revision += 1
        return key

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` made, until the kinds change."""
        if self._remembered[0] != self.revision:
            self._remembered = (self.revision, {})
        known = self._remembered[1]
        if key not in known:
            known[key] = make()
        return known[key]

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._resources.get((group, version, plural))

    def find_kind(self, group: str, version: str, kind: str) -> Resource | None:
        for resource in self._resources.values():
            if (resource.group, resource.version, resource.kind) == (group, version, kind):
                return resource
        return None

    def of(self, item: Object) -> Resource | None:
        """By apiVersion and kind of an object."""
        group, _, version = str(item.get("apiVersion", "")).rpartition("/")
        return self.find_kind(group, version, str(item.get("kind", "")))

    def all(self) -> list[Resource]:
        return list(self._resources.values())

    def groups(self) -> dict[str, list[str]]:
        """Versions by group, preferred one first."""
        found: dict[str, list[str]] = {}
        for resource in self._resources.values():
            versions = found.setdefault(resource.group, [])
            if resource.version not in versions:
                versions.append(resource.version)
        from evertrain.embedded.schema.definitions import version_rank

        return {group: sorted(versions, key=version_rank) for group, versions in found.items()}

    def served(self, group: str, version: str) -> list[Resource]:
        return [item for item in self._resources.values() if (item.group, item.version) == (group, version)]

    def add_definition(self, definition: Object) -> list[Resource]:
        """Serves what a (valid) CustomResourceDefinition object describes, instead of what it described before."""
        from evertrain.embedded.schema.definitions import resources_of

        resources = resources_of(definition)
        self.remove_definition(definition["metadata"]["name"])
        self._defined[definition["metadata"]["name"]] = tuple(self._put(resource) for resource in resources)
        return resources

    def remove_definition(self, name: str) -> None:
        for key in self._defined.pop(name, ()):
            self._resources.pop(key, None)
            self.revision += 1
