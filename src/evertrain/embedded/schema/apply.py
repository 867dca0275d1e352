"""Server-side apply, and who manages which field."""

from __future__ import annotations

from datetime import datetime

from evertrain.embedded.schema.kinds import Resource
from evertrain.kube.port import Object


def applied(
    resource: Resource,
    old: Object | None,
    patch: Object,
    *,
    manager: str,
    now: datetime,
    force: bool = False,
    subresource: str = "",
) -> Object:
    """The object after `manager` applied `patch`, with its managedFields; to be prepared and stored like any other
    write. `old` is None if there is none yet. Raises Refused: 409 with a cause for every field that others manage."""
    return {**(old or {}), **patch}


def tracked(
    resource: Resource, old: Object | None, new: Object, *, manager: str, now: datetime, subresource: str = ""
) -> Object:
    """A (prepared) object with the managedFields after a create, update or patch by `manager`."""
    return new
