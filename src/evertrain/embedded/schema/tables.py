"""Lists as `kubectl get` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from evertrain.embedded.schema.kinds import Resource
from evertrain.kube.port import Object


def table(
    resource: Resource,
    items: Sequence[Object],
    *,
    now: datetime,
    metadata: Object | None = None,
    include: str = "Metadata",
) -> Object:
    """A meta.k8s.io/v1 Table. `metadata` is that of the list; `include` is the query parameter includeObject: None,
    Metadata or Object."""
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata or {},
        "columnDefinitions": [],
        "rows": [],
    }
