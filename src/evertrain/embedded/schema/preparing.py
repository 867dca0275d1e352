"""From what a user sent to what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evertrain.embedded.schema.kinds import Resource
from evertrain.kube.port import Object


@dataclass(frozen=True)
class Prepared:
    object: Object
    warnings: list[str] = field(default_factory=list)
    """Texts for the Warning header."""


def prepare_create(
    resource: Resource, item: Object, *, field_validation: str = "Warn", duplicates: Sequence[str] = ()
) -> Prepared:
    """Checks, prunes, defaults and validates a new object. The name (or generateName's result) and the namespace must
    be there already. The result has generation 1 where the kind counts generations, and no status where that is for
    the status subresource; uid, resourceVersion, creationTimestamp and addresses are the caller's."""
    return Prepared(item)


def prepare_update(
    resource: Resource,
    item: Object,
    old: Object,
    *,
    subresource: str = "",
    field_validation: str = "Warn",
    duplicates: Sequence[str] = (),
) -> Prepared:
    """The same for a new state of `old`: an update of the object takes no status, one of the `status` subresource
    takes nothing else. uid, creationTimestamp, deletionTimestamp and such come from `old`, generation grows with the
    spec. If the result equals `old` there is nothing to write. Handles also `old` without schema changes, such as
    finalizers of a deleted object."""
    return Prepared(item)


def converted(item: Object, resource: Resource) -> Object:
    """A stored object as this version of its kind shows it (apiVersion; the other fields of events.k8s.io)."""
    return item
